"""What this process and its children may use: cores; of memory what cgroups and limits leave, of time what the work asks for."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from numbers import Real
from pathlib import Path

from .errors import KernelError, shown
from .problem import Problem

MOST_SECONDS = 1_000_000
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_BY_ERROR = {
    errno.EMFILE: ("ulimit -n", "RLIMIT_NOFILE"),
    errno.EFBIG: ("ulimit -f", "RLIMIT_FSIZE"),
    errno.EAGAIN: ("ulimit -u", "RLIMIT_NPROC"),
}


def cores() -> int:
    """Return how many of the machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return how much memory this process may use: the least of the machine's, of each cgroup it is in, and of its own hard limit."""
    import resource

    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_cgroup_limits()]
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    return min(limits if hard == resource.RLIM_INFINITY else [*limits, hard])


def share_of_memory(processes: int = 1) -> int:
    """Return what each of so many processes may have at once: together half of `memory_bytes`, so that the machine stays usable."""
    return memory_bytes() // (2 * max(1, processes))


def _cgroup_limits() -> Iterator[int]:
    """Yield the memory limit of this process's cgroup and of those around it (cgroup-v2's `memory.max`, v1's `limit_in_bytes`)."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            text = _read(folder / name)
            if text.isdigit():  # "max" is no limit
                yield int(text)
            if folder == root:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def check_time_limit(time_limit_s: object) -> None:
    """Raise KernelError unless it is a number of seconds that a process can be waited for."""
    if not isinstance(time_limit_s, Real) or isinstance(time_limit_s, bool) or not 0 < time_limit_s <= MOST_SECONDS:  # type: ignore[operator]
        raise KernelError(f"time_limit_s={shown(time_limit_s)}: must be a number of seconds above 0, at most {MOST_SECONDS}")


def time_limit_s(problem: Problem, least: float) -> float:
    """Return when an example counts as a hang: after `least` seconds, and longer for more work, so that a large problem is none.

    The plainest kernel makes some 10^8 FLOP a second on the host, and 10^6 elements; a sanitizer or a busy machine a tenth of that.
    """
    elements = sum(map(math.prod, (problem.input_shape, problem.weight_shape, problem.output_shape)))
    return least + problem.flop / 1e7 + elements / 1e5


def named_limit(error: OSError) -> str:
    """Return what is added to an error that a limit of the process may be the reason of, as a shell calls it; "" for another one."""
    if error.errno not in _BY_ERROR:
        return ""
    import resource

    name, limit = _BY_ERROR[error.errno]
    return f"; its limit is {resource.getrlimit(getattr(resource, limit))[0]} ({name})"
