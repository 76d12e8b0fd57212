"""Records of the operators: what others ask of each of them, declared once in its `op.py`.

Activation checkpointing, the table of step times, estimates, `scripts/bench`, `scripts/sanitize_kernels.py` and the
compile gates of `tests/kernels/aot.py` read the records, so none of them names an operator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from vsa_kernels.testing import Call, Case

MODEL_SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "pretrain_120m": (8, 16384, 12, 64),
    "wan1.3b": (1, 23296, 12, 128),
    "wan14b": (1, 23296, 40, 128),
}
"""Samples, tokens, heads and head dim of hidden states, by model."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The record of an operator.

    Args:
        name: name of its public function.
        module: module that declares it; `cases.py` beside it has a function of the operator's name that makes its
            calls at the sizes of a `Case`.
        ops: registered ops by name under `torch.ops.vsa_kernels`, with the FLOP formula of each, as for
            `torch.utils.flop_counter`; None: no matmul.
        moved: tensors of the size of its tokens that forward and backward read and write, of an elementwise operator.
        sizes: sizes in models by name as in `MODEL_SIZES`, at which `scripts/bench` times the first of its calls, and
            the compile gates compile all; without any, `scripts/bench` times it only in cases of its own.
        result_bytes: bytes of the forward's results on a GPU, from numbers of tokens, heads, head dim, blocks and list
            entries of a row; None: nothing estimates it.
    """

    name: str
    module: str
    ops: Mapping[str, Callable[..., int] | None]
    moved: tuple[int, int] = (0, 0)
    sizes: Mapping[str, tuple[int, int, int, int]] = field(default_factory=dict)
    result_bytes: Callable[[int, int, int, int, int], int] | None = None

    @property
    def elementwise(self) -> bool:
        """Whether it costs less than the memory of its results: activation checkpointing recomputes it, and keeps the
        results of other operators; step times count it among elementwise operations."""
        return self.moved != (0, 0)

    def cases(self, case: Case) -> Iterator[Call]:
        """Calls that reach every kernel of the operator."""
        module = importlib.import_module(f"{self.module.rpartition('.')[0]}.cases")
        return getattr(module, self.name)(case)


OPERATORS: dict[str, Operator] = {}
"""All operators by name."""


def declare(operator: Operator) -> None:
    """Add an operator to the records, and its formulas to torch's FLOP counter."""
    OPERATORS[operator.name] = operator
    for name, formula in operator.ops.items():
        if formula is not None:
            register_flop_formula(getattr(torch.ops.vsa_kernels, name))(formula)


def operator_of(op: str) -> Operator:
    """The operator of a registered op.

    Raises:
        ValueError: the op has no record.
    """
    for operator in OPERATORS.values():
        if op in operator.ops:
            return operator
    raise ValueError(f"vsa_kernels::{op} belongs to no operator: declare it in the op.py of its folder")


def elementwise_ops() -> tuple[str, ...]:
    """Names of the registered ops of elementwise operators."""
    return tuple(op for operator in OPERATORS.values() if operator.elementwise for op in operator.ops)
