"""Public interface of residual connections and layer norm. B batch, L tokens, C channels, E input width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa_kernels.checks import check_device, check_projection, has_sizes
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.modes import refuse_forward_mode
from vsa_kernels.residual_norm import reference
from vsa_kernels.residual_norm.gated_op import gated_residual_fwd
from vsa_kernels.residual_norm.op import residual_norm_fwd

MOST_GATED_CHANNELS = 4096
"""Channels up to which the kernels of `residual_norm` add the bias of a projection to a gated update."""


def residual_norm(
    x: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    projection: tuple[Tensor, Tensor] | None = None,
    places: tuple[Tensor, int] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum `x + gate * update` of a residual connection, and its layer norm with weight and bias.

    With modulated norms (DiT), weight is 1 + scale and bias is the shift of each sample. `triton` computes in fp32 and
    rounds the sum and the norm once each; `reference` is torch's operations. Parameters with one row per token are
    computed by `reference` alone; where tokens have one of two rows, they need no memory per token.

    With a projection, the update is the output of that linear layer. On `triton` torch multiplies, and the kernels add
    the bias in fp32 to the rounded product; its gradient, a sum over the tokens, is part of the backward kernel. (For
    more than 4,096 channels and a gate torch does both.)

    Args:
        x: `[B, L, C]` hidden states.
        update: `[B, L, C]` output of a sub-layer in x's dtype; None: the sum is x itself; with a projection
            `[B, L, E]`.
        gate: `[B, 1, C]` or `[B, L, C]` factor of the update, with places `[B, 2, C]`; None: 1.
        weight: `[C]` or of the sizes of gate, factor of the normalised sum.
        bias: shift of the shape of weight.
        eps: constant added to the variance.
        projection: weight `[C, E]` and bias `[C]` of the last linear layer of the sub-layer.
        places: int32 `[L]`, all tokens, and the number of those at its beginning that have the first of two rows of
            parameters; the others have the second one.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        The sum and its norm, `[B, L, C]` each in x's dtype; differentiable in all tensors.

    Source: Ba et al., "Layer Normalization"; Peebles and Xie, "Scalable Diffusion Models with Transformers",
    section 3.2, adaLN with gates.
    """
    _check_places(x, places)
    _check_update(x, update, gate, projection, places)
    _check_norm(x, weight, bias, eps, places)
    refuse_forward_mode(*_given(x, update, gate, weight, bias, *(projection or ())))
    chosen = resolve_plain(backend, x.device, x.dtype)
    if (places is not None or _one_row(backend, gate, weight)) and chosen == "triton":
        # of a long row, the four sums of a gated backward do not fit into the registers
        joins = gate is None or x.shape[2] <= MOST_GATED_CHANNELS
        update, update_bias = _multiplied(update, projection, joins)
        total, norm, *_ = residual_norm_fwd(x, update, update_bias, gate, weight, bias, eps, *(places or ()))
        return x if update is None else total, norm
    return reference.residual_norm(x, update, gate, weight, bias, eps, projection, places)


def gated_residual(
    x: Tensor,
    update: Tensor,
    gate: Tensor,
    *,
    projection: tuple[Tensor, Tensor] | None = None,
    places: tuple[Tensor, int] | None = None,
    backend: str | None = None,
) -> Tensor:
    """The sum `x + gate * update` of a residual connection.

    On `triton`, the kernel of the backward sums the gradients of gate and bias over the tokens while it computes that
    of the update. Everything else is as in `residual_norm`.

    Args:
        x: `[B, L, C]` hidden states.
        update: `[B, L, C]` output of a sub-layer in x's dtype; with a projection `[B, L, E]`.
        gate: `[B, 1, C]` or `[B, L, C]` factor of the update, with places `[B, 2, C]`.
        projection: weight `[C, E]` and bias `[C]` of the last linear layer of the sub-layer.
        places: as in `residual_norm`.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        `[B, L, C]` in x's dtype; differentiable in all tensors.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", section 3.2.
    """
    _check_places(x, places)
    _check_update(x, update, gate, projection, places)
    refuse_forward_mode(*_given(x, update, gate, *(projection or ())))
    chosen = resolve_plain(backend, x.device, x.dtype)
    if (places is not None or _one_row(backend, gate)) and chosen == "triton":
        product, update_bias = _multiplied(update, projection)
        assert product is not None
        return gated_residual_fwd(x, product, update_bias, gate, *(places or ()))
    return reference.residual_sum(x, update, gate, projection, places)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _multiplied(
    update: Tensor | None, projection: tuple[Tensor, Tensor] | None, joins: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """The update without the bias of its projection, and that bias; with it, and None, unless the bias `joins`."""
    if update is None or projection is None:
        return update, None
    if not joins:
        return F.linear(update, *projection), None
    return F.linear(update, projection[0]), projection[1]


def _one_row(backend: str | None, *parameters: Tensor | None) -> bool:
    """Whether all parameters of a sample are those of all its tokens."""
    if all(parameter.shape[1] == 1 for parameter in _given(*parameters) if parameter.ndim == 3):
        return True
    if backend == "triton":
        raise ValueError("backend triton takes one row of parameters per sample, got one per token")
    return False


def _check_places(x: Tensor, places: tuple[Tensor, int] | None) -> None:
    if x.ndim != 3 or not x.is_floating_point() or 0 in x.shape[1:]:
        raise ValueError(f"x must be a float [B, tokens, channels] with tokens, got {x.dtype} {list(x.shape)}")
    if places is None:
        return
    order, split = places
    if not has_sizes(order, [x.shape[1]]) or order.dtype != torch.int32:
        raise ValueError(f"places must hold an int32 [{x.shape[1]}], got {order.dtype} {list(order.shape)}")
    if not 0 <= split <= x.shape[1]:
        raise ValueError(f"places must hold a number of tokens up to {x.shape[1]}, got {split}")
    check_device("places", order, "x", x)


def _check_update(
    x: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    projection: tuple[Tensor, Tensor] | None,
    places: tuple[Tensor, int] | None,
) -> None:
    B, L, C = x.shape
    if update is None:
        for name, value in (("gate", gate), ("projection", projection)):
            if value is not None:
                raise ValueError(f"{name} must be None without an update")
        return
    if projection is not None and update.ndim:
        check_projection(projection, "update", update, C)
    expected = [B, L, C] if projection is None else [B, L, projection[0].shape[1]]
    if not has_sizes(update, expected) or update.dtype != x.dtype:
        raise ValueError(f"update must be {x.dtype} {expected} like x, got {update.dtype} {list(update.shape)}")
    check_device("update", update, "x", x)
    _check_rows("gate", gate, x, _rows(x, places))


def _check_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, places: tuple[Tensor, int] | None) -> None:
    _check_rows("weight", weight, x, [[x.shape[2]], *_rows(x, places)])
    _check_rows("bias", bias, x, [list(weight.shape)])
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be finite and at least 0, got {eps}")


def _rows(x: Tensor, places: tuple[Tensor, int] | None) -> list[list[int]]:
    B, L, C = x.shape
    return [[B, rows, C] for rows in ((1, L) if places is None else (2,))]


def _check_rows(name: str, parameter: Tensor | None, x: Tensor, shapes: list[list[int]]) -> None:
    if parameter is None:
        return
    # size by size: in a compiled graph of several widths, a list with symbols is in no list of lists
    if not any(has_sizes(parameter, sizes) for sizes in shapes) or not parameter.is_floating_point():
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must be a float {expected}, got {parameter.dtype} {list(parameter.shape)}")
    check_device(name, parameter, "x", x)
