"""The functional API: agreement with torch for every library and layout, and every bad argument refused before a launch."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_convt3d as ct
from cupy_convt3d import choice, ops, reference
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels

torch = pytest.importorskip("torch")
from cupy_convt3d import torch_plan  # noqa: E402

LIBRARIES = ("numpy", "torch", "jax")
NUMPY_DTYPES = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp64": 1e-13, "fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}
GEOMETRY: dict[str, Any] = {
    "stride": (2, 1, 3), "padding": (1, 0, 2), "output_padding": (1, 0, 1), "groups": 2, "dilation": (1, 2, 1)
}  # fmt: skip


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Small fractions that fp16 and bf16 hold exactly, so that only the arithmetic can differ."""
    return np.random.default_rng(seed).integers(-8, 9, shape) / 8.0


def to(library: str, array: np.ndarray, dtype: str) -> Any:
    if library == "torch":
        return torch.tensor(array, dtype=TORCH_DTYPES[dtype])
    array = array.astype(NUMPY_DTYPES[dtype])
    if library == "jax":
        if dtype == "fp64":
            pytest.skip("JAX has fp64 only with jax_enable_x64")
        jax = pytest.importorskip("jax")
        return jax.device_put(array, jax.devices("cpu")[0])  # not on a GPU, where it would be by itself
    return array


def as_fp64(array: Any) -> np.ndarray:
    return array.double().numpy() if isinstance(array, torch.Tensor) else np.asarray(array).astype(np.float64)


def backend_of(library: str) -> str | None:
    return "host" if library == "torch" else None


def expected(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, grad: np.ndarray | None = None, **geometry: Any) -> Any:
    """Return torch's fp64 output, or its (grad_input, grad_weight) for the given grad_output."""
    tx, tw = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    y = torch.nn.functional.conv_transpose3d(tx, tw, None if b is None else torch.tensor(b), **geometry)
    if grad is None:
        return y.detach().numpy()
    return tuple(g.numpy() for g in torch.autograd.grad(y, (tx, tw), torch.tensor(grad)))


def assert_close(found: Any, wanted: np.ndarray, dtype: str) -> None:
    error = np.abs(as_fp64(found) - wanted).max(initial=0)
    limit = TOLERANCE[dtype] * max(1.0, np.abs(wanted).max(initial=0))
    assert found.shape == wanted.shape
    assert error <= limit, f"worst error {error:.3g}, limit {limit:.3g}"


def assert_library(array: Any, library: str) -> None:
    module = {"numpy": "numpy", "torch": "torch", "jax": "jax"}[library]
    assert type(array).__module__.startswith(module)


