"""Jobs shared among threads, each of which has a process of its own to ask: that is where the time goes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Job = TypeVar("Job")


def share(jobs: Iterable[Job], workers: int, work: Callable[[Iterator[Job]], None]) -> None:
    """Call `work` in up to so many threads, each time with an iterator over what is left of the jobs.

    The iterators end early when a thread fails, and at a Ctrl-C.

    Raises:
        BaseException: the first error of a thread, or the KeyboardInterrupt, when all threads have ended.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    errors: list[BaseException] = []

    def left() -> Iterator[Job]:
        while not errors:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            yield job

    def run() -> None:
        try:
            work(left())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(min(workers, waiting.qsize()))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as error:
        errors.append(error)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
