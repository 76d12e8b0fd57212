"""Registration of ops that are called with many arguments, for less work on the host in every differentiable call.

`torch.library.custom_op` and its autograd look up every argument's default in the schema, in time that is quadratic in
their number: 45 us for 14 arguments, 80 us for 19. The functions here do without defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("vsa_kernels", "FRAGMENT")


def define_op(name: str, schema: str) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Decorator that makes a function the op `vsa_kernels::name` on every device; its results are new tensors.

    Args:
        name: name of the op.
        schema: arguments and results as in `torch.library.define`, without defaults.
    """

    def define(implementation: Callable[..., Any]) -> torch._ops.OpOverload:
        _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        # a compiled graph calls it as it is
        _LIBRARY.impl(name, torch._disable_dynamo(implementation), "CompositeExplicitAutograd")
        return getattr(torch.ops.vsa_kernels, name).default

    return define


def register_autograd(
    op: torch._ops.OpOverload, backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> None:
    """Make an op of `define_op` differentiable; arguments as in `torch.library.register_autograd`."""

    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def forward(ctx: Any, *args: Any) -> Any:
        output = below(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(op.name(), (torch.autograd.Function,), methods)

    def call(*args: Any) -> Any:
        needed = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        return function.apply(*args) if needed else below(*args)

    _LIBRARY.impl(op, call, "Autograd")
