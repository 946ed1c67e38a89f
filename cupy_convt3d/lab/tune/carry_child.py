"""What `carry` runs in one tree of sources and in another: the package that it imports says how it plans and compiles an entry.

Run by its text, not as a part of this package, so that an older package can be asked the same. A line of JSON in, a line out.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections import Counter
from typing import Any

_VARIABLE = re.compile(r"\.global .*?([\w$]+)(?:\[\d*\])?(?: = .*)?;")  # such as the tables of numbers that a compiler has used up
_PARAMETER = re.compile(r"\.param .*?([\w$]+)(?:\[\d*\])?")
_PLANNED = ("symbol", "grid", "block", "shared_bytes", "packs", "prepares", "beside")


def sections(cubin: bytes) -> dict[str, tuple[int, str]]:
    """Return size and digest of each section of a cubin that a GPU or its driver uses, by name: not lines, symbols and notes."""
    start, entry_bytes, count, names_at = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + number * entry_bytes) for number in range(count)]
    names = cubin[headers[names_at][4] :]
    found = {}
    for name_at, kind, _, _, offset, size, *_ in headers:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        if kind and "debug" not in name and not name.startswith(".note") and name not in (".strtab", ".shstrtab", ".symtab"):
            content = b"" if kind == 8 else cubin[offset : offset + size]  # 8: NOBITS, in memory alone
            found[name] = (size, hashlib.sha256(content).hexdigest()[:16])
    return found


def _instance(asked: dict[str, Any]) -> tuple[Any, Any]:
    """Return an entry's instance and its plan, as `tuning.fitted` and a backend have them."""
    from cupy_convt3d import registry
    from cupy_convt3d.problem import Problem
    from cupy_convt3d.source import Instance

    kernel = registry.kernels()[asked["kernel"]]
    kernel = kernel.replace_tunables(**{name: value for name, value in asked["tunables"].items() if name not in kernel.specialize})
    arguments = (Problem.parse(asked["problem"]), asked["instance"], asked["multiprocessors"])
    # Before binaries were made for a layout, all layouts had the same.
    layout = {"output_layout": asked["output_layout"]} if getattr(kernel, "knows_layout", False) else {}
    plan = kernel.plan(*arguments, **layout)
    return Instance(kernel, asked["instance"], plan.specialization), plan


def _facts() -> dict[str, Any]:
    from cupy.cuda import nvrtc

    from cupy_convt3d import registry
    from cupy_convt3d.source import code_digest

    digests = {name: code_digest(kernel) for name, kernel in registry.kernels().items()}
    return {"compiler": ".".join(map(str, nvrtc.getVersion())), "digests": digests}


def _plan(asked: dict[str, Any]) -> dict[str, Any]:
    from cupy_convt3d.backends.nvrtc import compiler_options
    from cupy_convt3d.source import include_directory

    instance, plan = _instance(asked)
    launches = [
        {**{name: getattr(launch, name) for name in _PLANNED}, "scalars": {name: int(value) for name, value in launch.scalars.items()}}
        for launch in plan.launches
    ]
    own, options = str(include_directory()), compiler_options(instance, asked["arch"])
    workspace = {name: numel for name, numel in plan.workspace.items() if numel}
    idle = {launch.symbol for launch in instance.kernel.launches} - {launch.symbol for launch in plan.launches}
    told = [option.replace(own, "include") for option in options]
    return {"launches": launches, "workspace": workspace, "options": told, "idle": sorted(idle)}


def _source(asked: dict[str, Any]) -> dict[str, Any]:
    from cupy_convt3d.backends.nvrtc import device_source

    return {"text": device_source(_instance(asked)[0])}


def instructions(ptx: str) -> list[str]:
    """Return the lines of PTX that instructions follow from: not those about source lines, of variables that nothing names, and of such
    parameters behind all others."""
    lines = (line.strip() for line in ptx.partition(".section")[0].splitlines())
    kept = [line for line in lines if not line.startswith((".loc", ".file", "//", "$L__tmp", "$L__func"))]
    names = Counter(name for line in kept for name in re.findall(r"[\w$]+", line))
    used: list[str] = []
    for line in kept:
        if line == ")":  # of a function's parameters
            while used and (unused := _PARAMETER.fullmatch(used[-1])) and names[unused[1]] == 1:
                used.pop()
        if not ((variable := _VARIABLE.fullmatch(line)) and names[variable[1]] == 1):
            used.append(line.rstrip(",") if line.startswith(".param") else line)
    return used


def _assembly(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the digest of an instance's PTX: where it is the same, so are the instructions that the assembler makes of it."""
    from cupy.cuda import nvrtc

    from cupy_convt3d import cache
    from cupy_convt3d.backends.nvrtc import compiler_options, device_source, version

    instance, arch = _instance(asked)[0], str(asked["arch"])
    options = compiler_options(instance, arch.replace("sm_", "compute_"))
    name = f"{instance.kernel.name}-{arch}-{instance.key('cuda', version(), *options)}.assembly"
    if (known := cache.load(name)) is not None:
        return {"": known.decode()}
    program = nvrtc.createProgram(device_source(instance), "kernel.cu", (), ())
    nvrtc.compileProgram(program, options)
    text = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    digest = hashlib.sha256("\n".join(instructions(text if isinstance(text, str) else text.decode())).encode()).hexdigest()
    cache.store(name, digest.encode())
    return {"": digest}


def _code(asked: dict[str, Any]) -> dict[str, Any]:
    from cupy_convt3d.backends.nvrtc import compile_cubin

    return sections(compile_cubin(_instance(asked)[0], asked["arch"])[0])


def main() -> None:
    """Answer until the requests end."""
    requests = {"plan": _plan, "source": _source, "assembly": _assembly, "code": _code}
    for line in sys.stdin:
        request, asked = json.loads(line)
        try:
            answer = _facts() if request == "facts" else requests[request](asked)
        except Exception as error:  # whatever that package raises is an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
