"""Public interface of residual connection and layer norm. B batch, L tokens, C channels."""

from __future__ import annotations

from torch import Tensor

from vsa_kernels.checks import check_device, has_sizes
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.modes import refuse_forward_mode
from vsa_kernels.residual_norm import reference
from vsa_kernels.residual_norm.op import residual_norm_fwd


def residual_norm(
    x: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum `x + gate * update` of a residual connection, and its layer norm with weight and bias.

    With modulated norms (DiT), weight is 1 + scale and bias is the shift of each sample. `triton` computes in fp32 and
    rounds the sum and the norm once each; `reference` is torch's operations. Parameters with one row per token are
    computed by `reference` alone.

    Args:
        x: `[B, L, C]` hidden states.
        update: `[B, L, C]` output of a sub-layer in x's dtype; None: the sum is x itself.
        gate: `[B, 1, C]` or `[B, L, C]` factor of the update; None: 1.
        weight: `[C]`, `[B, 1, C]` or `[B, L, C]` factor of the normalised sum.
        bias: like weight, added to it.
        eps: added to the variance.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        The sum and its norm, `[B, L, C]` each in x's dtype; differentiable in all tensors.

    Source: Ba et al., "Layer Normalization"; Peebles and Xie, "Scalable Diffusion Models with Transformers",
    section 3.2, adaLN with gates.
    """
    _check(x, update, gate, weight, bias, eps)
    tensors = [tensor for tensor in (x, update, gate, weight, bias) if tensor is not None]
    refuse_forward_mode(*tensors)
    rows = [parameter.shape[1] for parameter in (gate, weight) if parameter is not None and parameter.ndim == 3]
    chosen = resolve_plain(backend, x.device, x.dtype)
    if chosen == "triton" and all(number == 1 for number in rows):
        total, norm, *_ = residual_norm_fwd(x, update, gate, weight, bias, eps)
        return x if update is None else total, norm
    if backend == "triton":
        raise ValueError("backend triton takes one row of parameters per sample, got one per token")
    return reference.residual_norm(x, update, gate, weight, bias, eps)


def _check(x: Tensor, update: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> None:
    if x.ndim != 3 or not x.is_floating_point() or 0 in x.shape[1:]:
        raise ValueError(f"x must be a float [B, tokens, channels] with tokens, got {x.dtype} {list(x.shape)}")
    B, L, C = x.shape
    if update is not None and (update.shape != x.shape or update.dtype != x.dtype):
        raise ValueError(f"update must be {x.dtype} {list(x.shape)} like x, got {update.dtype} {list(update.shape)}")
    if gate is not None and update is None:
        raise ValueError("gate must be None without an update")
    shapes = {"gate": [[B, 1, C], [B, L, C]], "weight": [[C], [B, 1, C], [B, L, C]], "bias": [list(weight.shape)]}
    for name, parameter in (("gate", gate), ("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        # size by size: in a compiled graph of several widths, a list with symbols is in no list of lists
        fits = any(has_sizes(parameter, sizes) for sizes in shapes[name])
        if not fits or not parameter.is_floating_point():
            expected = " or ".join(map(str, shapes[name]))
            raise ValueError(f"{name} must be a float {expected}, got {parameter.dtype} {list(parameter.shape)}")
    for name, tensor in (("update", update), ("gate", gate), ("weight", weight), ("bias", bias)):
        check_device(name, tensor, "x", x)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be finite and at least 0, got {eps}")
