"""The oracle against the rule itself, against torch, and against laws that need no oracle; and its error bound."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_convt3d import reference
from cupy_convt3d.errors import ProblemError
from cupy_convt3d.lab.strategies import EDGE_PROBLEMS, problems
from cupy_convt3d.lab.tensors import draw_tensors
from cupy_convt3d.problem import PASSES, Problem, Triple

Array = np.ndarray[Any, np.dtype[Any]]
seeds = st.integers(0, 2**32 - 1)
small_problems = problems(max_multiply_adds=5_000)


def exact(problem: Problem, seed: int) -> tuple[Array, Array, Array, Array]:
    """Return input, weight, bias and grad_output of small integers as int64, so that every law holds exactly."""
    generator = np.random.default_rng(seed)
    shapes = (problem.input_shape, problem.weight_shape, (problem.out_channels,), problem.output_shape)
    x, w, b, y = (generator.integers(-8, 9, shape) for shape in shapes)
    return x, w, b, y


def without_bias(problem: Problem) -> Problem:
    return replace(problem, bias=False)


def each_multiply_add(problem: Problem):  # type: ignore[no-untyped-def]
    """Yield the indices of input, weight and output of every multiply-add, one at a time, from the rule alone."""
    p, per_group = problem, problem.out_channels // problem.groups
    for n, c, o in itertools.product(range(p.batch), range(p.in_channels), range(per_group)):
        channel = c // (p.in_channels // p.groups) * per_group + o
        for i in np.ndindex(p.input_size):
            for t in np.ndindex(p.kernel_size):
                v = [i[a] * p.stride[a] - p.padding[a] + t[a] * p.dilation[a] for a in range(3)]
                if all(0 <= v[a] < p.output_size[a] for a in range(3)):
                    yield (n, c, *i), (c, o, *t), (n, channel, *v)


@settings(deadline=None, max_examples=60)
@given(problems(max_multiply_adds=500), seeds)
def test_every_pass_is_the_sum_of_its_multiply_adds(problem: Problem, seed: int) -> None:
    x, w, b, y = exact(problem, seed)
    output = np.zeros(problem.output_shape, np.int64) + problem.bias * b[:, None, None, None]
    grad_input, grad_weight = np.zeros_like(x), np.zeros_like(w)
    for at_input, at_weight, at_output in each_multiply_add(problem):
        output[at_output] += x[at_input] * w[at_weight]
        grad_input[at_input] += y[at_output] * w[at_weight]
        grad_weight[at_weight] += x[at_input] * y[at_output]
    np.testing.assert_array_equal(reference.fprop(problem, x, w, b if problem.bias else None), output)
    np.testing.assert_array_equal(reference.dgrad(problem, y, w), grad_input)
    np.testing.assert_array_equal(reference.wgrad(problem, x, y), grad_weight)


def torch_passes(problem: Problem, x: Array, w: Array, b: Array, y: Array) -> tuple[Array, ...]:
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(array).requires_grad_() for array in (x, w, b)]
    p = problem
    output = torch.nn.functional.conv_transpose3d(*tensors, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    gradients = torch.autograd.grad(output, tensors, torch.from_numpy(y))
    return (output.detach().numpy(), *(gradient.numpy() for gradient in gradients))


@settings(deadline=None, max_examples=1000)
@given(problems(), seeds)
def test_torch_agrees(problem: Problem, seed: int) -> None:
    generator = np.random.default_rng(seed)
    problem = replace(problem, bias=True)
    shapes = (problem.input_shape, problem.weight_shape, (problem.out_channels,), problem.output_shape)
    x, w, b, y = (generator.standard_normal(shape) for shape in shapes)
    tensors = {"input": x, "weight": w, "bias": b, "grad_output": y}
    found = torch_passes(problem, x, w, b, y)
    for pass_name, other in zip(PASSES, found, strict=False):
        bound = 1e-12 * reference.magnitude(pass_name, problem, tensors)
        assert other.shape == bound.shape
        assert (np.abs(reference.run(pass_name, problem, tensors) - other) <= bound).all(), pass_name
    bound = 1e-12 * reference.grad_bias(problem, np.abs(y))
    assert (np.abs(reference.grad_bias(problem, y) - found[3]) <= bound).all()


def test_samples_of_torch_agree() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("expecttest", reason="torch's op database needs expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    torch.backends.__allow_nonbracketed_mutation_flag = True  # which that forbids to all of the process
    (operator,) = [op for op in op_db if op.name == "nn.functional.conv_transpose3d"]
    samples = list(operator.sample_inputs("cpu", torch.float64))
    assert len(samples) >= 5
    for sample in samples:
        weight, bias = sample.args
        problem = Problem.from_shapes(sample.input.shape, weight.shape, None if bias is None else bias.shape, **sample.kwargs)
        x = sample.input.reshape(problem.input_shape).numpy()
        expected = operator(sample.input, *sample.args, **sample.kwargs).numpy()
        found = reference.fprop(problem, x, weight.numpy(), None if bias is None else bias.numpy())
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-12, atol=1e-9)


def test_onnx_published_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node tests of ONNX's specification (onnx/backend/test/case/node/convtranspose.py), whose results are written out by hand."""
    cases = pytest.importorskip("onnx.backend.test.case.node.convtranspose")
    published: list[tuple[dict[str, Any], list[Array], Array]] = []

    def note(node: Any, inputs: list[Array], outputs: list[Array], name: str) -> None:
        attributes = {a.name: list(a.ints) or a.i or a.s for a in node.attribute}
        published.append((attributes, inputs, outputs[0]))

    monkeypatch.setattr(cases, "expect", note)
    for name in vars(cases.ConvTranspose):
        if name.startswith("export"):
            getattr(cases.ConvTranspose, name)()
    compared = 0
    for attributes, (x, w), y in published:
        axes = x.ndim - 2
        pads = attributes.get("pads", [0] * 2 * axes)
        if {"output_shape", "auto_pad"} & attributes.keys() or pads[:axes] != pads[axes:]:
            continue  # what they stand for is ONNX's own arithmetic

        def three(name: str, default: int, given: dict[str, Any] = attributes, axes: int = axes) -> Triple:
            return (*[default] * (3 - axes), *given.get(name, [default] * axes))  # type: ignore[return-value]

        x, w = (tensor.reshape(*tensor.shape[:2], *[1] * (3 - axes), *tensor.shape[2:]) for tensor in (x, w))
        padding = (*[0] * (3 - axes), *pads[:axes])
        groups, geometry = attributes.get("group", 1), (three("strides", 1), padding, three("output_padding", 0))
        problem = Problem.from_shapes(x.shape, w.shape, None, *geometry, groups, three("dilations", 1))
        np.testing.assert_array_equal(reference.fprop(problem, x, w).reshape(y.shape), y)
        compared += 1
    assert compared >= 6


