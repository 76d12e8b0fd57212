"""Work in several threads, of which the first error ends all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event
from typing import Any


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
