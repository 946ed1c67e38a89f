"""How many tiny examples a second `convt3d fuzz` runs over the naive kernels on the host, compiling included.

python benchmarks/fuzz_throughput.py [--minutes 1] [--workers 2]
python benchmarks/fuzz_throughput.py --examples 3000    # of one worker, for each second of CPU time of all processes, compiled before

To compare two revisions, run the second form by turns in a worktree of each, with PYTHONPATH set to it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import tempfile
from pathlib import Path

from cupy_convt3d import Kernel, registry
from cupy_convt3d.lab.fuzz import fuzz

NAIVE = ("fprop_scatter", "fprop_gather", "fprop_residue", "fprop_tiled", "dgrad_gather", "wgrad_reduce")


def cpu_seconds() -> float:
    """Return the user and system seconds of this process and of all that it has started, which must have ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def by_cpu_time(kernels: list[Kernel], examples: int, path: Path) -> None:
    """Print the rate of so many examples, after a short run for what is to be compiled."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a killed process leaves is waited for here
    fuzz(kernels, backend="host", findings=path.with_suffix(".warm"), examples=30, workers=1, seed="warm")
    before = cpu_seconds()
    report = fuzz(kernels, backend="host", findings=path, examples=examples, workers=1, seed="rate")
    spent = cpu_seconds() - before
    print(f"{report.examples} examples in {spent:.1f} CPU seconds, {report.examples / spent:.0f} a second; {len(report.findings)} findings")


def main() -> None:
    """Fuzz with an empty cache, so that every instance is compiled within the time that counts; not so with `--examples`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--examples", type=int, help="measure by CPU time, with the cache as it is")
    parser.add_argument("kernels", nargs="*", help="default: the naive ones")
    options = parser.parse_args()
    known = registry.kernels()
    kernels = [known[name] for name in options.kernels or NAIVE]
    if options.examples:
        with tempfile.TemporaryDirectory() as directory:
            by_cpu_time(kernels, options.examples, Path(directory) / "findings.jsonl")
        return
    from cupy_convt3d.lab.fuzz.command import summary  # what follows is of this revision alone
    from cupy_convt3d.limits import cores

    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CONVT3D_CACHE"] = directory
        path = Path(directory) / "findings.jsonl"
        report = fuzz(kernels, backend="host", findings=path, minutes=options.minutes, workers=options.workers, seed="benchmark")
        print(summary(report, str(path)))
    instances = sum(len(kernel.dtypes) for kernel in kernels)
    print(f"{options.workers} workers on {cores()} cores, at least {instances} instances compiled; "
          f"1-minute load {before:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
