"""Training of video diffusion transformers with sparse attention."""
