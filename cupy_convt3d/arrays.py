"""Arrays in and out: NumPy, CuPy, torch, JAX and any `__dlpack__` object, their memory, devices, streams and allocators.

Memory is always of one of three libraries. NumPy, CuPy and torch arrays are read where they are; JAX arrays and unknown producers
come in through DLPack and are held as NumPy (CPU) or CuPy (GPU) arrays over the same memory.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backends.base import TensorRef
from .dtypes import DTYPES, dtype_name
from .errors import BackendError, ProblemError, ProblemTypeError

_CHANNELS_LAST = (0, 4, 1, 2, 3)  # axes of (N, D, H, W, C) memory that make it (N, C, D, H, W)


@dataclass(frozen=True)
class Device:
    """`cpu`, or `cuda` with the index of the GPU."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu")


@dataclass(frozen=True, eq=False)
class Array:
    """One argument: where its memory is, and the object (`native`, of the library's own type) that keeps it alive."""

    argument: str
    native: Any
    ref: TensorRef
    dtype: str
    device: Device
    library: Library
    read_only: bool = False
    foreign: bool = False  # came through DLPack: its producer knows nothing of the stream it is read on

    @property
    def byte_range(self) -> tuple[int, int]:
        """First byte of the lowest element and the byte past the highest; empty for a zero-size array."""
        if 0 in self.ref.shape:
            return self.ref.pointer, self.ref.pointer
        steps = [(size - 1) * step for size, step in zip(self.ref.shape, self.ref.strides, strict=True)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        itemsize = DTYPES[self.dtype].itemsize
        return self.ref.pointer + low * itemsize, self.ref.pointer + (high + 1) * itemsize


class Library(ABC):
    """What the rest needs of an array library."""

    name: str
    writable = True  # whether its arrays can be written in place, as `out=` has to

    @abstractmethod
    def read(self, argument: str, value: Any) -> Array:
        """Return where an array of this library is; raises ProblemError for one whose memory cannot be used."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: str, device: Device, channels_last: bool = False) -> Any:
        """Return uninitialised memory on the device, as the library's allocator gives it."""

    @abstractmethod
    def contiguous(self, native: Any) -> Any:
        """Return a contiguous copy, made on the current stream."""

    @abstractmethod
    def assign(self, destination: Any, source: Any) -> None:
        """Copy (or broadcast a number) into all of `destination`, on the current stream."""

    def stream(self, device: Device) -> int:
        """Return the handle of the library's current stream, asked for afresh at each call; 0 on the CPU."""
        return 0

    def on(self, device: Device) -> AbstractContextManager[Any]:
        """Make the device current."""
        return nullcontext()

    def allocate(self, size: int, device: Device) -> tuple[int, object]:
        """Return the address of `size` bytes that live as long as the second value does."""
        native = self.empty((-(-size // 8),), "fp64", device)
        return self.read("workspace", native).ref.pointer, native

    def result(self, native: Any) -> Any:
        """Return what the user gets for memory made by `empty`."""
        return native


class NumpyLibrary(Library):
    name = "NumPy"

    def read(self, argument: str, value: Any) -> Array:
        if isinstance(value, np.ma.MaskedArray):
            raise ProblemError(f"{argument}: is a masked array; its mask would be ignored, pass `.filled(0)` or `.data`")
        dtype = _supported(argument, value.dtype, dtype_name(value.dtype))
        step = value.itemsize
        read_only = not value.flags.writeable
        if not value.flags.aligned or any(s % step for s in value.strides):
            value, read_only = np.array(value), True  # a field of packed records; only a copy of it can be read
        ref = TensorRef(value.__array_interface__["data"][0], value.shape, tuple(s // step for s in value.strides))
        return Array(argument, value, ref, dtype, CPU, self, read_only)

    def empty(self, shape: Sequence[int], dtype: str, device: Device, channels_last: bool = False) -> Any:
        return _empty(np, shape, dtype, channels_last)

    def contiguous(self, native: Any) -> Any:
        return np.array(native, order="C")

    def assign(self, destination: Any, source: Any) -> None:
        destination[...] = source


class CupyLibrary(Library):
    name = "CuPy"

    def read(self, argument: str, value: Any) -> Array:
        dtype = _supported(argument, value.dtype, dtype_name(value.dtype))
        ref = TensorRef(value.data.ptr, tuple(value.shape), tuple(s // value.itemsize for s in value.strides))
        return Array(argument, value, ref, dtype, Device("cuda", value.device.id), self)

    def empty(self, shape: Sequence[int], dtype: str, device: Device, channels_last: bool = False) -> Any:
        with self.on(device):
            return _empty(require_cupy(), shape, dtype, channels_last)

    def contiguous(self, native: Any) -> Any:
        return native.copy(order="C")

    def assign(self, destination: Any, source: Any) -> None:
        destination[...] = source

    def stream(self, device: Device) -> int:
        with self.on(device):
            return int(require_cupy().cuda.get_current_stream().ptr)

    def on(self, device: Device) -> AbstractContextManager[Any]:
        return require_cupy().cuda.Device(device.index)


class TorchLibrary(Library):
    name = "torch"

    def __init__(self) -> None:
        self.torch = sys.modules["torch"]
        names = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
        self._to_torch = {name: getattr(self.torch, full) for name, full in names.items()}
        self._from_torch = {known: name for name, known in self._to_torch.items()}

    def read(self, argument: str, value: Any) -> Array:
        self._refuse(argument, value)
        _supported(argument, value.dtype, self._from_torch.get(value.dtype))
        check_storage(argument, value)
        # NOTE: data_ptr and not DLPack: same stream and lifetime, 50 times cheaper, and it also takes a capturing stream.
        return self.describe(argument, value, value.data_ptr())

    def describe(self, argument: str, value: Any, pointer: int = 0) -> Array:
        """Return what `read` does of any tensor, its memory not looked at; a dtype that no kernel has keeps torch's name."""
        if not value.is_cuda and value.device.type not in ("cpu", "meta"):
            raise ProblemError(f"{argument}.device={value.device}: must be the CPU or a CUDA device")
        device = Device("cuda", value.device.index) if value.is_cuda else CPU
        dtype = self._from_torch.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        return Array(argument, value, TensorRef(pointer, tuple(value.shape), tuple(value.stride())), dtype, device, self)

    def _refuse(self, argument: str, value: Any) -> None:
        torch = self.torch
        dispatches = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if dispatches or torch._C._functorch.is_functorch_wrapped_tensor(value):
            kind = type(value).__name__
            raise ProblemError(f"{argument}: is a {kind} of a tracer or transform (fake, vmap, func.grad), not plain memory")
        if value.is_meta or value.layout != torch.strided:
            raise ProblemError(f"{argument}: device={value.device}, layout={value.layout}: must be dense and have memory")
        if value.is_conj() or value.is_neg():
            raise ProblemError(
                f"{argument}: is a lazily conjugated or negated view; call `.resolve_conj().resolve_neg()` first"
            )
        dual = (
            torch.autograd.forward_ad._current_level >= 0 and torch.autograd.forward_ad.unpack_dual(value).tangent is not None
        )
        if (value.requires_grad and torch.is_grad_enabled()) or dual:
            raise ProblemError(
                f"{argument}.requires_grad=True: this function records no gradient and does not detach silently; "
                "call it under torch.no_grad() or pass `.detach()`"
            )

    def empty(self, shape: Sequence[int], dtype: str, device: Device, channels_last: bool = False) -> Any:
        layout = self.torch.channels_last_3d if channels_last else self.torch.contiguous_format
        return self.torch.empty(tuple(shape), dtype=self._to_torch[dtype], device=str(device), memory_format=layout)

    def contiguous(self, native: Any) -> Any:
        return native.detach().clone(memory_format=self.torch.contiguous_format)

    def assign(self, destination: Any, source: Any) -> None:
        with self.torch.no_grad():
            destination.copy_(source) if isinstance(source, self.torch.Tensor) else destination.fill_(source)

    def stream(self, device: Device) -> int:
        return int(self.torch.cuda.current_stream(device.index).cuda_stream) if device.kind == "cuda" else 0

    def on(self, device: Device) -> AbstractContextManager[Any]:
        if device.kind == "cpu":
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(self.torch.cuda.device(device.index))
        stack.enter_context(require_cupy().cuda.Device(device.index))
        return stack


def check_storage(argument: str, tensor: Any) -> None:
    """Raise ProblemError for a torch tensor whose memory was given back (`untyped_storage().resize_(0)`), or that never had any."""
    if tensor.numel() == 0:
        return
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor._is_zerotensor() or tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
        kind = "is a ZeroTensor, zeros without memory" if tensor._is_zerotensor() else "its storage was resized, and is smaller than it"
        raise ProblemError(f"{argument}: {kind}; clone it, or give it memory first")


class _Foreign(Library):
    """Mixed into NumPy's or CuPy's library: values come in through `__dlpack__`."""

    def read(self, argument: str, value: Any) -> Array:
        if isinstance(value, (np.ndarray, *_cupy_arrays())):  # memory of our own: a result, a copy, a workspace
            return super().read(argument, value)  # type: ignore[safe-super]
        capsule, device = _capsule(argument, value)
        array = super().read(argument, _adopt(argument, capsule))  # type: ignore[safe-super]
        return Array(argument, array.native, array.ref, array.dtype, device, self, array.read_only, foreign=True)


class _Jax(_Foreign):
    """JAX arrays: immutable, so never an `out`; results are handed over through DLPack, which also orders the streams."""

    name = "JAX"
    writable = False

    def read(self, argument: str, value: Any) -> Array:
        import jax

        if isinstance(value, jax.core.Tracer):
            raise ProblemError(f"{argument}: is traced by a JAX transform (jit, grad, vmap), there is no memory to read")
        if isinstance(value, jax.Array):
            if value.is_deleted():
                raise ProblemError(f"{argument}: is a deleted JAX array; it has no memory")
            if len(value.devices()) > 1:
                raise ProblemError(f"{argument}: is spread over {len(value.devices())} devices; must be on one")
            value.block_until_ready()
        return super().read(argument, value)

    def empty(self, shape: Sequence[int], dtype: str, device: Device, channels_last: bool = False) -> Any:
        return super().empty(shape, dtype, device)  # type: ignore[safe-super]  # a JAX array shows no strides

    def result(self, native: Any) -> Any:
        import jax

        if native.dtype == DTYPES["bf16"].numpy:  # which NumPy's DLPack cannot say
            return jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(native.view(np.uint16)), jax.numpy.bfloat16)
        return jax.dlpack.from_dlpack(native)


class _ForeignNumpy(_Foreign, NumpyLibrary): ...


class _ForeignCupy(_Foreign, CupyLibrary): ...


class _JaxNumpy(_Jax, NumpyLibrary): ...


class _JaxCupy(_Jax, CupyLibrary): ...


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_DL_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # 3 is pinned host memory, 13 managed memory
_DL_DTYPES = {(2, 64): "fp64", (2, 32): "fp32", (2, 16): "fp16", (4, 16): "bf16"}
_DL_CODES = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))


def _dl_device(argument: str, value: Any) -> Device:
    kind, index = value.__dlpack_device__()
    if int(kind) not in _DL_DEVICES:
        raise ProblemError(f"{argument}: its DLPack device is ({int(kind)}, {index}); must be the CPU (1) or CUDA (2)")
    return Device("cuda", int(index)) if _DL_DEVICES[int(kind)] == "cuda" else CPU


def _capsule(argument: str, value: Any) -> tuple[Any, Device]:
    device = _dl_device(argument, value)
    # The producer makes our stream wait for its own; DLPack calls the legacy default stream 1, CuPy calls it 0.
    request = {"stream": CupyLibrary().stream(device) or 1} if device.kind == "cuda" else {}
    try:
        try:
            return value.__dlpack__(max_version=(1, 0), **request), device
        except TypeError:  # a producer from before DLPack 1.0
            return value.__dlpack__(**request), device
    except (BufferError, RuntimeError, TypeError) as error:
        raise ProblemError(f"{argument}: its __dlpack__() refused: {error}") from error


def _adopt(argument: str, capsule: Any) -> Any:
    """Return a NumPy or CuPy array over a capsule's memory.

    The capsule is kept and never marked as used: its own destructor then calls the producer's deleter, once, when the last view
    is gone. The structure is read here because NumPy's own reader knows no bf16.
    """
    if type(capsule).__name__ != "PyCapsule":
        raise ProblemError(f"{argument}: its __dlpack__() gave an {type(capsule).__name__}; must be a capsule")
    name = _get_name(capsule)
    address = _get_pointer(capsule, name)
    read_only = False
    if name == b"dltensor_versioned":
        managed = _DLManagedTensorVersioned.from_address(address)
        if managed.major != 1:
            raise ProblemError(f"{argument}: its DLPack version is {managed.major}.{managed.minor}; must be 0 or 1")
        tensor, read_only = managed.tensor, bool(managed.flags & 1)
    elif name == b"dltensor":
        tensor = _DLTensor.from_address(address)
    else:
        raise ProblemError(
            f"{argument}: its __dlpack__() gave a capsule named {name.decode()!r}; must be 'dltensor' or 'dltensor_versioned'"
        )
    what = f"{_DL_CODES.get(tensor.code, tensor.code)}{tensor.bits}" + (f"x{tensor.lanes}" if tensor.lanes != 1 else "")
    dtype = _supported(argument, what, _DL_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _row_major(shape)
    if not tensor.data and 0 not in shape:
        raise ProblemError(f"{argument}: its __dlpack__() gave no memory for shape {shape}")
    pointer = (tensor.data or 0) + tensor.byte_offset
    device = Device(_DL_DEVICES[tensor.device_type], tensor.device_id)
    return _over_memory(capsule, TensorRef(pointer, shape, strides), dtype, device, read_only)


def _over_memory(owner: object, ref: TensorRef, dtype: str, device: Device, read_only: bool) -> Any:
    numpy_dtype = DTYPES[dtype].numpy
    step = numpy_dtype.itemsize
    strides = tuple(s * step for s in ref.strides)
    if 0 in ref.shape:  # may have no address at all
        return CupyLibrary().empty(ref.shape, dtype, device) if device.kind == "cuda" else np.empty(ref.shape, numpy_dtype)
    if device.kind == "cpu":
        integer = f"<u{step}"  # the array interface has no letter for bf16
        interface = {"version": 3, "shape": ref.shape, "strides": strides, "typestr": integer, "data": (ref.pointer, read_only)}
        return np.asarray(_Memory(interface, owner)).view(numpy_dtype)
    cupy = require_cupy()
    low = sum((size - 1) * s for size, s in zip(ref.shape, strides, strict=True) if s < 0)
    high = sum((size - 1) * s for size, s in zip(ref.shape, strides, strict=True) if s > 0)
    memory = cupy.cuda.UnownedMemory(ref.pointer + low, high - low + step, owner, device.index)
    with cupy.cuda.Device(device.index):
        return cupy.ndarray(ref.shape, numpy_dtype, cupy.cuda.MemoryPointer(memory, -low), strides)


class _Memory:
    """What NumPy takes as the base of an array, and so keeps alive together with the owner."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _empty(module: Any, shape: Sequence[int], dtype: str, channels_last: bool) -> Any:
    if not channels_last:
        return module.empty(tuple(shape), DTYPES[dtype].numpy)
    batch, channels, *volume = shape
    return module.empty((batch, *volume, channels), DTYPES[dtype].numpy).transpose(_CHANNELS_LAST)


def _supported(argument: str, given: object, name: str | None) -> str:
    if name is None:
        raise ProblemError(f"{argument}.dtype={given}: must be float64, float32, float16 or bfloat16")
    return name


def _cupy_arrays() -> tuple[type, ...]:
    module = sys.modules.get("cupy")
    return (module.ndarray,) if module is not None and hasattr(module, "ndarray") else ()


def require_cupy() -> Any:
    """Return CuPy.

    Raises:
        BackendError: it is not installed; the message names the extra that brings it, by torch's CUDA version where torch is loaded.
    """
    try:
        import cupy

        return cupy
    except ImportError as error:
        torch = sys.modules.get("torch")
        version = (getattr(torch.version, "cuda", None) or "") if torch is not None else ""
        extras = {"12": ("cuda12",), "13": ("cuda13",)}.get(version.partition(".")[0], ("cuda12", "cuda13"))
        commands = " or ".join(f"`pip install 'cupy-convt3d[{extra}]'`" for extra in extras)
        raise BackendError(f"CUDA arrays need CuPy, which cannot be imported ({error}): {commands}") from None


def library_of(argument: str, value: Any) -> Library:
    """Return the library whose array `value` is; a producer nobody knows counts as NumPy's on the CPU and CuPy's on a GPU.

    Raises:
        ProblemError: `value` is no array.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if isinstance(value, np.ndarray):
        return NumpyLibrary()
    if isinstance(value, _cupy_arrays()):
        return CupyLibrary()
    if torch is not None and isinstance(value, torch.Tensor):
        return TorchLibrary()
    if jax is not None and isinstance(value, jax.Array):
        on_gpu = not isinstance(value, jax.core.Tracer) and not value.is_deleted() and _dl_device(argument, value).kind == "cuda"
        return _JaxCupy() if on_gpu else _JaxNumpy()
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__") and not isinstance(value, type):
        return _ForeignCupy() if _dl_device(argument, value).kind == "cuda" else _ForeignNumpy()
    raise ProblemTypeError(
        f"{argument}: is a {type(value).__name__}; must be a torch tensor, a NumPy, CuPy or JAX array, or have __dlpack__"
    )


def read(argument: str, value: Any) -> Array:
    """Return where an array is, of whatever library, without copying it.

    Args:
        argument: what error messages call it.
        value: torch tensor, NumPy, CuPy or JAX array, or any object with `__dlpack__`; fp64, fp32, fp16 or bf16.

    Raises:
        ProblemError: not an array, a dtype or device that kernels do not have, or no memory to read (a tracer, a fake or meta
            tensor, a tensor that requires grad while grad mode is on).
        BackendError: it is on a GPU and CuPy is missing.
    """
    return library_of(argument, value).read(argument, value)


def check_alike(arrays: dict[str, Array]) -> None:
    """Raise ProblemError unless all arrays are on one device and of one dtype."""
    first, *others = arrays.values()
    for other in others:
        for what in ("device", "dtype"):
            ours, theirs = getattr(first, what), getattr(other, what)
            if ours != theirs:
                raise ProblemError(f"{other.argument}: {what} is {theirs}; must be {ours}, as {first.argument}'s")


_PENDING: list[tuple[Any, Any]] = []
_PENDING_LOCK = threading.Lock()


def keep_until_done(owners: list[Any], device: Device) -> None:
    """Hold foreign GPU memory until the work now on CuPy's stream is done: its producer cannot know which stream reads it."""
    cupy = require_cupy()
    with cupy.cuda.Device(device.index):
        event = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))
    with _PENDING_LOCK:
        _PENDING[:] = [entry for entry in _PENDING if not entry[0].done] + [(event, owners)]
