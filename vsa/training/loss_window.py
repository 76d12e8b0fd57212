"""Losses of a training run between two log lines, over all ranks, for their mean and their deciles.

B samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from vsa.diffusion.decile_means import DecileMeans
from vsa.transfer import PendingCopy


class LossWindow:
    """Collects losses until they are logged, without synchronising with the device.

    Non-finite losses are left out, like their updates; a window without a finite step has the loss nan.

    Args:
        device: device of the losses.
        ranks_per_sample: number of ranks that add the same losses.
    """

    def __init__(self, device: torch.device, ranks_per_sample: int = 1) -> None:
        self._device, self._ranks_per_sample = device, ranks_per_sample
        self._micro_batches: list[Mapping[str, Tensor]] = []
        self._steps: list[Tensor] = []
        self._samples: list[tuple[Tensor, Tensor]] = []
        self._names: list[str] = []
        # state of the window before a resume, over all ranks
        self._steps_before = torch.empty(0, dtype=torch.float64)
        self._deciles_before = torch.zeros(2, 10, dtype=torch.float64)

    def empty(self) -> LossWindow:
        """A new window for the same ranks."""
        return LossWindow(self._device, self._ranks_per_sample)

    def add(self, losses: Mapping[str, Tensor], mse: Tensor, sigmas: Tensor) -> None:
        """Add a micro-batch.

        Args:
            losses: scalars by name, the share of this rank and micro-batch in the losses of the step.
            mse: `[B]` unweighted losses of the samples.
            sigmas: `[B]` noise levels of the samples, on the CPU.
        """
        self._micro_batches.append({name: loss.detach() for name, loss in losses.items()})
        self._samples.append((mse.detach(), sigmas))

    def end_step(self) -> None:
        """Combine the micro-batches added since the last call into one optimizer step."""
        names = list(self._micro_batches[0])
        if len(self._steps_before) and names != self._names:
            rank_zero_info(
                f"the checkpoint has {', '.join(self._names)} of {len(self._steps_before)} steps not logged yet, the "
                f"run now has {', '.join(names)}: its next log line has the steps since the resume only"
            )
            self._steps_before, self._deciles_before = torch.empty(0).double(), torch.zeros(2, 10).double()
        self._names = names
        sums = [torch.stack([losses[name] for losses in self._micro_batches]).sum() for name in self._names]
        self._steps.append(torch.stack(sums))
        self._micro_batches.clear()

    def metrics(self) -> Callable[[], dict[str, float]]:
        """Sum the losses over all ranks, a collective operation that waits for nothing.

        Returns:
            function that waits for the means: of every loss over the steps, and `loss_decile_D` over their samples.
        """
        return partial(self._means, self._totals())

    def _means(self, totals: Callable[[], tuple[Tensor, DecileMeans]]) -> dict[str, float]:
        steps, deciles = totals()
        steps = steps[steps.isfinite().all(1)]
        # the mean over zero steps is nan
        means = steps.mean(0)
        return {**dict(zip(self._names, means.tolist(), strict=True)), **deciles.by_decile("loss")}

    def _totals(self) -> Callable[[], tuple[Tensor, DecileMeans]]:
        """Function that waits for the float64 `[steps, names]` losses and the means by decile, over all ranks."""
        shape = len(self._steps), len(self._names)
        steps = torch.stack(self._steps).double().flatten() if self._steps else torch.empty(0, device=self._device)
        deciles = DecileMeans(self._device, finite_only=True)
        if self._samples:
            deciles.add(*(torch.cat(tensors) for tensors in zip(*self._samples, strict=True)))
        flat = torch.cat([steps, deciles.table.flatten()])
        if dist.is_initialized():
            # Lightning's reduction has a barrier, at which the host waits for the device
            dist.all_reduce(flat)
        return partial(self._with_earlier, PendingCopy.of(flat), shape)

    def _with_earlier(self, arriving: PendingCopy, shape: tuple[int, int]) -> tuple[Tensor, DecileMeans]:
        flat, deciles = arriving.read() / self._ranks_per_sample, DecileMeans(finite_only=True)
        steps, table = flat[:-20].view(shape), flat[-20:].view(2, 10)
        if len(self._steps_before):
            steps = torch.cat([self._steps_before.view(-1, len(self._names)), steps])
        deciles.table = table + self._deciles_before
        return steps, deciles

    def state_dict(self) -> dict[str, Any]:
        """The current window, for `state.json`, so that a resumed run logs the same values; a collective operation."""
        steps, deciles = self._totals()()
        return {"names": self._names, "steps": steps.tolist(), "deciles": deciles.table.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window of `state_dict`; without one, the first log line covers the steps since the resume."""
        if not state:
            return
        self._names = list(state["names"])
        self._steps_before = torch.tensor(state["steps"], dtype=torch.float64)
        self._deciles_before = torch.tensor(state["deciles"], dtype=torch.float64)
