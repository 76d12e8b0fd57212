"""Every operator on every backend, whichever inputs ask for a gradient and whichever optional arguments are there,
against the gradients of its reference in fp64.

The calls are those of `cases.py` and the same ones with optional arguments left out, so that a new operator is here by
its record.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from vsa_kernels.operators import OPERATORS, Operator
from vsa_kernels.testing import Call, Case, assert_within_budget, make_case, normal

SIZES: dict[str, Any] = {"q_sizes": [3, 5], "kv_sizes": [4, 3], "batch": 2, "heads": 2, "head_dim": 8}
SIZES |= {"fine": True, "kv_valid": True}
SMALL = {**SIZES, "q_sizes": [3], "kv_sizes": [3, 2], "batch": 1, "heads": 1, "head_dim": 4}
GATHERED = ("block_sparse_attn", "coarse_fine_attn", "tail_attn")
EVERY = [(name, b) for name in OPERATORS for b in ("gather", "triton") if b == "triton" or name in GATHERED]


def optional(operator: Operator) -> set[str]:
    """Names of the arguments of the public function that are tensors, or values with tensors, or None."""
    function = getattr(importlib.import_module(f"{operator.module.rpartition('.')[0]}.api"), operator.name)
    arguments = inspect.signature(function).parameters.values()
    return {x.name for x in arguments if "Tensor" in str(x.annotation) and "None" in str(x.annotation)}


def by_name(call: Call) -> dict[str, Any]:
    bound = inspect.signature(call.function).bind_partial(*call.inputs)
    return {**bound.arguments, **call.options}


def calls_of(operator: Operator, case: Case) -> Iterator[tuple[tuple[str, ...], Call, bool]]:
    """Calls with the names of their optional arguments: those of `cases.py` as they are, then with all, all but one and
    one of these left out, which the operator may refuse (True)."""
    for call in operator.cases(case):
        own = by_name(call)
        # the interpreter is wrong in half precision
        own |= {"half": False} if "half" in own else {}
        given = [name for name in own if name in optional(operator) and own[name] is not None]
        parts = {tuple(given): False, (): True}
        parts |= {part: True for n in (1, len(given) - 1) if n > 0 for part in itertools.combinations(given, n)}
        parts[tuple(given)] = False
        for kept, less in parts.items():
            options = {name: None if name in given and name not in kept else x for name, x in own.items()}
            yield kept, Call(call.function, (), options), less


def leaves_of(call: Call) -> list[Tensor]:
    return list({id(x): x for x in call.leaves}.values())


def asking(call: Call, which: set[int], dtype: torch.dtype | None = None) -> Call:
    """The call with copies of its tensors, of which these leaves ask for a gradient.

    Another dtype is that of the leaves; without leaves, of all. Constants of a call with leaves are fp32 as they are.
    """
    own = {id(x) for x in call.leaves}
    copies: dict[int, Tensor] = {}
    wanted = {id(x) for i, x in enumerate(leaves_of(call)) if i in which}

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if id(x) not in copies:
            cast = dtype if dtype is not None and (id(x) in own or not own) else x.dtype
            copies[id(x)] = x.detach().to(cast).clone().requires_grad_(id(x) in wanted)
        return copies[id(x)]

    return call._replace(options=tree_map(copied, call.options))


def subsets(number: int) -> list[set[int]]:
    """None, each alone, all but one, all."""
    alone = [{i} for i in range(number)]
    parts = [set(), *alone, *(set(range(number)) - one for one in alone), set(range(number))]
    return [part for i, part in enumerate(parts) if part not in parts[:i]]


def tensors_of(x: Any) -> list[Tensor]:
    if is_dataclass(x):
        x = [getattr(x, field.name) for field in fields(x)]
    return (
        [x] if isinstance(x, Tensor) else [z for y in x for z in tensors_of(y)] if isinstance(x, list | tuple) else []
    )


def run(call: Call, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients of the leaves from random ones of the results; RuntimeError where one is missing."""
    results, generator = tensors_of(call.function(**call.options, backend=backend)), torch.Generator().manual_seed(1)
    # of results without a gradient too, so that every result has the same one whatever asks
    douts = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]
    pairs = [(x, dout) for x, dout in zip(results, douts, strict=True) if x.requires_grad]
    grads = torch.autograd.grad([x for x, _ in pairs], leaves_of(call), [dout for _, dout in pairs]) if pairs else ()
    return [x.detach() for x in results], list(grads)


