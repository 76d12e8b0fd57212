"""Where gradients may flow, their norms, the check for non-finite ones, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from vsa.models.network import Network
from vsa.training.optimizer import ROLES
from vsa.transfer import PendingCopy


def refuse_training_free(model: Network, key: str = "attention") -> None:
    """Raise ValueError where gradients would flow through self-attention that does not take them.

    Args:
        model: network whose frozen parameters require no gradients.
        key: setting that chose its attention, for the message.
    """
    if any(p.requires_grad and not model.follows_attention(name) for name, p in model.named_parameters()):
        for method in model.attention_layers:
            method.refuse_training(key)


class GradientClipper:
    """Clips the gradients of one network, and drops all of them if one is not finite.

    A dropped update leaves weights and moments bitwise unchanged. To read the norm, the host waits for the backward,
    and afterwards the GPU waits for the host. A fused AdamW drops the update by itself, so the host reads the norm
    later: before the next update, or when `skipped`, `skipped_total` or `state_dict()` is read.

    Args:
        clip: largest global gradient norm; 0 disables clipping.
        max_skipped: number of consecutive dropped updates that stops training.
        network: name of the network for messages, if there are several.
        waits: whether the norm is read before the update in any case.

    Attributes:
        on_drop: function called on every rank with the step of a dropped update; weights and moments are those before
            it.
    """

    def __init__(self, *, clip: float, max_skipped: int, network: str = "", waits: bool = False):
        self.clip, self.max_skipped, self.waits = clip, max_skipped, waits
        self._of = f" of {network}" if network else ""
        self._skipped = False
        self._skipped_total = self._in_row = self._made = 0
        # of the last update: its norm and its step
        self._unread: tuple[PendingCopy, int] | None = None
        self.on_drop: Callable[[int], None] | None = None

    @record_function("GradientClipper")
    def __call__(self, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Tensor]:
        """Clip the gradients that `optimizer` is about to use, and make sure that it drops them if one is not finite.

        Args:
            optimizer: built by `vsa.training.optimizer`.
            step: optimizer step, for the message.

        Returns:
            Gradient norms before clipping, by parameter role and in total ("total").

        Raises:
            FloatingPointError: too many consecutive updates were dropped.
        """
        self._read()
        grads: dict[str, list[Tensor]] = {}
        for group in optimizer.param_groups:
            grads.setdefault(group["role"], []).extend(p.grad for p in group["params"] if p.grad is not None)
        norms = {}
        for role in filter(grads.get, grads):
            norm = torch.nn.utils.get_total_norm(grads[role])
            norms[role] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        if self.clip > 0:
            # before the host waits for the norm, since a GPU would wait for the host afterwards
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, total)
        self._unread = PendingCopy.of(total), step
        self._made += 1
        if optimizer.param_groups[0].get("fused") and not self.waits:
            # a fused AdamW does nothing where this is 1, as for gradients scaled to fp16
            optimizer.found_inf = (~total.isfinite()).float()  # type: ignore[attr-defined]
        elif self.skipped:
            optimizer.zero_grad(set_to_none=True)
        return {"total": total, **{role: norms[role] for role in ROLES if role in norms}}

    @property
    def unread(self) -> bool:
        """Whether it is not known yet if the last update was dropped."""
        return self._unread is not None

    @property
    def skipped(self) -> bool:
        """Whether the last update was dropped."""
        self._read()
        return self._skipped

    @property
    def skipped_total(self) -> int:
        """Number of dropped updates."""
        self._read()
        return self._skipped_total

    def _read(self) -> None:
        """Read the norm of the last update unless that is done, and count the update if it was dropped."""
        if self._unread is None:
            return
        (norm, step), self._unread = self._unread, None
        finite = math.isfinite(norm.read().item())
        self._skipped = not finite
        if finite:
            self._in_row = 0
            return
        self._in_row += 1
        self._skipped_total += 1
        if self.on_drop is not None:
            self.on_drop(step)
        if self._in_row >= self.max_skipped:
            raise FloatingPointError(
                f"gradients{self._of} were not finite for {self._in_row} steps in a row, "
                f"the last one step {step}: training stopped"
            )

    def refuse_all_dropped(self) -> None:
        """Raise FloatingPointError at the end of a training if it dropped every update, so that nothing was trained."""
        if self.skipped and self._in_row >= self._made:
            raise FloatingPointError(f"gradients{self._of} were not finite in any of {self._made} steps")

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update with the gradients of the last call unless they were dropped, and clear them."""
        if not self.skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, int]:
        """The counters, for `state.json`."""
        return {"skipped_steps": self.skipped_total, "skipped_in_row": self._in_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counters of `state_dict`."""
        self._unread, self._skipped = None, False
        self._skipped_total, self._in_row = state["skipped_steps"], state["skipped_in_row"]
