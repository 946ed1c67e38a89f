"""The geometry: output size, residue classes, FLOP, names, the C twin, and a clear error for every bad argument."""

from __future__ import annotations

import math
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from cupy_convt3d import reference, registry
from cupy_convt3d.errors import ProblemError, ProblemTypeError
from cupy_convt3d.lab.strategies import EDGE_PROBLEMS, problems
from cupy_convt3d.problem import INT32_MAX, Problem, c_struct, c_values, triple

HEADER = Path(__file__).parents[1] / "kernels" / "include" / "convt3d" / "core" / "problem.cuh"
VALID: dict[str, Any] = {"input_shape": (2, 4, 3, 4, 5), "weight_shape": (4, 6, 3, 3, 3)}


def pairs_by_output(problem: Problem, a: int) -> dict[int, list[tuple[int, int]]]:
    """Enumerate every (tap, input) of axis `a` and sort them by the output they land on: the rule itself, no residues."""
    pairs: dict[int, list[tuple[int, int]]] = {o: [] for o in range(problem.output_size[a])}
    for tap in range(problem.kernel_size[a]):
        for i in range(problem.input_size[a]):
            output = i * problem.stride[a] - problem.padding[a] + tap * problem.dilation[a]
            if 0 <= output < problem.output_size[a]:
                pairs[output].append((tap, i))
    return pairs


@settings(deadline=None, max_examples=300)
@given(problems())
def test_name_reads_back(problem: Problem) -> None:
    assert Problem.parse(str(problem)) == problem
    assert pickle.loads(pickle.dumps(problem)) == problem


@pytest.mark.parametrize(
    "name", ["", "n1", "n1_c1to1_i1", "n1_c1to1_i1x2_k1", "n1_c1to1_i1_k1_p1_s2", "n1_c1to1_i1_k1_q3", "N1_c1to1_i1_k1"]
)
def test_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ProblemError, match="must look like"):
        Problem.parse(name)


@settings(deadline=None, max_examples=200)
@given(problems())
def test_output_size_is_that_of_torch(problem: Problem) -> None:
    torch = pytest.importorskip("torch")
    output = torch.nn.functional.conv_transpose3d(
        torch.empty(problem.input_shape, device="meta"),
        torch.empty(problem.weight_shape, device="meta"),
        None,
        problem.stride,
        problem.padding,
        problem.output_padding,
        problem.groups,
        problem.dilation,
    )
    assert tuple(output.shape) == problem.output_shape


