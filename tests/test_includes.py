"""What a source includes, against what compilers say, and which binaries an edited header makes anew."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from selection import some

from cupy_convt3d import includes
from cupy_convt3d.backends.host import _EVERY_KERNELS, HostBackend, compiler
from cupy_convt3d.errors import KernelError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.registry import kernel
from cupy_convt3d.source import Instance, code_alone, code_digest, headers_of, include_directory

WAYS = {
    '#include "a.cuh"': {"a.cuh"},
    "#include <a.cuh>": {"a.cuh"},
    "#if 0\n  #  include /* why */ <a.cuh>  // here\n#endif": {"a.cuh"},
    "/* x */ #include \\\n \"a.cuh\"": {"a.cuh"},
    '%:include "a.cuh"': {"a.cuh"},
    '#if __has_include("a.cuh")\n#endif': {"a.cuh"},
    '#include "more/b.cuh"': {"more/b.cuh", "more/c.cuh", "a.cuh"},
    "#define NAME <a.cuh>\n#include NAME": {"a.cuh", "more/b.cuh", "more/c.cuh", "convt3d/standard/d.h", "convt3d/host/e.h"},
    "#include <unknown>": {"convt3d/standard/d.h"},
    'const char* text = "include a.cuh";': set(),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "a.cuh": "",
        "more/b.cuh": '#include "c.cuh"\n#include "convt3d/host/e.h"\n',
        "more/c.cuh": '#include "a.cuh"\n',
        "convt3d/standard/d.h": "",
        "convt3d/host/e.h": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("text", WAYS)
def test_every_way_to_include(root: Path, text: str) -> None:
    assert includes.headers([text], root, {}, host=False).keys() == WAYS[text]


def test_an_overlay_comes_first_and_the_host_sees_its_own_headers(root: Path) -> None:
    found = includes.headers(['#include "more/b.cuh"'], root, {"more/c.cuh": '#include "new.h"', "new.h": "1"}, host=True)
    assert found.keys() == {"more/b.cuh", "more/c.cuh", "new.h", "convt3d/host/e.h"} and found["new.h"] == "1"
    with includes.tree(root, {"more/c.cuh": "2", "new/x.h": "3"}) as copy:
        assert [(copy / name).read_text() for name in ("more/c.cuh", "new/x.h", "a.cuh")] == ["2", "3", ""]
        assert len([path for path in copy.rglob("*") if path.is_file()]) == 6
    assert not copy.exists() and (root / "more/c.cuh").read_text() != "2"


def test_no_file_is_missed_that_the_compiler_opens() -> None:
    """g++ names what it opened: for the host as it is, and as NVRTC sees the headers, with `__CUDACC__` and without CUDA's own."""
    root = include_directory()

    def opened(text: str, *flags: str) -> set[str]:
        command = [compiler(), "-std=c++17", "-M", f"-I{root}", *flags, "-x", "c++", "-"]
        words = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.split()
        return {str(Path(word).relative_to(root)) for word in words if word.startswith(str(root))}

    every = "".join(f'#include "{path.relative_to(root)}"\n' for path in (root / "convt3d").rglob("*.cuh"))
    on_host = opened(_EVERY_KERNELS + every, f"-I{root}/convt3d/host/shim", "-DCONVT3D_FP32")
    assert len(on_host) > 30 and on_host <= includes.headers([_EVERY_KERNELS + every], root, {}, host=True).keys()
    on_device = opened(every, "-D__CUDACC__", "-DCONVT3D_FP32", "-MG")
    assert len(on_device) > 20 and on_device <= includes.headers([every], root, {}, host=False).keys()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_each_header_includes_what_it_names(precision: str) -> None:
    """A block compiles alone, behind what every kernel includes first and the tunables that it takes from its kernel."""
    root = include_directory()
    flags = ["-std=c++17", "-fsyntax-only", f"-I{root}", f"-I{root}/convt3d/host/shim", f"-DCONVT3D_{precision}", "-x", "c++", "-"]
    headers = [path for folder in ("core", "ptx", "pipe", "epilogue") for path in sorted((root / "convt3d" / folder).glob("*.cuh"))]
    assert len(headers) > 30
    failed = {}
    for path in headers:
        tunables = "#define ROWS 1\n#define STAGES 2\n" if path.name == "patch_wgmma.cuh" else ""
        text = f'{_EVERY_KERNELS}{tunables}#include "convt3d.cuh"\n#include "{path.relative_to(root)}"\n'
        found = subprocess.run([compiler(), *flags], input=text, capture_output=True, text=True)
        if found.returncode:
            failed[path.name] = found.stderr[:500]
    assert not failed


