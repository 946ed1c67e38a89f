"""`convt3d kernelbench`: its command and its search, and the seven example files, which are drop-ins.

The cheats are in `test_hostile_models`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

from cupy_convt3d.cli import main
from cupy_convt3d.lab import kernelbench

torch = pytest.importorskip("torch")

MODEL = '''
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0, groups: int = 1):
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False)

    def forward(self, x):
        return self.conv_transpose3d(x)

def get_inputs():
    return [torch.rand(2, 4, 5, 6, 7)]

def get_init_inputs():
    return [4, 6, 3, 2, 1]
'''
NEW = '''
class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x)
'''
def write(directory: Path, text: str, name: str = "subject.py") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def examine(directory: Path, new: str, **options: Any) -> kernelbench.Verdict:
    path = write(directory, MODEL + new)
    return kernelbench.examine(path, path, **options)


def test_an_honest_file_passes_and_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, MODEL + NEW)
    assert main(["kernelbench", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "in a child process for at most 600 s" in printed
    assert f"{path}: passed" in printed
    assert "ModelNew" in printed.splitlines()[-1] and " ms" in printed.splitlines()[-1]


@pytest.mark.slow
def test_a_cheat_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coarse = "class ModelNew(Model):\n    def forward(self, x):\n        return self.conv_transpose3d(x.bfloat16().to(x.dtype))\n"
    path = write(tmp_path, MODEL + coarse)
    assert main(["kernelbench", str(path)]) == 1
    assert "precision lowered: the file's inputs: root mean square error" in capsys.readouterr().out


@pytest.mark.slow
def test_a_hang_is_killed_with_what_it_started(tmp_path: Path) -> None:
    hang = '''
import subprocess
class ModelNew(Model):
    def forward(self, x):
        subprocess.run(["sleep", "1000"])
'''
    verdict = examine(tmp_path, hang, time_limit_s=15)
    assert verdict.findings[-1].kind == "hang"
    assert "not done after 15 s; ModelNew killed while comparing on the file's inputs" in verdict.findings[-1].detail


@pytest.mark.slow
def test_fuzz_finds_and_shrinks_what_the_files_own_problem_hides(tmp_path: Path) -> None:
    """The index rule of systems 000 and 001: right for stride 1 and no padding, wrong for nearly everything else."""
    ignores_groups = '''
class ModelNew(Model):
    def forward(self, x):
        c = self.conv_transpose3d
        padding = [min(p, 1) for p in c.padding]
        y = nn.functional.conv_transpose3d(x, c.weight, stride=c.stride, padding=padding, groups=c.groups)
        return y
'''
    assert examine(tmp_path, ignores_groups).passed
    verdict = examine(tmp_path, ignores_groups, fuzz=200)
    assert [finding.kind for finding in verdict.findings] == ["wrong result"]
    assert "padding=2" in str(verdict)
    assert verdict.fuzzed > 10
    honest = examine(tmp_path, NEW, fuzz=20)
    assert honest.passed, str(honest)
    assert honest.fuzzed > 10


@pytest.mark.slow
def test_fuzz_goes_on_after_a_crash_and_shrinks_it(tmp_path: Path) -> None:
    crashes = '''
import os, signal
class ModelNew(Model):
    def forward(self, x):
        if self.conv_transpose3d.padding[0] == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.conv_transpose3d(x)
'''
    verdict = examine(tmp_path, crashes, fuzz=200)
    assert [finding.kind for finding in verdict.findings] == ["crash"], str(verdict)
    assert "signal SIGSEGV while computing Model(in_channels=1, out_channels=1," in str(verdict)
    assert "padding=2" in str(verdict)
    assert not verdict.times_ms


@pytest.mark.slow
def test_classes_in_two_files_and_a_state_dict_that_does_not_fit(tmp_path: Path) -> None:
    reference = write(tmp_path, MODEL, "reference.py")
    candidate = write(
        tmp_path,
        '''
import torch
from torch import nn
class ModelNew(nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.layer = nn.ConvTranspose3d(*arguments, bias=False)
    def forward(self, x):
        return self.layer(x)
''',
        "candidate.py",
    )
    assert kernelbench.pair([candidate, reference]) == [(reference, candidate)]
    verdict = kernelbench.examine(reference, candidate)
    assert verdict.passed, str(verdict)
    assert "does not load Model's state_dict" in verdict.notes[0]


def test_what_is_handed_over_is_not_kept() -> None:
    """Outputs of a gigabyte, call after call, fill a GPU if each lives until Python looks for cycles."""
    from cupy_convt3d.lab.kernelbench.memory import flatten, size_of, store, unflatten

    value = {"y": [torch.arange(3.0), (torch.ones(2, 2, dtype=torch.bfloat16), 1.5)]}
    gone = weakref.ref(value["y"][0])
    gc.disable()
    try:
        tree, tensors = flatten(value)
        assert size_of(tree) == 3 * 256 and [t.numel() for t in tensors] == [3, 4, 1]
        memory = torch.zeros(size_of(tree), dtype=torch.uint8)
        store(tensors, tree, memory)
        again = unflatten(tree, memory)
        assert torch.equal(again["y"][0], value["y"][0]) and again["y"][1][1] == 1.5
        del value, tensors
        assert gone() is None
    finally:
        gc.enable()


def test_files_that_cannot_be_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {
        "cannot be read": write(tmp_path, "class ModelNew(:", "syntax.py"),
        "neither a class Model": write(tmp_path, "x = 1", "neither.py"),
        "has no class Model": write(tmp_path, NEW, "alone.py"),
        "none has a class ModelNew": write(tmp_path, MODEL, "model.py"),
        "No such file": tmp_path / "missing.py",
        "null bytes": write(tmp_path, "class ModelNew:\0", "null.py"),
        "nested too deeply": write(tmp_path, f"x = {'-' * 100_000}1", "deep.py"),
        "not a regular file": tmp_path / "fifo.py",
        r"red\x1b[31m\u202e.py: has neither": write(tmp_path, "x = 1", "red\x1b[31m\u202e.py"),
    }
    os.mkfifo(tmp_path / "fifo.py")
    for message, path in bad.items():
        assert main(["kernelbench", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_a_file_that_needs_nvcc_is_not_judged_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(kernelbench.shutil, "which", lambda name: None)
    monkeypatch.setattr(kernelbench, "_NVCC", tmp_path / "nvcc")
    text = MODEL + NEW + "from torch.utils.cpp_extension import load_inline\n"
    inline = write(tmp_path, text + "load_inline('f', cpp_sources='', cuda_sources='')\n", "inline.py")
    named = write(tmp_path, text + "load('f', ['f.cu'])\n", "named.py")
    cpp = write(tmp_path, text + "build = lambda: load_inline('f', cpp_sources='')\ncuda = torch.cuda.is_available()\n", "cpp.py")
    assert main(["kernelbench", str(inline), str(named), str(cpp)]) == 2
    printed = capsys.readouterr().out
    for path in (inline, named):
        assert f"{path}: cannot be judged\n  problem: builds CUDA code" in printed
    assert f"{cpp}: passed" in printed


def test_what_model_has_or_returns_that_cannot_be_handed_over_is_no_failure(tmp_path: Path) -> None:
    cases = {
        "int_keys": ("nn.Identity()", "{0: x}", "dict with keys that are not all strings"),
        "complex": ("nn.Identity()", "x, 1 + 2j", "a complex"),
        "numpy": ("nn.Identity()", "x.numpy().sum()", "a float32"),
        "object": ("nn.Identity()", "slice(x)", "a slice"),
        "nested": ("nn.Identity()", "torch.nested.nested_tensor([x[0], x[1]])", "cannot be handed to another process"),
        "meta": ("nn.Identity()", "x.to('meta')", "device meta"),
        "huge": ("nn.Identity()", "10 ** 5000", "an integer of 16610 bits"),
        "lazy": ("nn.LazyConvTranspose3d(4, 3)", "self.layer(x)", "cannot be handed to another process"),
    }
    with kernelbench.Supervisor() as supervisor:
        for name, (layer, result, message) in cases.items():
            text = f'''
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = {layer}
    def forward(self, x):
        return {result}
class ModelNew(Model):
    pass
def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5)]
def get_init_inputs():
    return []
'''
            path = write(tmp_path, text, f"{name}.py")
            verdict = kernelbench.examine(path, path, device="cpu", supervisor=supervisor)
            assert [finding.kind for finding in verdict.findings] == ["problem"], str(verdict)
            assert str(verdict).startswith(f"{path}: cannot be judged\n  problem: Model while ") and message in str(verdict)
            assert not verdict.passed and not verdict.failed and not verdict.times_ms
        path = write(tmp_path, MODEL.replace("[torch.rand(2, 4, 5, 6, 7)]", "[{0: torch.rand(2)}]") + NEW)
        assert [finding.kind for finding in kernelbench.examine(path, path, supervisor=supervisor).findings] == ["problem"]


def test_a_model_that_fails_itself_is_no_fault_of_the_candidate(tmp_path: Path) -> None:
    works = "        return self.conv_transpose3d(x)\n\ndef get_inputs"
    assert works in MODEL
    failing = {
        "raise ValueError('not today')": "Model while building Model: ValueError: not today",
        "__import__('os')._exit(3)": "crash: Model: exit code 3 while building Model",
    }
    with kernelbench.Supervisor() as supervisor:
        for statement, said in failing.items():
            path = write(tmp_path, MODEL.replace(works, f"        {statement}\n\ndef get_inputs") + NEW)
            verdict = kernelbench.examine(path, path, device="cpu", supervisor=supervisor)
            assert str(verdict).startswith(f"{path}: cannot be judged\n  problem: {said}"), str(verdict)
        path = write(tmp_path, MODEL.replace("class Model(", "class Other(") + NEW)
        verdict = kernelbench.examine(path, path, device="cpu", supervisor=supervisor)
        assert verdict.failed and "while importing Model" in str(verdict), "one file, which cannot be read"


def test_a_warning_of_the_parser_is_not_printed(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = write(tmp_path, MODEL + NEW + 'x = "\\\x1b"\n', "warns.py")
    assert kernelbench.pair([path]) == [(path, path)]
    assert not recwarn.list


def test_a_ratio_beside_much_handing_over() -> None:
    def spelled(handing_ms: float) -> str:
        return str(kernelbench.Verdict(Path("f.py"), times_ms={"Model": 3.0, "ModelNew": 1.0}, handing_ms=handing_ms))

    assert "3.00x (" in spelled(0.4)
    assert "3.00x, 2.00x with the 1.000 ms of handing over (" in spelled(1.0)


# The seven example files

EXAMPLES = sorted((Path(__file__).parents[1] / "examples" / "kernelbench").glob("*.py"))


def example(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(module: Any, device: str = "cpu", **more: Any) -> tuple[Any, Any, torch.Tensor]:
    """Both models with the file's arguments, and an input of its channels with a small volume."""
    torch.manual_seed(0)
    arguments = module.get_init_inputs()
    theirs, ours = module.Model(*arguments, **more).to(device), module.ModelNew(*arguments, **more).to(device)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ours.conv_transpose3d.backend = "host" if device == "cpu" else "cuda"  # kernels, whatever torch's own operator would take
    assert list(ours.state_dict()) == ["conv_transpose3d.weight"] + ["conv_transpose3d.bias"] * bool(more.get("bias"))
    return theirs, ours, torch.rand(1, arguments[0], 3, 4, 5, device=device)


