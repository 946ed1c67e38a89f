"""Memory for tensors past 2^32 elements: addresses that are reserved, of which only the pages that are touched exist."""

from __future__ import annotations

import ctypes
import math
import mmap
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ...dtypes import DTYPES

Array = np.ndarray[Any, np.dtype[Any]]
_MOST_BYTES = 2**44  # from the first element of a tensor to the last
_NORESERVE = 0x4000  # of Linux; 3.13's mmap has it


def array_at(address: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Return the contiguous array at an address."""
    memory = memoryview((ctypes.c_ubyte * (math.prod(shape) * DTYPES[dtype].itemsize)).from_address(address))
    return np.ndarray(shape, DTYPES[dtype].numpy, memory)


@contextmanager
def reserved(size: int) -> Iterator[int]:
    """Yield the address of that many zero bytes, with pages on both sides, as far as a 32-bit index reaches, that fault.

    Raises:
        MemoryError: the system does not give that much address space.
    """
    page = mmap.PAGESIZE
    inside = -(-max(size, 1) // page) * page
    with _faulting(inside) as (start, allow):
        allow(start, inside)
        yield start + (inside - size) // 16 * 16  # the end lies at a page that faults, but for alignment


@contextmanager
def scattered(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Iterator[Array]:
    """Yield a tensor in memory of which only the pages that hold its elements do not fault.

    Raises:
        MemoryError: the system does not give that much address space.
    """
    kind, page = DTYPES[dtype].numpy, mmap.PAGESIZE
    size = span(shape, strides, dtype)
    offsets = sum(np.arange(count)[(...,) + (None,) * (len(shape) - a - 1)] * strides[a] for a, count in enumerate(shape))
    with _faulting(-(-size // page) * page) as (start, allow):
        for number in np.unique(np.asarray(offsets) * kind.itemsize // page):
            allow(start + int(number) * page, page)
        memory = memoryview((ctypes.c_ubyte * size).from_address(start))
        yield np.ndarray(shape, kind, memory, 0, tuple(step * kind.itemsize for step in strides))


def span(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor from its first element to the last."""
    last = sum(step * (count - 1) for step, count in zip(strides, shape, strict=True))
    return 0 if 0 in shape else (last + 1) * DTYPES[dtype].itemsize


def require_space(sizes: Sequence[int]) -> None:
    """Reserve address space for tensors of so many bytes, and give it back: what the kernel's process says of it counts for nothing.

    Raises:
        MemoryError: the system does not give that much, or a tensor is too long.
    """
    with ExitStack() as stack:
        for size in sizes:
            if size > _MOST_BYTES:
                raise MemoryError(f"a tensor of {size} bytes from its first element to the last")
            stack.enter_context(_faulting(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE))


@contextmanager
def _faulting(size: int) -> Iterator[tuple[int, Callable[[int, int], None]]]:
    """Yield the address of that many bytes that fault, as what surrounds them does, and a function that allows some of them."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    guard = 2**32 * 8

    def allow(address: int, count: int) -> None:
        if library.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(count), mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"no memory for {count} bytes")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        start = library.mmap(None, size + 2 * guard, 0, flags, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no address space for {size} bytes")
        try:
            yield start + guard, allow
        finally:
            library.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size + 2 * guard))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
