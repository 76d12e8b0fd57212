"""Tensors of networks and optimizers by name, and their restoration from a checkpoint, by rows on each rank."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from vsa.checkpoints.weight_files import TensorFiles, refuse_key_difference, refuse_other_tensors

# fields of the state of AdamW
_MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def load_model_tensors(model: nn.Module, tensors: TensorFiles, what: str) -> None:
    """Copy `tensors` into the parameters of `model`, each rank its own rows.

    Raises:
        ValueError: names a missing or unexpected tensor, or another shape, and `what`.
    """
    parameters = dict(model.named_parameters())
    refuse_other_tensors({name: tuple(p.shape) for name, p in parameters.items()}, tensors.shapes, what)
    for name, parameter in parameters.items():
        tensors.fill(parameter, name)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of an optimizer built by `vsa.training.optimizer` by `NAME/exp_avg` and so on (not copied)."""
    state = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{name}/{key}"] = value
    return state


def without_state(optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameters without optimizer state, since they never had a gradient."""
    groups = [zip(group["names"], group["params"], strict=True) for group in optimizer.param_groups]
    return [name for group in groups for name, parameter in group if not optimizer.state.get(parameter)]


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    tensors: TensorFiles,
    what: str,
    *,
    without: Collection[str] | None = None,
    most_updates: float = math.inf,
) -> None:
    """Restore the state of `optimizer_state`.

    Args:
        optimizer: built by `vsa.training.optimizer`.
        tensors: see `optimizer_state`.
        what: origin of the tensors, for messages.
        without: see `without_state`; None: every parameter without tensors, since checkpoints of the first schema do
            not list them.
        most_updates: largest possible number of updates of a parameter.

    Raises:
        ValueError: names state that is missing or unexpected, has another shape, or counts too many updates.
    """
    parameters = {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }
    if without is None:
        without = set(parameters) - {key.rpartition("/")[0] for key in tensors.keys}
    expected = {f"{name}/{field}" for name in set(parameters) - set(without) for field in ("step", *_MOMENTS)}
    refuse_key_difference(expected, tensors.keys, what)
    for key, actual in tensors.shapes.items():
        name, _, field = key.rpartition("/")
        shape = () if field == "step" else tuple(parameters[name].shape)
        if actual != shape:
            raise ValueError(f"{what}: {key} has shape {actual}, the optimizer needs {shape}")
        if field == "step" and not 0 < (updates := float(tensors.read(key))) <= most_updates:
            raise ValueError(f"{what}: {key} counts {updates:g} updates in {most_updates:g} steps")
    # a fused optimizer counts updates on the device
    on_device = optimizer.defaults.get("fused", False)
    for name, parameter in parameters.items():
        if name not in without:
            count = tensors.read(f"{name}/step").to(parameter.device if on_device else "cpu", copy=True)
            moments = {field: _restored(tensors, f"{name}/{field}", parameter) for field in _MOMENTS}
            optimizer.state[parameter] = {"step": count, **moments}


def _restored(tensors: TensorFiles, key: str, like: Tensor) -> Tensor:
    value = torch.empty_like(like, dtype=tensors.dtype(key), requires_grad=False)
    tensors.fill(value, key)
    return value