def test_a_case_worked_out_by_hand() -> None:
    """Two volumes and a third, stride 2, padding 1, kernel 3 along w: o = 2*i - 1 + t of inputs (1, 10), taps (1, 2, 3)."""
    problem = Problem.parse("n3_c1to1_i1x1x2_k1x1x3_s1x1x2_p0x0x1_bias")
    x, w = np.array([[1, 10], [2, 20], [5, 50]]).reshape(3, 1, 1, 1, 2), np.array([1, 2, 3]).reshape(1, 1, 1, 1, 3)
    y = np.array([[2, 13, 20], [4, 26, 40], [10, 65, 100]]).reshape(3, 1, 1, 1, 3)
    np.testing.assert_array_equal(reference.fprop(problem, x, w, np.array([7])), y + 7)
    ones = np.ones_like(y)
    np.testing.assert_array_equal(reference.dgrad(problem, ones, w).reshape(3, 2), [[5, 3]] * 3)
    np.testing.assert_array_equal(reference.wgrad(problem, x, ones).ravel(), [80, 88, 8])
    np.testing.assert_array_equal(reference.grad_bias(problem, ones), [9])


def test_integers_stay_exact_where_doubles_would_not() -> None:
    problem = Problem.parse("n1_c2to1_i1_k1_bias")
    x, w, b = np.array([2**40 + 1, -(2**40)]), np.array([2**20 + 1, 2**20 + 1]), np.array([3])
    found = reference.fprop(problem, x.reshape(1, 2, 1, 1, 1), w.reshape(2, 1, 1, 1, 1), b)
    assert found.dtype == np.int64
    assert found.item() == (2**40 + 1) * (2**20 + 1) - 2**40 * (2**20 + 1) + 3


