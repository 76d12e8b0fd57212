"""Initial values of networks on the meta device, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Fills(TorchDispatchMode):
    """Records how tensors on the meta device were last filled.

    Args:
        draws: whether random values are drawn and discarded, so that the random state advances as on a real device, and
            every value is that of a real device. Otherwise values are drawn when they are asked for, in that order.
    """

    FUNCTIONS = (aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default)

    def __init__(self, *, draws: bool):
        super().__init__()
        self._draws = draws
        # by storage, which all views of a parameter share; a reference to the tensor keeps its address from being
        # reused
        self._last: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        # one shared buffer, since freed buffers would fragment the memory between the recorded tensors
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.FUNCTIONS or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        tensor: Tensor = args[0]

        def fill() -> Tensor:
            return func(self._buffer_for(tensor), *args[1:], **(kwargs or {}))

        recorded = fill
        if self._draws:
            state = torch.get_rng_state()

            def fill_again() -> Tensor:
                torch.set_rng_state(state)
                return fill()

            recorded = fill_again
            if torch.Tag.nondeterministic_seeded in func.tags:
                fill()
        self._last[tensor.untyped_storage()._cdata] = (tensor, recorded)
        return tensor

    def _buffer_for(self, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._buffer[:size].view(like.dtype).view(like.shape)

    def of(self, name: str, parameter: nn.Parameter) -> Callable[[], Tensor]:
        """Function that returns the value of `parameter` on the CPU, valid until the next value is computed."""
        tensor, recorded = self._last[parameter.untyped_storage()._cdata]
        assert tensor.shape == parameter.shape, name
        return recorded
