"""Ends a rank whose main thread cannot: while it waits in a collective for a rank that is frozen, dead or stuck."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from types import TracebackType

from torch.distributed import DistError

from vsa.signals import ENDING, NOTHING_SAVED, Stopped, exit_now, is_foreign
from vsa.training.heartbeats import Heartbeat, HeartbeatExchange, collectives_begun, own_heartbeat, state_of_process
from vsa.training.run_state import RunStatus

LOST_STATUS = 75
"""Exit status of the other ranks when one is lost; it asks for a retry (`EX_TEMPFAIL` of sysexits.h)."""

LAUNCHER = "VSA_RANK_0"
"""Environment variable that gives ranks the id of the process that started them."""

INTERVAL = 1.0
"""Seconds between two heartbeats of a rank; fewer with a short timeout."""

GRACE = 10.0
"""Seconds that the main thread has to end by itself after a signal, in phases where nothing is saved."""

SILENCE = 15.0
"""Seconds without a heartbeat after which a rank of another machine is assumed unable to finish a step for a signal."""

SETTLING = 30.0
"""Seconds in which the reason for a failed collective becomes known, including the time in which a rank ends."""

CONFIRMED = 2.0
"""Seconds for which a process must be observed as dead or stopped."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time limits in seconds for waiting for a rank.

    Args:
        step: limit without a heartbeat of a rank, or without progress of any rank.
        first: the same until the first step is done, which includes compilation and the start of workers.
    """

    step: float = 600.0
    first: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Last observation of another rank.

    Args:
        beat: its last heartbeat.
        heard: time of its arrival.
        lost_since: time since which its process is dead or stopped; None: it is not, as far as is known.
    """

    beat: Heartbeat
    heard: float
    lost_since: float | None = None

    def lost_for(self, now: float) -> float:
        """Seconds for which its process has been dead or stopped."""
        return 0.0 if self.lost_since is None else now - self.lost_since