def test_a_header_makes_those_anew_that_include_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(include_directory(), tmp_path / "include")
    monkeypatch.setenv("CONVT3D_KERNELS", str(tmp_path))
    gather, taps = Kernel.from_source(kernel_text("fprop_gather"), "gather"), Kernel.from_source(kernel_text("fprop_depthwise"), "taps")

    def keys() -> dict[str, tuple[str, ...]]:
        return {
            k.name: (Instance(k, "fp32").key("host", prelude=_EVERY_KERNELS), Instance(k, "fp32").key("cuda"), code_digest(k))
            for k in (gather, taps)
        }

    def changed_by(name: str) -> dict[str, list[bool]]:
        before = keys()
        path = tmp_path / "include" / name
        path.write_text(path.read_text() + "\nstatic const int one_more = 1;\n")
        return {name: [a != b for a, b in zip(before[name], after, strict=True)] for name, after in keys().items()}

    assert changed_by("convt3d/core/taps.cuh") == {"gather": [False] * 3, "taps": [True] * 3}
    assert changed_by("convt3d/core/geometry.cuh") == {"gather": [True] * 3, "taps": [True] * 3}
    assert changed_by("convt3d/host/block.h") == {"gather": [True, False, False], "taps": [True, False, False]}
    assert changed_by("convt3d/pipe/row_tile.cuh") == {"gather": [False] * 3, "taps": [False] * 3}


def kernel_text(name: str) -> str:
    return (Path(__file__).parents[1] / "kernels" / f"{name}.cu").read_text()


def test_an_overlay_is_compiled_for_its_kernel_alone() -> None:
    plain = kernel("fprop_gather")
    name = "convt3d/core/geometry.cuh"
    broken = plain.replace_headers({name: headers_of(plain, host=False)[name] + "\n#error planted\n"})
    assert Instance(broken, "fp32").key("host") != Instance(plain, "fp32").key("host")
    with pytest.raises(RuntimeError, match="planted"):
        HostBackend(optimize=False).library(Instance(broken, "fp32"))
    assert HostBackend(optimize=False).library(Instance(plain, "fp32")).exists()
    spaced = plain.replace_headers({name: headers_of(plain, host=False)[name] + "\n// another comment\n"})
    assert HostBackend(optimize=False).library(Instance(spaced, "fp32")) != HostBackend(optimize=False).library(Instance(plain, "fp32"))