@settings(deadline=None, max_examples=300)
@given(problems())
def test_residue_classes_cover_each_output_once_with_its_pairs(problem: Problem) -> None:
    for a in range(3):
        stride, padding, size = problem.stride[a], problem.padding[a], problem.input_size[a]
        found: dict[int, list[tuple[int, int]]] = {}
        for axis in problem.axis_classes(a):
            for output in range(axis.first_output, axis.first_output + axis.count * stride, stride):
                assert output not in found
                assert (output + padding) % stride == axis.residue
                sources = [
                    (tap, (output + padding) // stride - offset)
                    for tap, offset in zip(axis.taps, axis.input_offsets, strict=True)
                ]
                found[output] = [(tap, i) for tap, i in sources if 0 <= i < size]
        assert found == pairs_by_output(problem, a)


@settings(deadline=None, max_examples=100)
@given(problems())
def test_residue_classes_are_the_product_of_their_axes(problem: Problem) -> None:
    classes = problem.residue_classes()
    assert len(classes) == math.prod(problem.stride)
    assert sum(c.voxels for c in classes) == math.prod(problem.output_size)
    assert sum(c.taps for c in classes) == math.prod(problem.kernel_size)
    assert max(c.voxels for c in classes) == problem.names["residue_voxels"]
    assert [tuple(axis.residue for axis in c.axes) for c in classes] == sorted(
        tuple(axis.residue for axis in c.axes) for c in classes
    )


@settings(deadline=None, max_examples=300)
@given(problems())
def test_flop_counts_two_for_each_pair_that_is_not_clipped(problem: Problem) -> None:
    pairs = math.prod(sum(map(len, pairs_by_output(problem, a).values())) for a in range(3))
    assert problem.flop == 2 * pairs * problem.batch * problem.in_channels * problem.out_channels // problem.groups


def test_bytes_count_each_tensor_once() -> None:
    problem = Problem.parse("n2_c3to5_i2_k2_s2_bias")
    assert problem.compulsory_bytes(2) == 2 * (2 * 3 * 8 + 3 * 5 * 8 + 5 + 2 * 5 * 64)
    assert problem.compulsory_bytes(4, "wgrad") == 4 * (2 * 3 * 8 + 2 * 5 * 64 + 3 * 5 * 8)


def test_int32_offsets_end_at_2_to_the_31() -> None:
    largest = Problem(1, 1, 1, (1, 1, INT32_MAX), (1, 1, 1))
    assert largest.fits_int32_offsets
    assert not Problem(1, 1, 2, (1, 1, INT32_MAX), (1, 1, 1)).fits_int32_offsets
    assert not Problem.parse("n1_c8to8_i128x512x512_k4_s2_p1").fits_int32_offsets  # 2**31 outputs, from 2**28 inputs


@pytest.mark.parametrize("problem", EDGE_PROBLEMS, ids=str)
def test_from_shapes_inverts_shapes(problem: Problem) -> None:
    again = Problem.from_shapes(
        problem.input_shape,
        problem.weight_shape,
        (problem.out_channels,) if problem.bias else None,
        problem.stride,
        problem.padding,
        problem.output_padding,
        problem.groups,
        problem.dilation,
    )
    assert again == problem


def test_shapes_end_with_the_written_tensor() -> None:
    problem = Problem.parse("n2_c4to6_i3_k2_g2_bias")
    assert problem.shapes("fprop") == (
        {"input": (2, 4, 3, 3, 3), "weight": (4, 3, 2, 2, 2), "bias": (6,), "output": (2, 6, 4, 4, 4)},
        "output",
    )
    assert [list(problem.shapes(name)[0]) for name in ("dgrad", "wgrad")] == [
        ["grad_output", "weight", "grad_input"],
        ["input", "grad_output", "grad_weight"],
    ]
    with pytest.raises(ProblemError, match="pass='backward'"):
        problem.shapes("backward")


def test_unbatched_input_counts_as_batch_1() -> None:
    assert Problem.from_shapes((4, 3, 4, 5), (4, 6, 3, 3, 3)) == Problem.from_shapes((1, 4, 3, 4, 5), (4, 6, 3, 3, 3))


def test_triples_take_one_or_three_integers_of_any_kind() -> None:
    numpy = pytest.importorskip("numpy")
    assert triple("stride", 2) == triple("stride", [2]) == triple("stride", numpy.int64(2)) == (2, 2, 2)
    assert triple("stride", (1, 2, 3)) == triple("stride", numpy.array([1, 2, 3])) == (1, 2, 3)
    assert all(type(v) is int for v in triple("stride", numpy.array([1, 2, 3])))


# Each bad argument, and what the message has to name.
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "input of 3 axes": ({"input_shape": (4, 3, 4)}, ["input.shape=(4, 3, 4)"]),
    "input of 6 axes": ({"input_shape": (1, 1, 4, 3, 4, 5)}, ["input.shape=(1, 1, 4, 3, 4, 5)"]),
    "weight of 4 axes": ({"weight_shape": (4, 6, 3, 3)}, ["weight.shape=(4, 6, 3, 3)"]),
    "channels differ": ({"weight_shape": (5, 6, 3, 3, 3)}, ["weight.shape=(5, 6, 3, 3, 3)", "input.shape=(2, 4, 3, 4, 5)"]),
    "bias too long": ({"bias_shape": (7,)}, ["bias.shape=(7,)", "(6,)"]),
    "bias of one group": ({"bias_shape": (6,), "groups": 2}, ["bias.shape=(6,)", "(12,)"]),
    "bias of 2 axes": ({"bias_shape": (6, 1)}, ["bias.shape=(6, 1)"]),
    "no channels": ({"input_shape": (2, 0, 3, 4, 5), "weight_shape": (0, 6, 3, 3, 3)}, ["input.shape", "0"]),
    "no output channels": ({"weight_shape": (4, 0, 3, 3, 3)}, ["weight.shape=(4, 0, 3, 3, 3)"]),
    "empty axis": ({"input_shape": (2, 4, 0, 4, 5)}, ["input.shape"]),
    "empty kernel": ({"weight_shape": (4, 6, 3, 0, 3)}, ["weight.shape"]),
    "groups do not divide": ({"groups": 3}, ["groups=3", "in_channels=4"]),
    "groups 0": ({"groups": 0}, ["groups=0"]),
    "groups negative": ({"groups": -1}, ["groups=-1"]),
    "groups a float": ({"groups": 2.0}, ["groups=2.0"]),
    "stride 0": ({"stride": 0}, ["stride=0"]),
    "stride negative on one axis": ({"stride": (1, -2, 1)}, ["stride[1]=-2"]),
    "stride a fraction": ({"stride": 1.5}, ["stride=1.5"]),
    "stride a bool": ({"stride": True}, ["stride=True"]),
    "stride None": ({"stride": None}, ["stride=None"]),
    "stride of two": ({"stride": (1, 2)}, ["stride=(1, 2)", "got 2"]),
    "stride of none": ({"stride": ()}, ["stride=()"]),
    "dilation 0": ({"dilation": (1, 1, 0)}, ["dilation[2]=0"]),
    "dilation overflows": ({"dilation": 1_800_000_000}, ["dilation[0]=1800000000", "2**31 - 1"]),
    "dilation past int32": ({"dilation": 2**31}, ["dilation=2147483648", "2**31 - 1"]),
    "stride overflows": ({"stride": (1, 1, 2**30)}, ["stride[2]=1073741824", "2**31 - 1"]),
    "padding negative": ({"padding": (0, 0, -1)}, ["padding[2]=-1"]),
    "padding same": ({"padding": "same"}, ["padding='same'", "zero padding"]),
    "padding reflect": ({"padding": "reflect"}, ["padding='reflect'", "zero padding"]),
    "padding past int32": ({"padding": 2**40}, [f"padding={2**40}"]),
    "output empty": ({"padding": (0, 3, 0)}, ["padding[1]=3", "empty output", "at most 2"]),
    "output negative": ({"padding": 1000}, ["padding[0]=1000", "empty output", "at most 2"]),
    "output_padding negative": ({"output_padding": -1}, ["output_padding=-1"]),
    "output_padding = stride": ({"output_padding": 2, "stride": 2}, ["output_padding[0]=2", "max(stride, dilation)=2"]),
    "output_padding = dilation": ({"output_padding": (0, 3, 0), "dilation": (1, 3, 1)}, ["output_padding[1]=3", "=3"]),
    "output_padding without stride": ({"output_padding": (0, 0, 1)}, ["output_padding[2]=1", "axis w"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named_with_its_value(case: str) -> None:
    arguments, fragments = BAD[case]
    with pytest.raises(ProblemError) as caught:
        Problem.from_shapes(**(VALID | arguments))
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_largest_legal_arguments_are_taken() -> None:
    Problem.from_shapes(**VALID, output_padding=1, stride=2)
    Problem.from_shapes(**VALID, output_padding=2, dilation=3)
    assert Problem.from_shapes(**VALID, padding=(2, 2, 3)).output_size == (1, 2, 1)
    assert Problem.from_shapes((0, 4, 3, 4, 5), VALID["weight_shape"]).output_shape == (0, 6, 5, 6, 7)
    assert Problem.from_shapes((1, 1, 1, 1, 1), (1, 1, 2, 2, 2), dilation=INT32_MAX - 1).output_size == (INT32_MAX,) * 3


def test_constructor_refuses_a_bad_batch_and_channels() -> None:
    with pytest.raises(ProblemError, match="batch=-1"):
        Problem(-1, 1, 1, (1, 1, 1), (1, 1, 1))
    with pytest.raises(ProblemError, match="groups=0"):
        Problem(1, 1, 1, (1, 1, 1), (1, 1, 1), groups=0)
    with pytest.raises(ProblemError, match="out_channels=3"):
        Problem(1, 4, 3, (1, 1, 1), (1, 1, 1), groups=2)


def test_header_is_the_generated_struct() -> None:
    assert HEADER.read_text() == c_struct(), "run `python -m cupy_convt3d.problem > kernels/include/convt3d/core/problem.cuh`"


def test_c_values_follow_the_struct() -> None:
    problem = Problem.parse("n2_c3to6_i4x5x6_k1x2x3_s2x3x4_p0x1x2_op1x0x1_d1x2x1_g3_bias")
    members = [line.split()[1].rstrip(";") for line in c_struct().splitlines() if line.startswith("  int ")]
    values = iter(c_values(problem))
    for member in members:
        name, _, count = member.partition("[")
        wanted = getattr(problem, name)
        assert tuple(next(values) for _ in range(int(count.rstrip("]") or 1))) == (wanted if count else (wanted,))
    assert next(values, None) is None


@settings(deadline=None, max_examples=100)
@given(problems())
def test_names_hold_every_field_and_axis(problem: Problem) -> None:
    names = problem.names
    for field in ("input", "output", "kernel"):
        assert tuple(names[f"{field}_{axis}"] for axis in "dhw") == getattr(problem, f"{field}_size")
    for field in ("stride", "padding", "output_padding", "dilation"):
        assert tuple(names[f"{field}_{axis}"] for axis in "dhw") == getattr(problem, field)
    assert names["output_numel"] == math.prod(problem.output_shape)
    assert names["output_voxels"] == math.prod(problem.output_size)


@pytest.mark.parametrize("bias", ["no", "", 0, 1, None, [], 1.0, np.zeros(3)])
def test_bias_is_true_or_false(bias: object) -> None:
    with pytest.raises(ProblemTypeError, match=r"bias=.*: must be True or False"):
        Problem(1, 1, 1, 1, 1, bias=bias)  # type: ignore[arg-type]
    assert Problem(1, 1, 1, 1, 1, bias=np.bool_(True)).bias is True  # type: ignore[arg-type]


def test_a_problem_of_many_taps_answers_at_once() -> None:
    start = time.process_time()
    problem = Problem(1, 1, 1, (1, 1, 2**30), (1, 2**30, 2**30), (1, 7, 1))
    assert problem.flop == 2**91 and problem.names["taps"] == 2**60 and Problem.parse(str(problem)) == problem
    assert Problem(1, 1, 1, (1, 1, 1), (1, 1, 2**30), padding=(0, 0, 2**28)).flop == 2**30
    assert "no fp16" not in (registry.kernel("fprop_gather").why_not(problem, "fp16") or "")
    assert time.process_time() - start < 0.5


@given(problems())
def test_live_pairs_are_those_that_land(problem: Problem) -> None:
    for a in range(3):
        places = (
            i * problem.stride[a] - problem.padding[a] + t * problem.dilation[a]
            for i in range(problem.input_size[a])
            for t in range(problem.kernel_size[a])
        )
        assert problem.live_pairs(a) == sum(0 <= place < problem.output_size[a] for place in places)


@pytest.mark.parametrize("size", [10**5000, range(10**12), "3" * 10**6, [3] * 4, [], -(10**400), object()], ids=range(7))
def test_any_size_is_a_problem_error(size: object) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem(1, 1, 1, 1, size)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "name", ["n1_c1to1_i1_k" + "1" * 5000, "n١_c1to1_i1_k1", "", "x" * 10**6, 5, None, b"n1_c1to1_i1_k1", "n1_c1to1_i1_k1\n"], ids=range(8)
)
def test_any_name_is_a_problem_error(name: object) -> None:
    with pytest.raises(ProblemError, match="must look like"):
        Problem.parse(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected", "live"),
    [
        ("n1_c1to1_i1x5x6_k3_p1", "n1_c1to1_i1x5x6_k1x3x3_p0x1x1", (slice(1, 2), slice(0, 3), slice(0, 3))),  # flat: the middle plane
        ("n1_c1to1_i1_k4_s2_p1", "n1_c1to1_i1_k2_s2", (slice(1, 3),) * 3),  # kernel = stride is left
        ("n1_c1to1_i1x1x4_k3_s2_p1_op1", "n1_c1to1_i1x1x4_k2x2x3_s2_p0x0x1_op0x0x1", (slice(1, 3), slice(1, 3), slice(0, 3))),
        ("n1_c1to1_i4x4x1_k3_p3_d3", "n1_c1to1_i4x4x1_k3x3x1_p3x3x0_d3", (slice(0, 3), slice(0, 3), slice(1, 2))),
        ("n1_c1to1_i1_k4", "n1_c1to1_i1_k4", (slice(0, 4),) * 3),  # one voxel to 4x4x4: every tap leads somewhere
        ("n1_c1to1_i1x4x4_k2x3x3_s1x2x2_p1_d2x1x1", None, None),  # dead taps, and no problem's own without them
    ],
)
def test_taps_that_lead_nowhere(name: str, expected: str | None, live: tuple[slice, ...] | None) -> None:
    problem = Problem.parse(name)
    found = problem.without_dead_taps
    if expected is None:
        assert found.output_shape == problem.output_shape and found.flop == problem.flop
        return
    assert (str(found), problem.live_taps) == (expected, live)
    assert (found is problem) == (expected == name)


@given(problems())
def test_a_problem_without_dead_taps_is_as_much_work(problem: Problem) -> None:
    found = problem.without_dead_taps
    assert (found.output_shape, found.input_shape, found.flop) == (problem.output_shape, problem.input_shape, problem.flop)
    assert found.without_dead_taps is found
    sizes = tuple(tap.stop - tap.start for tap in problem.live_taps)
    assert sizes == found.kernel_size
    rng = np.random.default_rng(0)
    x, w = rng.integers(-4, 5, problem.input_shape), rng.integers(-4, 5, problem.weight_shape)
    b = rng.integers(-4, 5, problem.out_channels) if problem.bias else None
    part = w[(slice(None), slice(None), *problem.live_taps)]
    assert np.array_equal(reference.fprop(problem, x, w, b), reference.fprop(found, x, part, b))
