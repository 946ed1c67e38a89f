"""Jobs shared among threads, each of which has a process of its own to ask: that is where the time goes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

Job = TypeVar("Job")

_here = threading.local()  # `stopped`, in a thread of `share`


def share(jobs: Iterable[Job], workers: int, work: Callable[[Iterator[Job]], None]) -> None:
    """Call `work` in up to so many threads, each time with an iterator over what is left of the jobs.

    The iterators end early when a thread fails, and at a Ctrl-C; a job in which `end_if_stopped` is called ends in its middle.

    Raises:
        BaseException: the first error of a thread, or the KeyboardInterrupt, when all threads have ended.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    errors: list[BaseException] = []
    stopped = threading.Event()

    def stop(error: BaseException) -> None:
        errors.append(error)
        stopped.set()

    def left() -> Iterator[Job]:
        while not stopped.is_set():
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            yield job

    def run() -> None:
        _here.stopped = stopped
        try:
            work(left())
        except BaseException as error:
            stop(error)

    together([run] * min(workers, waiting.qsize()), stop)
    if errors:
        raise errors[0]


def end_if_stopped() -> None:
    """Raise a KeyboardInterrupt in a thread of `share` that has nothing more to do, since another has failed or at a Ctrl-C."""
    stopped = getattr(_here, "stopped", None)
    if stopped is not None and stopped.is_set():
        raise KeyboardInterrupt


def together(
    works: Sequence[Callable[[], None]], stop: Callable[[BaseException], None], meanwhile: Callable[[], None] | None = None
) -> None:
    """Run each work in a thread of its own, and return when all of them have ended.

    NOTE: not by `Thread.join`: Python 3.11 takes a thread for ended whose `join` a Ctrl-C interrupts.

    Args:
        works: they raise nothing.
        stop: called once with what has interrupted the waiting, a Ctrl-C or an error of `meanwhile`; has the works end early.
        meanwhile: called some times a second.

    Raises:
        BaseException: the error of `meanwhile`, or a second Ctrl-C.
    """
    done: list[None] = []
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            done.append(None)
            ended.put(None)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        while len(done) < len(threads):
            with suppress(queue.Empty):
                ended.get(timeout=0.25)
            if meanwhile is not None:
                meanwhile()
    except BaseException as error:
        stop(error)
        while len(done) < len(threads):
            ended.get()
        if not isinstance(error, KeyboardInterrupt):
            raise