SOURCE = '/* convt3d\npass = "fprop"\ndtypes = ["fp32"]\n[[launch]]\ngrid = 1\nblock = 1\n*/\n'
BODY = 'extern "C" __global__ void k(float* output) { output[0] = ONE; }\n'
OUTSIDE = "lies outside of the kernel's folder .*; set CONVT3D_INCLUDE"
REFUSED = {
    '#include "{outside}/one.h"': OUTSIDE,
    "#include <{outside}/one.h>": OUTSIDE,
    '#include "../outside/one.h"': OUTSIDE,
    "#include <../outside/one.h>": "leads out of the folders of headers",
    '#include "convt3d/../../../../etc/passwd"': "leads out of the folders of headers",
    '#include "link.h"': OUTSIDE,
    '#include "linked/one.h"': OUTSIDE,
    '#include "chain.h"': OUTSIDE,
    '#include "pipe.h"': "is no regular file",
    '#include "/dev/stdin"': OUTSIDE,
    "#include </etc//passwd>": OUTSIDE,
    "#define NAME </etc/passwd>\n#include NAME": "by a macro could be any file",
    '#define $f "/etc/passwd"\n#include $f': "by a macro could be any file",
    '#define \\u00e9x "/etc/passwd"\n#include \\u00e9x': "by a macro could be any file",
    '#define \u00e9 "/etc/passwd"\n%:import \u00e9': "by a macro could be any file",
    '#define $f(x) "/etc/passwd"\n#include /* of */ $f(1)': "by a macro could be any file",
    '#include R"(/etc/passwd)"': "by a macro could be any file",
    "#include /* /* */ </etc/passwd>": "by a macro could be any file",
    '/*\n#include "x*/ #include "/etc/passwd"': OUTSIDE,
    '#  /* a */ inc\\\nlude /* b */ "{outside}/one.h"': OUTSIDE,
    '%:include "{outside}/one.h"': OUTSIDE,
    '#if 1 //\n#import "{outside}/one.h"\n#endif': OUTSIDE,
    'const char* t = R"( /* )";\n#include_next "{outside}/one.h"': OUTSIDE,
    '#if __has_include("{outside}/one.h")\n#endif': OUTSIDE,
    'const char t[] = {\n#embed "/etc/passwd"\n};': OUTSIDE,
}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "outside" / "one.h").write_text("#define ONE 1\n")
    (tmp_path / "mine" / "link.h").symlink_to(tmp_path / "outside" / "one.h")
    (tmp_path / "mine" / "linked").symlink_to(tmp_path / "outside")
    (tmp_path / "mine" / "chain.h").write_text('\n#include "sub/chain.h"\n')
    (tmp_path / "mine" / "sub" / "chain.h").write_text('#include "../../outside/one.h"\n')
    (tmp_path / "mine" / "sub" / "up.h").write_text('#include "../two.h"\n')
    (tmp_path / "mine" / "two.h").write_text("#define ONE 1\n")
    os.mkfifo(tmp_path / "mine" / "pipe.h")
    return tmp_path


NO_FILE = "a #line may have a number alone"
ANY_FILE = "__has_include could be of any file"
REFUSED_TOO = {
    '\r#include "/etc/passwd"': "a carriage return with no newline behind it",
    '#\rinclude\r"/etc/passwd"': "a carriage return with no newline behind it",
    '#line 2 "/etc/passwd"': NO_FILE,
    '# 2 "/etc/passwd"': NO_FILE,
    '#/**/2/**/R"(/etc/passwd)"': NO_FILE,
    '#line 2 /**/ "/etc/passwd" /**/': NO_FILE,
    '%:line 2 /*\n*/ "/dev/zero"': NO_FILE,
    '#define AT 2 "/etc/passwd"\n#line AT': NO_FILE,
    '#define FILE "/etc/passwd"\n#line 2 FILE': NO_FILE,
    '#define $f "/etc/passwd"\n#line 2 $f': NO_FILE,
    '# 2 /* /* */ "/etc/passwd"': NO_FILE,
    '# /* /* */ include "/etc/passwd"': "a comment behind a # must end, and hold no other",
    '#if __has_include/**/("/etc/passwd")\n#endif': "#include of /etc/passwd lies outside",
    '#define F "/etc/passwd"\n#if __has_include(F)\n#endif': ANY_FILE,
    '#define F "/etc/passwd"\n#if __has_include /**/ (F) /**/ ("own.h")\n#endif': ANY_FILE,
    '#define H __has_include\n#if H ("/etc/passwd")\n#endif': ANY_FILE,
    '#define P ("/etc/passwd")\n#if __has_include P\n#endif': ANY_FILE,
    '#define F "/etc/passwd"\n#define P(defined) defined __has_include (F)\n#if P(0+)\n#endif': ANY_FILE,
}


