"""The torch operators in graphs: compile, export, fx and jit traces, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest

import cupy_convt3d as ct

torch = pytest.importorskip("torch")

F = torch.nn.functional
GEOMETRY: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}
SHAPES = ((2, 4, 3, 5, 7), (3, 4, 5, 7, 8), (5, 4, 7, 6, 9))  # other batches and volumes


def module(backend: str | None, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    return ct.nn.ConvTranspose3d(4, 6, 3, **GEOMETRY, backend=backend).to(device, torch.float64)


def reference(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.conv_transpose3d(x, m.weight, m.bias, **GEOMETRY)


@pytest.fixture
def no_recompiles() -> Any:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def check(compiled: Any, m: Any, shape: tuple[int, ...], device: str, layout: torch.memory_format) -> None:
    x = torch.randn(shape, dtype=torch.float64, device=device).to(memory_format=layout).requires_grad_()
    y, wanted = compiled(x), reference(m, x)
    torch.testing.assert_close(y, wanted)
    assert y.stride() == wanted.stride() if m.backend in ("torch", None) else y.is_contiguous(memory_format=layout)
    operands = (x, m.weight, m.bias)
    found, expected = (torch.autograd.grad(r.pow(2).sum(), operands) for r in (y, wanted))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("backend", ["host", "torch"])
def test_compile_forward_and_backward_without_a_recompile(backend: str, layout: torch.memory_format, no_recompiles: None) -> None:
    m = module(backend)
    compiled = torch.compile(m, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in SHAPES:
        check(compiled, m, shape, "cpu", layout)


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    m = module("host")
    compiled = torch.compile(m, fullgraph=True, dynamic=True)
    for shape in SHAPES:
        check(compiled, m, shape, "cpu", torch.contiguous_format)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "torch"])
def test_compile_with_inductor_on_a_gpu(backend: str, no_recompiles: None) -> None:
    m = module(backend, "cuda")
    compiled = torch.compile(m, fullgraph=True, dynamic=True)
    for shape in SHAPES:
        check(compiled, m, shape, "cuda", torch.contiguous_format)


def test_compile_of_the_function_on_torch_tensors() -> None:
    torch._dynamo.reset()
    m = module("host")

    def function(x: torch.Tensor) -> torch.Tensor:
        return ct.conv_transpose3d(x, m.weight, m.bias, **GEOMETRY, backend="host") * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.randn(SHAPES[0], dtype=torch.float64)
    torch.testing.assert_close(compiled(x), reference(m, x) * 2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x[0]), reference(m, x[0]) * 2)


def test_a_bad_argument_is_named_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: ct.conv_transpose3d(x, w, padding=9, backend="host"), backend="aot_eager")
    with pytest.raises(Exception, match="padding"):
        compiled(torch.ones(1, 2, 3, 3, 3), torch.ones(2, 2, 3, 3, 3))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    m, dim = module("host"), torch.export.Dim
    volume = {0: dim("n"), 2: dim("d"), 3: dim("h"), 4: dim("w")}
    x = torch.randn(SHAPES[0], dtype=torch.float64)
    program = torch.export.export(m, (x,), dynamic_shapes=(volume,), strict=strict)
    called = [node.target for node in program.run_decompositions().graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.cupy_convt3d.conv_transpose3d.default]
    x = torch.randn(SHAPES[1], dtype=torch.float64)
    torch.testing.assert_close(program.module()(x), reference(m, x))


class Skip(torch.nn.Module):
    """A U-Net's way up: the output takes the size of what came from the way down."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.down = torch.nn.Conv3d(1, 4, 3, stride=2, padding=1)
        self.up = ct.nn.ConvTranspose3d(4, 1, 3, stride=2, padding=1, backend=backend)

    def forward(self, skip: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(skip), output_size=skip.shape[2:]) + skip


