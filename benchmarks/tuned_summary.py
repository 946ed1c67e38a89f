"""What the shipped tuning database holds, for reading: each problem's quickest kernel beside torch's own operator.

    python benchmarks/tuned_summary.py [PRECISION ...]

One table for each device, precision and layout, with the packed weight kept, and the geometric mean of library / kernel over the
suite `core` and over all problems that were measured.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence

from cupy_convt3d import registry, tuning
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.source import code_digest
from cupy_convt3d.tuning import LIBRARY, Database, Entry


def main(wanted: Sequence[str] = ()) -> None:
    """Print the tables of the given precisions, or of all."""
    names = {str(problem): name for name, problem in suite("named").items()}
    order = {name: number for number, name in enumerate(names.values())}
    digests = {name: code_digest(kernel) for name, kernel in registry.kernels().items()}
    tables: dict[tuple[str, str, str], dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in Database.load(tuning.SHIPPED).entries():
        if entry.kernel == LIBRARY or digests.get(entry.kernel) == entry.digest:
            tables[entry.device, entry.precision, entry.layout][names.get(entry.problem, entry.problem)].append(entry)
    for (device, precision, layout), problems in sorted(tables.items()):
        if wanted and precision not in wanted:
            continue
        print(f"\n{device}, {precision}, {layout}\n{'problem':24}{'kernel':32}{'ms':>9}{'library':>9}{'ratio':>7}")
        ratios: dict[str, float] = {}
        for name in sorted(problems, key=lambda name: order.get(name, len(order))):
            library = next((e.median_ms for e in problems[name] if e.kernel == LIBRARY), None)
            best = min((e for e in problems[name] if e.kernel != LIBRARY), key=lambda e: e.median_ms, default=None)
            if library is None or best is None:
                continue
            ratios[name] = library / best.median_ms
            print(f"{name:24}{best.kernel + ' [' + best.instance + ']':32}{best.median_ms:9.4f}{library:9.4f}{ratios[name]:6.2f}x")
        core = [ratio for name, ratio in ratios.items() if name in suite("core")]
        for label, values in (("core", core), ("all", list(ratios.values()))):
            if values:
                print(f"geometric mean, {label} ({len(values)}): {math.exp(sum(map(math.log, values)) / len(values)):.2f}x")


if __name__ == "__main__":
    main(sys.argv[1:])
