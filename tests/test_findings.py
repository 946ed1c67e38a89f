"""What fuzzing has found, pinned: paste the `@example` lines of `convt3d fuzz` here."""

from __future__ import annotations

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.lab.check import resolve
from cupy_convt3d.lab.run.verify import verify
from cupy_convt3d.problem import Problem


@example(kernel="fprop_gather", problem=Problem.parse("n1_c1to1_i1_k1"), dtype="fp32", kind="exact", seed=0, tunables={})
@settings(phases=[Phase.explicit])
@given(**dict.fromkeys(("kernel", "problem", "dtype", "kind", "seed", "tunables"), st.none()))
def test_finding(kernel: str, problem: Problem, dtype: str, kind: str, seed: int, tunables: dict[str, int]) -> None:
    outcome = verify(HostBackend(), resolve(kernel).replace_tunables(**tunables), problem, dtype, kind, seed)
    assert outcome.ok, outcome.message
