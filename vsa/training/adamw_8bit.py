"""torchao's AdamW with 8-bit moments, by the rule of `vsa.checkpoints.moments`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torchao import optim

from vsa.checkpoints.moments import BLOCK, new_moment

# of the cache of compiled graphs, which takes another hash
warnings.filterwarnings("ignore", message="OptimState8bit does not implement _stable_hash_for_caching")


class AdamW8bit(optim.AdamW8bit):
    """AdamW of torchao 0.18, whose update is compiled on GPUs, once for every shape of parameter, and eager elsewhere.

    Args:
        params: parameter groups.
        **settings: those of `torch.optim.AdamW`.
    """

    def __init__(self, params: Any, **settings: Any):
        super().__init__(params, block_size=BLOCK, **settings)
        self.defaults["moments"] = "int8"

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        # torchao's own rule depends on the number of ranks
        return new_moment(p, "int8", signed=signed)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            # as numbers they would be compiled into the update
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
        on_gpus = all(p.is_cuda for group in self.param_groups for p in group["params"])
        with torch.compiler.set_stance("default" if on_gpus else "force_eager"):
            return super().step(closure)
