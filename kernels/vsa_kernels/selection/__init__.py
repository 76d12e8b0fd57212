"""Which kv blocks each query block keeps."""

from __future__ import annotations

from vsa_kernels.selection.api import select_topk
from vsa_kernels.selection.reference import order_keys

__all__ = ["order_keys", "select_topk"]