@pytest.mark.parametrize("text", REFUSED_TOO)
def test_a_kernel_has_no_files_named_to_the_compiler(tmp_path: Path, text: str) -> None:
    path = tmp_path / "k.cu"
    path.write_bytes(f"{SOURCE}{text}\n{BODY}".encode())
    with pytest.raises(KernelError, match=rf"k\.cu:\d+: {REFUSED_TOO[text]}"):
        Kernel.from_file(path)
    with pytest.raises(KernelError, match=rf"k\.cu:\d+: {REFUSED_TOO[text]}"):
        Kernel.from_source(f"{SOURCE}{text}\n{BODY}", "k")


REPEATED = (
    *("/*\n", "/*", "#/*\n", "#/*", "#/**/", "/*\n#/**/ ", "*/#/*", "*/#include<", "#include <a>\n"),
    *("#line 1/*", "# 1", "__has_include/*", "__has_include(<", "#if defined(__has_include) &&"),
)


@pytest.mark.parametrize("repeated", some(REPEATED))
def test_a_long_text_is_read_in_time(repeated: str) -> None:
    begun = time.process_time()
    for end in ("", "*/"):
        text = repeated * ((1 << 20) // len(repeated)) + end
        with contextlib.suppress(KernelError):
            includes.require_inside(text, "k.cu")
        includes._names(text)
        code_alone(text)
    assert time.process_time() - begun < 8


def test_what_names_no_file_is_no_harm() -> None:
    asks = "#ifdef __has_include\n#if defined(__has_include) && __has_include( <cmath> )\n#define ONE 1\n#endif\n#endif\n"
    text = f"{SOURCE}{asks}#line 7\r\n# 9\n#line 8 // here\n// # 1 of 2\n{BODY}"
    assert HostBackend(optimize=False).library(Instance(Kernel.from_source(text, "k"), "fp32")).exists()


@pytest.mark.parametrize("text", REFUSED)
def test_a_kernel_includes_nothing_from_elsewhere(folders: Path, text: str) -> None:
    path = folders / "mine" / "k.cu"
    path.write_text(SOURCE + text.replace("{outside}", str(folders / "outside")) + "\n" + BODY)
    with pytest.raises(KernelError, match=rf"\.(cu|h):\d+: #include of .*{REFUSED[text]}") as refused:
        Kernel.from_file(path)
    if "\n" not in text and "chain" not in text:
        assert str(refused.value).startswith(f"{path}:8: ")
    if "/etc" in text or "{outside}" in text:
        with pytest.raises(KernelError, match=r"k\.cu:\d+: #include of"):
            Kernel.from_source(path.read_text(), "k")
    if "chain" in text:
        return
    plain = Kernel.from_source(SOURCE + BODY, "k")
    with pytest.raises(KernelError, match="#include of"):
        dataclasses.replace(plain, path=path).replace_source(path.read_text())


def test_folders_that_are_allowed(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVT3D_INCLUDE", f"/nowhere:{folders / 'outside'}")
    path = folders / "mine" / "k.cu"
    for name in ("../outside/one.h", "link.h", "chain.h", "sub/up.h", f"{folders}/outside/one.h"):
        path.write_text(f'{SOURCE}#include "{name}"\n{BODY}')
        assert HostBackend(optimize=False).library(Instance(Kernel.from_file(path), "fp32")).exists()
    monkeypatch.delenv("CONVT3D_INCLUDE")
    path.write_text(f'{SOURCE}#include "sub/up.h"\n#include <cmath>\n#include "convt3d.cuh"\n{BODY}')
    assert Kernel.from_file(path).headers.keys() == {folders / "mine/sub/up.h", folders / "mine/two.h"}
