"""The image encoder of image-to-video models: the first frame of a clip as tokens."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from vsa.data.pretrained import component_folder, config_digest, read_config, refuse_missing, weights_digest
from vsa.files import check_kind, read_json
from vsa.settings import AtLeastOne


class ImageEncoder:
    """CLIP's vision model in a pipeline of Wan2.1 image-to-video: the hidden states before its last layer.

    The picture is resized and cropped by the pipeline's `image_processor`, and the hidden states are those of
    `WanImageToVideoPipeline.encode_image` of diffusers. The model computes in float32. Weights are loaded with the
    first picture. Needs the extra `wan` (transformers).

    Args:
        source: a diffusers pipeline folder with `image_encoder/` and `image_processor/`, or a hub id.

    Attributes:
        id: name, stored in the index of a data set.
        hash: digest of everything that changes the tokens.
        tokens: I, tokens of a picture.
        dim: width of a token.
    """

    def __init__(self, source: str) -> None:
        self._folder, self._processor_folder = (
            component_folder(source, name) for name in ("image_encoder", "image_processor")
        )
        config = read_config(self._folder, "CLIPVisionModel", "CLIPVisionModelWithProjection")
        sizes = ("hidden_size", "image_size", "patch_size")
        check_kind(config, dict.fromkeys(sizes, AtLeastOne), self._folder / "config.json")
        self.dim, side = config["hidden_size"], config["image_size"] // config["patch_size"]
        # one for the whole picture, and one for each patch
        self.tokens = 1 + side**2
        self.id = f"clip-{self.tokens}x{self.dim}"
        pixels = config_digest(read_json(self._processor_folder / "preprocessor_config.json"))
        content = [self.id, "v1", config_digest(config), weights_digest(self._folder), pixels]
        self.hash = hashlib.sha256(" ".join(content).encode()).hexdigest()[:16]
        self._loaded: tuple[Any, Any] | None = None

    @torch.no_grad()
    def encode(self, picture: Tensor) -> Tensor:
        """float32 tokens `[I, dim]` of a picture, uint8 `[H, W, 3]`, computed on its device."""
        processor, model = self._modules()
        pixels = processor(images=picture.cpu().numpy(), return_tensors="pt").to(picture.device)
        return model.to(picture.device)(**pixels, output_hidden_states=True).hidden_states[-2][0]

    def _modules(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import transformers

            how: Any = {"dtype": torch.float32, "output_loading_info": True}
            loaded: Any = transformers.CLIPVisionModel.from_pretrained(self._folder, **how)
            model, info = loaded
            refuse_missing(info, self._folder)
            # transformers 5 has a second one, which computes other pixels where torchvision is installed
            kind = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
            self._loaded = kind.from_pretrained(self._processor_folder), model.eval().requires_grad_(False)
        return self._loaded
