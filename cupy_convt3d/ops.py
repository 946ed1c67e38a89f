"""The functional API: `conv_transpose3d` and its two gradients on arrays.

Everything is validated before anything is allocated or launched. A call is then one `_Call`: the problem, the arrays it reads, where
the result goes, and who computes it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import torch_library
from .arrays import Array, keep_until_done, library_of, read
from .backends.base import Backend, TensorRef, run
from .choice import Choice, backend_for, decide
from .errors import ProblemError, ProblemTypeError
from .kernel import Kernel
from .problem import Problem

Size = int | Sequence[int]

_loaded_torch_op: Any = None  # a look-up in the import system takes longer than this


def conv_transpose3d(
    x: Any,
    w: Any,
    bias: Any = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    *,
    algorithm: str | Kernel = "auto",
    fp32_precision: str | None = None,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """Return the 3D transposed convolution of `x`, as `torch.nn.functional.conv_transpose3d` defines it.

    On torch tensors it is differentiable to any order, obeys autocast and can be traced, compiled and exported. The gradients use the
    same backend; an `algorithm` that names a kernel is the forward's, the gradients then take "auto".

    Some kernels read the weight in an order of their own. Calls on torch tensors that record no gradient keep it in that order until
    the weight changes (`forget_packed_weights` says what is noticed). Other libraries' arrays do not tell when they are written, so
    each call with them, and each call with `out`, packs the weight anew.

    Input `i` and tap `t` feed output `o = i*stride - padding + t*dilation`; each output size is
    `(in - 1)*stride - 2*padding + dilation*(kernel - 1) + output_padding + 1`.

    Args:
        x: the input (N, Cin, D, H, W) or (Cin, D, H, W); torch tensor, NumPy, CuPy or JAX array, or any `__dlpack__` object;
            fp64, fp32, fp16 or bf16 (the last two accumulate in fp32).
        w: the weight (Cin, Cout / groups, kD, kH, kW); dtype, device and library of `x`.
        bias: (Cout,) or None.
        stride, padding, output_padding, dilation: an int or three.
        groups: divides Cin and Cout.
        algorithm: "auto" (what was measured quickest on this device for the problem or one near it, else a plain kernel if it is
            tiny and on a GPU, else the first kernel of `choice.ORDER` that takes it), a registered kernel's name with or without
            its pass ("gather", "fprop_gather"), a `Kernel`, or "library" (torch's own operator).
        fp32_precision: the loosest arithmetic allowed for fp32: "ieee", "tf32x3", "tf32"; None is
            `torch.backends.cudnn.conv.fp32_precision` for torch tensors, else "ieee".
        backend: "cuda", "host" (the same kernels on the CPU), "torch" (torch's own operator). None takes "cuda" for CUDA arrays
            and "host" for CPU arrays. Unless `algorithm` names a kernel it takes "torch" for torch's CPU tensors, and for its CUDA
            tensors where no kernel was measured to be quicker, unless the problem is tiny (`convt3d info --why` says).
        out: an array to write: the result's library, shape, dtype and device, any strides. Its bytes, from the first to the last,
            must not overlap those of an input; interleaved views of one buffer are refused too.

    Returns:
        (N, Cout, oD, oH, oW), or without N as `x` is; same library and device as `x` (unknown producers: CuPy or NumPy), in
        channels_last_3d strides if `x` or `w` has them (JAX arrays show no strides). On a GPU the work is queued on torch's
        current stream for torch tensors, on CuPy's for others.

    Raises:
        ProblemError: an argument is wrong; nothing has been launched.
        KernelError: the named kernel cannot do this problem.
        BackendError: CuPy, a GPU or a compiler is missing.
    """
    geometry = (stride, padding, output_padding, groups, dilation)
    if out is None and _are_torch(x, w, bias):
        return _torch_op().conv_transpose3d(
            x, w, bias, *geometry, algorithm=algorithm, fp32_precision=fp32_precision, backend=backend
        )
    given = {"input": x, "weight": w} | ({} if bias is None else {"bias": bias})
    arrays = _read_all(given)
    bias_shape = arrays["bias"].ref.shape if "bias" in arrays else None
    problem = Problem.from_shapes(arrays["input"].ref.shape, arrays["weight"].ref.shape, bias_shape, *geometry)
    return _execute("fprop", problem, arrays, len(arrays["input"].ref.shape) == 4, algorithm, fp32_precision, backend, out)


def conv_transpose3d_grad_input(
    grad_output: Any,
    weight: Any,
    input_shape: Sequence[int],
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    *,
    algorithm: str | Kernel = "auto",
    fp32_precision: str | None = None,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """Return the gradient of `conv_transpose3d` by its input: each input gathers the outputs it fed, times the weight.

    Args:
        grad_output: (N, Cout, oD, oH, oW), or without N.
        weight: (Cin, Cout / groups, kD, kH, kW).
        input_shape: (N, Cin, D, H, W), or without N as `grad_output` is.
        stride, padding, output_padding, groups, dilation, algorithm, fp32_precision, backend, out: as for `conv_transpose3d`.

    Returns:
        An array of `input_shape`, in channels_last_3d strides if `grad_output` or `weight` has them.

    Raises:
        ProblemError, KernelError, BackendError: as for `conv_transpose3d`.
    """
    geometry = (stride, padding, output_padding, groups, dilation)
    if out is None and _are_torch(grad_output, weight):
        shape = _shape("input_shape", input_shape)
        return _torch_op().conv_transpose3d_grad_input(
            grad_output, weight, shape, *geometry, algorithm=algorithm, fp32_precision=fp32_precision, backend=backend
        )
    arrays = _read_all({"grad_output": grad_output, "weight": weight})
    problem = Problem.from_shapes(_shape("input_shape", input_shape), arrays["weight"].ref.shape, None, *geometry)
    unbatched = len(input_shape) == 4
    _check_shape(arrays["grad_output"], problem.output_shape, unbatched)
    return _execute("dgrad", problem, arrays, unbatched, algorithm, fp32_precision, backend, out)


def conv_transpose3d_grad_weight(
    input: Any,
    grad_output: Any,
    weight_shape: Sequence[int],
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    *,
    algorithm: str | Kernel = "auto",
    fp32_precision: str | None = None,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """Return the gradient of `conv_transpose3d` by its weight: each tap sums input times grad_output over batch and volume.

    Args:
        input: (N, Cin, D, H, W), or without N.
        grad_output: (N, Cout, oD, oH, oW), or without N as `input` is.
        weight_shape: (Cin, Cout / groups, kD, kH, kW).
        stride, padding, output_padding, groups, dilation, algorithm, fp32_precision, backend, out: as for `conv_transpose3d`.

    Returns:
        A contiguous array of `weight_shape`; zeros for batch 0.

    Raises:
        ProblemError, KernelError, BackendError: as for `conv_transpose3d`.
    """
    geometry = (stride, padding, output_padding, groups, dilation)
    if out is None and _are_torch(input, grad_output):
        shape = _shape("weight_shape", weight_shape)
        return _torch_op().conv_transpose3d_grad_weight(
            input, grad_output, shape, *geometry, algorithm=algorithm, fp32_precision=fp32_precision, backend=backend
        )
    arrays = _read_all({"input": input, "grad_output": grad_output})
    problem = Problem.from_shapes(arrays["input"].ref.shape, _shape("weight_shape", weight_shape), None, *geometry)
    unbatched = len(arrays["input"].ref.shape) == 4
    _check_shape(arrays["grad_output"], problem.output_shape, unbatched)
    return _execute("wgrad", problem, arrays, unbatched, algorithm, fp32_precision, backend, out)


def _are_torch(*values: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    for value in values:  # a generator costs a microsecond more
        if value is not None and not isinstance(value, torch.Tensor):
            return False
    return values[0] is not None


def _torch_op() -> Any:
    global _loaded_torch_op
    if _loaded_torch_op is None:
        from . import torch_op  # imports torch

        _loaded_torch_op = torch_op
    return _loaded_torch_op


def _read_all(given: dict[str, Any]) -> dict[str, Array]:
    names = {argument: library_of(argument, value).name for argument, value in given.items()}
    first, *others = names
    for other in others:
        if names[other] != names[first]:
            raise ProblemTypeError(f"{other}: library is {names[other]}; must be {names[first]}, as {first}'s")
    arrays = {name: read(name, value) for name, value in given.items()}
    check_alike(arrays)
    return arrays


def check_alike(arrays: dict[str, Array]) -> None:
    """Raise ProblemError unless all arrays are on one device and of one dtype."""
    first, *others = arrays.values()
    for other in others:
        for what in ("device", "dtype"):
            ours, theirs = getattr(first, what), getattr(other, what)
            if ours != theirs:
                raise ProblemError(f"{other.argument}: {what} is {theirs}; must be {ours}, as {first.argument}'s")


def _shape(name: str, value: Any) -> tuple[int, ...]:
    try:
        shape = tuple(value)
    except TypeError:
        raise ProblemError(f"{name}={value!r}: must be a sequence of integers") from None
    if any(isinstance(size, bool) or not hasattr(size, "__index__") or size < 0 for size in shape):
        raise ProblemError(f"{name}={value!r}: must hold integers, none negative")
    return tuple(int(size) for size in shape)


def _check_shape(array: Array, batched: tuple[int, ...], unbatched: bool) -> None:
    expected = batched[1:] if unbatched else batched
    if array.ref.shape != expected:
        raise ProblemError(f"{array.argument}.shape={array.ref.shape}: must be {expected} for this problem")


@dataclass(frozen=True, eq=False)
class _Call:
    pass_name: str
    problem: Problem
    arrays: dict[str, Array]
    unbatched: bool
    out: Array | None

    @property
    def first(self) -> Array:
        return next(iter(self.arrays.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The written tensor's, as kernels see it: always with a batch."""
        shapes, written = self.problem.shapes(self.pass_name)
        return shapes[written]

    @property
    def drops_batch(self) -> bool:
        return self.unbatched and self.pass_name != "wgrad"

    def destination(self) -> Array:
        """Return `out`, or new memory in the layout torch would give it."""
        if self.out is not None:
            return self.out
        channels_last = self.pass_name != "wgrad" and any(a.ref.is_channels_last for a in self.arrays.values())
        library = self.first.library
        native = library.empty(self.shape, self.first.dtype, self.first.device, channels_last)
        return library.read("out", native[0] if self.drops_batch else native)


def _execute(
    pass_name: str,
    problem: Problem,
    arrays: dict[str, Array],
    unbatched: bool,
    algorithm: str | Kernel,
    fp32_precision: str | None,
    backend: str | None,
    out: Any,
) -> Any:
    choice = decide(pass_name, problem, arrays, algorithm, fp32_precision, backend)
    call = _Call(pass_name, problem, arrays, unbatched, None if out is None else read("out", out))
    if call.out is not None:
        _check_out(call)
    result = _run_library(call, choice.precision) if choice.kernel is None else _run_kernel(call, choice.kernel, choice)
    return result if out is None else out


def _check_out(call: _Call) -> None:
    out, first = call.out, call.first
    assert out is not None
    expected = call.shape[1:] if call.drops_batch else call.shape
    found = (out.library.name, out.ref.shape, out.dtype, str(out.device))
    wanted = (first.library.name, expected, first.dtype, str(first.device))
    for what, have, want in zip(("library", "shape", "dtype", "device"), found, wanted, strict=True):
        if have != want:
            raise ProblemError(f"out: {what} is {have}; must be {want}")
    if out.read_only or not out.library.writable:
        never = "" if out.library.writable else f" ({out.library.name} arrays never are)"
        raise ProblemError(f"out: is read-only; must be writable{never}")
    if out.foreign:
        raise ProblemError(
            f"out: is an object known by its __dlpack__ alone; must be a {out.library.name} array, as the result would be"
        )
    if _overlaps_itself(out.ref):
        raise ProblemError(f"out.strides={out.ref.strides}: some of its elements share memory; each must have its own")
    low, high = out.byte_range
    for array in call.arrays.values():
        start, stop = array.byte_range
        if low < stop and start < high:
            raise ProblemError(f"out: its memory overlaps that of {array.argument}; must be apart from every input")


def _overlaps_itself(ref: TensorRef) -> bool:
    if 0 in ref.shape:
        return False
    reach = 0  # offset of the last element of the axes with smaller strides
    for step, size in sorted((abs(step), size) for step, size in zip(ref.strides, ref.shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _run_kernel(call: _Call, kernel: Kernel, choice: Choice) -> Any:
    library, device = call.first.library, call.first.device
    if math.prod(call.shape) == 0:
        return library.result(call.destination().native)
    backend = backend_for(choice.backend, device.index) if call.problem.batch else None
    with library.on(device):
        destination = call.destination()
        if backend is None:  # batch 0: no launch, and a sum over nothing
            library.assign(destination.native, 0)
        else:
            _launch(call, kernel, choice.instance, backend, destination)
        foreign = [array.native for array in call.arrays.values() if array.foreign]
        if foreign and device.kind == "cuda":
            keep_until_done(foreign, device)
        if call.out is None:
            return library.result(destination.native)
    if library.name == "torch":  # autograd must notice a write that it cannot see
        sys.modules["torch"].autograd.graph.increment_version(destination.native)
    return destination.native


def _launch(call: _Call, kernel: Kernel, instance: str, backend: Backend, destination: Array) -> None:
    """Run the kernel; what it cannot read or write in its own strides goes through a contiguous copy."""
    library, device = call.first.library, call.first.device
    arrays = dict(call.arrays)
    for name, array in arrays.items():
        if not kernel.takes_strides(name) and not array.ref.is_contiguous:
            arrays[name] = library.read(name, library.contiguous(array.native))
    target = destination
    if not kernel.takes_strides(kernel.written) and not target.ref.is_contiguous:
        target = library.read("out", library.empty(target.ref.shape, target.dtype, device))
    shapes = call.problem.shapes(call.pass_name)[0]
    refs = {name: _of_rank(array.ref, len(shapes[name])) for name, array in arrays.items()}
    refs[kernel.written] = _of_rank(target.ref, len(call.shape))
    workspaces = []

    def allocate(_: str, size: int) -> int:
        pointer, owner = library.allocate(size, device)
        workspaces.append(owner)  # alive until the launches are queued; after that the allocator's stream order protects it
        return pointer

    run(backend, kernel, call.problem, instance, refs, allocate, library.stream(device))
    if target is not destination:
        library.assign(destination.native, target.native)


def _of_rank(ref: TensorRef, rank: int) -> TensorRef:
    return ref.with_batch() if len(ref.shape) == 4 and rank == 5 else ref


def _run_library(call: _Call, precision: str) -> Any:
    assert call.out is not None  # without `out`, torch's tensors go through `torch_op`
    operands = [array.native for array in call.arrays.values()]
    if call.unbatched:
        operands = [tensor.unsqueeze(0) if tensor.dim() == 4 else tensor for tensor in operands]
    result = torch_library.run(call.pass_name, call.problem, precision, *operands)
    return call.out.native.copy_(result.squeeze(0) if call.drops_batch else result)
