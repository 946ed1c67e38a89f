"""The CUDA backend: cubins loaded by `cupy.RawModule`, launched on the stream the caller names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import architecture, scratch
from ..errors import BackendError, LaunchError
from ..kernel import PlannedLaunch
from ..source import Instance
from .base import Arguments, Backend, Module, Packed, Step
from .launch import launch
from .nvrtc import _nvrtc, compile_parts, log_attributes, version

FLUSH_BYTES = 256 << 20  # several times any L2
MOST_WRITES = 16  # of these bytes before a timed call
_DEFAULT_SHARED_LIMIT = 48 << 10  # more dynamic shared memory has to be asked for
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_GRAPHS_TAKE_LAUNCHES_BESIDE = 12030  # this driver's and newer ones'


def available() -> bool:
    """Whether CuPy is installed and sees a GPU."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # ImportError, or whatever the missing driver raises
        return False


class CudaModule(Module):
    """A cubin loaded on one device."""

    def __init__(self, instance: Instance, device: int, arch: str) -> None:
        import cupy

        self._name = str(instance)
        self._log_attributes: dict[str, dict[str, int]] = {}
        self._driver, self._runtime = cupy.cuda.driver, cupy.cuda.runtime
        self._overlaps = architecture.runs_on("sm_90", arch)  # older GPUs run one launch after the other
        self._overlaps_in_graphs = self._runtime.driverGetVersion() >= _GRAPHS_TAKE_LAUNCHES_BESIDE
        self._device = cupy.cuda.Device(device)
        self._functions: dict[str, Any] = {}
        with scratch.directory() as directory, self._device:
            for number, (part, cubin, log) in enumerate(compile_parts(instance, arch)):
                path = Path(directory) / f"{number}.cubin"
                path.write_bytes(cubin)
                module = cupy.RawModule(path=str(path))
                symbols = part.launched or [launch.symbol for launch in part.kernel.launches]
                self._functions |= {symbol: module.get_function(symbol) for symbol in symbols}
                self._log_attributes |= log_attributes(log)
            self._pointers = {symbol: function.kernel.ptr for symbol, function in self._functions.items()}
            # What a block may have of shared memory without asking is for static and dynamic together.
            self._shared_limits = {
                symbol: _DEFAULT_SHARED_LIMIT - function.shared_size_bytes for symbol, function in self._functions.items()
            }

    def launch(
        self, launch: PlannedLaunch, arguments: Arguments, stream: int, seed: int = 0, beside: Packed | None = None
    ) -> None:
        self.launch_all((Step(launch, arguments, beside),), {}, stream, seed)  # type: ignore[arg-type]

    def launch_all(self, steps: Sequence[Step], addresses: Mapping[str, int], stream: int, seed: int) -> None:
        if self._runtime.getDevice() != self._device.id:
            with self._device:
                return self.launch_all(steps, addresses, stream, seed)
        overlaps = self._overlaps and (self._overlaps_in_graphs or not self._runtime.streamIsCapturing(stream))
        for planned, arguments, beside in steps:
            symbol = planned.symbol
            if planned.shared_bytes > self._shared_limits[symbol]:
                self._functions[symbol].max_dynamic_shared_size_bytes = planned.shared_bytes
                self._shared_limits[symbol] = planned.shared_bytes
            how = (self._pointers[symbol], planned, stream, arguments, overlaps and beside is not None)
            code = launch(*how)
            if code == _INVALID_CONTEXT:
                self._runtime.free(0)  # a thread that has not used this GPU yet has no context: now it has
                code = launch(*how)
            if code:
                raise LaunchError(f"{self._name}: {symbol} grid {planned.grid} block {planned.block}: {self._driver.CUDADriverError(code)}")

    def attributes(self, symbol: str) -> dict[str, int]:
        function = self._functions[symbol]
        return {
            **self._log_attributes.get(symbol, {}),
            "registers": function.num_regs,
            "local_bytes": function.local_size_bytes,
            "shared_bytes": function.shared_size_bytes,
        }


class CudaBackend(Backend):
    """Runs kernels on one GPU.

    Args:
        device: the GPU's number; None takes CuPy's current device.

    Raises:
        BackendError: CuPy is missing or sees no GPU.
    """

    name = "cuda"

    def __init__(self, device: int | None = None) -> None:
        _nvrtc()
        import cupy

        if not available():
            raise BackendError("the cuda backend needs an NVIDIA GPU and its driver; CuPy sees none (use backend='host')")
        self._cupy = cupy
        self.device = cupy.cuda.Device().id if device is None else device
        properties = cupy.cuda.runtime.getDeviceProperties(self.device)
        self.device_name = properties["name"].decode()
        self.arch = architecture.of_device(properties["major"], properties["minor"])
        self._modules: dict[Instance, CudaModule] = {}
        self.multiprocessors = properties["multiProcessorCount"]
        self.shared_limit = properties["sharedMemPerBlockOptin"]
        self.clock_hz = 1e3 * properties.get("clockRate", 0)
        self.memory_bytes_per_s = 2e3 * properties.get("memoryClockRate", 0) * properties.get("memoryBusWidth", 0) / 8  # two a clock
        self._flush: Any = None

    def compile(self, instance: Instance) -> CudaModule:
        known = self._modules.get(instance)
        if known is None:
            known = self._modules[instance] = CudaModule(instance, self.device, self.arch)
        return known

    def build(self, instance: Instance) -> None:
        compile_parts(instance, self.arch)

    def capabilities(self) -> dict[str, str]:
        runtime = self._cupy.cuda.runtime

        def dotted(version: int) -> str:
            return f"{version // 1000}.{version % 1000 // 10}"

        return {
            "backend": "cuda",
            "device": self.device_name,
            "architecture": self.arch,
            "driver": dotted(runtime.driverGetVersion()),
            "runtime": dotted(runtime.runtimeGetVersion()),
            "nvrtc": version(),
            "cupy": self._cupy.__version__,
        }

    def is_capturing(self, stream: int) -> bool:
        return bool(self._cupy.cuda.runtime.streamIsCapturing(stream))

    def synchronize(self) -> None:
        try:
            self._cupy.cuda.Device(self.device).synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise LaunchError(f"a kernel failed on {self.device_name}: {error}") from None

    def time(self, call: Callable[[], object], repeats: int) -> list[float]:
        """Return milliseconds of `call`'s work on the default stream by CUDA events, the L2 flushed before each call.

        The flush keeps the GPU busy until the host has queued the call. Where it was too short for that, the call is timed again behind
        a longer one: what is timed is the GPU's part, however busy the host.
        """
        cupy = self._cupy
        with cupy.cuda.Device(self.device):
            if self._flush is None:
                self._flush = cupy.empty(FLUSH_BYTES, cupy.uint8)
            call()
            times: list[float] = []
            writes = 1
            while len(times) < repeats:
                taken = []
                for _ in range(repeats - len(times)):
                    for _ in range(writes):
                        self._flush.fill(0)
                    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
                    start.record()
                    call()
                    stop.record()
                    taken.append((start, stop, bool(start.done)))
                self.synchronize()
                every = writes >= MOST_WRITES
                times += [cupy.cuda.get_elapsed_time(start, stop) for start, stop, waited in taken if every or not waited]
                writes *= 2
            return times