@pytest.mark.parametrize("backend", ["host", "torch", None])
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_an_output_size_of_dynamic_sizes(strict: bool, backend: str | None) -> None:
    net, auto = Skip(backend), torch.export.Dim.AUTO
    volume = {0: auto, 2: auto, 3: auto, 4: auto}
    program = torch.export.export(net, (torch.randn(2, 1, 9, 10, 12),), dynamic_shapes=(volume,), strict=strict)
    for shape in ((2, 1, 9, 10, 12), (3, 1, 11, 14, 15), (4, 1, 6, 9, 7)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), net(x))


def test_a_compiled_layer_that_is_left_to_torch_is_torchs_own() -> None:
    """The graph that is lowered has torch's convolution and its gradient, which compilers know."""
    from torch._functorch.aot_autograd import aot_module_simplified

    seen: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function" and "convol" in str(node.target))
        return graph

    for backend in ("torch", None):
        torch._dynamo.reset()
        seen.clear()
        m = module(backend)
        compiled = torch.compile(m, backend=lambda g, i: aot_module_simplified(g, i, fw_compiler=note, bw_compiler=note), fullgraph=True)
        check(compiled, m, SHAPES[0], "cpu", torch.contiguous_format)
        assert seen == [torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default]


def test_fx_and_jit_traces_keep_the_operator() -> None:
    m = module("host")
    for traced in (torch.fx.symbolic_trace(torch.nn.Sequential(m)), torch.jit.trace(m, (torch.ones(1, 4, 2, 2, 2).double(),))):
        x = torch.randn(SHAPES[0], dtype=torch.float64)
        torch.testing.assert_close(traced(x), reference(m, x))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graph_of_forward_and_backward(backend: str, dtype: torch.dtype) -> None:
    """A capture fails on any host synchronisation, and on work for any stream but the captured one."""
    m = module(backend, "cuda").to(dtype)
    x = torch.randn(SHAPES[0], device="cuda", dtype=dtype, requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        y = m(x)
        return (y, *torch.autograd.grad(y.square().sum(), (x, m.weight, m.bias)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        # Our kernels give the same bits each time, torch's operator need not.
        tolerance = {"rtol": 0, "atol": 0} if backend == "cuda" else {}
        for found, wanted in zip(captured, step(), strict=True):
            torch.testing.assert_close(found, wanted, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "torch"])
def test_a_call_waits_for_nothing(backend: str) -> None:
    m = module(backend, "cuda").float()
    x = torch.randn(SHAPES[0], device="cuda", requires_grad=True)
    m(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        m(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "torch"])
def test_side_streams(backend: str, ieee: None) -> None:
    m = module(backend, "cuda").float()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    xs, ys = [], []
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                xs.append(torch.randn(SHAPES[0], device="cuda"))
                ys.append(m(xs[-1]))
    torch.cuda.synchronize()
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(y, reference(m, x), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_what_is_left_to_torch_obeys_torchs_switches() -> None:
    """`cudnn.deterministic` and `cudnn.benchmark` are read by the call itself, and stay as they are."""
    m = module("torch", "cuda").float()
    x = torch.randn(SHAPES[0], device="cuda", requires_grad=True)
    for deterministic in (False, True):
        for benchmark in (False, True):
            with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, deterministic=deterministic, allow_tf32=False):
                y, wanted = m(x), reference(m, x)
                grads = [torch.autograd.grad(t.square().sum(), (x, m.weight, m.bias)) for t in (y, wanted)]
                assert torch.backends.cudnn.deterministic == deterministic and torch.backends.cudnn.benchmark == benchmark
            if deterministic:
                assert torch.equal(y, wanted) and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.gpu
def test_a_hundred_runs_of_our_kernels_give_the_same_bits() -> None:
    """cuDNN does not on this problem (pytorch#137970) unless it is told to."""
    torch.manual_seed(0)
    m = ct.nn.ConvTranspose3d(32, 16, 4, stride=2, padding=1, backend="cuda").to("cuda")
    x = torch.randn(1, 32, 32, 32, 10, device="cuda", requires_grad=True)
    first = None
    for _ in range(100):
        y = m(x)
        results = (y, *torch.autograd.grad(y.square().sum(), (x, m.weight, m.bias)))
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
