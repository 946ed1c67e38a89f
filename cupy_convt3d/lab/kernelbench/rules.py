"""When an output of `ModelNew` is right: as near to the truth as `Model` itself is.

The truth is `Model` in fp64. A candidate may be off by as much as `Model` itself is in its own dtype with TF32 off, times
`ERROR_RATIO`; more is lowered precision, and much more is a wrong result. Numbers that are not floating-point must be equal, but for those
that rounding decides: where Model in fp64 gives others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import printable
from .memory import Tree, leaves, view

ERROR_RATIO = 16.0  # another order of the same fp32 sums is off by a few times the baseline, TF32 by hundreds
WRONG = 1e-2  # of the largest value: further off is no matter of rounding
_UNKNOWN_BASELINE = 4.0  # in units of the dtype's epsilon, where there is no truth to tell how far off `Model` is


class Wrong(Exception):
    """A finding: its kind and detail. After a `fatal` one the child is gone."""

    def __init__(self, kind: str, detail: str, fatal: bool = False) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail, self.fatal = kind, detail, fatal


def check_alike(found: Output, expected: Output, what: str) -> Output:
    """Return what the candidate gave, read as the reference's tree says: its own has equal entries, but 4096.0 equals 4096.

    Raises:
        Wrong: its tree is another.
    """
    if found.tree != expected.tree:
        raise Wrong("wrong result", f"{what}: {_difference(found.tree, expected.tree)}")
    return Output(expected.tree, found.memory, found.elapsed_ms, found.changed_inputs)


def _difference(found: Any, expected: Any, name: str = "") -> str:
    where = f"output{name} " if name else ""
    if not isinstance(found, dict) or found.get("type") != expected["type"]:
        kind = found.get("type") if isinstance(found, dict) else found
        plain = "plain " * (expected["type"] == "Tensor")
        return f"{where}is a {printable(str(kind), 80)}; must be a {plain}{expected['type']}, as of Model"
    for key in ("shape", "dtype", "device", "value"):
        if found.get(key) != expected.get(key):
            have, want = (tuple(v) if isinstance(v, list) else v for v in (found.get(key), expected.get(key)))
            return f"{where}{key} is {printable(str(have), 200)}; must be {want}"
    have, want = (_pairs(tree.get("items")) for tree in (found, expected))
    if set(have) != set(want):
        return f"{where}has the items {printable(str(list(have)), 200)}; must have {list(want)}"
    for key in want:
        if have[key] != want[key]:
            return _difference(have[key], want[key], f"{name}[{key!r}]")
    return f"{where}is described differently"


def _pairs(items: Any) -> dict[Any, Any]:
    return items if isinstance(items, dict) else dict(enumerate(items)) if isinstance(items, list) else {}


def modified(what: str, changed: dict[str, int], by_model: dict[str, int]) -> str:
    """Return a sentence on the tensors that a candidate changes and Model does not; "" if there are none."""
    found = [f"{count} elements of {what}{name}" for name, count in changed.items() if name not in by_model]
    return f"{', '.join(found)} changed" if found else ""


class Output:
    """What a model returned: the tree, and the judge's own copy of its tensors."""

    def __init__(self, tree: Tree, memory: torch.Tensor, elapsed_ms: float, changed: dict[str, int]) -> None:
        self.tree, self.memory, self.elapsed_ms, self.changed_inputs = tree, memory, elapsed_ms, changed

    def tensors(self) -> list[torch.Tensor]:
        both = [(view(self.memory, leaf), leaf["type"]) for _, leaf in leaves(self.tree)]
        return [tensor.float() if kind == "float" else tensor for tensor, kind in both]  # Python's floats come of fp32

    def names(self) -> list[str]:
        return [name for name, _ in leaves(self.tree)]

    def same_bits(self, other: Output) -> bool:
        return self.tree == other.tree and all(
            torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            for a, b in zip(self.tensors(), other.tensors(), strict=True)
        )

    def is_near(self, other: Output) -> bool:
        """Whether the same computation may have given both: a library's operator may add in another order each time."""
        return self.tree == other.tree and all(map(_are_near, self.tensors(), other.tensors()))

    def is_finite(self) -> bool:
        return all(bool((t.float() if t.dtype.itemsize == 1 else t).isfinite().all()) for t in self.tensors())  # float8 has no isfinite


def _are_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    limit = ERROR_RATIO * torch.finfo(one.dtype).eps * float(other.double().nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=limit, equal_nan=True)


