"""A transformer alone: whether our attention with all tiles is its own, and the time of a step, dense and sparse.

B batch, C T H W latent channels, frames, rows and columns, S text tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsa.attention.layout import Segment
from vsa.attention.tiling import Grid
from vsa.checkpoints.golden import TOLERANCE, attention_output, check_golden
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.checkpoints.wan_config import CLASS_NAME
from vsa.checkpoints.weight_files import WeightFiles, read_json
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.evaluation.comparison.methods import Method
from vsa.evaluation.comparison.timing import fast_dense, interleaved_ms
from vsa.integrations.diffusers import apply, load_sparse, remove
from vsa.integrations.diffusers.families import FAMILIES
from vsa.integrations.diffusers.families.parts import Inputs, Parts
from vsa.integrations.diffusers.pretrained import load_plain
from vsa.models.init import without_memory
from vsa.models.network import Network

TOLERANCES = {"float32": TOLERANCE, "float16": 0.004, "bfloat16": 0.03}
"""Largest difference of outputs relative to the largest output, by dtype: three times the rounding of 30 layers."""
WHOLE, GATED = "all tiles against the class of diffusers", "gates and all tiles against the network of this project"
GOLDEN = "golden tensors"
TEXT_TOKENS, IMAGE_TOKENS, TIMESTEP = 512, 257, 500.0

Install = Callable[[Any], Any]
"""Function that installs attention in a transformer, see `apply`."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A transformer and the attention that is certified in it.

    Args:
        folder: folder of its config and weights.
        sparse: settings of an export; None for a dense model.
        method: method for a dense model; None for an export.
        latents: latent frames, rows and columns of the passes.
        dtype: dtype of the weights.
        device: device of the passes.
        seed: seed of the random inputs.

    Raises:
        ValueError: a class whose inputs are not known here, or sizes and a budget that do not fit its grid.
    """

    folder: Path
    sparse: SparseAttentionConfig | None
    method: Method | None
    latents: Grid
    dtype: str
    device: str
    seed: int

    def __post_init__(self) -> None:
        # raises for a class that is not known, and for latents that do not fit its patch
        grid = self.grid
        if self.method is not None:
            # raises for more tiles than there are
            layer = self.method.make(dim=24, num_heads=1, head_dim=24, layer_idx=0)
            self.method.kept(layer.layout([Segment(grid)], "cpu"))

    @property
    def class_name(self) -> str:
        return read_json(self.folder / "config.json").get("_class_name", CLASS_NAME)

    @property
    def files(self) -> list[str]:
        """Names of the files of the folder, and of those below it that its index or its settings name."""
        named = {*WeightFiles(self.folder).names, *filter(None, [self.sparse and self.sparse.golden])}
        return sorted(named | {path.name for path in self.folder.iterdir() if path.is_file()})

    @property
    def num_layers(self) -> int:
        return len(self._sizes.blocks)

    @property
    def grid(self) -> Grid:
        """Token grid of the passes."""
        return self._sizes.grid((self._sizes.in_channels, *self.latents))

    @torch.no_grad()
    def parity(self) -> dict[str, Any]:
        """Checks of equal outputs, and the difference of the sparse output from the dense one, which should be larger.

        With all tiles, our attention in the class of diffusers is compared with the attention of the class; an export
        with its gates also with the network of this project, and that with the golden tensors of the export.
        """
        model, given = self._open(), self._given(self.device)
        dense = self._run(model, given)
        with _with(self._whole, model):
            whole = _difference(self._run(model, given), dense)
        with _with(self._sparse, model):
            apart = _difference(self._run(model, given), dense)
        errors = {WHOLE: whole}
        if self.sparse is not None:
            with _with(self._gated, model):
                output = self._run(model, given)
            velocity = self._parts.velocity(output, model, given, self._parts.constants or {})
            # one model at a time
            del model
            network = open_network(self.folder, device=self.device)[0]
            errors[GATED] = _difference(velocity, _velocity(network, given))
            if self.sparse.golden is not None:
                rows = check_golden(self.folder, partial(attention_output, network))
                worst = max(rows, key=lambda row: (row.failed, row.error))
                errors[f"{GOLDEN}, layer {worst.layer} the worst"] = worst.error
        checks = [{"compared": name, "error": error} for name, error in errors.items()]
        return self.judged({"checks": checks, "sparse_difference": apart})

    def judged(self, parity: Mapping[str, Any]) -> dict[str, Any]:
        """Errors of `parity` with verdicts by this transformer's own tolerances.

        What is missing, or no number from 0 on, fails.
        """
        errors = {each["compared"]: float(each["error"]) for each in parity["checks"]}
        tolerances = {WHOLE: TOLERANCES[self.dtype]}
        if self.sparse is not None:
            tolerances[GATED] = TOLERANCES[self.dtype]
            if self.sparse.golden_tolerance is not None:
                tolerances[GOLDEN] = min(TOLERANCE, self.sparse.golden_tolerance)
        checks = []
        for kind, tolerance in tolerances.items():
            name, error = next((item for item in errors.items() if item[0].startswith(kind)), (kind, math.nan))
            failed = not 0 <= error <= tolerance
            checks.append({"compared": name, "error": error, "tolerance": tolerance, "failed": failed})
        return {"checks": checks, "sparse_difference": float(parity["sparse_difference"])}

    @torch.no_grad()
    def step_ms(self, repeats: int) -> dict[str, list[float]]:
        """Milliseconds of one forward of one clip, dense with the attention of the class, and sparse."""
        model = self._open()
        given, device, times = self._given(self.device), torch.device(self.device), {}
        with fast_dense(device):
            forward = partial(self._run, model, given)
            (times["dense"],) = interleaved_ms([forward], repeats, device)
            with _with(self._sparse, model):
                (times["sparse"],) = interleaved_ms([forward], repeats, device)
        return times

    def _open(self) -> Any:
        return load_plain(self.folder, getattr(torch, self.dtype)).to(self.device).eval().requires_grad_(False)

    def _given(self, device: torch.device | str) -> Inputs:
        """Random inputs of one clip at half noise."""
        network = self._sizes
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, getattr(torch, self.dtype))

        shape = (network.in_channels, *self.latents)
        tokens = read_json(self.folder / "config.json").get("max_text_seq_length", TEXT_TOKENS)
        text = randn(1, tokens, network.text_dim)
        return Inputs(
            x=randn(1, *shape),
            timestep=torch.full((1,), TIMESTEP, device=device),
            text=text,
            mask=torch.ones(text.shape[:2], dtype=torch.bool, device=device) if network.takes_text_mask else None,
            image=None if network.image_dim is None else randn(1, IMAGE_TOKENS, network.image_dim),
            grid=self.grid,
        )

    def _run(self, model: Any, given: Inputs) -> Tensor:
        return model(**self._parts.inputs(model, given, self._parts.constants or {})).sample

    @cached_property
    def _sizes(self) -> Network:
        """The network without values."""
        with without_memory():
            return open_weights(self.folder).network()

    @property
    def _parts(self) -> Parts:
        parts = FAMILIES[self.class_name].parts
        # a class without them has no network either
        assert parts is not None
        return parts

    def _whole(self, model: Any) -> None:
        if self._tiles:
            apply(model, sparsity=0, **self._tiles)
        elif self.method is not None and self.method.selects:
            apply(model, self.method.make, sparsity=0)
        else:
            apply(model, "full")

    def _sparse(self, model: Any) -> None:
        if self.method is None:
            load_sparse(self.folder, transformer=model)
        else:
            # video_sparse without gates, as it is served
            attention: Any = "video_sparse" if self._tiles else self.method.make
            apply(model, attention, topk=self.method.topk, sparsity=self.method.sparsity, **self._tiles)

    def _gated(self, model: Any) -> None:
        assert self.sparse is not None
        load_sparse(self.folder, transformer=model, sparsity=0 if self.sparse.selects else None)

    @property
    def _tiles(self) -> dict[str, Any]:
        """Tiles of video_sparse; none for another method."""
        if self.method is not None:
            settings = self.method.config if self.method.label.startswith("video_sparse ") else {}
        else:
            export = self.sparse
            assert export is not None
            settings = (export.settings or vars(export)) if export.method == "video_sparse" else {}
        return {name: settings[name] for name in ("tile_thw", "partition", "block_order") if name in settings}


def _velocity(network: Network, given: Inputs) -> Tensor:
    """Output of a network of this project in float32, with all tiles."""
    # conditions are the last channels
    x, conditions = given.x.float().split((network.out_channels, given.x.shape[1] - network.out_channels), 1)
    image = None if given.image is None else given.image.float()
    conditions = conditions if conditions.shape[1] else None
    return network(x, given.timestep, given.text.float(), given.mask, cond_latents=conditions, image_embeds=image)


@contextmanager
def _with(install: Install, model: Any) -> Iterator[None]:
    install(model)
    try:
        yield
    finally:
        remove(model)


def _difference(output: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest entry of `expected`."""
    return float((output.float() - expected).abs().max() / expected.abs().max())