def check(backend: str, call: Call, which: set[int], label: str) -> None:
    """Results and gradients of the leaves that ask, within the budget of their dtype."""
    exact, plain = run(asking(call, which, torch.float64), "reference"), run(asking(call, which), "reference")
    own = run(asking(call, which), backend)
    assert len(own[1]) == len(which), label
    for part, *lists in zip(("result", "gradient"), own, plain, exact, strict=True):
        for i, (actual, rounded, expected) in enumerate(zip(*lists, strict=True)):
            assert actual.shape == expected.shape, f"{label} {part} {i}"
            if actual.is_floating_point():
                # one rounding more, because the plain result of a few numbers may be exact by chance
                most = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
                assert_within_budget(actual, rounded, expected, f"{label} {part} {i}", most)


def checked(name: str, backend: str, device: torch.device, case: Case, *, sampled: bool) -> set[str]:
    """Check an operator with every set of its optional arguments that it takes, and return those that were there.

    Sampled: one subset of the leaves with every set of arguments of `cases.py`; and of an elementwise operator, whose
    kernels leave out what nothing asks for, each leaf of the first call alone and one subset with every set.
    """
    seen: set[tuple[str, ...]] = set()
    torch.manual_seed(0)
    calls = list(calls_of(OPERATORS[name], case))
    assert calls, f"{name} has no case"
    for kept, call, may_refuse in calls:
        leaves = len(leaves_of(call))
        some = subsets(leaves)
        if sampled:
            elementwise = OPERATORS[name].elementwise
            if may_refuse and not elementwise:
                continue
            some = some[1 : 1 + leaves] if elementwise and not seen else [some[-1 - len(seen) % len(some)]]
        for which in some if kept not in seen or not sampled else ():
            try:
                check(backend, call, which, f"{name} {'+'.join(kept) or 'plain'} {sorted(which)} of {leaves}")
            except ValueError:
                if may_refuse:
                    break
                raise
            seen.add(kept)
    return {argument for kept in seen for argument in kept}


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_each_input_alone_asks_for_its_gradient(name, backend, request):
    device = request.getfixturevalue("triton_device") if backend == "triton" else torch.device("cpu")
    there = checked(name, backend, device, make_case(**SMALL, device=device), sampled=True)
    # an optional tensor that no case gives would be tested by nothing
    assert there == optional(OPERATORS[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_every_subset_of_the_inputs_asks_for_gradients(name, backend, request):
    device = request.getfixturevalue("triton_device") if backend == "triton" else torch.device("cpu")
    assert checked(name, backend, device, make_case(**SIZES, device=device), sampled=False) == optional(OPERATORS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
# linear_gelu multiplies by torch's own product, in the dtype of its weights
@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "linear_gelu"])
def test_every_subset_of_the_inputs_asks_for_gradients_of_the_kernels_for_hopper(name, dim):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    sizes = {**SIZES, "q_sizes": [64] * 4, "kv_sizes": [64] * 6, "head_dim": dim, "dtype": torch.bfloat16}
    checked(name, "triton", torch.device("cuda"), make_case(**sizes, device="cuda"), sampled=False)


def test_a_gradient_that_an_operator_forgets_is_found(monkeypatch):
    """The control: an operator that forgets the gradient of a bias whose weight asks for none."""

    def forgetful(x, weight, bias, *, backend):
        bias = bias if weight.requires_grad or backend == "reference" else bias.detach()
        return x * weight + bias

    def cases(case):
        yield Call(forgetful, tuple(normal(case, 4) for _ in range(3)))

    toy = Operator(name="forgetful", module=f"{__name__}.op", ops={}, moved=(1, 1))
    monkeypatch.setitem(OPERATORS, "forgetful", toy)
    module: Any = ModuleType(f"{__name__}.cases")
    module.forgetful = cases
    monkeypatch.setitem(sys.modules, f"{__name__}.cases", module)
    monkeypatch.setitem(sys.modules, f"{__name__}.api", module)
    case = make_case(**SMALL)
    checked("forgetful", "reference", torch.device("cpu"), case, sampled=True)
    with pytest.raises((RuntimeError, AssertionError)):
        checked("forgetful", "gather", torch.device("cpu"), case, sampled=True)
