"""Counts, in the machine code of a kernel's loops, the cycles in which multiply-adds wait for the register file.

    python benchmarks/register_ports.py KERNEL[.cu] PROBLEM [--dtype fp32] [--arch sm_90a] [NAME=VALUE ...]

PROBLEM is a name of `convt3d bench`'s suites or a problem's short name; NAME=VALUE sets a tunable. No GPU is needed, but nvdisasm, of the
CUDA toolkit or of PyPI's nvidia-cuda-nvdisasm; it has to know what the NVRTC writes that CuPy found.

The model: registers lie in two banks, even and odd, and each gives one operand a cycle. An operand marked `.reuse` is kept for the
same place of the next instruction. One read may wait in each bank; an instruction that would leave more waits itself. On kb61 (kernel
fprop_implicit_gemm_simt, one H100) the places of these waits are those of ncu's dispatch stalls: docs/performance/fprop_flattened_simt.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cupy_convt3d import Kernel, registry
from cupy_convt3d.backends.nvrtc import compile_cubin
from cupy_convt3d.lab.suites import SUITES
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import Instance

MULTIPROCESSORS = 132  # an H100's
WAITING = 1  # reads of a bank
LEAST_PRODUCTS = 60  # of a piece of code that is worth a line
_STORES = ("STS", "STG", "ST", "LDGSTS", "RED", "ATOMS")
_REGISTER = re.compile(r"(?<![UA-Z])R(\d+)(\.reuse)?")


def disassemble(cubin: bytes, symbol: str) -> list[str]:
    """Return the instructions of a function, and an empty one wherever a branch may lead."""
    tool = shutil.which("nvdisasm")
    if tool is None:
        sys.exit("nvdisasm is not on the PATH: it comes with the CUDA toolkit and with PyPI's nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin + b"\0")  # CuPy takes the last zero for the end of a string
        text = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    section = next(part for part in re.split(r"\.section\s+\.text\.", text) if part.startswith(f"{symbol},"))
    found = re.finditer(r"^\s*\.L\w+:|/\*[0-9a-f]{4,5}\*/\s+(.*?);", section, re.MULTILINE)
    return [(match[1] or "").strip() for match in found]


def reads(instruction: str, kept: dict[int, int]) -> tuple[list[int], dict[int, int]]:
    """Return the registers it reads, but for those kept from the instruction before, and what it keeps by operand."""
    match = re.match(r"(?:@!?U?P\w+ )?([\w.]+)\s*(.*)", instruction)
    assert match is not None
    operands = match[2].split(", ")
    sources = operands if match[1].split(".")[0] in _STORES else operands[1:]
    found, keeps = [], {}
    for place, operand in enumerate(sources):
        for register, reuse in _REGISTER.findall(operand):
            if kept.get(place) != int(register):
                found.append(int(register))
            if reuse:
                keeps[place] = int(register)
    return found, keeps


def waits(loop: Sequence[str]) -> int:
    """Return the cycles of one round of a loop in which nothing is issued because a bank is busy."""
    backlog, kept, counted = [0, 0], {}, 0
    for _ in range(2):  # the second begins as the first has ended
        counted = 0
        for instruction in loop:
            found, kept = reads(instruction, kept)
            for register in found:
                backlog[register % 2] += 1
            backlog = [max(0, each - 1) for each in backlog]
            while max(backlog) > WAITING:
                counted += 1
                backlog = [max(0, each - 1) for each in backlog]
    return counted


def pieces(code: Sequence[str]) -> Iterator[list[str]]:
    """Yield what lies between branches, the places where they lead, and barriers, and has multiply-adds."""
    piece: list[str] = []
    for instruction in code:
        if instruction:
            piece.append(instruction)
        if not instruction or re.search(r"\b(BRA|EXIT|RET)\b|BAR\.SYNC", instruction):
            if sum("FFMA" in each for each in piece) >= LEAST_PRODUCTS:
                yield piece
            piece = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kernel")
    parser.add_argument("problem")
    parser.add_argument("tunables", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--arch", default="sm_90a")
    options = parser.parse_args()
    kernel = Kernel.from_file(options.kernel) if options.kernel.endswith(".cu") else registry.kernel(options.kernel)
    kernel = kernel.replace_tunables(**{name: int(value) for name, value in (text.split("=") for text in options.tunables)})
    problem = SUITES["named"].get(options.problem) or Problem.parse(options.problem)
    plan = kernel.plan(problem, options.dtype, MULTIPROCESSORS)
    cubin, _ = compile_cubin(Instance(kernel, options.dtype, plan.specialization), options.arch)
    print("| instructions | multiply-adds | cycles lost at the ports | multiply-adds a cycle |\n|---|---|---|---|")
    for launch in plan.launches:
        for piece in pieces(disassemble(cubin, launch.symbol)):
            products, lost = sum("FFMA" in instruction for instruction in piece), waits(piece)
            print(f"| {len(piece)} | {products} | {lost} | {products / (len(piece) + lost):.2f} |")


if __name__ == "__main__":
    main()