@pytest.mark.parametrize("dtype_name", ["fp64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("pass_name", PASSES)
def test_floats_accumulate_in_fp64(pass_name: str, dtype_name: str) -> None:
    problem = Problem.parse("n2_c4to6_i3_k3_s2_p1_op1_g2_bias")
    tensors = draw_tensors(pass_name, problem, dtype_name, "exact", 0)
    found = reference.run(pass_name, problem, tensors)
    assert found.dtype == np.float64
    assert found.shape == list(problem.shapes(pass_name)[0].values())[-1]
    integers = {name: tensor.astype(np.float64).astype(np.int64) for name, tensor in tensors.items()}
    assert reference.run(pass_name, problem, integers).dtype == np.int64
    np.testing.assert_array_equal(found, reference.run(pass_name, problem, integers))


@settings(deadline=None, max_examples=100)
@given(small_problems, seeds)
def test_linear_in_input_and_in_weight(problem: Problem, seed: int) -> None:
    p = without_bias(problem)
    (x, w, _, _), (x2, w2, _, _) = exact(p, seed), exact(p, seed + 1)
    both = 3 * reference.fprop(p, x, w) - 2 * reference.fprop(p, x2, w)
    np.testing.assert_array_equal(reference.fprop(p, 3 * x - 2 * x2, w), both)
    both = 3 * reference.fprop(p, x, w) - 2 * reference.fprop(p, x, w2)
    np.testing.assert_array_equal(reference.fprop(p, x, 3 * w - 2 * w2), both)


@settings(deadline=None, max_examples=200)
@given(small_problems, seeds)
def test_gradients_are_adjoint(problem: Problem, seed: int) -> None:
    p = replace(problem, bias=True)
    x, w, b, y = exact(p, seed)
    product = (reference.fprop(without_bias(p), x, w) * y).sum()
    assert product == (x * reference.dgrad(p, y, w)).sum() == (w * reference.wgrad(p, x, y)).sum()
    assert (reference.fprop(p, x, w, b) * y).sum() - product == (b * reference.grad_bias(p, y)).sum()


@settings(deadline=None, max_examples=100)
@given(small_problems, seeds, st.integers(0, 2))
def test_shifted_input_shifts_the_output_by_stride(problem: Problem, seed: int, a: int) -> None:
    p, axis = without_bias(problem), a + 2
    x, w, _, _ = exact(p, seed)
    x = np.moveaxis(x, axis, 0).copy()
    x[-1] = 0  # it would leave the volume
    shifted = np.roll(x, 1, axis=0)
    before, after = (np.moveaxis(reference.fprop(p, np.moveaxis(source, 0, axis), w), axis, 0) for source in (x, shifted))
    np.testing.assert_array_equal(after[p.stride[a] :], before[: -p.stride[a]])


def stuffed(tensor: Array, step: Triple, tail: Triple) -> Array:
    """Return the tensor with `step - 1` zeros between the entries of its last three axes and `tail` zeros after them."""
    size = [(n - 1) * s + 1 + e for n, s, e in zip(tensor.shape[2:], step, tail, strict=True)]
    out = np.zeros((*tensor.shape[:2], *size), tensor.dtype)
    out[:, :, : size[0] - tail[0] : step[0], : size[1] - tail[1] : step[1], : size[2] - tail[2] : step[2]] = tensor
    return out


@settings(deadline=None, max_examples=100)
@given(small_problems, seeds)
def test_stride_is_a_zero_stuffed_input(problem: Problem, seed: int) -> None:
    p = without_bias(problem)
    x, w, _, _ = exact(p, seed)
    wide = stuffed(x, p.stride, p.output_padding)  # output_padding becomes zeros at the end: it needs a stride to be legal
    dense = Problem.from_shapes(wide.shape, w.shape, None, 1, p.padding, 0, p.groups, p.dilation)
    np.testing.assert_array_equal(reference.fprop(p, x, w), reference.fprop(dense, wide, w))


@settings(deadline=None, max_examples=100)
@given(small_problems, seeds)
def test_dilation_is_a_zero_stuffed_weight(problem: Problem, seed: int) -> None:
    p = without_bias(problem)
    x, w, _, _ = exact(p, seed)
    wide = stuffed(w, p.dilation, p.output_padding)
    dense = Problem.from_shapes(x.shape, wide.shape, None, p.stride, p.padding, 0, p.groups, 1)
    np.testing.assert_array_equal(reference.fprop(p, x, w), reference.fprop(dense, x, wide))


@settings(deadline=None, max_examples=100)
@given(small_problems, seeds)
def test_groups_are_separate_convolutions(problem: Problem, seed: int) -> None:
    p = problem
    x, w, b, y = exact(p, seed)
    one = replace(p, in_channels=p.in_channels // p.groups, out_channels=p.out_channels // p.groups, groups=1)
    splits = (np.split(x, p.groups, 1), np.split(w, p.groups), np.split(b, p.groups), np.split(y, p.groups, 1))
    parts = list(zip(*splits, strict=True))
    outputs = [reference.fprop(one, xs, ws, bs if p.bias else None) for xs, ws, bs, _ in parts]
    np.testing.assert_array_equal(reference.fprop(p, x, w, b if p.bias else None), np.concatenate(outputs, 1))
    gradients = [reference.dgrad(one, ys, ws) for _, ws, _, ys in parts]
    np.testing.assert_array_equal(reference.dgrad(p, y, w), np.concatenate(gradients, 1))
    gradients = [reference.wgrad(one, xs, ys) for xs, _, _, ys in parts]
    np.testing.assert_array_equal(reference.wgrad(p, x, y), np.concatenate(gradients))


@settings(deadline=None, max_examples=100)
@given(small_problems, seeds)
def test_batch_entries_are_independent(problem: Problem, seed: int) -> None:
    p = without_bias(replace(problem, batch=3))
    x, w, _, y = exact(p, seed)
    one = replace(p, batch=1)
    alone = [reference.fprop(one, x[n : n + 1], w) for n in range(3)]
    np.testing.assert_array_equal(reference.fprop(p, x, w), np.concatenate(alone))
    alone = [reference.dgrad(one, y[n : n + 1], w) for n in range(3)]
    np.testing.assert_array_equal(reference.dgrad(p, y, w), np.concatenate(alone))
    np.testing.assert_array_equal(
        reference.wgrad(p, x, y), sum(reference.wgrad(one, x[n : n + 1], y[n : n + 1]) for n in range(3))
    )


@settings(deadline=None, max_examples=100)
@given(small_problems, seeds, st.sampled_from([np.nan, np.inf]), st.data())
def test_non_finite_values_land_only_where_taps_reach(problem: Problem, seed: int, value: float, data: st.DataObject) -> None:
    p = without_bias(problem)
    for pass_name in PASSES:
        tensors = draw_tensors(pass_name, p, "fp64", "exact", seed)
        name = data.draw(st.sampled_from(list(tensors)))
        if not tensors[name].size:
            continue
        mark = {n: np.ones(t.shape) for n, t in tensors.items()} | {name: np.zeros(tensors[name].shape)}
        place = data.draw(st.integers(0, tensors[name].size - 1))
        mark[name].flat[place], tensors[name].flat[place] = 1, value
        reached = reference.run(pass_name, p, mark) > 0
        np.testing.assert_array_equal(~np.isfinite(reference.run(pass_name, p, tensors)), reached)


@settings(deadline=None, max_examples=200)
@given(small_problems, seeds, st.sampled_from(PASSES))
def test_bound_quantities_are_the_pass_over_magnitudes_and_ones(problem: Problem, seed: int, pass_name: str) -> None:
    tensors = draw_tensors(pass_name, problem, "fp64", "random", seed)
    magnitudes = {name: np.abs(tensor) for name, tensor in tensors.items()}
    ones = {name: np.ones(tensor.shape, np.int64) for name, tensor in tensors.items()}
    np.testing.assert_array_equal(
        reference.magnitude(pass_name, problem, tensors), reference.run(pass_name, problem, magnitudes)
    )
    np.testing.assert_array_equal(reference.terms(pass_name, problem), reference.run(pass_name, problem, ones))


@pytest.mark.parametrize("problem", EDGE_PROBLEMS, ids=str)
def test_bound_is_the_formula(problem: Problem) -> None:
    tensors = draw_tensors("fprop", problem, "fp32", "random", 1)
    ref, b, k = (
        reference.run("fprop", problem, tensors),
        reference.magnitude("fprop", problem, tensors),
        reference.terms("fprop", problem),
    )
    c, u = reference.ACCUMULATION_FACTOR, reference.precision("tf32")
    rest = 2 * u.unit_in * b + u.unit_out * abs(ref) + u.tiny
    expected = c * np.sqrt(k) * u.unit_accumulate * b + rest
    np.testing.assert_allclose(reference.error_bound("fprop", problem, tensors, u), expected, rtol=1e-14)
    np.testing.assert_allclose(reference.error_bound("fprop", problem, tensors, u, reference=ref), expected, rtol=1e-14)
    expected = c * k * u.unit_accumulate * b + rest
    np.testing.assert_allclose(reference.error_bound("fprop", problem, tensors, u, strict=True), expected, rtol=1e-14)


def rounded_to_tf32(array: Array, truncate: bool = False) -> Array:
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits if truncate else bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def test_roundoffs_are_those_of_the_formats() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, dtype in [("fp64", np.float64), ("fp32", np.float32), ("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)]:
        assert reference.precision(name).unit_out == float(ml_dtypes.finfo(dtype).eps) / 2
    values = np.linspace(1, 2, 100_001, dtype=np.float32)
    high = rounded_to_tf32(values)
    low = rounded_to_tf32(values - high)
    worst = float((np.abs(high.astype(np.float64) - values) / values).max())
    assert 0.9 < worst / reference.precision("tf32").unit_in <= 1
    assert (np.abs(high.astype(np.float64) + low - values) / values).max() <= reference.precision("tf32x3").unit_in
    # What three products leave out is low * low, at most unit_in(tf32)**2.
    assert worst**2 <= reference.precision("tf32x3").unit_in <= 2.0**-22


def summed_in_fp32(problem: Problem, x: Array, w: Array) -> Array:
    """Return fprop with every product and every addition rounded to fp32, one term after the other."""
    output = np.zeros(problem.output_shape, np.float32)
    for at_input, at_weight, at_output in each_multiply_add(problem):
        output[at_output] += x[at_input] * w[at_weight]
    return output


@pytest.mark.parametrize("positive", [False, True])
def test_bound_holds_and_bites(positive: bool) -> None:
    problem = Problem.parse("n1_c32to2_i3_k3_p1")
    tensors = draw_tensors("fprop", problem, "fp32", "random", 3)
    x, w = (np.abs(t) if positive else t for t in tensors.values())
    tensors = {"input": x, "weight": w}
    ref = reference.fprop(problem, x, w)
    assert reference.terms("fprop", problem).max() == 864

    def worst(found: Array, dtype_name: str) -> float:
        bound = reference.error_bound("fprop", problem, tensors, reference.precision(dtype_name), reference=ref)
        return float((np.abs(found - ref) / bound).max())

    ieee = summed_in_fp32(problem, x, w)
    tf32 = summed_in_fp32(problem, rounded_to_tf32(x), rounded_to_tf32(w))
    fp16 = summed_in_fp32(problem, x.astype(np.float16).astype(np.float32), w.astype(np.float16).astype(np.float32))
    assert 0.001 < worst(ieee, "fp32") < 0.5
    assert worst(ieee, "tf32x3") < 0.5
    assert 0.001 < worst(tf32, "tf32") < 1
    assert worst(tf32, "tf32x3") > 2  # silently rounded operands are found out
    assert worst(tf32, "fp32") > 2 and worst(fp16, "fp32") > 2
    lost = ref.copy()
    lost[0, 0, 1, 1, 1] -= x[0, 5, 1, 1, 1] * w[5, 0, 1, 1, 1]
    assert worst(lost, "fp32") > 2  # and so is one lost product of 864


@pytest.mark.parametrize("dtype_name", ["fp64", "fp32", "fp16", "bf16"])
def test_torch_keeps_the_bound(dtype_name: str) -> None:
    torch = pytest.importorskip("torch")
    problem = Problem.parse("n2_c24to6_i4_k3_s2_p1_op1_bias")
    tensors = draw_tensors("fprop", problem, dtype_name, "random", 5)
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype_name]
    # Of 16-bit operands torch adds in fp32 on some CPUs and in 16 bits on others, so they are widened, and the sums rounded once.
    wide = torch.float64 if dtype_name == "fp64" else torch.float32
    operands = [torch.from_numpy(tensor.astype(np.float64)).to(dtype).to(wide) for tensor in tensors.values()]
    found = torch.nn.functional.conv_transpose3d(*operands, 2, 1, 1).to(dtype).double().numpy()
    bound = reference.error_bound("fprop", problem, tensors, reference.precision(dtype_name))
    ratio = (np.abs(found - reference.run("fprop", problem, tensors)) / bound).max()
    assert ratio <= 1
    assert ratio > 0 or dtype_name == "fp64"  # in fp64 torch may well add in the same order


def test_outputs_without_taps_must_be_exact() -> None:
    problem = Problem.parse("n1_c2to2_i2_k1_s2")
    tensors = draw_tensors("fprop", problem, "fp32", "random", 0)
    bound = reference.error_bound("fprop", problem, tensors, reference.precision("tf32"))
    untouched = reference.terms("fprop", problem) == 0
    assert untouched.sum() == 2 * (27 - 8)
    assert bound[untouched].max() < 1e-30 < bound[~untouched].min()


def test_wrong_tensors_are_named() -> None:
    problem = Problem.parse("n1_c2to4_i2_k3_bias")
    x, w, b = np.ones((1, 2, 2, 2, 2)), np.ones((2, 4, 3, 3, 3)), np.ones(4)
    for call, fragment in [
        (lambda: reference.fprop(problem, x[0], w, b), r"input.shape=\(2, 2, 2, 2\): must be \(1, 2, 2, 2, 2\)"),
        (lambda: reference.fprop(problem, x, w.swapaxes(0, 1), b), r"weight.shape=\(4, 2, 3, 3, 3\)"),
        (lambda: reference.fprop(problem, x, w), "bias: missing"),
        (lambda: reference.fprop(replace(problem, bias=False), x, w, b), "bias=False"),
        (lambda: reference.fprop(problem, x * 1j, w, b), "input.dtype=complex128"),
        (lambda: reference.grad_bias(problem, x), "grad_output.shape"),
        (lambda: reference.run("forward", problem, {}), "pass='forward'"),
        (lambda: reference.precision("fp8"), "dtype='fp8'"),
        (lambda: reference.precision("ieee"), "dtype='ieee'"),
    ]:
        with pytest.raises(ProblemError, match=fragment):
            call()


def test_padded_is_the_same_but_for_weights_that_are_not_finite() -> None:
    """A tap that is infinite then meets zeros beyond the input, in all outputs of its residue class."""
    problem = Problem.parse("n1_c1to2_i3x1x2_k3x1x4_s1x1x2_p1x0x1_op0x0x1_bias")
    tensors = {name: np.ones(problem.shapes("fprop")[0][name]) for name in ("input", "weight", "bias")}
    np.testing.assert_array_equal(reference.padded(problem, tensors), reference.run("fprop", problem, tensors))
    tensors["weight"][0, 1, 0, 0, 1] = np.inf
    padded, plain = reference.padded(problem, tensors), reference.run("fprop", problem, tensors)
    assert np.isfinite(padded[:, 0]).all() and np.isfinite(padded[:, 1, :, :, 1::2]).all()
    assert not np.isfinite(padded[:, 1, :, :, ::2]).any() and np.isfinite(plain[0, 1, 2, 0, ::2]).all()
