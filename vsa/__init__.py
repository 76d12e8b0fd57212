"""Training of video diffusion transformers with sparse attention."""

from vsa.lazy_torchmetrics import install

install()
