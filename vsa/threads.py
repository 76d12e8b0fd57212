"""Work in several threads, of which the first error ends all, and in a thread that is waited for only so long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from threading import Event, Thread
from typing import Any, TypeVar

T = TypeVar("T")


def each_in_threads(work: Callable[[Any, Event], None], items: Iterable[Any], threads: int) -> None:
    """Call `work` with every item and an event that is set when one has failed, in threads if there are several."""
    stopping = Event()
    if threads == 1:
        for item in items:
            work(item, stopping)
        return
    with ThreadPoolExecutor(threads) as pool:
        calls = [pool.submit(work, item, stopping) for item in items]
        try:
            for call in as_completed(calls):
                call.result()
        except BaseException:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`; TimeoutError after a time in seconds, when its thread is left alone.

    It ends with the process: a client without a time limit can wait for its server for ever.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result(seconds)
