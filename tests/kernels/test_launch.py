"""Launching a kernel: which code a call takes, and the table of configurations."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from vsa_kernels import launch

STREAM = 7


class Kernel:
    """In place of a jitted function: notes the constants of every compilation, and of the code behind every run."""

    def __init__(self):
        self.fn, self.arg_names = object(), ["x", "n", "A", "B"]
        self.compiled: list[dict[str, Any]] = []
        self.ran: list[dict[str, Any]] = []
        self.direct = 0

    def __getitem__(self, _grid):
        def compile_and_run(*args: Any, **constants: Any) -> Code:
            self.compiled.append(constants)
            code = Code(self, constants)
            code[1, 1, 1](*args, constants["A"], constants["B"])
            return code

        return compile_and_run


class Code:
    """What a compilation returns: takes the run-time arguments and the constexprs in the kernel's own order."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Kernel, constants: dict[str, Any]):
        self.kernel, self.constants = kernel, constants

    def __getitem__(self, grid):
        """The launch for hooks, as that of triton."""

        def run(_x: torch.Tensor, _n: int, a: Any, b: Any) -> None:
            assert (a, b) == (self.constants["A"], self.constants["B"])
            assert len(grid) == 3
            self.kernel.ran.append(self.constants)

        return run

    def run(self, *call: Any) -> None:
        """The launch that `compiled[grid]` ends in, without hooks."""
        assert call[3:9] == (STREAM, "function", "metadata", None, None, None)
        self.kernel.direct += 1
        self[call[:3]](*call[9:])


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    # torch for a CPU has none
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: STREAM, raising=False)
    return Kernel()


def test_constants_are_told_apart_by_their_names(kernel):
    """The order in which a call writes its constants is no difference, whose value is whose is one."""
    x = torch.zeros(4)
    for a, b, warps in ((1, 2, 4), (2, 1, 4), (2, 4, 1)):
        constants = {"A": a, "B": b, "num_warps": warps}
        for names in itertools.permutations(constants):
            launch.launch(kernel, (1,), x, 7, **{name: constants[name] for name in names})
            assert kernel.ran[-1] == constants
    assert len(kernel.compiled) == 3
    assert len(kernel.ran) == 18


def test_what_triton_specialises_on_is_told_apart(kernel):
    wide = torch.zeros(16)
    # dtype, 16-byte alignment, an integer, an option
    calls = [(wide, 7, 4), (wide.half(), 7, 4), (wide[1:], 7, 4), (wide, 8, 4), (wide, 7, 8)]
    for _ in range(2):
        for x, n, warps in calls:
            launch.launch(kernel, (1,), x, n, A=1, B=2, num_warps=warps)
    assert len(kernel.compiled) == len(calls)
    assert len(kernel.ran) == 2 * len(calls)


def test_hooks_of_profilers_get_their_launches(kernel):
    """Triton prepares what a hook is told in `compiled[grid]`, which is left out while there is no hook."""
    from triton import knobs

    x, hook = torch.zeros(4), print
    launch.launch(kernel, (1,), x, 7, A=1, B=2)
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        launch.launch(kernel, (1, 2), x, 7, A=1, B=2)
        hooks.add(hook)
        try:
            launch.launch(kernel, (1, 2), x, 7, A=1, B=2)
        finally:
            hooks.remove(hook)
    assert len(kernel.ran) == 5
    assert kernel.direct == 2


def test_the_cache_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launch, "_MOST_COMPILED", 8)
    x = torch.zeros(4)
    for n in [*range(20), *range(20)]:
        launch.launch(kernel, (1,), x, n, A=n, B=2)
        assert kernel.ran[-1]["A"] == n
        assert len(launch._compiled) <= 10


def test_configurations_of_a_kernel_have_the_same_keys():
    table = json.loads(launch.CONFIGS.read_text())
    assert {"fwd", "dq", "dkv"} <= table.keys()
    for name, archs in table.items():
        keys = {
            f"{name} sm_{arch} {bits} bit D={dim}": tuple(config)
            for arch, by_bits in archs.items()
            for bits, by_dim in by_bits.items()
            for dim, config in by_dim.items()
        }
        first = next(iter(keys.values()))
        assert not {place: names for place, names in keys.items() if names != first}, f"expected {first}"
