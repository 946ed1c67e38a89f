"""The child process of `convt3d kernelbench`: runs a stranger's `ModelNew` against `Model`, looks for cheats, times both.

The truth is `Model` in fp64. A candidate may be off by as much as `Model` itself is in its own dtype with TF32 off, times
`ERROR_RATIO`; more is lowered precision, and much more is a wrong result.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ERROR_RATIO = 16.0  # another order of the same fp32 sums is off by a few times the baseline, TF32 by hundreds
WRONG = 1e-2  # of the largest value: further off is no matter of rounding
SEEDS = 3
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
BUDGET_MS = 500.0
LATE_S = 0.3  # how long work that nobody waits for is given to show itself
Tensors = list[Any]


class Wrong(Exception):
    """A finding: its kind and detail."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Report:
    """What was found so far, on disk after every step, so that a crash or a hang loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = {"findings": [], "notes": []}

    def doing(self, what: str) -> None:
        self.content["doing"] = what
        self._path.write_text(json.dumps(self.content))

    def attempt(self, what: str, check: Callable[[], None]) -> bool:
        """Run one check; whether it found nothing. An exception of the candidate is a finding."""
        self.doing(what)
        try:
            check()
            return True
        except Wrong as wrong:
            finding = {"kind": wrong.kind, "detail": wrong.detail}
        except Exception as error:
            finding = {"kind": "error", "detail": f"{type(error).__name__} while {what}: {str(error).strip()[:500]}"}
            traceback.print_exc()
        if finding["kind"] not in [known["kind"] for known in self.content["findings"]]:
            self.content["findings"].append(finding)
        return False


def load(path: str, name: str) -> ModuleType:
    """Execute a file as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # torch.compile and pickle look it up there
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)
    return module


