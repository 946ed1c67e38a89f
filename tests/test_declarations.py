"""Random declarations: whatever a kernel file says of itself, it is a kernel or a KernelError, at once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from cupy_convt3d.errors import KernelError
from cupy_convt3d.expressions import _program, evaluate, evaluate_all
from cupy_convt3d.kernel import HOST_MULTIPROCESSORS, MAX_SHARED_BYTES, Kernel, without_comments
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels

CODE = """#ifndef TILE
#define TILE 64
#endif
#ifndef WIDE
#define WIDE 1
#endif
__global__ void first(const float* weight, float* space, int taps) {}
__global__ void trial(const float* input, const float* weight, const float* bias, const float* space, float* output, const int tiles) {}
"""
PROBLEMS = (Problem(1, 1, 1, 1, 1), Problem(2, 4, 6, (3, 4, 5), (1, 2, 3), (3, 2, 1), 0, 0, 2, 2, True), Problem(1, 2, 2, (1, 1, 2**20), 3))
NAMES = (
    *("batch", "groups", "stride", "stride_d", "kernel_size", "output_numel", "output_size", "taps", "itemsize", "TILE", "WIDE", "tiles"),
    *("a", "b", "c", "nobody", "min", "True", "None", "__import__", "x.y", "multiprocessors", "padding_w", "input"),
)
OPERATORS = ("+", "-", "*", "*", "//", "%", "/", "**", "<<", "==", "<", "in", "and", "or", "if 1 else", "is", ",", "@", ":=")
TOML = ('"1.5"', '"false"', "1.5", "true", "[]", "{}", "[[1]]", "{a = 1}", '""', "-1", "0", "1", "9223372036854775807", "1979-05-27")
TEXTS = ('"\'a\' * 1000000000"', '"(0,) * 1000000000"', '"stride * 1000000000"', '"2 ** 999999"', '"9" * 9', '"\\u0000"', '"\\n1"')


def expression(generator: random.Random, depth: int = 0) -> str:
    way = generator.random()
    if depth > 5 or way < 0.3:
        return generator.choice([*NAMES, str(generator.choice([0, 1, 2, 3, 64, 2**31, 2**63, 10**30]))])
    parts = [expression(generator, depth + 1) for _ in range(generator.randint(1, 3))]
    if way < 0.65:
        return f"({parts[0]} {generator.choice(OPERATORS)} {parts[-1]})"
    if way < 0.85:
        return f"{generator.choice(['min', 'max', 'gcd', 'ceil_div', 'all', 'any', 'len', 'pow', 'eval'])}({', '.join(parts)})"
    return generator.choice([f"({parts[0]}, {parts[-1]})", f"{parts[0]}[{parts[-1]}]", f"-{parts[0]}", f"not {parts[0]}", f"[{parts[0]}]"])


def value(generator: random.Random) -> str:
    way = generator.random()
    if way < 0.55:
        return f'"{expression(generator)}"'
    if way < 0.7:
        return str(generator.choice([0, 1, 32, 64, 256, 1024, 1025, -1, 2**31, 10**9, 10**18, 10**25]))
    return generator.choice([*TOML, *TEXTS, f"[{value(generator)}, {value(generator)}]" if way < 0.98 else "[" * 2000 + "]" * 2000])


def declaration(generator: random.Random) -> str:
    """Return a declaration that is right but for a few keys."""
    keys = {"pass": '"fprop"', "dtypes": '["fp32"]', "deterministic": "true"}
    tables = {
        "constants": {"tiles": '"ceil_div(output_numel, TILE)"', "a": "3"},
        "restrictions": {'"groups >= 1"': '"why"'},
        "workspace": {"space": '"weight_numel"'},
        "search": {"TILE": "[32, 64]"},
        "specialize": {"WIDE": '"1 if taps > 3 else 2"'},
    }
    launches = [
        {"symbol": '"first"', "grid": "1", "block": "64", "packs": '"space"'},
        {"symbol": '"trial"', "grid": '"tiles"', "block": '"TILE"', "shared_bytes": '"4 * TILE"', "when": '"taps > 0"'},
    ]
    places: list[dict[str, str]] = [keys, *tables.values(), *launches]
    for _ in range(generator.randint(0, 3)):
        place = generator.choice(places)
        key = generator.choice([*place, *("a", "b", "c", "tiles", "x", '"a b"', '"A=1 -D"', '""', "input", "stride", "min")])
        if generator.random() < 0.15:
            place.pop(key, None)
        else:
            place[key] = value(generator)
    text = "".join(f"{key} = {given}\n" for key, given in keys.items())
    for name, table in tables.items():
        text += f"[{name}]\n" + "".join(f"{key} = {given}\n" for key, given in table.items())
    text += "".join("[[launch]]\n" + "".join(f"{k} = {v}\n" for k, v in launch.items()) for launch in launches)
    if generator.random() < 0.1:
        start = generator.randrange(len(text))
        text = text[:start] + generator.choice(["", "[", '"', "\0", "\ud800", "*/", "{", "é" * 9]) + text[start + generator.randrange(9) :]
    return f"/* convt3d\n{text}*/\n{CODE}"


def judge(text: str) -> bool:
    """Return whether it is a kernel for one of the problems."""
    try:
        kernel = Kernel.from_source(text, "trial")
    except KernelError:
        return False
    able = False
    for problem in PROBLEMS:
        try:
            if kernel.why_not(problem, kernel.dtypes[0]) is not None:
                continue
            plan = kernel.plan(problem, kernel.dtypes[0])
        except KernelError:
            continue
        able = True
        for launch in plan.launches:
            assert all(type(n) is int for n in (*launch.grid, *launch.block, launch.shared_bytes))
            assert 0 <= launch.shared_bytes <= MAX_SHARED_BYTES
        assert all(type(n) is int and n >= 0 for n in plan.workspace.values())
        assert all(type(n) is int for _, n in plan.specialization)
    return able


def run_declarations(first: int, count: int) -> None:
    able, slowest = 0, 0.0
    for seed in range(first, first + count):
        text = declaration(random.Random(seed))
        start = time.process_time()
        try:
            able += judge(text)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {text[:3000]}") from error
        slowest = max(slowest, time.process_time() - start)
    assert able > count // 10, "the rest shows little where nothing gets through"
    assert slowest < 2.0


def test_random_declarations() -> None:
    run_declarations(0, 300)


@pytest.mark.slow
def test_many_random_declarations() -> None:
    run_declarations(300, 10_000)


RIGHT = declaration(random.Random(1))
BASE = """/* convt3d
pass = "fprop"
{keys}
[[launch]]
grid = {grid}
block = {block}
shared_bytes = {shared}
*/
__global__ void trial(float* output) {{}}
"""


def declared(keys: str = "", grid: str = "1", block: str = "1", shared: str = "0") -> Kernel:
    return Kernel.from_source(BASE.format(keys=keys, grid=grid, block=block, shared=shared), "trial")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block": '"1.5"'}, "Constant is not allowed"),
        ({"block": "1.5"}, "must be one to three integers"),
        ({"block": "true"}, "must be one to three integers"),
        ({"keys": 'deterministic = "false"'}, "deterministic='false': must be true or false"),
        ({"keys": "deterministic = 0"}, "deterministic=0: must be true or false"),
        ({"keys": "multiplies_padding = 1"}, "multiplies_padding=1: must be true or false"),
        ({"keys": "skips_dead_taps = 1"}, "skips_dead_taps=1: must be true or false"),
        ({"keys": "spreads_nan = {'batch > 0' = ''}"}, "must be the sentence"),
        ({"keys": "spreads_nan = {'stride' = 'x'}"}, "is a tuple"),
        ({"grid": "\"'a' * 1000000000\""}, "Constant is not allowed"),
        ({"grid": '"(0,) * 1000000000"'}, "is a tuple"),
        ({"grid": '"stride * 1000000000"'}, "is a tuple"),
        ({"grid": '"stride"'}, "is a tuple"),
        ({"grid": '"99999999999999999999"'}, r"above 2\*\*63"),
        ({"grid": "99999999999999999999"}, "must be an integer or an expression"),
        ({"grid": "1" * 6000}, "no valid TOML"),
        ({"grid": f'"{"(" * 500}1{")" * 500}"'}, "expression"),
        ({"grid": f'"{"-" * 1500}1"'}, "expression"),
        ({"grid": f'"1{" + 1" * 4000}"'}, "the limit is 2000"),
        ({"keys": "constants = " + "[" * 5000 + "]" * 5000}, "no valid TOML"),
        ({"keys": "dtypes = [[1]]"}, "dtypes="),
        ({"keys": 'dtypes = ["fp32", 1]'}, "dtypes="),
        ({"keys": 'constants = {"A=1 -DB" = 1}'}, "must be a name of letters"),
        ({"keys": "workspace = {output = 1}"}, "is a tensor of fprop"),
        ({"keys": "restrictions = {'batch > 0' = 1}"}, "must be the sentence"),
        ({"keys": "constants = {" + ", ".join(f"a{n} = 1" for n in range(500)) + "}"}, "at most 400"),
        ({"shared": "1.5"}, "shared_bytes=1.5: must be an integer"),
        ({"shared": '"1.5"'}, "Constant is not allowed"),
    ],
)
def test_types_and_sizes_are_bounded(changes: dict[str, str], words: str) -> None:
    start = time.process_time()
    with pytest.raises(KernelError, match=words):
        declared(**changes)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("words", ["AXIS", "SPECIALIZED(AXIS, 0)", "TILE"])
def test_a_general_function_reads_no_number_of_a_layer(words: str) -> None:
    """It is compiled once for all problems; a host, which compiles all functions together, would not see it."""
    launch = '1\nsymbol = "trial"\ngeneral = true'
    source = BASE.format(keys="specialize = {AXIS = 'kernel_w'}", grid=launch, block=1, shared=0)
    source = source.replace("__global__", "#ifndef TILE\n#define TILE 4\n#endif\n__global__")
    Kernel.from_source(source, "trial")
    with pytest.raises(KernelError, match=f"general: trial reads {'TILE' if words == 'TILE' else 'AXIS'}, a number"):
        Kernel.from_source(source.replace("{}", f"{{ output[0] = {words}; }}"), "trial")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared": "-1"}, "shared_bytes=-1: must be from 0"),
        ({"shared": '"batch - 2"'}, "shared_bytes=-1: must be from 0"),
        ({"shared": str(MAX_SHARED_BYTES + 1)}, "the most a GPU gives"),
        ({"keys": "workspace = {space = -1}"}, "workspace space=-1"),
        ({"keys": 'constants = {a = "b * b", b = "c * c", c = "d * d", d = 65536}'}, "bits"),
        ({"keys": 'constants = {a = "b", b = "a"}'}, "unknown name"),
        ({"keys": "constants = {" + ", ".join(f'a{n} = "a{n + 1}"' for n in range(390)) + "}"}, "unknown name|too many constants"),
    ],
)
def test_values_are_bounded(changes: dict[str, str], words: str) -> None:
    kernel = declared(**changes)
    with pytest.raises(KernelError, match=words):
        kernel.plan(Problem(1, 1, 1, 1, 1), "fp32")


@pytest.mark.parametrize(
    "text",
    ["stride == (1, 1, 1)", "all((1, batch > 0))", "2 in stride", "min(stride)", "stride[0]", "(1 if batch else 2) * 3", "gcd(4, 6)"],
)
def test_what_declarations_use_is_allowed(text: str) -> None:
    assert evaluate(text, {"batch": 2, "stride": (1, 2, 1)}) in (0, 1, 2, 3)


def test_names_are_reckoned_in_any_order() -> None:
    expressions = (("c", "a + b"), ("b", "a * stride[1]"), ("a", "batch"), ("batch", 3))
    found = evaluate_all(expressions, {"batch": 2, "stride": (1, 2, 1)})
    assert found == {"stride": (1, 2, 1), "batch": 3, "a": 3, "b": 6, "c": 9}, "a declared name hides what is known"


@pytest.mark.parametrize(
    ("expressions", "words"),
    [
        ({"a": "b", "b": "a"}, "expression 'a': unknown name 'a'"),
        ({"a": "missing", "b": "1"}, "expression 'missing': unknown name 'missing'"),
        ({"b": "a // zero", "a": "7", "zero": "batch - 2"}, "expression 'a // zero': integer division"),
        ({"b": "gcd(a, a)", "a": "b"}, "unknown name"),
        ({f"a{n}": f"a{n + 1} * a{n + 1}" for n in range(64)} | {"a64": 2}, "'a59 \\* a59': its value has 65 bits"),
        ({"a": "1 +"}, "expression '1 \\+'"),
        ({"a": "b", "import os; a": "1", "None": "1"}, "unknown name 'b'"),
    ],
)
def test_what_is_wrong_among_names_is_named(expressions: dict[str, str | int], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        evaluate_all(tuple(expressions.items()), {"batch": 2})


@pytest.mark.parametrize("name", kernels())
def test_all_at_once_is_as_one_by_one(name: str) -> None:
    kernel = kernels()[name]
    for problem in map(Problem.parse, ("n1_c1to1_i1_k1", "n2_c6to4_i3x5x7_k3x4x5_s2x1x3_p1x0x2_g2", "n3_c64to32_i8_k2_s2_bias")):
        found = kernel.names(problem, kernel.dtypes[-1], HOST_MULTIPROCESSORS)
        for declared, text in {**kernel.specialize, **kernel.constants}.items():
            assert found[declared] == evaluate(text, found), declared
        assert _program(kernel._named) is not None


@pytest.mark.parametrize("text", ["stride == 1", "(1, 2) in stride", "stride[stride]", "((1, 2), 3)", "min((1, 2), (3, 4))", "not stride"])
def test_numbers_and_tuples_are_not_mixed(text: str) -> None:
    with pytest.raises(KernelError, match=r"tuple|number"):
        evaluate(text, {"batch": 2, "stride": (1, 2, 1)})


@pytest.mark.parametrize(
    "source",
    [
        "__global__ void __launch_bounds__(" * 20_000,
        "__global__ void __launch_bounds__(" + ") " * 300_000,
        "__global__ void " + "__launch_bounds__(32) " * 40_000,
        "__global__ " + "__maxnreg__(((" * 40_000,
        "__global__ void a(" * 40_000,
        "/* convt3d\n" * 60_000,
        "/*" * 400_000,
        '"\\"' * 250_000,
        "'\\'" * 250_000 + "\\",
        "__global__ void a(int" + " " * 500_000 + "!) {}",
        "__global__ void a(" + "a " * 250_000 + ") {}",
        "#ifndef A\n#define A 1" * 40_000,
        " " * 1_000_000,
    ],
    ids=range(13),
)
def test_no_text_is_read_for_long(source: str) -> None:
    start = time.process_time()
    for text in (source, RIGHT.split("*/")[0] + "*/\n" + source):
        with pytest.raises(KernelError):
            Kernel.from_source(text, "trial")
    without_comments(source)
    assert time.process_time() - start < 5.0


@pytest.mark.parametrize("keys", ["\n".join(f"k{n} = 1" for n in range(60_000)), "grid = 1\n" + " \t" * 400_000 + "\nzzz = 1"])
def test_no_line_is_looked_for_for_long(keys: str) -> None:
    start = time.process_time()
    with pytest.raises(KernelError, match=r"unknown keys .*\(line \d+\)"):
        Kernel.from_source(f"/* convt3d\n{keys}\n*/\n", "trial")
    assert time.process_time() - start < 5.0


def test_a_source_has_a_limit() -> None:
    with pytest.raises(KernelError, match="the limit is 1048576"):
        Kernel.from_source(RIGHT + " " * 2**20, "trial")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('rows = "input_h"', 'rows = "input_h ** 9"', 5),
        ('grid = "2"', 'grid = "(1, 2)"', 10),
        ("block = 64", "block = 1.5", 11),
        ("block = 64", "block = 64\nfoo = 1", 12),
        ('grid = "2"\n', "", 9),
        ('dtypes = ["fp32"]', 'dtypes = ["fp99"]', 3),
        ("[constants]", "[tables]", 4),
    ],
)
@pytest.mark.parametrize("as_file", [True, False])
def test_what_is_wrong_with_a_declaration_is_named_with_its_line(old: str, new: str, line: int, as_file: bool, tmp_path: Path) -> None:
    source = """/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[constants]
rows = "input_h"
[[launch]]
grid = "1"
block = 128
[[launch]]
grid = "2"
block = 64
*/
__global__ void mine(const float* input, const float* weight, float* output) {}
"""
    path = tmp_path / "mine.cu"
    path.write_text(source.replace(old, new))
    assert source.count(old) == 1
    with pytest.raises(KernelError) as found:
        Kernel.from_file(path) if as_file else Kernel.from_source(path.read_text())
    assert str(found.value).endswith(f"({path}:{line})" if as_file else f"(line {line})")
