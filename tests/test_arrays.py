"""DLPack itself: what comes in is the same memory, alive as long as it is used and never written; streams on a GPU."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_convt3d as ct
from cupy_convt3d.arrays import CPU, Device, read

SHAPE = (2, 3, 4, 5, 6)
ONE = (1, 1, 1, 1, 1)  # a weight that makes the convolution the identity


class Producer:
    """Has `__dlpack__` and nothing else; a `legacy` one knows no keyword of DLPack 1.0."""

    def __init__(self, array: Any, legacy: bool = False) -> None:
        self._array = array
        self._legacy = legacy
        self.requests: list[dict[str, Any]] = []

    def __dlpack__(self, **request: Any) -> Any:
        self.requests.append(request)
        if self._legacy and "max_version" in request:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self._array.__dlpack__(**request)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def sample(dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(SHAPE)).reshape(SHAPE).astype(dtype)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_numpy_is_read_where_it_is() -> None:
    array = sample()
    found = read("input", array[1:, :, ::2, :, ::-1])
    assert found.ref.pointer == address(array) + 4 * (360 + 5)
    assert found.ref.shape == (1, 3, 2, 5, 6)
    assert found.ref.strides == (360, 120, 60, 6, -1)
    assert (found.dtype, found.device, found.library.name) == ("fp32", CPU, "NumPy")


@pytest.mark.parametrize("legacy", [False, True])
def test_unknown_producer_is_read_where_it_is(legacy: bool) -> None:
    array = sample()
    producer = Producer(array[:, 1:, :, ::2], legacy)
    found = read("input", producer)
    assert found.ref.pointer == address(array) + 120 * 4
    assert found.ref.strides == (360, 120, 30, 12, 1)
    assert isinstance(found.native, np.ndarray)
    assert address(found.native) == found.ref.pointer
    assert producer.requests[0] == {"max_version": (1, 0)}
    assert len(producer.requests) == 1 + legacy


@pytest.mark.parametrize("wrap", [lambda array: array, Producer], ids=["numpy", "dlpack"])
def test_import_copies_nothing(wrap: Any) -> None:
    array = wrap(np.zeros((64, 64, 64, 16, 2), np.float64))  # 64 MiB
    read("input", array)
    tracemalloc.start()
    found = read("input", array)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.ref.shape[0] == 64
    assert peak < 100_000


def test_memory_lives_until_the_last_use_and_no_longer() -> None:
    class Owned(np.ndarray): ...  # a plain ndarray takes no weak reference to its memory's owner

    array = sample().view(Owned)
    alive = weakref.ref(array)
    producer = Producer(array)
    found = read("input", producer)
    del array, producer
    gc.collect()
    assert alive() is not None
    assert np.array_equal(found.native, sample())
    view = found.native[1, 2]
    del found
    gc.collect()
    assert alive() is not None
    assert view[0, 0, 0] == 600
    del view
    gc.collect()
    assert alive() is None


def test_result_of_a_deleted_producer() -> None:
    def temporary() -> Producer:
        return Producer(sample())

    result = ct.conv_transpose3d(temporary(), Producer(np.ones((3, 1, 1, 1, 1), np.float32)))
    gc.collect()
    assert np.array_equal(result, sample().sum(1, keepdims=True))


def test_unknown_producer_gets_numpy_back() -> None:
    x, w = sample()[:, :1], np.ones(ONE, np.float32)
    for given in ((Producer(x), Producer(w)), (Producer(x), w), (x, Producer(w))):
        result = ct.conv_transpose3d(*given)
        assert type(result) is np.ndarray
        assert np.array_equal(result, x)


def test_unknown_producer_is_no_out() -> None:
    x = sample()[:, :1]
    with pytest.raises(ct.ProblemError, match="out: is an object known by its __dlpack__ alone; must be a NumPy array"):
        ct.conv_transpose3d(x, np.ones(ONE, np.float32), out=Producer(np.empty_like(x)))


@pytest.mark.parametrize("shape", [(0, 3, 4, 5, 6), (0, 1, 1, 1, 1)])
def test_zero_size(shape: tuple[int, ...]) -> None:
    for value in (np.empty(shape), Producer(np.empty(shape))):
        assert read("input", value).ref.shape == shape
    weight = np.ones((shape[1], 2, 1, 1, 1))
    assert ct.conv_transpose3d(Producer(np.empty(shape)), weight).shape == (0, 2, *shape[2:])


def test_read_only_input_is_taken_and_never_written() -> None:
    x, w, b = sample()[:, :1].copy(), np.ones(ONE, np.float32), np.zeros(1, np.float32)
    before = x.tobytes()
    for array in (x, w, b):
        array.flags.writeable = False
    assert read("input", x).read_only
    assert read("input", x).ref.pointer == address(x)
    assert np.array_equal(ct.conv_transpose3d(x, w, b), x)
    assert x.tobytes() == before


def test_read_only_flag_of_dlpack() -> None:
    array = sample()
    assert not read("input", Producer(array)).read_only
    array.flags.writeable = False
    found = read("input", Producer(array))
    assert found.read_only
    assert not found.native.flags.writeable


def test_unaligned_memory_is_copied_for_reading_and_refused_as_out() -> None:
    room = np.zeros(sample().nbytes + 1, np.uint8)
    unaligned = np.frombuffer(room, np.float32, offset=1, count=sample().size).reshape(SHAPE)
    assert not unaligned.flags.aligned
    assert read("input", unaligned).ref.pointer % 4 == 0
    records = np.zeros(SHAPE, [("value", np.float32), ("tag", np.int8)])
    records["value"] = sample()
    assert np.array_equal(read("input", records["value"]).native, sample())
    with pytest.raises(ct.ProblemError, match="out: is read-only"):
        ct.conv_transpose3d(sample()[:, :1], np.ones(ONE, np.float32), out=records["value"][:, :1])


def test_bf16_of_every_cpu_library() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    values = sample()[:, :1] % 128
    bf16 = values.astype(ml_dtypes.bfloat16)
    tensor = torch.tensor(values).bfloat16()
    cpu = jax.devices("cpu")[0]
    givens = {"NumPy": bf16, "torch": tensor, "JAX": jax.device_put(bf16, cpu), "producer": Producer(tensor)}
    for name, x in givens.items():
        found = read("input", x)
        assert found.dtype == "bf16"
        weight = {"torch": torch.ones(ONE).bfloat16(), "JAX": jax.device_put(np.ones(ONE, ml_dtypes.bfloat16), cpu)}.get(
            name, np.ones(ONE, ml_dtypes.bfloat16)
        )
        result = ct.conv_transpose3d(x, weight, backend="host")
        assert type(result) is (np.ndarray if name == "producer" else type(x))
        as_fp32 = result.float().numpy() if name == "torch" else np.asarray(result).astype(np.float32)
        assert np.array_equal(as_fp32, values)
    assert read("input", givens["producer"]).ref.pointer == tensor.data_ptr()


def test_torch_is_read_where_it_is() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(sample()).to(memory_format=torch.channels_last_3d)[1:]
    found = read("input", tensor)
    assert (found.ref.pointer, found.ref.shape, found.ref.strides) == (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
    assert found.native is tensor


def test_jax_is_read_where_it_is_and_gets_jax_back() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.asarray(sample())
    found = read("input", array)
    assert found.ref.pointer == array.unsafe_buffer_pointer()
    assert found.library.name == "JAX"
    result = ct.conv_transpose3d(array[:, :1], jax.numpy.ones(ONE))
    assert isinstance(result, jax.Array)
    assert np.array_equal(result, sample()[:, :1])
    assert ct.conv_transpose3d(array[:0], jax.numpy.ones((3, 2, 1, 1, 1))).shape == (0, 2, 4, 5, 6)


class Odd(Producer):
    """A producer that answers wrongly."""

    def __init__(self, device: tuple[int, int] = (1, 0), capsule: Any = None, error: Exception | None = None) -> None:
        self._device, self._capsule, self._error = device, capsule, error

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **request: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._capsule


def test_bad_producers() -> None:
    used = sample().__dlpack__()
    consumed = type("Holder", (), {"__dlpack__": lambda self, **_: used, "__dlpack_device__": lambda self: (1, 0)})()
    np.from_dlpack(consumed)
    bad = {
        r"its DLPack device is \(10, 0\)": Odd((10, 0)),
        "refused: no export today": Odd(error=BufferError("no export today")),
        "capsule named 'used_dltensor": Odd(capsule=used),
        "gave an? int": Odd(capsule=5),
        "dtype=int64: must be": Producer(sample(np.int64)),
        "dtype=complex64: must be": Producer(sample(np.complex64)),
        "dtype=bool8: must be": Producer(sample(np.bool_)),
    }
    for message, value in bad.items():
        with pytest.raises(ct.ProblemError, match=message):
            read("input", value)


def test_byte_range_covers_negative_strides() -> None:
    array = sample()
    for view in (array, array[:, :, ::-1], array[1:, :, :, ::-2, 3], array[:0]):
        low, high = read("input", view).byte_range
        bounds = np.lib.array_utils.byte_bounds(view) if view.size else (low, low)
        assert (low, high) == bounds


def test_device_names() -> None:
    assert str(CPU) == "cpu"
    assert str(Device("cuda", 1)) == "cuda:1"


# On a GPU


def busy(cupy: Any, milliseconds: int = 200) -> None:
    """Occupy the current stream, so that work which fails to wait for it is caught."""
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }', "spin"
    )
    spin((1,), (1,), (np.int64(milliseconds * 1_500_000),))


@pytest.mark.gpu
def test_cuda_memory_is_shared_and_none_is_allocated() -> None:
    import cupy

    array = cupy.asarray(sample())
    read("input", Producer(array))
    used = cupy.get_default_memory_pool().used_bytes()
    for value in (array[1:, :, ::2], Producer(array[1:, :, ::2])):
        found = read("input", value)
        assert found.ref.pointer == array.data.ptr + 360 * 4
        assert found.ref.strides == (360, 120, 60, 6, 1)
        assert found.device == Device("cuda", array.device.id)
        assert cupy.get_default_memory_pool().used_bytes() == used


@pytest.mark.gpu
def test_cuda_call_allocates_the_result_alone() -> None:
    import cupy

    x, w = cupy.asarray(sample()[:, :1]), cupy.ones(ONE, cupy.float32)
    ct.conv_transpose3d(x, w, algorithm="gather")
    used = cupy.get_default_memory_pool().used_bytes()
    y = ct.conv_transpose3d(x, w, algorithm="gather")
    assert cupy.get_default_memory_pool().used_bytes() - used == -(-y.nbytes // 512) * 512
    assert isinstance(y, cupy.ndarray)
    assert isinstance(ct.conv_transpose3d(Producer(x), Producer(w)), cupy.ndarray)
    assert ct.conv_transpose3d(x, w, out=y) is y


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_cuda_torch_same_pointer_and_result(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    x = torch.tensor(sample() % 16, device="cuda").to(getattr(torch, dtype)).to(memory_format=torch.channels_last_3d)
    w = torch.ones((3, 2, 2, 2, 2), device="cuda", dtype=x.dtype)
    assert read("input", x).ref.pointer == x.data_ptr()
    y = ct.conv_transpose3d(x, w, stride=2)
    assert y.device == x.device
    assert y.stride() == torch.nn.functional.conv_transpose3d(x, w, stride=2).stride()  # of fp64 torch makes NCDHW
    y = ct.conv_transpose3d(x, w, stride=2, backend="cuda")
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(y.double(), torch.nn.functional.conv_transpose3d(x.double(), w.double(), stride=2))
    g = ct.conv_transpose3d_grad_input(y, w, x.shape, stride=2, backend="cuda")
    assert g.is_contiguous(memory_format=torch.channels_last_3d)
    with pytest.raises(ct.ProblemError, match="needs arrays on the CPU"):
        ct.conv_transpose3d(x, w, backend="host")
    with pytest.raises(ct.ProblemError, match="weight: device is cpu; must be cuda:0"):
        ct.conv_transpose3d(x, w.cpu())


@pytest.mark.gpu
def test_cuda_waits_for_the_producers_stream_and_the_consumer_for_ours() -> None:
    import cupy

    class OnStream(Producer):
        def __init__(self, array: Any, stream: Any) -> None:
            super().__init__(array)
            self._stream = stream

        def __dlpack__(self, **request: Any) -> Any:
            with self._stream:
                return super().__dlpack__(**request)

    x, w = cupy.zeros(SHAPE, cupy.float32)[:, :1].copy(), cupy.ones(ONE, cupy.float32)
    ct.conv_transpose3d(x, w)
    cupy.cuda.Device().synchronize()
    producing, ours, consuming = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    with producing:
        busy(cupy)
        x += 1
    with ours:
        y = ct.conv_transpose3d(OnStream(x, producing), w)
        exported = OnStream(y, ours)
    with consuming:
        taken = cupy.from_dlpack(exported)
        total = float((taken * 2).sum(dtype=cupy.float64))
    assert total == 2 * x.size


@pytest.mark.gpu
def test_cuda_work_goes_to_cupys_current_stream() -> None:
    import cupy

    x, w = cupy.zeros((1, 1, 8, 8, 8), cupy.float32), cupy.ones(ONE, cupy.float32)
    x += 0  # compiles what the loop uses, so that its time is not the busy kernel's
    busy(cupy, 1)
    ct.conv_transpose3d(x, w)
    for _ in range(2):
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            busy(cupy)
            x += 1
            y = ct.conv_transpose3d(x, w)
            assert not stream.done
        stream.synchronize()
        assert (y == x).all()


@pytest.mark.gpu
def test_cuda_work_goes_to_torchs_current_stream_taken_afresh() -> None:
    torch = pytest.importorskip("torch")
    import cupy

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    x, w = torch.zeros((1, 1, 8, 8, 8), device="cuda"), torch.ones(ONE, device="cuda")
    busy(cupy, 1)
    x += 1  # a kernel's first launch loads it, which can wait for the whole device
    ct.conv_transpose3d(x, w)
    for _ in range(2):
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            with cupy.cuda.Stream.from_external(stream):
                busy(cupy)
            x += 1
            y = ct.conv_transpose3d(x, w)
            assert not stream.query()
        stream.synchronize()
        assert torch.equal(y, x)


@pytest.mark.gpu
def test_cuda_graph_capture() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    x, w = torch.zeros((1, 1, 8, 8, 8), device="cuda"), torch.ones(ONE, device="cuda")
    out = torch.empty_like(x)
    ct.conv_transpose3d(x, w, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ct.conv_transpose3d(x, w, out=out)
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, x)


def test_a_deleted_jax_array_is_an_error() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones(SHAPE, jax.numpy.float32)
    array.delete()
    with pytest.raises(ct.ProblemError, match="input: is a deleted JAX array"):
        read("input", array)


def test_a_producer_without_memory_is_an_error() -> None:
    torch = pytest.importorskip("torch")
    gone = torch.ones(SHAPE)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ct.ProblemError, match=r"input: its __dlpack__\(\) (gave no memory|refused)"):
        read("input", Producer(gone))