class Subject:
    """`Model` and `ModelNew` of one set of constructor arguments, with the same parameters, on a device."""

    def __init__(self, model: Any, model_new: Any, arguments: Sequence[Any], keywords: dict[str, Any], device: str) -> None:
        torch.manual_seed(0)
        self.reference = model(*arguments, **keywords).to(device)
        torch.manual_seed(0)
        self.candidate = model_new(*arguments, **keywords).to(device)
        self.note = ""
        try:
            self.candidate.load_state_dict(self.reference.state_dict(), strict=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            self.note = f"ModelNew does not load Model's state_dict; compared as both were initialised from one seed ({reason[:200]})"
        self.device = device

    def call(self, inputs: Tensors, model: Any = None) -> Any:
        """Return what the candidate's output holds when the call returns, as the next operation on the stream would see it."""
        _ieee()
        with torch.no_grad():
            return (model or self.candidate)(*inputs)

    def truth(self, inputs: Tensors) -> Any:
        doubles = [t.double() if _is_real(t) else t for t in inputs]
        return self.call(doubles, copy.deepcopy(self.reference).double())

    def compare(self, inputs: Tensors, what: str) -> None:
        """Raise Wrong unless the candidate is as near to the truth as the baseline."""
        found = self.call(inputs)
        if isinstance(found, torch.Tensor):
            found = found.clone()
        expected = self.call(inputs, self.reference)
        _check_alike(found, expected, what)
        truth = self.truth(inputs)
        self.judge(found, expected, truth, what)

    def judge(self, found: Any, expected: Any, truth: Any, what: str) -> None:
        difference = (found.double() - truth).abs_()
        largest = float(truth.abs().max()) if truth.numel() else 0.0
        wrong = ~(difference <= WRONG * max(largest, torch.finfo(torch.float32).tiny))
        if bool(wrong.any()):
            index = tuple(int(i) for i in wrong.nonzero()[0])
            raise Wrong(
                "wrong result",
                f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are off by more than {WRONG:g} of the largest; at {index} "
                f"{float(found[index]):.6g} instead of {float(truth[index]):.6g}",
            )
        scale = float(truth.square().mean().sqrt()) or 1.0
        error = float(difference.square().mean().sqrt()) / scale
        baseline = float((expected.double() - truth).square().mean().sqrt()) / scale
        limit = ERROR_RATIO * max(baseline, torch.finfo(found.dtype).eps / 4)
        if error > limit:
            raise Wrong(
                "precision lowered",
                f"{what}: root mean square error {error:.2g} of the result's, the baseline's is {baseline:.2g} (limit {limit:.2g})",
            )


def _check_alike(found: Any, expected: Any, what: str) -> None:
    if not isinstance(found, torch.Tensor):
        raise Wrong("wrong result", f"{what}: returns a {type(found).__name__}, Model a tensor")
    for name in ("shape", "dtype", "device"):
        have, want = getattr(found, name), getattr(expected, name)
        if have != want:
            raise Wrong("wrong result", f"{what}: {name} is {have}; must be {want}")


def _ieee() -> None:
    """Set before every call, so that a file that changes it gains nothing."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _fresh(inputs: Tensors, seed: int) -> Tensors:
    """Return other values of the same shapes, in other memory."""
    torch.manual_seed(seed)
    return [torch.randn_like(t) if _is_real(t) else copy.deepcopy(t) for t in inputs]


def check_late(subject: Subject, inputs: Tensors) -> None:
    """A result that is not there when the call returns: work on a stream or thread that the caller's stream does not wait for."""
    subject.call(inputs)  # compile, load
    _synchronize(subject.device)
    found = subject.call(_fresh(inputs, 100))
    if not isinstance(found, torch.Tensor):
        return
    seen = found.clone()  # on the current stream, right behind the call
    _synchronize(subject.device)
    time.sleep(LATE_S)
    _synchronize(subject.device)
    if not torch.equal(seen.nan_to_num(nan=7e7), found.nan_to_num(nan=7e7)):
        changed = int((seen != found).sum())
        raise Wrong("unjoined work", f"{changed} elements changed after the call: a side stream or thread that is not waited for")


def check_unwritten(subject: Subject, inputs: Tensors) -> None:
    """Memory that was never written: new memory is NaN, so whatever keeps it shows."""
    expected = subject.call(inputs, subject.reference)
    _poison(subject.device, expected)
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Makes torch.empty, called from C++ too, fill its memory with NaN. The public function also imports the compiler, for seconds.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            found = subject.call(inputs)
            found = found.clone() if isinstance(found, torch.Tensor) else found
        finally:
            torch._C._set_deterministic_algorithms(before[0])
            torch.utils.deterministic.fill_uninitialized_memory = before[1]
    _check_alike(found, expected, "with new memory filled with NaN")
    unwritten = found.isnan() & ~expected.isnan()
    if bool(unwritten.any()):
        index = tuple(int(i) for i in unwritten.nonzero()[0])
        detail = f"{int(unwritten.sum())} of {unwritten.numel()} elements keep what was in memory before, the first at {index}"
        raise Wrong("output not fully written", detail)


def _poison(device: str, like: Any) -> None:
    """Leave NaN in freed blocks of the output's size, for allocators that do not obey torch's switch."""
    if device == "cpu":
        return
    for _ in range(2):
        torch.full_like(like, float("nan"))
    if cupy := sys.modules.get("cupy"):
        cupy.full(like.numel() * like.element_size() // 4, cupy.nan, cupy.float32)
    torch.cuda.synchronize()


def check_cached(subject: Subject, inputs: Tensors) -> None:
    """An output kept from an earlier call: the same buffers, and then the same parameters, get new values."""
    inputs = _fresh(inputs, 200)
    first = subject.call(inputs)
    kept = first.clone()
    for what, tensors in (("inputs", inputs), ("parameters", list(subject.candidate.parameters()))):
        with torch.no_grad():
            for index, tensor in enumerate(t for t in tensors if _is_real(t)):
                torch.manual_seed(300 + index)
                tensor.copy_(torch.randn_like(tensor) * tensor.abs().mean())
        if what == "parameters":
            if subject.note or not tensors:
                return
            subject.reference.load_state_dict(subject.candidate.state_dict())
        second = subject.call(inputs).clone()
        if torch.equal(second, kept):
            raise Wrong("cached output", f"new values in the same {what} give the bits of the earlier output")
        if what == "inputs" and not torch.equal(first, kept):
            raise Wrong("cached output", "the output of the first call is overwritten by the second: its memory is kept and used again")
        kept = second
        truth, expected = subject.truth(inputs), subject.call(inputs, subject.reference)
        subject.judge(second, expected, truth, f"new values in the same {what}")


def check_inputs(subject: Subject, inputs: Tensors) -> None:
    """Inputs and parameters are only read."""
    kept = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
    state = {name: value.clone() for name, value in subject.candidate.state_dict().items()}
    subject.call(inputs)
    _synchronize(subject.device)
    for index, (before, after) in enumerate(zip(kept, inputs, strict=True)):
        if isinstance(after, torch.Tensor) and not torch.equal(before, after):
            raise Wrong("inputs modified", f"{int((before != after).sum())} elements of input {index} changed")
    for name, after in subject.candidate.state_dict().items():
        if not torch.equal(state[name], after):
            raise Wrong("inputs modified", f"{name} of the module's state changed in a forward pass")


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Return the median time of a call, caches flushed before each, after one that does not count."""
    flush = torch.empty(FLUSH_BYTES[device], dtype=torch.uint8, device=device)

    def once() -> float:
        flush.fill_(1)
        if device == "cpu":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        torch.cuda.synchronize()
        return float(events[0].elapsed_time(events[1]))

    once()
    first = once()
    repeats = min(50, max(3, int(BUDGET_MS / max(first, 1e-3))))
    return statistics.median([first, *(once() for _ in range(repeats))])


def main(job: dict[str, Any], path: Path) -> None:
    report = Report(path)
    report.doing("importing the files")
    reference = load(job["reference"], "kernelbench_reference")
    same = job["candidate"] == job["reference"]
    candidate = reference if same else load(job["candidate"], "kernelbench_candidate")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report.doing("building Model and ModelNew")
    torch.manual_seed(job["seed"])
    inputs = [t.to(device) if isinstance(t, torch.Tensor) else t for t in reference.get_inputs()]
    subject = Subject(reference.Model, candidate.ModelNew, reference.get_init_inputs(), {}, device)
    if subject.note:
        report.content["notes"].append(subject.note)
    right = report.attempt("looking for work that nobody waits for", lambda: check_late(subject, inputs))
    right &= report.attempt("looking for memory that is not written", lambda: check_unwritten(subject, inputs))
    right &= report.attempt("looking for changed inputs", lambda: check_inputs(subject, _fresh(inputs, 1)))
    right &= report.attempt("comparing on the file's inputs", lambda: subject.compare(inputs, "the file's inputs"))
    for seed in range(SEEDS):
        fresh = _fresh(inputs, job["seed"] + 10 + seed)
        right &= report.attempt("comparing on fresh inputs", lambda fresh=fresh: subject.compare(fresh, "fresh inputs"))  # type: ignore[misc]
    right &= report.attempt("looking for cached outputs", lambda: check_cached(subject, inputs))
    if right:
        report.doing("timing")
        models = {"Model": subject.reference, "ModelNew": subject.candidate}
        report.content["times_ms"] = {
            name: milliseconds(lambda model=model: subject.call(inputs, model), device)  # type: ignore[misc]
            for name, model in models.items()
        }
        report.content["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    if job["fuzz"]:
        from .kernelbench_fuzz import fuzz  # imports Hypothesis

        fuzz(report, reference.Model, candidate.ModelNew, device, job["fuzz"], job["seed"])
    report.doing("ending")


if __name__ == "__main__":
    from cupy_convt3d.lab import kernelbench_child  # `kernelbench_fuzz` imports it by this name, and classes must be the same

    kernelbench_child.main(json.loads(sys.argv[1]), Path(sys.argv[2]))
