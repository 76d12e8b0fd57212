"""Embeddings of latents, timestep, text and image; module names are those of diffusers' Wan.

B batch, L tokens, S text tokens, E text width, C model width.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vsa_kernels import gated_residual, linear_gelu, residual_norm

from vsa.models.compute_dtype import linear_arguments, rounded, split_projection

Grid = tuple[int, int, int]
Places = tuple[Tensor, int]
"""int32 `[L]`, all tokens, and the number of those at its beginning that have the first of two rows of modulation."""


def at_least_fp32(x: Tensor) -> Tensor:
    """x in float32, or unchanged if it is float64; norms, modulation and time embedding compute in this dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LinearFp32(nn.Linear):
    """A linear layer that computes in at least float32, whatever the dtype of its parameters."""

    compute_dtype: torch.dtype | None = None

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else at_least_fp32(rounded(self.bias, self.compute_dtype))
        weight = at_least_fp32(rounded(self.weight, self.compute_dtype))
        return F.linear(input.to(weight.dtype), weight, bias)


class LayerNormFp32(nn.LayerNorm):
    """Layer norm that computes and returns at least float32: the caller rounds after the modulation."""

    compute_dtype: torch.dtype | None = None

    def forward(self, input: Tensor) -> Tensor:
        weight = None if self.weight is None else at_least_fp32(rounded(self.weight, self.compute_dtype))
        bias = None if self.bias is None else at_least_fp32(rounded(self.bias, self.compute_dtype))
        return F.layer_norm(at_least_fp32(input), self.normalized_shape, weight, bias, self.eps)


class ResidualNorm(LayerNormFp32):
    """Residual connection and the layer norm of its sum, which is modulated or has parameters of its own."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        update: Tensor | None = None,
        gate: Tensor | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        projection: nn.Module | None = None,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The sum `x + gate * projection(update)` and its norm, `[B, L, C]` each in x's dtype.

        Args:
            x: `[B, L, C]` hidden states.
            update: `[B, L, E]` what a sub-layer gives to its last layer; None: the sum is x.
            gate: `[B, M, C]` with M = 1 or L, or 2 with places; None: 1.
            scale: `[B, M, C]`, the norm is multiplied by 1 + scale; with shift, of norms without parameters.
            shift: `[B, M, C]`, added to it.
            projection: last layer of the sub-layer, to `[B, L, C]`, whose bias the kernel of the norm adds; None: the
                identity.
            places: the tokens of each of two rows.

        Raises:
            ValueError: shift and scale are not given together, or given to a norm with parameters.
        """
        modulated = [rows is not None for rows in (scale, shift)]
        if modulated != 2 * [self.weight is None]:
            expected = "scale and shift" if self.weight is None else "neither scale nor shift"
            names = [name for name, rows in (("scale", scale), ("shift", shift)) if rows is not None]
            raise ValueError(f"expected {expected}, got {' and '.join(names) or 'neither'}")
        if scale is not None and shift is not None:
            weight, bias = 1 + scale, shift
        else:
            parameters = (self.weight, self.bias)
            weight, bias = (at_least_fp32(rounded(parameter, self.compute_dtype)) for parameter in parameters)
        arguments = None
        if projection is not None and update is not None:
            update, arguments = split_projection(projection, update)
        return residual_norm(x, update, gate, weight, bias, eps=self.eps, projection=arguments, places=places)


class Residual(nn.Module):
    """A `ResidualNorm` without the norm: the sum, twice."""

    def forward(
        self, x: Tensor, update: Tensor, gate: Tensor, projection: nn.Module, places: Places | None = None
    ) -> tuple[Tensor, Tensor]:
        total = residual_sum(x, update, gate, projection, places)
        return total, total


def residual_sum(
    x: Tensor, update: Tensor, gate: Tensor, projection: nn.Module, places: Places | None = None
) -> Tensor:
    """The sum `x + gate * projection(update)`; arguments as in `ResidualNorm`."""
    update, arguments = split_projection(projection, update)
    return gated_residual(x, update, gate, projection=arguments, places=places)


class PatchEmbedding(nn.Conv3d):
    """Embedding of non-overlapping patches: a 3-D convolution, as in checkpoints, computed as one matmul.

    Args:
        in_channels: latent channels.
        dim: C.
        patch_size: latent frames, rows and columns per token.
    """

    compute_dtype: torch.dtype | None = None

    def __init__(self, in_channels: int, dim: int, patch_size: Grid):
        super().__init__(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, input: Tensor) -> Tensor:
        """Tokens `[B, L, C]` from flattened patches `[B, L, in_channels * prod(patch_size)]`."""
        weight = rounded(self.weight, self.compute_dtype).flatten(1)
        bias = None if self.bias is None else rounded(self.bias, self.compute_dtype)
        tokens = F.linear(input.to(weight.dtype).flatten(0, 1), weight, bias)
        # not a view, like the results of blocks: for another input, the compiled block would need a graph of its own
        return torch.ops.aten._unsafe_view(tokens, [*input.shape[:2], tokens.shape[1]])