def test_there_are_seven_examples() -> None:
    assert [path.name[:2] for path in EXAMPLES] == ["58", "61", "68", "70", "72", "73", "77"]


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_drop_in(path: Path, device: str, precision: str, ieee: None) -> None:
    """System 003's acceptance: load the state_dict, then allclose with atol 1e-5."""
    theirs, ours, x = small(example(path), device)
    if precision == "ieee":
        found = ours(x)
    else:
        import cupy_convt3d as ct

        c = ours.conv_transpose3d
        geometry = (c.stride, c.padding, c.output_padding, c.groups, c.dilation)
        found = ct.conv_transpose3d(x, c.weight, c.bias, *geometry, backend=c.backend, fp32_precision="tf32x3")
    assert torch.allclose(found, theirs(x), atol=1e-5)


def test_system_004_with_its_bias() -> None:
    theirs, ours, x = small(example(EXAMPLES[-1]), bias=True)
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_system_002_trains(device: str, ieee: None) -> None:
    theirs, ours, x = small(example(EXAMPLES[3]), device)
    losses = []
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    torch.testing.assert_close(torch.tensor(losses[3:]), torch.tensor(losses[:3]), rtol=1e-4, atol=1e-6)
    assert losses[2] < losses[0]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone  # it fills a GPU's memory
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_passes_at_its_full_size(path: Path) -> None:
    verdict = kernelbench.examine(path, path)
    print(verdict)
    assert verdict.passed, str(verdict)
