"""What `check` hands back, and how it reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...problem import Problem

# What a check runs, and may be unable to run, in groups.
NAMED, TILES, DRAWN = "named problems", "problems of tiles and layouts", "drawn problems"
CORNERS, SEARCHED = "problems at corners of the declaration", "problems of values to search"
FAR_PROBLEMS, FAR_STRIDES, FAR_WORKSPACES = "far problems", "problems with far strides", "problems with far workspaces"
RACES = "problems under the thread sanitizer"
_MOST_SHOWN = 4  # operations of a declaration
KIND, SECOND_RUNS = "kinds of tensors", "second runs"


@dataclass(frozen=True)
class Counterexample:
    """The smallest failing example that was found; `message` to `got` are those of `Outcome`.

    `tunables` are the names and values of those that differ from the source's defaults.
    """

    problem: Problem
    dtype: str
    kind: str
    seed: int
    message: str
    index: tuple[int, ...] | None = None
    expected: float | None = None
    got: float | None = None
    tunables: tuple[tuple[str, int], ...] = ()


@dataclass
class CheckReport:
    """What `check` did and found; `str` of it is what the command line prints.

    Attributes:
        passed: no example failed, no named class of problems was missed, and something was run at all.
        examples: how many were run, in all dtypes and kinds.
        distinct_problems: how many different problems were among them.
        tried: how many of the examples are of each group: "named problems", "far problems" (past 2^32 elements), and so on.
        untried: by group, the reasons why something in it could not be run, and how often; with other numbers it is the same reason.
        features: named classes of the parameter space, and how many of the distinct problems lie in each.
        missing: classes that apply to the kernel and were not reached.
        not_applicable: classes of which the kernel's restrictions allow no problem.
        one_way: comparisons, `min` and `max` of the declaration that went one way for every problem that was looked at.
        worst_ratio, ratios: error over its bound, of the examples of kind "random".
        reproduce: one shell line that runs the counterexample again.
    """

    kernel: str
    backend: str
    dtypes: tuple[str, ...]
    passed: bool = True
    examples: int = 0
    distinct_problems: int = 0
    tried: dict[str, int] = field(default_factory=dict)
    untried: dict[str, dict[str, int]] = field(default_factory=dict)
    features: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    one_way: list[str] = field(default_factory=list)
    not_applicable: list[str] = field(default_factory=list)
    worst_ratio: float = 0.0
    ratios: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    counterexample: Counterexample | None = None
    reproduce: str | None = None

    def leave_out(self, group: str, reason: str, count: int = 1) -> None:
        """Count something of a group that was not run."""
        reason, reasons = reason.removeprefix(f"{self.kernel}: "), self.untried.setdefault(group, {})
        shape = re.sub(r"\d+", "", reason)
        known = next((other for other in reasons if re.sub(r"\d+", "", other) == shape), reason)
        reasons[known] = reasons.get(known, 0) + count

    @property
    def no_far(self) -> str | None:
        """Why no tensor of more than 2^31 elements was tried, though the check was to try some; None if one was."""
        if FAR_PROBLEMS in self.tried or FAR_PROBLEMS not in self.untried:
            return None
        reasons = self.untried[FAR_PROBLEMS]
        return max(reasons, key=lambda reason: reasons[reason])

    @property
    def verdict(self) -> str:
        """"passed" or "FAILED", and that no far problem was tried where that is so, though far strides may have been."""
        if not self.passed:
            return "FAILED"
        return "passed" if self.no_far is None else f"passed, but no far problem could be tried: {self.no_far}"

    def __str__(self) -> str:
        lines = [
            f"{self.kernel} on {self.backend} ({', '.join(self.dtypes)}): {self.verdict}; {self.examples} examples of "
            f"{self.distinct_problems} distinct problems in {self.elapsed_s:.1f} s"
        ]
        if self.ratios:
            lines.append(f"  worst error / bound {self.worst_ratio:.3f}")
        if self.counterexample is not None:
            return "\n".join([*lines, *self._failure(self.counterexample)])
        if self.features:
            lines.append(f"  features covered: {len(self.features)} of {len(self.features) + len(self.missing)} that apply")
        if self.not_applicable:
            lines.append(f"  not applicable (the kernel refuses them): {', '.join(self.not_applicable)}")
        if self.missing:
            lines.append(f"  MISSED: {', '.join(self.missing)}")
        if self.one_way:
            more = f" and {len(self.one_way) - _MOST_SHOWN} more" * (len(self.one_way) > _MOST_SHOWN)
            lines.append(f"  of the declaration only one way was tried of {'; '.join(self.one_way[:_MOST_SHOWN])}{more}")
        if not self.examples:
            lines.append("  nothing was run: the kernel refuses every problem that was drawn")
        return "\n".join([*lines, *self._left_out()])

    def _left_out(self) -> Iterator[str]:
        for group, reasons in self.untried.items():
            total = self.tried.get(group, 0) + sum(reasons.values())
            for reason, count in reasons.items():
                number = f"{count} of {total} " if group not in (KIND, SECOND_RUNS) else ""
                yield f"  not tried: {number}{group}: {reason}"

    def _failure(self, found: Counterexample) -> Iterator[str]:
        changed = "".join(f", {name}={value}" for name, value in found.tunables)
        yield f"  smallest failing problem: {found.problem}  ({found.dtype}, {found.kind}, seed {found.seed}{changed})"
        yield f"  {found.message}"
        if found.index is not None:
            yield f"  first wrong element {list(found.index)}: expected {found.expected!r}, got {found.got!r}"
        yield f"  reproduce: {self.reproduce}"