def patchify(x: Tensor, patch_size: Grid) -> Tensor:
    """Split latents into patches, one per token in raster order, with channels as the slowest dimension of a patch.

    Args:
        x: `[B, C, T, H, W]` latents, divisible by the patch.
        patch_size: frames, rows, columns of a patch.

    Returns:
        `[B, L, C * prod(patch_size)]`.
    """
    pt, ph, pw = patch_size
    b, c, t, h, w = x.shape
    x = x.view(b, c, t // pt, pt, h // ph, ph, w // pw, pw)
    return x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(1, 3).flatten(2)


def unpatchify(tokens: Tensor, grid_thw: Grid, patch_size: Grid) -> Tensor:
    """Assemble latents from patches with channels as the fastest dimension of a patch (Wan's order of the head).

    The order differs from that of `patchify`.

    Args:
        tokens: `[B, L, prod(patch_size) * C]` in raster order.
        grid_thw: token grid with L cells.
        patch_size: frames, rows, columns of a patch.

    Returns:
        `[B, C, T, H, W]`.
    """
    b = tokens.shape[0]
    x = tokens.view(b, *grid_thw, *patch_size, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoidal features `[..., dim]` float32 of timesteps `[...]` in 0..1000, cosines first, period base 1e4.

    The frequencies are rounded to float32 as in Wan: at t = 1000, exact frequencies change the features by 1e-4.
    """
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=timestep.device) / half
    angle = timestep.float()[..., None] * torch.exp(-math.log(10000) * exponent)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


class TimeEmbedder(nn.Module):
    """Two-layer SiLU MLP over the sinusoid, in at least float32.

    Args:
        freq_dim: width of the sinusoid.
        dim: C.
    """

    def __init__(self, freq_dim: int, dim: int):
        super().__init__()
        self.linear_1 = LinearFp32(freq_dim, dim)
        self.linear_2 = LinearFp32(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class TextEmbedder(nn.Module):
    """Two-layer tanh-GELU MLP from the text encoder's width to the model's.

    Args:
        text_dim: E.
        dim: C.
    """

    def __init__(self, text_dim: int, dim: int):
        super().__init__()
        self.linear_1 = nn.Linear(text_dim, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, text: Tensor) -> Tensor:
        text = text.to(self.linear_1.weight.dtype)
        return self.linear_2(F.gelu(self.linear_1(text), approximate="tanh"))


class GeluProjection(nn.Module):
    """Linear then GELU, the first half of a feed-forward layer (`net.0.proj`).

    Args:
        dim: input width.
        hidden_dim: output width.
        approximate: "tanh" or "none".
    """

    def __init__(self, dim: int, hidden_dim: int, approximate: str = "tanh"):
        super().__init__()
        self.proj = nn.Linear(dim, hidden_dim)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        arguments = linear_arguments(self.proj, x)
        if self.approximate != "tanh" or arguments is None:
            return F.gelu(self.proj(x), approximate=self.approximate)
        return linear_gelu(*arguments)


class FeedForward(nn.Module):
    """Linear, GELU, linear under diffusers' names `net.0.proj` and `net.2`.

    Args:
        dim: input width.
        hidden_dim: width between the two layers.
        out_dim: output width, None for dim.
        approximate: "tanh" or "none".
    """

    def __init__(self, dim: int, hidden_dim: int, out_dim: int | None = None, approximate: str = "tanh"):
        super().__init__()
        # the identity replaces the dropout of diffusers, so that the second layer is net.2 as in checkpoints
        self.net = nn.Sequential(
            GeluProjection(dim, hidden_dim, approximate), nn.Identity(), nn.Linear(hidden_dim, out_dim or dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def hidden(self, x: Tensor) -> Tensor:
        """What the last layer gets."""
        return self.net[0](x)

    @property
    def projection(self) -> nn.Module:
        """The last layer."""
        return self.net[2]


class ImageEmbedder(nn.Module):
    """Projection of CLIP image tokens to the model width (image-to-video checkpoints of Wan2.1).

    Args:
        image_dim: width of the image encoder.
        dim: C.
    """

    def __init__(self, image_dim: int, dim: int):
        super().__init__()
        self.norm1 = LayerNormFp32(image_dim)
        self.ff = FeedForward(image_dim, image_dim, dim, approximate="none")
        self.norm2 = LayerNormFp32(dim)

    def forward(self, image: Tensor) -> Tensor:
        dtype = cast(nn.Linear, self.ff.net[2]).weight.dtype
        hidden = self.ff(self.norm1(image).to(dtype))
        return self.norm2(hidden).to(hidden.dtype)


class ConditionEmbedder(nn.Module):
    """Embeddings of the conditions: time, text and, for image-to-video, an image.

    Args:
        dim: C.
        freq_dim: width of the timestep sinusoid.
        text_dim: E.
        image_dim: width of the image tokens, None without an image branch.
    """

    def __init__(self, dim: int, freq_dim: int, text_dim: int, image_dim: int | None):
        super().__init__()
        self.freq_dim = freq_dim
        self.time_embedder = TimeEmbedder(freq_dim, dim)
        self.time_proj = LinearFp32(dim, 6 * dim)
        self.text_embedder = TextEmbedder(text_dim, dim)
        self.image_embedder = None if image_dim is None else ImageEmbedder(image_dim, dim)

    def time(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Time embedding `[B, M, C]` and its six modulation parts `[B, M, 6, C]` from timesteps `[B, M]`.

        M is 1, 2 where the first latent frame has its own timestep (Wan2.2 TI2V), or L where every token has one.
        """
        temb = self.time_embedder(sinusoid(timestep, self.freq_dim))
        return temb, self.time_proj(F.silu(temb)).unflatten(-1, (6, -1))
