"""Activation memory of a transformer block, and memory traffic of its elementwise operations, in bytes.

n tokens of a micro-batch, C model width, F width of the feed-forward layer, H heads. Activations are bf16, norms and
modulation fp32, as `vsa.models.blocks` computes them on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vsa_kernels.operators import OPERATORS

from vsa.models.recompute import Level

HALF, SINGLE = 2, 4
"""Bytes of a number in bf16 and fp32."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """A block and the sizes of its input.

    Args:
        tokens: n, of all samples.
        text: text tokens of all samples.
        dim: C.
        ffn_dim: F.
        heads: H.
        gates: number of gate layers of the attention method, linear layers of width C.
        operator: name of the operator that a method which selects tiles runs.
        tiles: tiles of all samples if the method runs the operator, otherwise 0.
        capacity: capacity of the operator's index lists.
        workspace: bytes that the operator's backward takes and gives back.
        compiled: whether the block is compiled, which fuses norms, modulation and casts.
        fused_norms: whether torch has RMSNorm as one kernel, which keeps its input; otherwise two fp32 tensors are
            kept.
    """

    tokens: int
    text: int
    dim: int
    ffn_dim: int
    heads: int
    gates: int = 0
    operator: str = "coarse_fine_attn"
    tiles: int = 0
    capacity: int = 0
    workspace: int = 0
    compiled: bool = False
    fused_norms: bool = True

    @property
    def wide(self) -> int:
        """Number of elements of the hidden states."""
        return self.tokens * self.dim


def kept_bytes(shape: BlockShape, level: Level) -> float:
    """Bytes that a block keeps from forward to backward, without parameters and tensors that all blocks share."""
    wide = shape.wide
    states = HALF * wide
    if level == "full":
        return states
    outputs = _attention_outputs(shape)
    if level == "attention_mlp":
        return states + outputs
    if level == "attention":
        return states + outputs + _feed_forward(shape)
    # inputs of the products of self- and cross-attention, their queries, keys, values and outputs
    if shape.compiled:
        # the block's input, inputs and outputs of the products of each attention, and both sums; no fp32 copy
        inner = states + HALF * wide * 12
    else:
        norms = SINGLE * wide * 3 + HALF * wide * 3
        inner = norms + 3 * _rms_norm(shape, wide) + HALF * wide * 4
    text = shape.text * shape.dim
    keys = _rms_norm(shape, text) + 2 * HALF * text
    statistics = SINGLE * shape.tokens * 7
    return inner + outputs + HALF * wide * shape.gates + keys + statistics + _feed_forward(shape)


def turn_bytes(shape: BlockShape, level: Level) -> float:
    """Bytes that a block's backward needs beyond `kept_bytes`: recomputed activations, and gradients."""
    width = HALF * shape.tokens
    if shape.compiled:
        gradients = width * (shape.ffn_dim + shape.dim)
    else:
        # gradients of the hidden layer, or fp32 gradients of modulation and residual
        gradients = max(width * (shape.ffn_dim + 3 * shape.dim), width * 7 * shape.dim)
    if shape.workspace:
        # beside queries, keys, values, their gradients and that of the output
        gradients = max(gradients, width * 7 * shape.dim + shape.workspace)
    all_activations, kept_activations = kept_bytes(shape, "none"), kept_bytes(shape, level)
    if level == "attention":
        # the backward of the feed-forward layer is done when the attentions are recomputed
        return max(kept_activations, all_activations - _feed_forward(shape)) - kept_activations + gradients
    return max(0.0, all_activations - kept_activations) + gradients


def _attention_outputs(shape: BlockShape) -> float:
    """Bytes of the results of both attentions: those of the operator, or output and logsumexp."""
    dense = HALF * shape.wide + SINGLE * shape.heads * shape.tokens
    result_bytes = OPERATORS[shape.operator].result_bytes
    if not shape.tiles or result_bytes is None:
        return 2 * dense
    return dense + result_bytes(shape.tokens, shape.heads, shape.dim // shape.heads, shape.tiles, shape.capacity)


def _rms_norm(shape: BlockShape, numbers: int) -> float:
    return numbers * (HALF if shape.fused_norms or shape.compiled else 2 * SINGLE)


def _feed_forward(shape: BlockShape) -> float:
    hidden = 2 * HALF * shape.tokens * shape.ffn_dim
    # its input and output, and without compilation the fp32 input and output of the norm
    return hidden + shape.wide * (2 * HALF if shape.compiled else 2 * HALF + 2 * SINGLE)


class Traffic(NamedTuple):
    """Bytes that elementwise kernels read and write, in forward and backward."""

    forward: float
    backward: float


# bytes per element of the hidden states (C) and of the hidden layer (F), as (forward, backward). Eager: every operation
# reads its arguments and writes its result, including casts to and from fp32. Compiled: one kernel between two
# products. They and the eager memory are those before the fused elementwise operators, which move less and keep no fp32
# copy: the eager steps of `docs/benchmarks/how-fast.md` are older than these, compiled ones differ little.
_EAGER = {
    "norm1, modulation": (36, 58),
    "RMSNorm of q and k": (8, 20),
    "RoPE of q and k": (84, 88),
    "gate, residual": (22, 40),
    "norm2": (20, 38),
    "RMSNorm of the second q, residual": (10, 10),
    "norm3, modulation": (36, 58),
    "gate, residual of the feed-forward layer": (22, 40),
    "biases, sum of the gradients of q, k, v": (0, 24),
}
_COMPILED = {
    "norm1, modulation": (4, 10),
    "RMSNorm, RoPE of q and k": (8, 20),
    "gate, residual, norm2": (8, 18),
    "RMSNorm of the second q": (4, 10),
    "residual, norm3, modulation": [HALF * n for n in OPERATORS["residual_norm"].moved],
    "gate, residual of the feed-forward layer": [HALF * n for n in OPERATORS["gated_residual"].moved],
    "biases, sum of the gradients of q, k, v": (0, 28),
}
_GELU = (4, 8)
_GATE = (0, 8)


def block_traffic(shape: BlockShape) -> Traffic:
    """Traffic of one block."""
    table = _COMPILED if shape.compiled else _EAGER
    forward, backward = (
        shape.wide * (sum(row[i] for row in table.values()) + shape.gates * _GATE[i])
        + shape.tokens * shape.ffn_dim * _GELU[i]
        for i in range(2)
    )
    return Traffic(forward, backward)


def head_bytes(shape: BlockShape) -> float:
    """Bytes kept by the last norm and modulation: the norm's fp32 input and output, and the result.

    As it was when the steps were measured: the fused operator keeps input and result alone.
    """
    return shape.wide * (2 * SINGLE + HALF)


def head_traffic(shape: BlockShape) -> Traffic:
    """Traffic of the last norm and modulation."""
    return Traffic(*(shape.wide * bytes_ for bytes_ in _EAGER["norm1, modulation"]))
