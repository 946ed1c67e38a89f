"""The cache of compiled kernels: whatever its directory or an entry has become, a kernel still runs, and a warning says so."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from selection import some

from cupy_convt3d import cache, cli, files, scratch
from cupy_convt3d.backends import host
from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import BackendError, CacheWarning, KernelError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import Instance

TEXT = """/* convt3d
pass = "fprop"
[[launch]]
grid = 1
block = 1
*/
__global__ void one(float* output) { output[0] = 1.0f; }
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, and no memory of other tests' directories."""
    monkeypatch.setenv("CONVT3D_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_private", None)
    monkeypatch.setattr(cache, "_TOLD", set())
    yield tmp_path / "cache"


def computes(backend: HostBackend | None = None, name: str = "one") -> bool:
    output = np.zeros(1, np.float32)
    problem = Problem(1, 1, 1, 1, 1)
    refs = {"output": TensorRef(output.ctypes.data, output.shape, (1,))}
    run(backend or HostBackend(), Kernel.from_source(TEXT, name), problem, "fp32", refs, lambda name, size: 0)
    return bool(output[0] == 1)


def unusable(directory: Path, how: str) -> None:
    if how == "a file in its place":
        directory.write_text("")
    elif how == "a pipe in its place":
        os.mkfifo(directory)
    elif how == "a loop":
        directory.symlink_to(directory)


@pytest.mark.parametrize("how", ["a file in its place", "a pipe in its place", "a loop"])
def test_a_directory_that_cannot_be_is_replaced(own: Path, how: str) -> None:
    unusable(own, how)
    with pytest.warns(CacheWarning, match=r"cannot be made: .*set CONVT3D_CACHE"):
        assert computes()
    private = cache.cache_directory()
    assert private != own and private.stat().st_mode & 0o77 == 0
    assert cache.load(next(private.glob("one-*.so")).name) is not None


@pytest.mark.parametrize("code", some([errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT], 2))
def test_a_directory_that_cannot_be_written_is_read_still(own: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    cache.store("kept.bin", b"as before")
    write = files.write_all

    def refuse(descriptor: int, data: bytes) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(own)):
            raise OSError(code, os.strerror(code))
        write(descriptor, data)

    monkeypatch.setattr(files, "write_all", refuse)
    with pytest.warns(CacheWarning, match="cannot be written") as caught:
        assert computes() and computes(HostBackend()) and computes(name="two")
    assert len([w for w in caught if issubclass(w.category, CacheWarning)]) == 1, "once is enough"
    assert cache.load("kept.bin") == b"as before"
    assert not list(own.glob(".new-*")) and not list(own.glob("*.lock"))


