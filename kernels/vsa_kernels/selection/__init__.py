"""Which kv blocks each query block keeps."""

from __future__ import annotations

from vsa_kernels.selection.api import select_topk

__all__ = ["select_topk"]