X, W, B = values((2, 4, 3, 4, 2), 1), values((4, 3, 3, 2, 3), 2), values((6,), 3)
ORDER = ("stride", "padding", "output_padding", "groups", "dilation")
PROBLEM = Problem.from_shapes(X.shape, W.shape, B.shape, *(GEOMETRY[name] for name in ORDER))
Y = expected(X, W, B, **GEOMETRY)
G = values(Y.shape, 4)
GRADIENTS = expected(X, W, B, G, **GEOMETRY)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("library", LIBRARIES)
def test_all_three_functions_agree_with_torch(library: str, dtype: str) -> None:
    x, w, b, g = (to(library, a, dtype) for a in (X, W, B, G))
    backend = backend_of(library)
    y = ct.conv_transpose3d(x, w, b, **GEOMETRY, backend=backend)
    grad_input = ct.conv_transpose3d_grad_input(g, w, x.shape, **GEOMETRY, backend=backend)
    grad_weight = ct.conv_transpose3d_grad_weight(x, g, w.shape, **GEOMETRY, backend=backend)
    for found, wanted in zip((y, grad_input, grad_weight), (Y, *GRADIENTS), strict=True):
        assert_library(found, library)
        assert found.dtype == x.dtype
        assert_close(found, wanted, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_torch_cpu_tensors_take_torchs_own_operator(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "backend_for", None)
    monkeypatch.setattr(torch_plan, "_KernelPlan", None)
    x, w, b, g = (to("torch", a, dtype) for a in (X, W, B, G))
    assert_close(ct.conv_transpose3d(x, w, b, **GEOMETRY), Y, dtype)
    assert_close(ct.conv_transpose3d(x[0], w, b, **GEOMETRY, algorithm="library"), Y[0], dtype)
    assert_close(ct.conv_transpose3d_grad_input(g, w, x.shape, **GEOMETRY), GRADIENTS[0], dtype)
    assert_close(ct.conv_transpose3d_grad_weight(x, g, w.shape, **GEOMETRY, backend="torch"), GRADIENTS[1], dtype)
    out = torch.empty(Y.shape, dtype=x.dtype)
    assert ct.conv_transpose3d(x, w, b, **GEOMETRY, out=out) is out
    assert_close(out, Y, dtype)


def call_by_name(algorithm: Any, name: str, x: Any, w: Any, b: Any, g: Any, out: Any = None) -> tuple[Any, Any, str]:
    """Return what a kernel makes of its widest element type, what is right, and that type; skip what it cannot do."""
    kernel = kernels()[name]
    instance = next(i for i in ("fp64", "fp32", "tf32x3", "tf32", "fp16") if i in kernel.dtypes)
    element = DTYPES[instance].element
    if reason := kernel.why_not(PROBLEM, instance):
        pytest.skip(reason)
    options = GEOMETRY | {"algorithm": algorithm, "out": out, "fp32_precision": instance if instance.startswith("tf32") else None}
    x, w, b, g = (cast_in_place(a, NUMPY_DTYPES[element]) for a in (x, w, b, g))
    if kernel.pass_name == "fprop":
        return ct.conv_transpose3d(x, w, b, **options), Y, element
    if kernel.pass_name == "dgrad":
        return ct.conv_transpose3d_grad_input(g, w, X.shape, **options), GRADIENTS[0], element
    return ct.conv_transpose3d_grad_weight(x, g, W.shape, **options), GRADIENTS[1], element


def cast_in_place(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return the array in another type with the same strides, counted in elements."""
    if array.dtype == dtype:
        return array
    size = np.dtype(dtype).itemsize
    steps = [step // array.itemsize for step in array.strides]
    span = sum(abs(step) * (length - 1) for step, length in zip(steps, array.shape, strict=True)) + 1
    start = sum(-step * (length - 1) for step, length in zip(steps, array.shape, strict=True) if step < 0)
    buffer = np.zeros(span, dtype)
    view = np.ndarray(array.shape, dtype, buffer, start * size, [step * size for step in steps])
    view[...] = array
    return view


@pytest.mark.parametrize("name", sorted(kernels()))
def test_every_kernel_by_either_name(name: str) -> None:
    kernel = kernels()[name]
    for algorithm in (name, name.removeprefix(f"{kernel.pass_name}_"), kernel):
        assert_close(*call_by_name(algorithm, name, X, W, B, G))


def test_a_named_kernel_runs_on_torch_cpu_tensors() -> None:
    assert_close(
        ct.conv_transpose3d(torch.tensor(X), torch.tensor(W), torch.tensor(B), **GEOMETRY, algorithm="gather"), Y, "fp64"
    )


def layouts(array: np.ndarray) -> dict[str, np.ndarray]:
    """Return the same 5-D values in memory of every kind."""
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1))
    wide[..., 1::2] = array
    return {
        "contiguous": array,
        "channels_last_3d": np.ascontiguousarray(array.transpose(0, 2, 3, 4, 1)).transpose(0, 4, 1, 2, 3),
        "sliced": wide[..., 1::2],
        "transposed": np.ascontiguousarray(array.transpose(4, 3, 2, 1, 0)).transpose(4, 3, 2, 1, 0),
        "negative": np.ascontiguousarray(array[::-1, :, ::-1, :, ::-1])[::-1, :, ::-1, :, ::-1],
        "fortran": np.asfortranarray(array),
    }


@pytest.mark.parametrize("name", sorted(kernels()))
@pytest.mark.parametrize("layout", sorted(layouts(X)))
def test_layouts(layout: str, name: str) -> None:
    """Every kernel, in particular those that take no strides, and `out=` in the same layout."""
    x, w, g = (layouts(a)[layout] for a in (X, W, G))
    b = np.repeat(B, 2)[::2]
    found, wanted, element = call_by_name(name, name, x, w, b, g)
    assert_close(found, wanted, element)
    out = cast_in_place(layouts(np.full(wanted.shape, np.nan))[layout], NUMPY_DTYPES[element])
    assert call_by_name(name, name, x, w, b, g, out)[0] is out
    assert_close(out, wanted, element)


def test_out_fills_a_slice_and_nothing_beside_it() -> None:
    room = np.full((4, *Y.shape[1:]), 7.0)
    ct.conv_transpose3d(X, W, B, **GEOMETRY, out=room[1:3])
    assert_close(room[1:3], Y, "fp64")
    assert (room[[0, 3]] == 7).all()


@pytest.mark.parametrize("which", ["input", "weight", "both", "neither"])
def test_channels_last_3d_follows_torch(which: str) -> None:
    def last(a: np.ndarray, name: str) -> torch.Tensor:
        return torch.tensor(a).to(memory_format=torch.channels_last_3d if which in (name, "both") else torch.contiguous_format)

    y = ct.conv_transpose3d(last(X, "input"), last(W, "weight"), **GEOMETRY, backend="host")
    grad = ct.conv_transpose3d_grad_input(last(G, "input"), last(W, "weight"), X.shape, **GEOMETRY, backend="host")
    for result in (y, grad):
        assert result.is_contiguous(memory_format=torch.channels_last_3d) == (which != "neither")
        assert result.is_contiguous() == (which == "neither")
    array = layouts(X)["channels_last_3d" if which in ("input", "both") else "contiguous"]
    same = ct.conv_transpose3d(array, np.asarray(last(W, "weight")), **GEOMETRY)
    assert tuple(s // 8 for s in same.strides) == y.stride()


@pytest.mark.parametrize("shape", [(2, 3, 2, 2, 2), (2, 1, 2, 2, 2), (2, 3, 1, 1, 1), (1, 1, 1, 1, 1), (1, 4, 1, 3, 1)])
def test_channels_last_rule_is_torchs_own(shape: tuple[int, ...]) -> None:
    for tensor in (
        torch.zeros(shape),
        torch.zeros(shape).to(memory_format=torch.channels_last_3d),
        torch.zeros(shape).transpose(2, 4),
    ):
        suggested = torch._prims_common.suggest_memory_format(tensor)
        assert ct.arrays.read("input", tensor).ref.is_channels_last == (suggested == torch.channels_last_3d)


@pytest.mark.parametrize("library", LIBRARIES)
def test_unbatched(library: str) -> None:
    x, w, b, g = (to(library, a, "fp32") for a in (X[0], W, B, G[0]))
    backend = backend_of(library)
    grad_input, grad_weight = expected(X[0], W, B, G[0], **GEOMETRY)
    assert_close(ct.conv_transpose3d(x, w, b, **GEOMETRY, backend=backend), Y[0], "fp32")
    assert_close(ct.conv_transpose3d_grad_input(g, w, x.shape, **GEOMETRY, backend=backend), grad_input, "fp32")
    assert_close(ct.conv_transpose3d_grad_weight(x, g, w.shape, **GEOMETRY, backend=backend), grad_weight, "fp32")


def test_unbatched_out_and_strides() -> None:
    out = np.full((*Y.shape[1:], 2), np.nan)[..., 0]
    x = layouts(X)["channels_last_3d"][0]
    assert ct.conv_transpose3d(x, W, B, **GEOMETRY, out=out) is out
    assert_close(out, Y[0], "fp64")


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_batch_zero_launches_nothing(library: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "torch" and library != "torch":
        pytest.skip("torch's own operator takes torch tensors")
    monkeypatch.setattr(ops, "backend_for", None)
    monkeypatch.setattr(HostBackend, "compile", None)
    monkeypatch.setattr(torch_plan, "_KernelPlan", None)
    x, w, b, g = (to(library, a, "fp32") for a in (X[:0], W, B, G[:0]))
    assert ct.conv_transpose3d(x, w, b, **GEOMETRY, backend=backend).shape == (0, *Y.shape[1:])
    assert ct.conv_transpose3d_grad_input(g, w, x.shape, **GEOMETRY, backend=backend).shape == (0, *X.shape[1:])
    grad_weight = ct.conv_transpose3d_grad_weight(x, g, w.shape, **GEOMETRY, backend=backend)
    assert grad_weight.shape == W.shape
    assert not as_fp64(grad_weight).any()


BAD: dict[str, tuple[Any, str]] = {
    "list": (lambda: ct.conv_transpose3d([[1.0]], W), "input.*list.*must be"),
    "None": (lambda: ct.conv_transpose3d(X, None), "weight.*NoneType.*must be"),
    "integers": (lambda: ct.conv_transpose3d(X.astype(np.int32), W), "input.dtype=int32: must be float64, float32"),
    "big endian": (lambda: ct.conv_transpose3d(X.astype(">f4"), W), "input.dtype=>f4: must be"),
    "masked": (lambda: ct.conv_transpose3d(np.ma.masked_array(X), W), "input: is a masked array"),
    "dtype mix": (lambda: ct.conv_transpose3d(X, W.astype(np.float32)), "weight: dtype is fp32; must be fp64, as input's"),
    "bias dtype": (lambda: ct.conv_transpose3d(X, W, B.astype(np.float16), **GEOMETRY), "bias: dtype is fp16"),
    "library mix": (lambda: ct.conv_transpose3d(X, torch.tensor(W)), "weight: library is torch; must be NumPy"),
    "rank": (lambda: ct.conv_transpose3d(X[0, 0], W), "input.shape="),
    "weight rank": (lambda: ct.conv_transpose3d(X, W[0]), "weight.shape="),
    "channels": (lambda: ct.conv_transpose3d(X[:, :3], W), "weight.shape="),
    "groups": (lambda: ct.conv_transpose3d(X, W, groups=3), "groups=3: must divide in_channels=4"),
    "bias shape": (lambda: ct.conv_transpose3d(X, W, B), r"bias.shape=\(6,\): must be \(3,\)"),
    "stride": (lambda: ct.conv_transpose3d(X, W, stride=0), "stride=0"),
    "stride kind": (lambda: ct.conv_transpose3d(X, W, stride=1.5), "stride=1.5: must be an integer"),
    "dilation": (lambda: ct.conv_transpose3d(X, W, dilation=(1, 0, 1)), r"dilation\[1\]=0"),
    "padding": (lambda: ct.conv_transpose3d(X, W, padding=-1), "padding=-1"),
    "padding mode": (lambda: ct.conv_transpose3d(X, W, padding="same"), "padding='same'.*zero padding only"),
    "output_padding": (lambda: ct.conv_transpose3d(X, W, output_padding=1), r"output_padding\[0\]=1: must be below max"),
    "empty output": (lambda: ct.conv_transpose3d(X, W, padding=4), r"padding\[0\]=4: leaves an empty output"),
    "overflow": (lambda: ct.conv_transpose3d(X, W, dilation=2**30), "limit is 2"),
    "volume 0": (lambda: ct.conv_transpose3d(X[:, :, :0], W), "input.shape=.*only the batch may be 0"),
    "input_shape": (lambda: ct.conv_transpose3d_grad_input(G, W, 5), "input_shape=5: must be a sequence"),
    "input_shape float": (lambda: ct.conv_transpose3d_grad_input(G, W, (2, 4, 3, 4, 2.5)), "input_shape=.*must hold integers"),
    "grad_output": (lambda: ct.conv_transpose3d_grad_input(G, W, X.shape), r"grad_output.shape=.*must be \(2, 3, 5, 5, 4\)"),
    "grad_output rank": (lambda: ct.conv_transpose3d_grad_weight(X[0], G, W.shape, **GEOMETRY), "grad_output.shape="),
    "weight_shape": (lambda: ct.conv_transpose3d_grad_weight(X, G, W.shape[1:], **GEOMETRY), "weight.shape="),
    "algorithm": (lambda: ct.conv_transpose3d(X, W, algorithm="winograd"), "algorithm='winograd': must be one of auto, library,.*gather"),
    "algorithm of another pass": (lambda: ct.conv_transpose3d(X, W, algorithm="wgrad_reduce"), "algorithm='wgrad_reduce': must be"),
    "algorithm kind": (lambda: ct.conv_transpose3d(X, W, algorithm=3), "algorithm=3: must be"),
    "Kernel of another pass": (lambda: ct.conv_transpose3d(X, W, algorithm=kernels()["dgrad_gather"]), "is a dgrad kernel"),
    "fp32_precision": (lambda: ct.conv_transpose3d(X, W, fp32_precision="bf16x9"), "fp32_precision='bf16x9': must be"),
    "backend": (lambda: ct.conv_transpose3d(X, W, backend="metal"), "backend='metal': must be"),
    "cuda backend": (lambda: ct.conv_transpose3d(X, W, backend="cuda"), "backend='cuda': needs arrays on a CUDA device; input is on cpu"),
    "torch backend": (lambda: ct.conv_transpose3d(X, W, backend="torch"), "backend='torch'.*input is of NumPy"),
    "library of NumPy": (lambda: ct.conv_transpose3d(X, W, algorithm="library"), "backend='torch'.*takes torch tensors"),
    "library on host": (lambda: ct.conv_transpose3d(X, W, algorithm="library", backend="host"), "algorithm='library', backend='host'"),
    "kernel on torch": (
        lambda: ct.conv_transpose3d(torch.tensor(X), torch.tensor(W), algorithm="gather", backend="torch"),
        "algorithm='gather', backend='torch'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_any_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, message = BAD[name]
    monkeypatch.setattr(ops._PlannedCall, "run", None)
    with pytest.raises(ct.ProblemError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


BAD_OUT: dict[str, tuple[Any, str]] = {
    "shape": (lambda: np.empty(Y.shape[1:]), "out: shape is"),
    "dtype": (lambda: np.empty(Y.shape, np.float32), "out: dtype is fp32; must be fp64"),
    "library": (lambda: torch.empty(Y.shape, dtype=torch.float64), "out: library is torch; must be NumPy"),
    "no array": (lambda: [1.0], "out: is a list"),
    "read-only": (lambda: read_only(np.empty(Y.shape)), "out: is read-only"),
    "expanded": (
        lambda: np.lib.stride_tricks.as_strided(np.empty(Y.shape), Y.shape, (0, *np.empty(Y.shape).strides[1:])),
        "share memory",
    ),
}


@pytest.mark.parametrize("name", BAD_OUT)
def test_bad_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = BAD_OUT[name]
    monkeypatch.setattr(ops._PlannedCall, "run", None)
    with pytest.raises(ct.ProblemError, match=message):
        ct.conv_transpose3d(X, W, B, **GEOMETRY, out=make())


def test_out_that_overlaps_an_input() -> None:
    """By byte ranges, so interleaved views of one buffer are refused too, and neighbours in it are not."""
    ones = np.ones((1, 1, 1, 1, 1))
    shape = (1, 1, 2, 2, 2)
    room = np.zeros(16)
    neighbours = room[:8].reshape(shape), room[8:].reshape(shape)
    assert ct.conv_transpose3d(neighbours[0], ones, out=neighbours[1]) is neighbours[1]
    for out in (neighbours[0], neighbours[0][..., ::-1], room[4:12].reshape(shape)):
        with pytest.raises(ct.ProblemError, match="out: its memory overlaps that of input"):
            ct.conv_transpose3d(neighbours[0], ones, out=out)
    with pytest.raises(ct.ProblemError, match="overlaps"):
        ct.conv_transpose3d(room[::2].reshape(shape), ones, out=room[1::2].reshape((8,))[:8].reshape(shape))
    with pytest.raises(ct.ProblemError, match="overlaps that of weight"):
        ct.conv_transpose3d(np.ones((1, 1, 1, 1, 1)), neighbours[0], out=neighbours[0])


def test_jax_out_is_refused() -> None:
    jax = pytest.importorskip("jax")
    x, w = (jax.numpy.ones((1, 1, 2, 2, 2)) for _ in range(2))
    with pytest.raises(ct.ProblemError, match=r"out: is read-only.*JAX"):
        ct.conv_transpose3d(x, w, out=jax.numpy.zeros((1, 1, 3, 3, 3)))


def test_traced_jax_array_is_refused() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(ct.ProblemError, match="input: is traced"):
        jax.jit(lambda x: ct.conv_transpose3d(x, x))(jax.numpy.ones((1, 1, 2, 2, 2)))


def test_out_is_refused_for_a_tensor_that_requires_grad() -> None:
    x, w, out = torch.tensor(X), torch.nn.Parameter(torch.tensor(W)), torch.empty(Y.shape, dtype=torch.float64)
    for backend in ("host", "torch", None):
        with pytest.raises(ct.ProblemError, match=r"weight\.requires_grad=True"):
            ct.conv_transpose3d(x, w, torch.tensor(B), **GEOMETRY, backend=backend, out=out)
        with torch.no_grad():
            assert ct.conv_transpose3d(x, w, torch.tensor(B), **GEOMETRY, backend=backend, out=out) is out
        assert_close(out, Y, "fp64")


def test_tensors_without_plain_memory_are_refused_as_out() -> None:
    x, w = torch.tensor(X), torch.tensor(W)
    refused = {
        "device=meta": torch.empty(Y.shape, dtype=torch.float64, device="meta"),
        "layout=torch.sparse": torch.tensor(Y).to_sparse(),
        "lazily conjugated": torch.tensor(Y + 1j).conj(),
        "negated view": torch.tensor(Y + 1j).conj().imag,
    }
    for message, tensor in refused.items():
        with pytest.raises(ct.ProblemError, match=message):
            ct.conv_transpose3d(x, w, torch.tensor(B), **GEOMETRY, out=tensor)
    with pytest.raises(ct.ProblemError, match="tracer or transform"):
        torch.func.vmap(lambda x: ct.conv_transpose3d(x, w, **GEOMETRY, out=x))(x[None])


def test_autograd_notices_a_write_to_out() -> None:
    x, w, b = torch.tensor(X), torch.tensor(W), torch.tensor(B)
    out = torch.empty(Y.shape, dtype=torch.float64)
    loss = (out.requires_grad_(False) * torch.ones((), dtype=torch.float64, requires_grad=True)).sum()
    ct.conv_transpose3d(x, w, b, **GEOMETRY, backend="host", out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_kernel_that_cannot_says_why() -> None:
    source = kernels()["fprop_gather"].source.replace('dtypes = ["fp64", "fp32", "fp16", "bf16"]', 'dtypes = ["fp32"]')
    with pytest.raises(ct.KernelError, match="has no fp64 instance"):
        ct.conv_transpose3d(X, W, **GEOMETRY, algorithm=ct.Kernel.from_source(source, "narrow"))


def test_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for version, extra in (("12.8", r"cuda12\]'`$"), ("13.0", r"cuda13\]'`$"), (None, "cuda12.*cuda13")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(ct.BackendError, match=extra):
            ct.arrays.require_cupy()


def test_import_is_light() -> None:
    code = (
        "import time, numpy; start = time.thread_time(); import cupy_convt3d as ct; elapsed = time.thread_time() - start\n"
        "import sys; heavy = {'torch', 'cupy', 'hypothesis', 'jax'} & set(sys.modules); assert not heavy, heavy\n"
        "assert ct.__version__ and 'check' in dir(ct)\nprint(elapsed)"
    )
    best = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(3)
    )
    assert best < 0.3, f"import cupy_convt3d took {best:.2f} s"


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'deconv'"):
        ct.deconv  # noqa: B018


@pytest.mark.parametrize(
    "options",
    [
        *({name: value} for name in ("algorithm", "fp32_precision", "backend") for value in ([], {}, 5, b"auto", 1.5, True)),
        {"algorithm": None},
    ],
)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_options_of_a_wrong_type_are_named(options: dict[str, object], library: str) -> None:
    x, w = X, W
    if library == "torch":
        torch = pytest.importorskip("torch")
        x, w = torch.from_numpy(np.asarray(X)), torch.from_numpy(np.asarray(W))
    with pytest.raises(ct.ProblemTypeError, match=f"{next(iter(options))}="):
        ct.conv_transpose3d(x, w, **GEOMETRY, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["w", "x"])
def test_a_tensor_that_is_none_is_named(missing: str) -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.from_numpy(np.asarray(X)), torch.from_numpy(np.asarray(W))
    for tensors in ((X, W), (x, w)):
        first, second = (None, tensors[1]) if missing == "x" else (tensors[0], None)
        with pytest.raises(ct.ProblemTypeError, match=f"{'input' if missing == 'x' else 'weight'}: is a NoneType; must be a torch tensor"):
            ct.conv_transpose3d(first, second, **GEOMETRY)
        with pytest.raises(ct.ProblemTypeError, match="is a NoneType"):
            ct.conv_transpose3d_grad_input(None, second, (1, 1, 3, 3, 3))
        with pytest.raises(ct.ProblemTypeError, match="is a NoneType"):
            ct.conv_transpose3d_grad_weight(first, None, (1, 1, 3, 3, 3))


def test_a_call_like_one_before_is_planned_no_more(monkeypatch: pytest.MonkeyPatch, new_plans: None) -> None:
    planned: list[str] = []
    decide = ops.decide
    monkeypatch.setattr(ops, "decide", lambda *given: planned.append(given[0]) or decide(*given))
    right = expected(X, W, B, **GEOMETRY)

    def calls(added: int, x: Any, **options: Any) -> None:
        before = len(planned)
        for _ in range(2):
            np.testing.assert_allclose(ct.conv_transpose3d(x, W, B, **(GEOMETRY | options)), right, rtol=1e-12)
        assert len(planned) == before + added

    strided = np.zeros((*X.shape[:-1], 2 * X.shape[-1]))[..., ::2]
    strided[...] = X
    calls(1, X)
    calls(0, X.copy())
    calls(1, strided)
    calls(1, X, out=np.empty(right.shape))
    calls(1, X, out=np.empty((*right.shape[:-1], 2 * right.shape[-1]))[..., ::2])
    calls(1, X, algorithm="tiled")
    calls(0, X)
    with pytest.raises(ct.ProblemError, match=r"stride"):
        ct.conv_transpose3d(X, W, B, **(GEOMETRY | {"stride": [1.0, 2.0, 2.0]}))  # equal to integers, and as keys the same


@pytest.mark.slow
def test_a_tiny_call_on_the_host_takes_at_most_150_us() -> None:
    x, w = np.ones((1, 1, 2, 2, 2), np.float32), np.ones((1, 1, 2, 2, 2), np.float32)
    seconds = []
    for _ in range(500):
        start = time.process_time()
        ct.conv_transpose3d(x, w, stride=2)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 150e-6, f"{min(seconds) * 1e6:.0f} us"


@pytest.mark.parametrize("library", ["NumPy", "torch", "torch, channels_last", "torch, frozen"])
@pytest.mark.parametrize("name", ["n2_c4to6_i1x5x4_k3_p1_bias", "n2_c8to4_i1_k4_s2_p1", "n1_c4to4_i3x4x1_k3x3x5_s2_p1x1x2_op1_g2"])
def test_auto_leaves_out_taps_that_lead_nowhere(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is given a part of the weight; the results are those of all of it, the gradient of the weight's other taps too."""
    given: list[Problem] = []
    prepared = ops.Prepared.__init__
    monkeypatch.setattr(ops.Prepared, "__init__", lambda self, *a, **k: given.append(a[2]) or prepared(self, *a, **k))
    problem = Problem.parse(name)
    rng = np.random.default_rng(1)
    shapes, _ = problem.shapes("fprop")
    x, w, *b = (rng.integers(-4, 5, shape).astype(np.float32) for key, shape in shapes.items() if key != "output")
    bias = b[0] if b else None
    expected = reference.run("fprop", problem, {"input": x, "weight": w} | ({"bias": bias} if b else {}))
    geometry = (problem.stride, problem.padding, problem.output_padding, problem.groups, problem.dilation)
    if library == "NumPy":
        assert np.array_equal(ct.conv_transpose3d(x, w, bias, *geometry), expected)
        gradient = rng.integers(-4, 5, problem.output_shape).astype(np.float32)
        found = ct.conv_transpose3d_grad_input(gradient, w, x.shape, *geometry)
        assert np.array_equal(found, reference.dgrad(problem, gradient, w))
    else:
        layer = ct.nn.ConvTranspose3d(
            *(problem.in_channels, problem.out_channels, problem.kernel_size, *geometry[:4]), bool(b), problem.dilation, backend="host"
        )
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(w))
            if b:
                layer.bias.copy_(torch.from_numpy(bias))
        if "channels_last" in library:
            layer.to(memory_format=torch.channels_last_3d)
        volume = torch.from_numpy(x).requires_grad_()
        if "frozen" in library:
            with ct.nn.freeze(layer), torch.no_grad():
                results = [layer(volume) for _ in range(2)]
                layer.weight.mul_(2)
                start = layer.bias.view(1, -1, 1, 1, 1) if b else 0
                results.append((layer(volume) - start) / 2 + start)
            assert all(np.array_equal(result.numpy(), expected) for result in results)
        else:
            result = layer(volume)
            gradient = torch.ones_like(result)
            result.backward(gradient)
            assert np.array_equal(result.detach().numpy(), expected)
            assert np.array_equal(volume.grad.numpy(), reference.dgrad(problem, gradient.numpy(), w))
            assert np.array_equal(layer.weight.grad.numpy(), reference.wgrad(problem, x, gradient.numpy()))
    assert problem.without_dead_taps is not problem and problem.without_dead_taps in given
