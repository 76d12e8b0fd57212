"""States of checkpoints: compared, and as another training, or an older version, would have left them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vsa.checkpoints.state_file import read_state, write_state
from vsa.checkpoints.weight_files import TensorFiles


def rewrite_state(checkpoint: Path, *without: str, **changes: Any) -> None:
    """Change values of a checkpoint's state, or leave some out, under a digest that fits."""
    state = {**json.loads((checkpoint / "state.json").read_text()), **changes}
    write_state(checkpoint, {name: value for name, value in state.items() if name not in {"digest", *without}})


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The values alone."""
    return read_state(checkpoint)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of two states with the same names, the largest difference between two values."""
    assert set(a) == set(b)
    return max((a[name] - b[name]).abs().max().item() for name in a)


def files_of(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorFiles:
    """Tensors in a file, as a checkpoint has them."""
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "held.safetensors")
    return TensorFiles(folder, ["held.safetensors"])
