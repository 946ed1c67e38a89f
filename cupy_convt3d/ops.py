"""The functional API: `conv_transpose3d` and its two gradients on arrays.

Everything is validated before anything is allocated or launched. What comes of it (the problem, who computes it, the compiled kernel)
is one `_PlannedCall`, kept for calls like it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from . import registry, torch_library, tuning
from .arrays import Array, check_alike, keep_until_done, library_of, read
from .backends.base import Prepared, TensorRef
from .choice import Choice, backend_for, check_options, decide
from .errors import ProblemError, ProblemTypeError
from .kernel import Kernel
from .plans import keep, plans
from .problem import Problem

Size = int | Sequence[int]

_torch_layer: Any = None  # the module, once it is loaded: a look-up in the import system takes longer, and disturbs torch.compile


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

    Some kernels read the weight in an order of their own: each call brings it into that order, and keeps nothing. A module whose
    weights are declared frozen keeps it (`nn.freeze`).

    Input `i` and tap `t` feed output `o = i*stride - padding + t*dilation`; each output size is
    `(in - 1)*stride - 2*padding + dilation*(kernel - 1) + output_padding + 1`.

    Args:
        x: the input (N, Cin, D, H, W) or (Cin, D, H, W); torch tensor, NumPy, CuPy or JAX array, or any `__dlpack__` object;
            fp64, fp32, fp16 or bf16 (the last two accumulate in fp32).
        w: the weight (Cin, Cout / groups, kD, kH, kW); dtype, device and library of `x`.
        bias: (Cout,) or None.
        stride, padding, output_padding, dilation: an int or three.
        groups: divides Cin and Cout.
        algorithm: "auto" (what was measured quickest on this device for the problem, else a plain kernel if it is tiny, else what is
            predicted to be the quickest), a registered kernel's name with or without its pass ("gather", "fprop_gather"), a
            `Kernel`, or "library" (torch's own operator).
        fp32_precision: the loosest arithmetic allowed for fp32: "ieee", "tf32x3", "tf32"; None is
            `torch.backends.cudnn.conv.fp32_precision` for torch tensors, else "ieee".
        backend: "cuda", "host" (the same kernels on the CPU), "torch" (torch's own operator). None takes "cuda" for CUDA arrays
            and "host" for CPU arrays. Unless `algorithm` names a kernel it takes "torch" for torch's CPU tensors, and for its CUDA
            tensors where no kernel was measured or predicted to be quicker (`convt3d info --why` says).
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
    if out is None and (_are_torch(x, w) if bias is None else _are_torch(x, w, bias)):
        return load_torch_layer().conv_transpose3d(
            x, w, bias, *geometry, algorithm=algorithm, fp32_precision=fp32_precision, backend=backend
        )
    check_options(algorithm, fp32_precision, backend)
    given = {"input": x, "weight": w} | ({} if bias is None else {"bias": bias})
    return _execute("fprop", _read_all(given), None, geometry, (algorithm, fp32_precision, backend), out)


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
    check_options(algorithm, fp32_precision, backend)
    geometry = (stride, padding, output_padding, groups, dilation)
    if out is None and _are_torch(grad_output, weight):
        shape = _shape("input_shape", input_shape)
        return load_torch_layer().conv_transpose3d_grad_input(
            grad_output, weight, shape, *geometry, algorithm=algorithm, fp32_precision=fp32_precision, backend=backend
        )
    arrays = _read_all({"grad_output": grad_output, "weight": weight})
    return _execute("dgrad", arrays, _shape("input_shape", input_shape), geometry, (algorithm, fp32_precision, backend), out)


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
    check_options(algorithm, fp32_precision, backend)
    geometry = (stride, padding, output_padding, groups, dilation)
    if out is None and _are_torch(input, grad_output):
        shape = _shape("weight_shape", weight_shape)
        return load_torch_layer().conv_transpose3d_grad_weight(
            input, grad_output, shape, *geometry, algorithm=algorithm, fp32_precision=fp32_precision, backend=backend
        )
    arrays = _read_all({"input": input, "grad_output": grad_output})
    return _execute("wgrad", arrays, _shape("weight_shape", weight_shape), geometry, (algorithm, fp32_precision, backend), out)


def _are_torch(*values: Any) -> bool:
    if _torch_layer is None and (values[0] is None or "torch" not in sys.modules):
        return False
    tensor = load_torch_layer().torch.Tensor
    for value in values:  # noqa: SIM110, a generator costs a microsecond more
        if not isinstance(value, tensor):
            return False
    return True


def load_torch_layer() -> Any:
    """Return `torch_layer`, which brings torch."""
    global _torch_layer
    if _torch_layer is None:
        from . import torch_layer  # imports torch

        _torch_layer = torch_layer
    return _torch_layer


def _read_all(given: dict[str, Any]) -> dict[str, Array]:
    names = {argument: library_of(argument, value).name for argument, value in given.items()}
    first, *others = names
    for other in others:
        if names[other] != names[first]:
            raise ProblemTypeError(f"{other}: library is {names[other]}; must be {names[first]}, as {first}'s")
    arrays = {name: read(name, value) for name, value in given.items()}
    check_alike(arrays)
    return arrays


def _shape(name: str, value: Any) -> tuple[int, ...]:
    try:
        shape = tuple(value)
    except TypeError:
        raise ProblemError(f"{name}={value!r}: must be a sequence of integers") from None
    if any(isinstance(size, bool) or not hasattr(size, "__index__") or size < 0 for size in shape):
        raise ProblemError(f"{name}={value!r}: must hold integers, none negative")
    return tuple(int(size) for size in shape)


class _PlannedCall:
    """How calls of one description are computed.

    Attributes:
        shape: the written tensor's, as kernels see it: always with a batch.
        drops_batch: whether the caller's result has none.
    """

    def __init__(
        self, pass_name: str, problem: Problem, arrays: dict[str, Array], unbatched: bool, options: tuple[Any, Any, Any]
    ) -> None:
        self.pass_name, self.problem, self.unbatched, self.fp32_precision = pass_name, problem, unbatched, options[1]
        self.shapes, written = problem.shapes(pass_name)
        self.shape = self.shapes[written]
        self.drops_batch = unbatched and pass_name != "wgrad"
        self.channels_last = pass_name != "wgrad" and any(array.ref.is_channels_last for array in arrays.values())
        self.choice: Choice = decide(pass_name, problem, arrays, *options)
        self._prepared: Prepared | None = None  # from the first call on, when there is a result
        self._copied: tuple[str, ...] = ()

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.drops_batch else self.shape

    def run(self, arrays: dict[str, Array], out: Array | None) -> Any:
        """Return the result of a call that this plan was made for; `out` has been checked."""
        if self.choice.kernel is None:
            assert out is not None  # without `out`, torch's tensors go through `torch_layer`
            return self._by_library(arrays, out)
        first = next(iter(arrays.values()))
        library, device = first.library, first.device
        with library.on(device):
            destination = out or self._new(first)
            if self.problem.batch:
                self._launch(arrays, destination)
            else:  # no launch, and a sum over nothing
                library.assign(destination.native, 0)
            foreign = [array.native for array in arrays.values() if array.foreign]
            if foreign and device.kind == "cuda":
                keep_until_done(foreign, device)
            if out is None:
                return library.result(destination.native)
        if library.name == "torch":  # autograd must notice a write that it cannot see
            sys.modules["torch"].autograd.graph.increment_version(destination.native)
        return destination.native

    def _new(self, first: Array) -> Array:
        """Return new memory in the layout that torch would give the result."""
        native = first.library.empty(self.shape, first.dtype, first.device, self.channels_last)
        return first.library.read("out", native[0] if self.drops_batch else native)

    def _launch(self, arrays: dict[str, Array], destination: Array) -> None:
        """Run the kernel; what it cannot read or write in its own strides goes through a contiguous copy."""
        kernel, library, device = self.choice.kernel, destination.library, destination.device
        assert kernel is not None
        tensors = {**arrays, kernel.written: destination}
        if self.choice.problem is not None:
            weight = arrays["weight"].native[(slice(None), slice(None), *self.problem.live_taps)]
            tensors["weight"] = library.read("weight", weight)
        if self._prepared is None:
            self._copied = tuple(n for n, array in tensors.items() if not (kernel.takes_strides(n) or array.ref.is_contiguous))
        for name in self._copied:
            array, output = tensors[name], name == kernel.written
            copy = library.empty(array.ref.shape, array.dtype, device) if output else library.contiguous(array.native)
            tensors[name] = library.read(name, copy)
        if self._prepared is None:
            refs = {name: _of_rank(array.ref, len(self.shapes[name])) for name, array in tensors.items()}
            backend = backend_for(self.choice.backend, device.index)
            self._prepared = Prepared(backend, kernel, self.choice.problem or self.problem, self.choice.instance, refs)
        addresses = {name: array.ref.pointer for name, array in tensors.items()}
        workspaces = []  # alive until the launches are queued; after that the allocator's stream order protects them
        for name, size in self._prepared.workspace.items():
            addresses[name], owner = library.allocate(size, device) if size else (0, None)
            workspaces.append(owner)
        self._prepared.launch(addresses, library.stream(device))
        if kernel.written in self._copied:
            library.assign(destination.native, tensors[kernel.written].native)

    def _by_library(self, arrays: dict[str, Array], out: Array) -> Any:
        operands = [array.native for array in arrays.values()]
        if self.unbatched:
            operands = [tensor.unsqueeze(0) if tensor.dim() == 4 else tensor for tensor in operands]
        stricter = torch_library.is_stricter(self.fp32_precision, operands[0])
        result = torch_library.run(self.pass_name, self.problem, stricter, *operands)
        return out.native.copy_(result.squeeze(0) if self.drops_batch else result)


def _execute(
    pass_name: str,
    arrays: dict[str, Array],
    shape: tuple[int, ...] | None,
    geometry: tuple[Any, ...],
    options: tuple[str | Kernel, str | None, str | None],
    out: Any,
) -> Any:
    """Compute a pass.

    Args:
        shape: of the gradient; None for fprop.
        options: algorithm, fp32_precision, backend.
    """
    destination = None if out is None else read("out", out)
    key = _key(pass_name, arrays, destination, shape, geometry, options)
    plan = None if key is None else plans.get(key)
    if plan is None:
        plan = _make_plan(pass_name, arrays, shape, geometry, options)
    if destination is not None:
        _check_out(plan, arrays, destination)
    result = plan.run(arrays, destination)
    if key is not None and key not in plans:
        keep(key, plan)
    return result if out is None else out


def _key(
    pass_name: str,
    arrays: dict[str, Array],
    destination: Array | None,
    shape: tuple[int, ...] | None,
    geometry: tuple[Any, ...],
    options: tuple[Any, Any, Any],
) -> tuple[Any, ...] | None:
    """Return what a plan depends on; None where torch's settings belong to it, or sizes are no plain integers (1.0 is 1 in a key)."""
    for sizes in geometry:
        if type(sizes) is not int and not (type(sizes) is tuple and all(type(size) is int for size in sizes)):
            return None
    described: list[Any] = []
    for array in arrays.values():
        if array.library.name == "torch":
            return None
        described += (type(array.library), array.ref.shape, array.ref.strides, array.dtype, array.device)
    layout = None if destination is None else destination.ref.strides
    return (pass_name, *described, layout, shape, geometry, options, registry.state(), tuning.state())


