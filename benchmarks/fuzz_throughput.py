"""How many tiny examples a second `convt3d fuzz` runs over the naive kernels on the host, compiling included.

python benchmarks/fuzz_throughput.py [--minutes 1] [--workers 2]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from cupy_convt3d import registry
from cupy_convt3d.lab.fuzz import fuzz
from cupy_convt3d.lab.fuzz.command import summary

NAIVE = ("fprop_scatter", "fprop_gather", "fprop_residue", "fprop_tiled", "dgrad_gather", "wgrad_reduce")


def main() -> None:
    """Fuzz with an empty cache, so that every instance is compiled within the time that counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("kernels", nargs="*", help="default: the naive ones")
    options = parser.parse_args()
    known = registry.kernels()
    kernels = [known[name] for name in options.kernels or NAIVE]
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CONVT3D_CACHE"] = directory
        path = Path(directory) / "findings.jsonl"
        report = fuzz(kernels, backend="host", findings=path, minutes=options.minutes, workers=options.workers, seed="benchmark")
        print(summary(report, str(path)))
    instances = sum(len(kernel.dtypes) for kernel in kernels)
    print(f"{options.workers} workers on {os.cpu_count()} cores, at least {instances} instances compiled; "
          f"1-minute load {before:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
