"""Block selection: the kv blocks that each query block attends to, by top-k or by share of the softmax (top-p)."""

from __future__ import annotations

from vsa_kernels.selection.api import Form, mean_scores, select_share, select_topk, subblock_scores
from vsa_kernels.selection.reference import order_keys
from vsa_kernels.selection.weights import Crossing, weight_units, within_share

__all__ = [
    "Crossing",
    "Form",
    "mean_scores",
    "order_keys",
    "select_share",
    "select_topk",
    "subblock_scores",
    "weight_units",
    "within_share",
]
