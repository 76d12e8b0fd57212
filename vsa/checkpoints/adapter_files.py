"""Adapters in files of their own, with the gates trained beside them: written from a run, and merged into weights.

Forms, whose readers are those of diffusers 0.42 (`loaders/lora_conversion_utils.py`): `diffusers` has its module names
below `transformer.`; `comfyui` has the original ones below `diffusion_model.`, and whole differences as `.diff` and
`.diff_b`; `musubi` (musubi-tuner) has the original ones, joined by underscores, after `lora_unet_`, with `.alpha`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vsa.checkpoints.adapter_changes import AdapterChanges, open_adapters
from vsa.checkpoints.lora import LowRank
from vsa.checkpoints.original_names import Rows
from vsa.checkpoints.sparse_config import (
    SPARSE_CONFIG,
    SparseAttentionConfig,
    has_sparse_config,
    read_sparse_config,
    write_sparse_config,
)
from vsa.checkpoints.wan import attention_of
from vsa.checkpoints.weight_files import refuse_existing, save_tensors
from vsa.checkpoints.weights import WeightSource
from vsa.data.pretrained import weights_digest
from vsa.files import atomic_folder, typed
from vsa.models.network import Network

AdapterForm = Literal["diffusers", "comfyui", "musubi"]
FILE, GATES_FILE = "pytorch_lora_weights.safetensors", "gates.safetensors"


def write_adapters(
    adapters: Mapping[str, LowRank],
    gates: Mapping[str, Tensor],
    folder: Path,
    form: AdapterForm,
    *,
    rows: Mapping[str, Rows],
    sparse: SparseAttentionConfig | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write adapters and gates to a folder, which must not exist.

    Gates start at zero, so that their values are differences, which ComfyUI's form has in the same file. The readers of
    the other forms take adapters alone, so gates are a second file there.

    Args:
        adapters: adapters by module name.
        gates: tensors of the gates by parameter name.
        folder: target folder.
        form: key form.
        rows: see `original_rows`, of all parameters of the model.
        sparse: description of the gates, written beside them.
        dtype: dtype of the tensors; None: their own.
    """
    refuse_existing(folder)
    tensors: dict[str, Tensor] = {}
    if form != "diffusers":
        adapters, gates = _originals(adapters, rows), {rows[key].key: x for key, x in gates.items()}
    for module, (a, b, scale) in adapters.items():
        if form == "musubi":
            name = f"lora_unet_{module.replace('.', '_')}"
            tensors |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}
            tensors[f"{name}.alpha"] = torch.tensor(scale * len(a), dtype=torch.float32)
            continue
        name = f"{'transformer' if form == 'diffusers' else 'diffusion_model'}.{module}"
        # readers take alpha as the rank
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": scale * b}
    own = dict(gates)
    if form == "comfyui":
        for key, value in gates.items():
            module, _, kind = key.rpartition(".")
            tensors[f"diffusion_model.{module}.{'diff' if kind == 'weight' else 'diff_b'}"] = value
        own = {}
    with atomic_folder(folder) as temporary:
        for file, held in ((FILE, tensors), (GATES_FILE, own)):
            if held:
                cast = {key: x.to(x.dtype if x.ndim == 0 else dtype or x.dtype).contiguous() for key, x in held.items()}
                save_tensors(cast, temporary / file, {"format": "pt"})
        if sparse is not None:
            write_sparse_config(temporary, sparse)


def _originals(adapters: Mapping[str, LowRank], rows: Mapping[str, Rows]) -> dict[str, LowRank]:
    """The adapters of the original layers; one that holds several layers has the sum of their ranks."""
    parts = dict[str, dict[int, str]]()
    for name, own in rows.items():
        parts.setdefault(own.key, {})[own.start] = name
    joined = {}
    for original in dict.fromkeys(rows[f"{module}.weight"].key for module in adapters):
        names = [name for _, name in sorted(parts[original].items())]
        lows = [adapters.get(name.removesuffix(".weight")) for name in names]
        a = torch.cat([low.a for low in lows if low is not None])
        # layers without an adapter get rows of zeros
        halves = [
            a.new_zeros(rows[name].stop - rows[name].start, 0) if low is None else low.b
            for name, low in zip(names, lows, strict=True)
        ]
        b = torch.block_diag(*(rows[name].ordered(half) for name, half in zip(names, halves, strict=True)))
        joined[original.removesuffix(".weight")] = LowRank(a, b, next(low.scale for low in lows if low is not None))
    return joined


class AdaptedWeights(WeightSource):
    """Weights with the adapters, differences and gates of a file, in any form, merged into them.

    Args:
        base: weights that the adapters were trained on.
        place: file or folder, see `open_adapters`.

    Raises:
        ValueError: see `AdapterChanges`.
    """

    def __init__(self, base: WeightSource, place: Path):
        self._base, self._place = base, place
        self._own = open_adapters(place)
        self._changes = AdapterChanges(self._own, base.shapes, str(place), base.name, base.class_name)
        super().__init__(
            f"{base.source}+{place}", base.files, {name: name for name in (*base, *self._changes.new)}, base.state
        )

    def _read(self, name: str) -> Tensor:
        if name not in self._changes:
            return self._base[name]
        gate = self._changes.new.get(name)
        value = self._base[name] if gate is None else torch.zeros(gate, dtype=self.dtypes[name])
        return self._changes.changed(name, value)

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        return self[name][start:stop]

    @property
    def name(self) -> str:
        return self.source

    @property
    def places(self) -> list[Path]:
        return [*self._base.places, *(self._own.folder / name for name in self._own.names)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._base.shapes | self._changes.new

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return self._base.dtypes | {
            name: self._own.dtype(key) for name in self._changes.new for key in self._changes[name].values()
        }

    @property
    def digest(self) -> str:
        configs = [repr(fields) for own in self._changes.configs.values() for fields in own.values()]
        both = "".join([self._base.digest, weights_digest(self._own.folder, self._own.names), *configs])
        return hashlib.sha256(both.encode()).hexdigest()

    @property
    def noise_range(self) -> tuple[float, float] | None:
        return self._base.noise_range

    @property
    def config(self) -> Mapping[str, Any]:
        return self._base.config

    @property
    def sparse(self) -> SparseAttentionConfig | None:
        if self._changes.new and has_sparse_config(self._own.folder):
            return read_sparse_config(self._own.folder)
        return self._base.sparse

    def network(self, **options: Any) -> Network:
        if self._changes.new and not options.get("attention"):
            if self.sparse is None:
                remedy = f"vsa convert {typed(Path(self.source))} OUT --sparsity S --grid T H W writes one"
                raise ValueError(f"{self._place} has gates but no {SPARSE_CONFIG} beside it; {remedy}")
            options["attention"] = attention_of(self.sparse, options.pop("backend", None))
        return self._base.network(**options)

    def refuse_other_architecture(self, model: Network) -> None:
        self._base.refuse_other_architecture(model)

    def check_data(self, data: Any) -> None:
        self._base.check_data(data)


def adapted_spec(spec: str | Path) -> tuple[str, Path] | None:
    """The weights and the file of `BASE+ADAPTERS`; None for any other specification."""
    base, plus, adapters = str(spec).rpartition("+")
    if plus and not adapters and not Path(spec).exists():
        raise ValueError(f"{spec} names no file of adapters behind its +")
    return (base, Path(adapters)) if plus and not Path(spec).exists() and Path(adapters).exists() else None
