"""Memory that kernels take while they run and give back at once: how much it may be, and how a call divides it."""

from __future__ import annotations

from typing import NamedTuple

from vsa_kernels.launch import cdiv

_limit = 4 << 30


def set_workspace_limit(limit: int) -> None:
    """Set how many bytes a call may take for a workspace, 4 GiB at the start of a process.

    The backward for tiles of 128 keeps the gradients of its logits there, 2 bytes each; with less room it computes
    some heads after others, and without room for a group of heads it computes the logits once more, which takes longer.
    The first changes no bit of a result and the second does, so a run that is resumed exactly keeps its limit.

    The limit is the process's: for all devices and threads, autograd's too, and compiled functions see a change at
    their next call. A captured CUDA graph keeps what it was captured with.

    Args:
        limit: bytes, at least 0; 0: no workspace.
    """
    global _limit
    if limit < 0:
        raise ValueError(f"the limit of the workspace must be at least 0 bytes, got {limit}")
    _limit = limit


def workspace_limit() -> int:
    """Bytes that a call may take for a workspace, see `set_workspace_limit`."""
    return _limit


class Parts(NamedTuple):
    """Division of a call into parts that share a workspace.

    Args:
        samples: samples of a part.
        heads: query heads of a part, whole groups of a kv head.
        size: bytes of the workspace.
    """

    samples: int
    heads: int
    size: int


def parts_of(batch: int, heads: int, kv_heads: int, head_bytes: int) -> Parts | None:
    """The parts of a call within the limit, about equally large; None if it has no room for the group of a kv head.

    Args:
        batch: samples.
        heads: query heads.
        kv_heads: kv heads, which divide the query heads.
        head_bytes: bytes of the workspace for a head of a sample.
    """
    group, most = heads // kv_heads, _limit // head_bytes
    if most < group:
        return None
    if most >= batch * heads:
        return Parts(batch, heads, batch * heads * head_bytes)
    # as few parts as fit, of equally many kv heads
    each = group * cdiv(kv_heads, cdiv(kv_heads, most // group))
    return Parts(1, each, each * head_bytes)
