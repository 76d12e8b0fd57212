"""Tensors of networks and optimizers by name, and their restoration from a checkpoint, by rows on each rank."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from vsa.checkpoints.moments import SCALE, Moments, has_codes, new_moment, stored, stored_shapes
from vsa.checkpoints.weight_files import TensorFiles, refuse_key_difference, refuse_other_tensors

# fields of the state of AdamW, and whether their values can be negative
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}


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
    state, form = {}, _form(optimizer)
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                state |= stored(f"{name}/{key}", value, form)
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
    without: Collection[str] = (),
    most_updates: float = math.inf,
) -> None:
    """Restore the state of `optimizer_state`; moments of another form than the optimizer's are converted.

    Args:
        optimizer: built by `vsa.training.optimizer`.
        tensors: see `optimizer_state`.
        what: origin of the tensors, for messages.
        without: see `without_state`.
        most_updates: largest possible number of updates of a parameter.

    Raises:
        ValueError: names state that is missing or unexpected, has another shape, or counts too many updates.
    """
    parameters = {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }
    held: Moments = "int8" if any(key.endswith(SCALE) for key in tensors.keys) else "fp32"
    expected: dict[str, tuple[int, ...]] = {}
    for name in set(parameters) - set(without):
        expected[f"{name}/step"] = ()
        for field in _MOMENTS:
            expected |= stored_shapes(f"{name}/{field}", parameters[name].shape, held)
    refuse_key_difference(expected, tensors.keys, what)
    for key, actual in tensors.shapes.items():
        if actual != expected[key]:
            raise ValueError(f"{what}: {key} has shape {actual}, the optimizer needs {expected[key]}")
        if key.endswith("/step") and not 0 < (updates := float(tensors.read(key))) <= most_updates:
            raise ValueError(f"{what}: {key} counts {updates:g} updates in {most_updates:g} steps")
    # a fused optimizer counts updates on the device
    on_device, form = optimizer.defaults.get("fused", False), _form(optimizer)
    for name, parameter in parameters.items():
        if name not in without:
            count = tensors.read(f"{name}/step").to(parameter.device if on_device else "cpu", copy=True)
            state = optimizer.state[parameter] = {"step": count}
            for field, signed in _MOMENTS.items():
                moment = _restored(tensors, f"{name}/{field}", parameter, held, signed=signed)
                if held != form and has_codes(parameter.shape, "int8"):
                    moment = new_moment(parameter, form, signed=signed).copy_(moment)
                state[field] = moment


def _form(optimizer: torch.optim.Optimizer) -> Moments:
    return optimizer.defaults.get("moments", "fp32")


def _restored(tensors: TensorFiles, key: str, like: Tensor, held: Moments, *, signed: bool) -> Tensor:
    if has_codes(like.shape, held):
        value = new_moment(like, held, signed=signed)
    else:
        value = torch.empty_like(like, dtype=tensors.dtype(key), requires_grad=False)
    for name, tensor in stored(key, value, held).items():
        tensors.fill(tensor, name)
    return value
