"""The command line where its surroundings are odd: extras that are missing, closed files, text that a terminal would obey."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from selection import some

from cupy_convt3d import cli
from cupy_convt3d.errors import printable

ROOT = Path(__file__).parents[1]
# A package that is not installed: its import fails, whatever is really there.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Missing())
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    ("package", "code", "extra"),
    [
        ("torch", "import cupy_convt3d as ct; ct.nn", "torch"),
        ("torch", "import cupy_convt3d.nn", "torch"),
        ("matplotlib", "import cupy_convt3d as ct; ct.plots", "report"),
        ("matplotlib", "from cupy_convt3d.plots import tap_map", "report"),
    ],
)
def test_what_needs_an_extra_names_it(package: str, code: str, extra: str) -> None:
    done = python(WITHOUT.format(package=package) + code)
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingPackageError" in last and f"needs {package}" in last and f"pip install 'cupy-convt3d[{extra}]'" in last
    caught = f"try:\n    exec({code!r})\nexcept ImportError as error: print('caught')"
    assert python(WITHOUT.format(package=package) + caught).stdout == "caught\n"


@pytest.mark.parametrize("package", ["matplotlib", "jinja2", "nibabel"])
def test_a_report_without_its_extra_says_so(package: str, tmp_path: Path) -> None:
    code = WITHOUT.format(package=package) + "from cupy_convt3d.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = python(code, "report", "--out", str(tmp_path / "report"))
    assert done.returncode == 2 and not (tmp_path / "report").exists()
    assert done.stderr.startswith("convt3d: error: ") and "pip install 'cupy-convt3d[report]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", some(["2>&-", "1>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"], 2))
def test_closed_standard_files(closed: str, tmp_path: Path) -> None:
    arguments = "check fprop_gather --backend host --problem n1_c1to1_i1_k1 --dtype fp32"
    command = f"exec {sys.executable} -m cupy_convt3d {arguments} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert ("passed" in done.stdout) == ("1>&-" not in closed and " >&-" not in f" {closed}")
    failing = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m cupy_convt3d check nobody {closed}"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert failing.returncode == 2 and "Traceback" not in failing.stderr + failing.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no file that is full")
@pytest.mark.parametrize("arguments", ["check nobody", "check --unknown"])
def test_an_error_that_cannot_be_written_is_an_exit_code_still(arguments: str) -> None:
    command = f"exec {sys.executable} -m cupy_convt3d {arguments} 2>/dev/full"
    assert subprocess.run(["sh", "-c", command], capture_output=True, check=False, cwd=ROOT).returncode == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain\ttext\nof größe ≤ 1", "plain\ttext\nof größe ≤ 1"),
        ("\x1b[2J\x07\r\b\x7f\x9b", r"\x1b[2J\x07\r\x08\x7f\x9b"),
        ("\u202edrow\u2066", r"\u202edrow\u2066"),
        ("\udc80\ud800", r"\udc80\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_with_a_limit_it_is_one_line() -> None:
    assert printable("a\n\tb\x1bc" * 2, 5) == r"a\n\tb\x1b [...]"
    assert printable("a\n", 2) == r"a\n"


HEAD = '/* convt3d\npass = "fprop"\n{more}[[launch]]\ngrid = 1\nblock = 1\n*/\n'
BODY = "__global__ void k(float* output) { output[0] = 1; }\n"


@pytest.mark.parametrize(
    "source",
    [
        HEAD.format(more="") + "#error \x1b[2J\x1b]0;title\x07\n" + BODY,
        HEAD.format(more="[restrictions]\n'batch < 0' = \"\\u001b[2J\"\n") + BODY,
        HEAD.format(more="\\u001b = 1\n") + BODY,
        HEAD.format(more="") + BODY.replace("output[0] = 1", "output[0] = \"\x1b[2J\""),
    ],
)
def test_nothing_of_a_kernel_reaches_the_terminal_raw(source: str, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(source)
    command = [sys.executable, "-m", "cupy_convt3d", "check", str(tmp_path / "k.cu"), "--backend", "host", "--examples", "5"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=ROOT)
    assert done.returncode in (1, 2) and b"\x1b" not in done.stdout + done.stderr and b"\x07" not in done.stdout + done.stderr


def test_a_terminal_without_the_letters_gets_escapes() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "cupy_convt3d", "check", "größe\udc80"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 2 and done.stderr.startswith("convt3d: error: kernel 'gr")


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf", "x"])
def test_a_time_limit_is_a_positive_number(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", "--time-limit", limit])
    assert caught.value.code == 2 and "--time-limit" in capsys.readouterr().err


def test_an_unknown_sanitizer_is_named() -> None:
    from cupy_convt3d import check, registry
    from cupy_convt3d.errors import BackendError
    from cupy_convt3d.lab.fuzz import fuzz

    for sanitize in ("2", "", 5, []):
        with pytest.raises(BackendError, match=r"sanitize=.*: must be None or one of address, undefined, thread"):
            check("fprop_gather", backend="host", sanitize=sanitize)  # type: ignore[arg-type]
        with pytest.raises(BackendError, match="sanitize="):
            fuzz([registry.kernel("fprop_gather")], backend="host", findings="nowhere.jsonl", sanitize=sanitize)  # type: ignore[arg-type]
    assert not Path("nowhere.jsonl").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "--backend", "host", "--problem", "n1_c1to1_i1_k1", "--kernels", "fprop_gather", "--out", "/proc/a/t.json"],
        ["bench", "--backend", "host", "--problem", "n1_c1to1_i1_k1", "--kernels", "fprop_gather", "--out", "/proc/b.json"],
        ["fuzz", "fprop_gather", "--backend", "host", "--findings", "/proc/nowhere/f.jsonl"],
    ],
)
def test_a_file_that_cannot_be_written_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("convt3d: error: ") and "cannot be written" in error and "/proc/" in error


def test_a_warning_is_one_line(tmp_path: Path) -> None:
    (damaged := tmp_path / "tuning.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", "cupy_convt3d", "info", "--why", "n1_c64to32_i16_k3_s2_p1"],
        **{"capture_output": True, "text": True, "check": True, "cwd": ROOT, "env": {**os.environ, "CONVT3D_TUNING": str(damaged)}},
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"convt3d: warning: tuning database '{damaged}': is no JSON") and done.stdout
