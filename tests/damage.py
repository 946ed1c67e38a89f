"""Damaged copies of files: bytes that were lost or changed, and JSON whose values are others. A seed gives the same copies."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

# What stands in for a value: other types, other ranges, and text that is code to a compiler, a shell, Python or a path.
VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], {"a": {}}, "", "x", " ", "\x1b[2J", "\ud800", "\u202e", "a" * 5000, "nan", "NaN", "inf", "1"),
    *(0, 1, -1, 2, 3, 7, 15, 16, 64, 2**31 - 1, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.5, 1.5, 1e308, 5e-324),
    *(float("nan"), float("inf"), -float("inf")),
    *("1;system(\"x\")", "8\n#include \"/etc/passwd\"", "__import__('os')", "$(reboot)", "../../x", "/dev/zero", "x.cu", "a\0b"),
    *("fp16", "fp64", "bf16", "tf32", "fp32", "fprop", "dgrad", "host", "cuda", "thread", "ncdhw", "exact", "n1_c1to1_i1_k1", "n" * 99),
)


def damaged(text: str, seed: int, lines: bool = False) -> bytes:
    """Return a damaged copy of a JSON file, or of one with JSON in each of its lines."""
    generator = random.Random(seed)
    if generator.random() < 0.3:
        return _bytes(text.encode(), generator)
    if not lines:
        return json.dumps(_value(json.loads(text), generator)).encode()
    rows = text.splitlines()
    number = generator.randrange(len(rows))
    rows[number] = json.dumps(_value(json.loads(rows[number]), generator))
    return "\n".join([*rows, ""]).encode()


def damaged_toml(text: str, seed: int, lines: bool = False) -> bytes:
    """Return a damaged copy of a TOML file: of its bytes, or of one of its values, which JSON writes as TOML does."""
    generator = random.Random(seed)
    if generator.random() < 0.3:
        return _bytes(text.encode(), generator)
    rows = text.splitlines()
    number = generator.choice([number for number, row in enumerate(rows) if "=" in row])
    name, _, value = rows[number].partition("=")
    rows[number] = f"{name}= {json.dumps(_value([json.loads(value)], generator))[1:-1]}"
    return "\n".join([*rows, ""]).encode()


def _bytes(data: bytes, generator: random.Random) -> bytes:
    """Lose the end, a part, or change, double or add some bytes."""
    start, stop = sorted(generator.randrange(len(data) + 1) for _ in range(2))
    way = generator.randrange(6)
    if way == 0:
        return data[:start]
    if way == 1:
        return data[:start] + data[min(stop, start + 9) :]
    if way == 2:
        return data[:start] + bytes(generator.randrange(256) for _ in range(generator.randint(1, 4))) + data[start:]
    if way == 3:
        return data[:start] + data[start:stop] + data[start:]
    if way == 4:
        changed = bytearray(data)
        for _ in range(generator.randint(1, 5)):
            changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
        return bytes(changed)
    return generator.choice([b"", b"\0" * 100, b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"1" * 6000, b"null", b"[]", b"{}"])


def _value(data: Any, generator: random.Random) -> Any:
    """Change one to three values, names or lengths, anywhere in the tree."""
    data = copy.deepcopy(data)
    for _ in range(generator.randint(1, 3)):
        places = list(_places(data))
        if not places:
            return generator.choice(VALUES)
        holder, key = generator.choice(places)
        way = generator.random()
        if way < 0.75:
            holder[key] = copy.deepcopy(generator.choice(VALUES))
        elif way < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[generator.choice([str(v) for v in VALUES if v != "\ud800"])] = holder.pop(key)
        else:
            holder.insert(key, copy.deepcopy(holder[key]))
    return data


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items):
        yield data, key
        yield from _places(value)
