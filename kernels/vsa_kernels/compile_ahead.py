"""Compilation of kernels ahead of their first launch, in other processes.

The first step of a program launches some thirty kernels. Each is compiled by the thread that launches it, one after the
other, which takes 20 to 25 s while the other processors wait; threads would not help, because Triton holds the
interpreter's lock. Here the launches are found without a GPU, by calling the ops with tensors of the meta device, and
several processes compile them at the same time. The program then finds the kernels in Triton's cache on disk.
"""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from vsa_kernels import launch
from vsa_kernels.compile_cache import source_hash


@dataclass(frozen=True)
class Pointer:
    """What Triton reads of a tensor when it compiles a kernel for it."""

    dtype: torch.dtype
    remainder: int

    def data_ptr(self) -> int:
        """An address of the same alignment."""
        return self.remainder


@contextmanager
def recorded_launches(capability: tuple[int, int]) -> Iterator[list[bytes]]:
    """Record, in the block, what the ops of this package would launch, called with tensors of the meta device.

    A launch of any other Triton kernel in the block is a RuntimeError.

    Args:
        capability: compute capability of the GPU that is meant.

    Yields:
        One entry per kernel to compile, for `compile_ahead`; equal ones are recorded once.
    """
    launches: list[bytes] = []
    known = set[bytes]()

    def record(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        names = (kernel.fn.__module__, kernel.fn.__name__)
        entry = pickle.dumps((*names, [_specialised(x) for x in args], sorted(constants.items())))
        if entry not in known:
            known.add(entry)
            launches.append(entry)

    with launch.recording(launch.Recording(capability, record)), _RealOps(), _nothing_launched():
        yield launches


@contextmanager
def _nothing_launched() -> Iterator[None]:
    # tensors of the meta device have the address 0, which a kernel would read on the GPU
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("kernels are not launched while launches are recorded")

    JITFunction.run = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


class _RealOps(TorchDispatchMode):
    """Calls the implementation of every op of this package, where the meta device gets its description alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "vsa_kernels":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _specialised(x: Any) -> Any:
    """An argument of a launch, as far as the compiled kernel depends on it."""
    if isinstance(x, Tensor):
        return Pointer(x.dtype, int(x.storage_offset()) * x.element_size() % 16)
    if type(x) is int:
        # Triton knows whether an integer is 1 or divisible by 16, and its width
        wide = 0 if abs(x) < 1 << 31 else 1 << 32
        return x if x == 1 else wide + (16 if x % 16 == 0 else 17)
    if type(x) is float:
        return 1.0
    return replace(x, base=_specialised(x.base)) if hasattr(x, "base") else x


def compile_ahead(launches: Iterable[bytes], capability: tuple[int, int], processes: int) -> Compilation | None:
    """Start the compilation of recorded launches, and return at once.

    Args:
        launches: those of `recorded_launches`.
        capability: compute capability of the GPU.
        processes: number of compiling processes.

    Returns:
        The compilation; None if all the launches are in the cache already.
    """
    entries = list(launches)
    mark = _mark(entries, capability)
    return None if not entries or mark.exists() else Compilation(entries, capability, processes, mark)


class Compilation:
    """A process that compiles launches, and the processes that do it for it.

    If this program is killed, they end when all is compiled.
    """

    def __init__(self, entries: list[bytes], capability: tuple[int, int], processes: int, mark: Path):
        # files, since a pipe would have to be read and written in time
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        with tempfile.TemporaryFile() as work:
            pickle.dump((entries, capability, processes, torch.cuda.is_available(), str(mark)), work)
            work.seek(0)
            self._process = subprocess.Popen(
                # -P: modules are those of this program, not of the current folder
                [sys.executable, "-P", "-m", __name__],
                stdin=work,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
                # Ctrl-C is for the program
                start_new_session=True,
            )

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end.

        Raises:
            RuntimeError: a kernel could not be compiled.
            subprocess.TimeoutExpired: it takes longer.
        """
        if self._process.wait(timeout):
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise RuntimeError(f"kernels were not compiled ahead: {lines[-1]}")

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """End it now."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()


def _mark(entries: list[bytes], capability: tuple[int, int]) -> Path:
    """File that exists when the launches have been compiled into the cache that holds it."""
    import triton
    from triton import knobs

    known = [triton.__version__, source_hash(Path(__file__).parent), repr(capability)]
    total = hashlib.sha256("\0".join(known).encode())
    for entry in entries:
        total.update(hashlib.sha256(entry).digest())
    return Path(knobs.cache.dir) / f"vsa_kernels-{total.hexdigest()[:16]}"


class OfflineDriver:
    """As much of Triton's driver as compilation asks for; a GPU is never touched.

    Args:
        capability: compute capability of the chip that kernels are compiled for.
        launchers: compile what calls them too, which needs the library of a GPU's driver.
    """

    def __init__(self, capability: tuple[int, int], *, launchers: bool = False) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.launcher_cls = CudaLauncher if launchers else lambda source, metadata: None
        self.utils = CudaUtils() if launchers else None
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _compile(entry: bytes) -> str:
    """Compile one launch and what calls it; the error, if any."""
    module, name, args, constants = pickle.loads(entry)
    try:
        kernel = getattr(importlib.import_module(module), name)
        compiled = kernel.warmup(*args, grid=(1,), **dict(constants))
        from triton.runtime import driver

        active: Any = driver.active
        active.launcher_cls(compiled.src, compiled.metadata)
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    return ""


def main() -> None:
    """The process that `compile_ahead` starts."""
    entries, capability, processes, launchers, mark = pickle.load(sys.stdin.buffer)
    from triton.runtime import driver

    driver.set_active(OfflineDriver(capability, launchers=launchers))  # type: ignore[arg-type]
    # until this process ends
    lock = _lock(Path(mark))
    if Path(mark).exists():
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(processes, len(entries)), mp_context=context) as pool:
        errors = [error for error in pool.map(_compile, entries) if error]
    if errors:
        sys.exit("\n".join(errors))
    if lock is not None:
        Path(mark).touch()


def _lock(mark: Path) -> IO[str] | None:
    """Lets other programs that compile the same wait; None where the folder cannot be written or has no locks."""
    import fcntl

    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        file = mark.with_suffix(".lock").open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return None
    return file


if __name__ == "__main__":
    main()
