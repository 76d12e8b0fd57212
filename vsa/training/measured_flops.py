"""FLOPs of attention whose number of kept tiles depends on q and k: counted on the device, read at log lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vsa.models.network import Network
from vsa.models.pair_tally import PairTally
from vsa.transfer import PendingCopy


class MeasuredFlops:
    """The sum over all ranks, an integer, so that a resumed run has the same one.

    Attributes:
        total: FLOPs that were read so far.
        density: pairs over those of dense attention, between the last two log lines.
    """

    def __init__(self) -> None:
        self._tallies: dict[Network, PairTally] = {}
        self._start({})

    def _start(self, state: Mapping[str, Any]) -> None:
        self.total, self.density = state.get("flops_measured", 0), 1.0
        # pairs since the last log line, and those of dense attention
        self._window = list(state.get("pairs_measured", (0, 0)))
        self._arriving: list[tuple[Sequence[tuple[int, PendingCopy, int]], bool]] = []

    @property
    def used(self) -> bool:
        """Whether anything is measured."""
        return bool(self._tallies or self.total)

    def begin(self, networks: Iterable[Network], device: torch.device) -> None:
        """Count the passes of networks until `end`."""
        for network in networks:
            network.tally = self._tallies.setdefault(network, PairTally(device))

    def end(self) -> None:
        """Count no more passes, such as those of a validation."""
        for network in self._tallies:
            network.tally = None

    def collect(self, *, line: bool) -> None:
        """Begin to read what was counted, for a log line or not; a collective operation that waits for nothing."""
        ranks, parts = dist.get_world_size() if dist.is_initialized() else 1, []
        for network, tally in self._tallies.items():
            pairs, dense = tally.take()
            if ranks > 1:
                dist.all_reduce(pairs)
            parts.append((network.head_dim, PendingCopy.of(pairs), ranks * dense))
        self._arriving.append((parts, line))

    def read(self) -> int:
        """The total with everything collected, after waiting for it."""
        while self._arriving:
            parts, line = self._arriving.pop(0)
            for head_dim, copy, dense in parts:
                forward, both, silent = copy.read().tolist()
                if silent:
                    raise ValueError(
                        f"{silent} calls of attention layers whose pairs are measured reported none: FLOPs are unknown "
                        "until such a layer calls ctx.select or ctx.count"
                    )
                # 4 D a pair, and 2.5 times as many again in a backward
                self.total += 2 * head_dim * (2 * forward + 7 * both)
                self._window = [self._window[0] + forward + both, self._window[1] + dense]
            if line:
                self.density = self._window[0] / max(self._window[1], 1)
                self._window = [0, 0]
        return self.total

    def state_dict(self) -> Mapping[str, Any]:
        """The sums, a collective operation; empty where nothing is measured."""
        if not self.used:
            return {}
        self.collect(line=False)
        return {"flops_measured": self.read(), "pairs_measured": self._window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for tally in self._tallies.values():
            tally.take()
        self._start(state)