class RankMonitor:
    """A thread that receives signals, forwards them to all ranks, and ends this rank if it can only wait.

    Python runs signal handlers in the main thread between bytecode instructions, hence not while it waits in a
    collective. The thread does not act as long as the main thread can.

    Args:
        run_dir: folder for `stacks-rank-N.txt`, the stacks of all threads when the run was ended.
        status: status of the run.
    """

    def __init__(self, run_dir: Path, status: RunStatus):
        self._run_dir, self._status = run_dir, status
        self._own = own_heartbeat()
        self._timeouts = Timeouts()
        self._meeting: HeartbeatExchange | None = None
        self._met = False
        self._seen: dict[int, _Seen] = {}
        self._moved = self._ticked = time.monotonic()
        self._moves: Sequence[int] = ()
        self._stepped = False
        self._received: list[tuple[int, float]] = []
        self._passed_on = False
        self._children: Sequence[Popen[bytes]] = ()
        self._parent: int | None = None
        self._interval = INTERVAL
        self._stop = threading.Event()
        self._wakeup = -1

    def __enter__(self) -> RankMonitor:
        self._ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        self._mouth = mouth
        # only the main thread can set the file descriptor that receives signals
        with suppress(ValueError):
            self._wakeup = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        launcher, rank = os.environ.get(LAUNCHER), os.environ.get("LOCAL_RANK", "0")
        self._parent = os.getppid() if launcher == str(os.getppid()) and rank != "0" else None
        os.environ[LAUNCHER] = str(os.getpid())
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss()
        # wakes the thread; with a full buffer, it is awake
        with suppress(BlockingIOError):
            self._mouth.send(b"\0")
        self._thread.join()
        os.environ.pop(LAUNCHER, None)
        with suppress(ValueError):
            signal.set_wakeup_fd(self._wakeup)
        if self._meeting is not None:
            if isinstance(error, Stopped) and not self._received:
                # the main thread handled the signal before this thread saw it
                self._received.append((error.number, time.monotonic()))
            outcome = "done" if kind is None else "stopped" if isinstance(error, SystemExit) else "failed"
            self._own = replace(self._own, left=outcome)
            self._meeting.close()
        self._ear.close()
        self._mouth.close()

    # calls from the main thread

    def starts(self, children: Sequence[Popen[bytes]]) -> None:
        """Watch the processes that this one started as ranks."""
        self._children = children

    def dismiss(self) -> None:
        """Stop monitoring: this rank is shutting down."""
        self._stop.set()

    def meet(self, timeouts: Timeouts) -> None:
        """Start exchanging heartbeats with the other ranks; the process group is initialised."""
        self._timeouts = timeouts
        self._interval = min(INTERVAL, timeouts.step / 5)
        # set before it is open: this rank may end meanwhile and must report it
        self._meeting = meeting = HeartbeatExchange(self._say, interval=self._interval, patience=timeouts.first)
        meeting.open()
        now = time.monotonic()
        self._seen = {r: _Seen(beat=b, heard=now) for r, b in enumerate(meeting.beats) if r != meeting.rank}
        self._moved = now
        self._met = True

    def begins(self, doing: str, *, stepped: bool = False) -> None:
        """Set the activity of this rank, and whether it has completed a step, after which nothing is compiled."""
        self._own = replace(self._own, doing=doing, moves=self._own.moves + 1)
        self._stepped = self._stepped or stepped

    def fails(self, why: str) -> None:
        """Let the other ranks end with this line and status 1: they wait in a collective for this one, which ends."""
        self._own = replace(self._own, verdict=why, status=1)
        if self._meeting is not None:
            self._meeting.tell()

    def settle(self, error: BaseException) -> None:
        """After a failed collective, wait for the report of a lost rank, which ends this process with the reason."""
        words = str(error)
        if self._met and (isinstance(error, DistError) or any(name in words for name in ("gloo", "NCCL"))):
            time.sleep(SETTLING)

    def _say(self) -> Heartbeat:
        received = self._received[0][0] if self._received else 0
        paused = self._status.paused_now or self._status.stage != "steps"
        return replace(self._own, paused=paused, signal=received, calls=collectives_begun())

    # the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            ready, _, _ = select.select([self._ear], [], [], min(self._interval, 0.5))
            now = time.monotonic()
            if ready:
                heard = [number for number in self._ear.recv(64) if number in ENDING]
                numbers = [number for number in heard if not is_foreign(signal.getsignal(number))]
                self._received += [(number, now) for number in numbers]
                if numbers and self._meeting is not None:
                    self._meeting.tell()
            if now - self._ticked > 5 * max(self._interval, 1.0):
                # this process itself, or its whole machine, was suspended
                self._forgive(now)
            self._ticked = now
            if self._meeting is None or not self._met:
                self._judge_family()
            elif self._status.stage != "end":
                self._hear(self._meeting, now)
                self._judge_ranks(self._meeting, now)
            self._judge_signals(now)

    def _forgive(self, now: float) -> None:
        self._moved = now
        self._seen = {rank: replace(peer, heard=now, lost_since=None) for rank, peer in self._seen.items()}

    def _hear(self, meeting: HeartbeatExchange, now: float) -> None:
        for rank, peer in self._seen.items():
            beat = meeting.beats[rank]
            if beat.count != peer.beat.count:
                peer = _Seen(beat=beat, heard=now)
            elif beat.place == self._own.place and state_of_process(beat.pid) in (None, "T", "t"):
                peer = replace(peer, lost_since=peer.lost_since or now)
            else:
                peer = replace(peer, lost_since=None)
            self._seen[rank] = peer
        moves = [beat.moves for beat in meeting.beats]
        if moves != self._moves or any(beat.paused for beat in meeting.beats):
            self._moves, self._moved = moves, now
        received = next((peer.beat.signal for peer in self._seen.values() if peer.beat.signal), 0)
        if received and not self._received and not self._passed_on and self._status.received is None:
            # resend the signal here, so that this rank's own handler decides what to do
            self._passed_on = True
            os.kill(os.getpid(), received)

    def _judge_family(self) -> None:
        """Check without heartbeats: only processes of the same launcher can be observed."""
        for child in self._children:
            if status := child.poll():
                # the child has reported the reason itself
                self._end("", 128 - status if status < 0 else status)
        if self._parent is not None and os.getppid() != self._parent:
            self._end(f"rank 0 (pid {self._parent} on {self._own.host}) has ended", LOST_STATUS)

    def _judge_signals(self, now: float) -> None:
        if not self._received:
            return
        number, came = self._received[0]
        name = signal.Signals(number).name
        interrupts = [when for received, when in self._received if received == signal.SIGINT]
        if self._status.stage == "start":
            if now - came > GRACE:
                self._end(f"{name}: {NOTHING_SAVED}", 128 + number, error=False)
        elif len(interrupts) > 1 and now - interrupts[1] > GRACE:
            self._end(f"{name}: ended at once, {self._saved()}", 128 + number, error=False)
        for rank, peer in self._seen.items():
            near, outcome = peer.beat.place == self._own.place, peer.beat.left
            silent = peer.lost_for(now) > CONFIRMED if near else now - peer.heard > SILENCE
            if outcome in ("stopped", "failed") or (not outcome and silent):
                why = f"{self._named(rank)} does not answer, so no step can be finished"
                self._end(f"{name}: {why}: {self._saved()}", 128 + number, error=False)

    def _judge_ranks(self, meeting: HeartbeatExchange, now: float) -> None:
        limit = self._timeouts.step if self._stepped else self._timeouts.first
        for peer in self._seen.values():
            if peer.beat.verdict:
                self._end(peer.beat.verdict, peer.beat.status, culprit=peer.beat.culprit)
        if self._received:
            # the other ranks end as well, in any order
            return
        host = meeting.host_rank
        store = "the store of the ranks" if host is None or host == meeting.rank else self._named(host)
        if meeting.failure is not None:
            # the loss of the store may be noticed before the last heartbeat of a rank
            if now - meeting.heard_at > CONFIRMED + 2 * self._interval:
                self._lost(host, f"{store} is gone")
            return
        if now - meeting.heard_at > 3 * self._interval:
            # without the rank that forwards heartbeats, none arrives
            if now - meeting.heard_at > limit:
                self._lost(host, f"{store} has not answered for {limit:g} s")
            return
        for rank, peer in self._seen.items():
            if peer.beat.left == "failed":
                self._lost(rank, f"{self._named(rank)} ended with an error of its own")
            if peer.beat.left:
                continue
            if peer.lost_for(now) > CONFIRMED and state_of_process(peer.beat.pid) is None:
                self._lost(rank, f"{self._named(rank)} died")
            if now - peer.heard > limit:
                self._lost(rank, f"{self._named(rank)} has not answered for {limit:g} s")
        if now - self._moved > limit:
            done = [(beat.moves, beat.calls) for beat in meeting.beats]
            last = [rank for rank, own in enumerate(done) if own == min(done)]
            if len(last) < len(done):
                self._lost(last[0], f"{self._named(last[0])} has made no progress for {limit:g} s")
            self._lost(None, f"no rank has made progress for {limit:g} s")

    # the end

    def _saved(self) -> str:
        saved = self._status.saved
        return "nothing was saved" if saved is None else f"the last checkpoint is {saved}"

    def _named(self, rank: int) -> str:
        beat = self._own if rank not in self._seen else self._seen[rank].beat
        return f"rank {rank} (pid {beat.pid} on {beat.host}, last in {beat.doing})"

    def _lost(self, culprit: int | None, why: str) -> None:
        stacks = f", see {self._run_dir}/stacks-rank-*.txt" if self._run_dir.is_dir() else ""
        again = "" if self._status.saved is None else f"; ckpt_path=last continues from {self._status.saved}"
        self._end(f"{why}: the other ranks were stopped{stacks}{again}", LOST_STATUS, culprit=culprit)

    def _speaks(self, meeting: HeartbeatExchange, culprit: int | None) -> bool:
        """Whether this rank prints that one is lost: the first that is left, of each agent if its store was lost."""
        if meeting.failure is not None and meeting.host_rank is None:
            # a rank of the agent that was killed prints to nobody
            return os.environ.get("LOCAL_RANK", "0") == "0"
        others = {r for r, peer in self._seen.items() if peer.lost_since is None and not peer.beat.left}
        return min({meeting.rank, *others} - {culprit}, default=meeting.rank) == meeting.rank

    def _end(self, line: str, status: int, *, error: bool = True, culprit: int | None = None) -> None:
        """Write the stacks of all threads, print the reason, and end this process and those it has started."""
        if self._stop.is_set():
            # the main thread ends the process already
            return
        if self._meeting is not None:
            rank = self._meeting.rank
            with suppress(OSError), open(self._run_dir / f"stacks-rank-{rank}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            if error:
                self._own = replace(self._own, verdict=line, status=status, culprit=culprit)
                self._meeting.tell()
                # time for the other ranks to write their stacks
                time.sleep(2 * self._interval + 0.5)
                if status == LOST_STATUS and not self._speaks(self._meeting, culprit):
                    line = ""
        for child in self._children:
            # kill also ends a stopped process
            child.kill()
        exit_now(status, f"error: {line}" if line and error else line)