def test_a_limit_of_file_size_is_a_warning(own: Path) -> None:
    """A real refusal: the process may write no more than a few bytes to a file."""
    code = (
        "import resource, signal, warnings\n"
        "from cupy_convt3d import cache\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "try:\n    cache.store('entry.bin', bytes(1000))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("BackendError cache entry 'entry.bin': cannot be written") and "CONVT3D_CACHE" in done.stdout
    assert "CacheWarning" in done.stderr and list(own.iterdir()) == []


def entry(own: Path) -> Path:
    return HostBackend().library(Instance(Kernel.from_source(TEXT, "one"), "fp32"))  # not loaded: the loader knows a path again


@pytest.mark.parametrize("what", some(["a directory", "a pipe", "a loop", "no ELF", "another library", "text", "nothing"]))
def test_an_entry_that_is_none_is_ignored(own: Path, what: str) -> None:
    path = entry(own)
    payload = path.read_bytes()[:-40]
    path.unlink()
    if what == "a directory":
        (path / "sub").mkdir(parents=True)
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a loop":
        path.symlink_to(path)
    elif what in ("no ELF", "another library"):
        content = b"no ELF" if what == "no ELF" else payload.replace(b"convt3d_launch", b"convt3d_lunch_")
        path.write_bytes(content + hashlib.sha256(content).digest() + b"convt3d\n")
    else:
        path.write_bytes(b"" if what == "nothing" else b"text" * 100)
    words = "was ignored: is no regular file" if what in ("a directory", "a pipe") else "was ignored|cannot be written"
    with pytest.warns(CacheWarning, match=words):
        assert computes(HostBackend())


def test_what_cannot_be_loaded_names_its_path_and_the_variable(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file system lets nothing be run."""

    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(host.ctypes, "CDLL", refuse)
    with pytest.warns(CacheWarning, match="is no library"), pytest.raises(BackendError, match=f"{own}.*set CONVT3D_CACHE"):
        computes()


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "", ".", "..", ".hidden", "x" * 251, "\udc80", "a\nb", "a\0b"])
def test_an_entry_never_leaves_the_directory(own: Path, name: str) -> None:
    for access in (cache.load, lambda name: cache.store(name, b"")):
        with pytest.raises(BackendError, match="must be the name of a file"):
            access(name)
    assert not own.exists() or list(own.iterdir()) == []


@pytest.mark.parametrize("name", ["../../x", "/", "a/b", "x" * 217, "\udc80", "", 'a"b', "a'b", "a\nb", "a\x1b[2Jb", ".a", "-a", "a\\b", 5])
def test_names_of_kernels_are_checked(name: object) -> None:
    with pytest.raises(KernelError, match="its name must be of letters"):
        Kernel.from_source(TEXT, name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "folder", some(['with "quotes"', "with 'these'", "back\\slash", "a\nline", "\udc80", "größe", "$(touch x) `y`; %s"], 2)
)
def test_any_path_of_a_kernel_can_be_compiled(tmp_path: Path, folder: str) -> None:
    directory = Path(os.fsdecode(os.fsencode(tmp_path / folder)))
    directory.mkdir()
    (directory / "one.cu").write_text(TEXT)
    kernel = Kernel.from_file(directory / "one.cu")
    assert HostBackend().library(Instance(kernel, "fp32")).is_file()


def test_a_file_that_is_a_pipe_is_no_kernel(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "one.cu")
    with pytest.raises(KernelError, match="is no regular file"):
        Kernel.from_file(tmp_path / "one.cu")


def compile_once(directory: str, begin: float) -> int:
    os.environ["CONVT3D_CACHE"] = directory
    compiled = []
    compile_unit = host.compile_unit

    def counted(*arguments: object) -> None:
        compiled.append(arguments)
        compile_unit(*arguments)  # type: ignore[arg-type]

    host.compile_unit = counted  # type: ignore[assignment]
    time.sleep(max(0.0, begin - time.time()))
    HostBackend().library(Instance(Kernel.from_source(TEXT, "one"), "fp32"))
    return len(compiled)


def test_many_processes_compile_a_kernel_once(own: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        begin = time.time() + 3.0
        counts = pool.starmap(compile_once, [(str(own), begin)] * 20, chunksize=5)
    assert sum(counts) == 1
    names = sorted(path.suffix or path.name.partition("-")[0] for path in own.iterdir())
    assert names == [".so", "headers"], "one library, what every kernel includes, and no lock is left"


def test_headers_that_a_killed_run_was_compiling_are_removed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, signal\nfrom cupy_convt3d.backends import host\nfrom cupy_convt3d.kernel import Kernel\n"
        "from cupy_convt3d.source import Instance\n"
        "host.run_compiler = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"host.HostBackend().library(Instance(Kernel.from_source({TEXT!r}, 'one'), 'fp32'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert [path.name[:12] for path in own.glob(".new-*")] == [".new-headers"]
    assert computes()
    assert not list(own.glob(".new-*")) and len(list(own.glob("headers-*/all.h.gch"))) == 1


def test_a_lock_goes_with_a_killed_holder(tmp_path: Path) -> None:
    code = "import time\nfrom pathlib import Path\nfrom cupy_convt3d.files import locked\n"
    code += f"with locked(Path({str(tmp_path / 'l')!r})):\n"
    code += "    print('held', flush=True)\n    time.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        holder.kill()
    with files.locked(tmp_path / "l"):
        assert (tmp_path / "l").exists()
    assert not (tmp_path / "l").exists()


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(files.os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    files.write_whole(tmp_path / "f", b"0123456789" * 5)
    assert (tmp_path / "f").read_bytes() == b"0123456789" * 5


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_whole(tmp_path / "f", "before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_whole(tmp_path / "f", "after")
    assert (tmp_path / "f").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("alive", [False, True])
def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path, alive: bool) -> None:
    """And nothing else: not the file of a writer who is at it still, nor one of somebody else's."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom cupy_convt3d import files\n"
        "files.os.fsync = lambda descriptor: (print('begun', flush=True), sys.stdin.read())\n"
        f"files.write_whole(Path({str(tmp_path / 'f')!r}), 'theirs')\n"
    )
    (tmp_path / ".new-thing").write_text("not ours")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
        if not alive:
            writer.kill()
            writer.wait()
        (begun,) = tmp_path.glob(".new-convt3d-*")
        files.write_whole(tmp_path / "g", "mine")
        assert begun.exists() == alive
    assert writer.returncode == (0 if alive else -9) and (tmp_path / "f").exists() == alive
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new-thing", *(["f"] if alive else []), "g"]


def test_threads_that_write_side_by_side_do_not_take_each_others_files_for_abandoned(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for again in range(40):
            files.write_whole(tmp_path / f"f{number}", f"{number} {again}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(16)))  # raises what a thread raised
    assert {path.name for path in tmp_path.iterdir()} == {f"f{number}" for number in range(16)}


def test_a_file_that_was_taken_for_abandoned_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, taken = files.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.unlink(taken[0])  # another process has had the lock between
        flock(descriptor, how)

    monkeypatch.setattr(files.fcntl, "flock", late)
    files.write_whole(tmp_path / "f", "whole")
    assert taken and (tmp_path / "f").read_text() == "whole" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kept", [4, 64, 3000, 4095])
@pytest.mark.parametrize("trailer", ["none", "of the whole", "half"])
def test_a_cut_entry_that_begins_as_an_elf_is_not_loaded(own: Path, kept: int, trailer: str) -> None:
    """As where a disk was full or a copy of the cache was cut off: the digest is of all bytes, not of those that are there."""
    whole = b"\x7fELF" + bytes(4092)
    path = cache.store("one.cubin", whole)
    assert cache.load("one.cubin", begins=b"\x7fELF") == whole
    end = {"none": b"", "of the whole": path.read_bytes()[-40:], "half": path.read_bytes()[-40:-20]}[trailer]
    path.write_bytes(whole[:kept] + end)
    with pytest.warns(CacheWarning, match="damaged"):
        assert cache.load("one.cubin", begins=b"\x7fELF") is None


def test_the_compiler_has_a_time_limit_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An include that is a pipe is waited for without end."""
    from cupy_convt3d.backends import host_compiler
    from cupy_convt3d.errors import CompileError

    os.mkfifo(tmp_path / "pipe.h")
    monkeypatch.setattr(host_compiler, "TIME_LIMIT_S", 1.0)
    with pytest.raises(CompileError, match="did not end within 1 s"):
        host_compiler.run_compiler([host.compiler(), "-E", "-x", "c++", "-"], f'#include "{tmp_path}/pipe.h"\n')
    assert not processes_with(str(tmp_path))


def processes_with(word: str) -> list[str]:
    """Return the command lines of the processes that have a file open, or an argument, with that word."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and int(process.name) != os.getpid():
            found.append(line)
    return found


def test_the_compiler_ends_with_its_parent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h")
    code = (
        "from cupy_convt3d.backends.host import compiler\nfrom cupy_convt3d.backends.host_compiler import run_compiler\n"
        f"run_compiler([compiler(), '-E', '-DMARK={tmp_path.name}', '-x', 'c++', '-'], '#include \"{tmp_path}/pipe.h\"')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        mark = f"MARK={tmp_path.name} "
        deadline = time.monotonic() + 30
        while not any("cc1plus" in line for line in processes_with(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert any("cc1plus" in line for line in processes_with(mark)), "it has begun"
        parent.kill()
    deadline = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(mark) == []


def test_the_compiler_has_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_convt3d.backends import host_compiler

    monkeypatch.setattr(host_compiler, "share_of_memory", lambda: 16 << 20)
    done = host_compiler.run_compiler([host.compiler(), "-x", "c++", "-c", "-o", "/dev/null", "-"], "int one;\n")
    assert done.returncode != 0


def test_what_the_compiler_prints_has_a_greatest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines name 64 MiB of text, in the unit that the preprocessor prints and in messages."""
    from cupy_convt3d.backends import host_compiler
    from cupy_convt3d.errors import CompileError

    def doubled(first: str, times: int) -> str:
        return f"#define A0 {first}\n" + "".join(f"#define A{n + 1} A{n} A{n}\n" for n in range(times))

    monkeypatch.setattr(host_compiler, "MOST_PRINTED", 1 << 20)
    unit = doubled(f'"{"x" * 2000}"', 15)
    with pytest.raises(CompileError, match=r"kernel 'k': .* prints more than 1048576 bytes"):
        host_compiler.run_compiler([host.compiler(), "-E", "-x", "c++", "-"], f"{unit}A15\n", "kernel 'k'")
    messages = doubled(f'_Pragma("message(\\"{"x" * 2000}\\")")', 9)
    done = host_compiler.run_compiler([host.compiler(), "-x", "c++", "-c", "-o", "/dev/null", "-"], f"{messages}A9\nint one;\n")
    assert done.returncode == 0 and 1 << 20 <= len(done.stderr.encode()) < 2 << 20
    head, body = TEXT.split("*/\n")
    wrong = body.replace("output[0]", 'mistake; const char* s = "" A15; output[0]')
    with pytest.raises(CompileError, match=r"refused it\n[^$]*mistake.* was not declared"):
        HostBackend().library(Instance(Kernel.from_source(f"{head}*/\n{unit}{wrong}", "much"), "fp32"))


def test_the_compilers_files_have_a_greatest_size(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_convt3d.backends import host_compiler
    from cupy_convt3d.errors import CompileError

    assert computes()  # makes the headers that every kernel includes
    monkeypatch.setattr(host_compiler, "MOST_BYTES", 4 << 20)
    for more in ("__attribute__((used)) volatile char big[8 << 20] = {1};", "alignas(8 << 20) static volatile char a = 1; auto p = &a;"):
        with pytest.raises(CompileError, match="a file that the compiler writes would be larger than 4194304 bytes"):
            HostBackend().library(Instance(Kernel.from_source(f"{TEXT}{more}\n", "big"), "fp32"))
    assert not list(own.glob("big-*"))
    assert computes(name="small")


@pytest.mark.parametrize("what", some(["pipe", "garbage", "folder", "link", "compiled pipe", "compiled folder", "a pipe in its place"]))
def test_headers_that_are_none_are_made_again(own: Path, what: str) -> None:
    assert computes()
    header = next(own.glob("headers-*/all.h"))
    text, place = header.read_text(), Path(f"{header}.gch") if "compiled" in what else header
    if what == "a pipe in its place":
        scratch.remove(place := header.parent)
    else:
        place.unlink()
    if "pipe" in what:
        os.mkfifo(place)
    elif "folder" in what:
        place.mkdir()
    elif what == "link":
        place.symlink_to("/dev/zero")
    else:
        place.write_text("#error garbage\n")
    made = subprocess.run([sys.executable, "-c", COMPILE], timeout=100, check=False)
    assert made.returncode == 0
    assert header.read_text() == text and Path(f"{header}.gch").is_file()


COMPILE = f"""
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.source import Instance

HostBackend().library(Instance(Kernel.from_source({TEXT!r}, 'other'), 'fp32'))
"""


def test_a_user_without_a_home_has_a_temporary_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that was started with `--user`: no HOME, and no line in the passwd file."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for variable in ("HOME", "XDG_CACHE_HOME", "CONVT3D_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.warns(CacheWarning, match="cannot be made: .*home"):
        assert computes()
    assert cache.cache_directory() == cache._private
    assert cli.main(["info"]) == 0


@pytest.mark.nvrtc
@pytest.mark.parametrize("what", ["no ELF", "cut"])
def test_a_cubin_that_is_none_is_made_again(own: Path, what: str) -> None:
    nvrtc = pytest.importorskip("cupy_convt3d.backends.nvrtc")
    pytest.importorskip("cupy")
    try:
        cubin, log = nvrtc.compile_cubin(Instance(Kernel.from_source(TEXT, "one"), "fp32"), "sm_80")
    except BackendError as error:
        pytest.skip(str(error))
    path = next(own.glob("one-*.cubin"))
    none = b"no ELF" + hashlib.sha256(b"no ELF").digest() + b"convt3d\n"
    path.write_bytes(none if what == "no ELF" else path.read_bytes()[: len(cubin) // 2] + path.read_bytes()[-40:])
    with pytest.warns(CacheWarning, match="damaged"):
        again, _ = nvrtc.compile_cubin(Instance(Kernel.from_source(TEXT, "one"), "fp32"), "sm_80")
    assert again == cubin and log and cache.load(path.name) == cubin
    assert not list(own.glob("*.lock"))


def nvrtc_compiles(name: str = "one", text: str = TEXT) -> tuple[bytes, str]:
    pytest.importorskip("cupy")
    nvrtc = pytest.importorskip("cupy_convt3d.backends.nvrtc")
    try:
        nvrtc.version()
    except BackendError as error:
        pytest.skip(str(error))
    return nvrtc.compile_cubin(Instance(Kernel.from_source(text, name), "fp32"), "sm_80")  # type: ignore[no-any-return]


@pytest.mark.nvrtc
def test_nvrtc_has_limits(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_convt3d.backends import host_compiler
    from cupy_convt3d.errors import CompileError

    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "share_of_memory", lambda: 96 << 20)
        with pytest.raises(CompileError, match=r"one\[fp32\] for sm_80: NVRTC ended without a result .* MiB of memory"):
            nvrtc_compiles()
    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "TIME_LIMIT_S", 0.01)
        with pytest.raises(CompileError, match=r"NVRTC: .* did not end within 0.01 s"):
            nvrtc_compiles()
    assert not list(own.iterdir()) and not processes_with(f"/{os.getpid()}-")
    cubin, _ = nvrtc_compiles()
    monkeypatch.setattr(host_compiler.subprocess, "Popen", None)
    assert nvrtc_compiles()[0] == cubin, "what is in the cache needs no process"


@pytest.mark.nvrtc
def test_nvrtc_ends_with_its_parent(own: Path) -> None:
    nvrtc_compiles()
    nested = "template <int A, int B> struct S { static const long v = S<A - 1, B>::v + S<A - 1, B + (1 << A)>::v; };\n"
    nested += "template <int B> struct S<0, B> { static const long v = B; };\nstatic const long slow = S<22, 0>::v;\n"
    text = TEXT.replace("__global__", nested + "__global__", 1)
    code = "from cupy_convt3d.backends import nvrtc\nfrom cupy_convt3d.kernel import Kernel\nfrom cupy_convt3d.source import Instance\n"
    code += f"nvrtc.compile_cubin(Instance(Kernel.from_source({text!r}, 'slow'), 'fp32'), 'sm_80')\n"
    mark, deadline = tempfile.mkdtemp(dir=own.parent), time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": mark}) as parent:
        while not processes_with(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_with(mark), "it has begun"
        time.sleep(1)
        assert processes_with(mark), "it takes long"
        parent.kill()
    deadline = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(mark) == []