def judge(
    found: Output,
    expected: Output,
    truth: Output | None,
    what: str,
    baselines: list[float] | None = None,
    shaken: Sequence[Output] = (),
) -> list[float]:
    """Raise Wrong unless each tensor is as near to the truth as the baseline; return how far off the baseline is.

    Args:
        truth: in fp64; None where there is none.
        baselines: of other inputs, where there is no truth of these.
        shaken: what Model in fp64 gives for inputs that are off by `ERROR_RATIO` times their rounding, one for each draw.
    """
    known = baselines or [float("nan")] * len(found.tensors())
    truths = zip(*(_as_truth(one, expected) for one in (truth, *shaken)), strict=True)
    return [
        _judge(have, want, true, baseline, truth is None, f"{what}{', output' + name if name else ''}")
        for name, have, want, true, baseline in zip(found.names(), found.tensors(), expected.tensors(), truths, known, strict=True)
    ]


def _as_truth(truth: Output | None, expected: Output) -> list[torch.Tensor]:
    tensors = [t.double() if t.dtype.is_floating_point else t for t in (truth or expected).tensors()]
    return tensors if [t.shape for t in tensors] == [t.shape for t in expected.tensors()] else expected.tensors()


def _judge(
    found: torch.Tensor, expected: torch.Tensor, truths: Sequence[torch.Tensor], known: float, untold: bool, what: str
) -> float:
    if found.is_complex():
        found, expected, *truths = (torch.view_as_real(t) for t in (found, expected, *truths))
    truth, *shaken = truths
    if not found.numel():
        return 0.0
    if not found.dtype.is_floating_point:
        _judge_exact(found, expected, truth, shaken, what)
        return 0.0
    eps = torch.finfo(found.dtype).eps
    rounded = truth.to(found.dtype).double()
    found, expected, truth, *shaken = (t.double() for t in (found, expected, truth, *shaken))
    finite = truth.isfinite() & expected.isfinite()
    same = (found == expected) | (found.isnan() & expected.isnan()) | (found == rounded) | (found.isnan() & rounded.isnan())
    _require(same | finite, found, truth, f"{what}: {{}} of {{}} elements are others where Model's are not finite")
    zero = torch.zeros((), dtype=torch.float64, device=found.device)
    true, difference, off = (torch.where(finite, t, zero) for t in (truth, (found - truth).abs(), (expected - truth).abs()))
    for one in shaken:
        off = torch.maximum(off, torch.where(finite & one.isfinite(), (one - truth).abs() / ERROR_RATIO, zero))
    largest = float(true.abs().max())
    limit = max(WRONG * max(largest, torch.finfo(torch.float32).tiny), ERROR_RATIO * float(off.max()))
    _require(difference <= limit, found, truth, f"{what}: {{}} of {{}} elements are off by more than {WRONG:g} of the largest")
    scale = float(true.square().mean().sqrt()) or 1.0
    error = float(difference.square().mean().sqrt()) / scale
    baseline = _UNKNOWN_BASELINE * eps if untold else float(off.square().mean().sqrt()) / scale
    if known == known:  # both are off, from a truth that is not known
        baseline, allowed = known, (ERROR_RATIO + 1) * max(known, eps / 4)
    else:
        allowed = ERROR_RATIO * max(baseline, eps / 4)
    if not error <= allowed:
        raise Wrong(
            "precision lowered",
            f"{what}: root mean square error {error:.2g} of the result's, the baseline's is {baseline:.2g} (limit {allowed:.2g})",
        )
    return baseline


def _judge_exact(found: torch.Tensor, expected: torch.Tensor, truth: torch.Tensor, shaken: Sequence[torch.Tensor], what: str) -> None:
    """Numbers that must be equal, unless rounding decides them, as it does a few of the signs or of the order of sums."""
    if torch.equal(found, expected):
        return
    rounding = expected != truth
    unsure = rounding.clone()
    for one in shaken:
        unsure |= one != truth
    strays = int(((found != expected) & (found != truth) & ~unsure).sum())
    few = int((found != expected).sum()) <= max(1.0, found.numel() / ERROR_RATIO)
    if not few or strays > max(ERROR_RATIO * int(rounding.sum()), int(unsure.sum()) / ERROR_RATIO / max(len(shaken), 1)):
        _require(found == expected, found, expected, f"{what}: {{}} of {{}} elements are others")


def _require(right: torch.Tensor, found: torch.Tensor, truth: torch.Tensor, text: str) -> None:
    if bool(right.all()):
        return
    index = tuple(int(i) for i in (~right).nonzero()[0])
    text = text.format(int((~right).sum()), right.numel())
    raise Wrong("wrong result", f"{text}; at {index} {float(found[index]):.6g} instead of {float(truth[index]):.6g}")