def _make_plan(
    pass_name: str,
    arrays: dict[str, Array],
    shape: tuple[int, ...] | None,
    geometry: tuple[Any, ...],
    options: tuple[str | Kernel, str | None, str | None],
) -> _PlannedCall:
    shapes = {name: array.ref.shape for name, array in arrays.items()}
    if shape is not None:
        shapes["input" if pass_name == "dgrad" else "weight"] = shape
    problem = Problem.from_shapes(shapes["input"], shapes["weight"], shapes.get("bias"), *geometry)
    unbatched = len(shapes["input"]) == 4
    if "grad_output" in arrays:
        _check_shape(arrays["grad_output"], problem.output_shape, unbatched)
    return _PlannedCall(pass_name, problem, arrays, unbatched, options)


def _check_shape(array: Array, batched: tuple[int, ...], unbatched: bool) -> None:
    expected = batched[1:] if unbatched else batched
    if array.ref.shape != expected:
        raise ProblemError(f"{array.argument}.shape={array.ref.shape}: must be {expected} for this problem")


def _check_out(plan: _PlannedCall, arrays: dict[str, Array], out: Array) -> None:
    first = next(iter(arrays.values()))
    found = (out.library.name, out.ref.shape, out.dtype, str(out.device))
    wanted = (first.library.name, plan.result_shape, first.dtype, str(first.device))
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
    for array in arrays.values():
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


def _of_rank(ref: TensorRef, rank: int) -> TensorRef:
    return ref.with_batch() if len(ref.shape) == 4 and rank == 5 else ref
