"""Memory that a judge shares with the kernel's process: arrays are laid out in it before a launch and read from it afterwards."""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_ALIGNMENT = 64
_KEPT_BYTES = 64 << 20  # after a larger example its pages go back to the system
_LANES = 32  # of a guarded arena, unless there are more arrays
_LANE_BYTES = 2 * 2**32 * 8  # an array ends in its middle, so that what a 32-bit index reaches on either side lies in the lane

Slot = tuple[int, str, tuple[int, ...]]  # where an array lies: the offset in bytes, the dtype, the shape


class Arena:
    """A file in memory that both processes map. It can't be made shorter: that would end whoever reads behind its end.

    Args:
        size: in bytes, of a file that can't be made longer either; 0: one that grows with what is laid out in it.
    """

    def __init__(self, size: int = 0) -> None:
        self.descriptor = _memory_file(size)
        self._map: mmap.mmap | None = None
        self._size = 0

    def lay_out(self, arrays: Mapping[str, Array]) -> tuple[dict[str, Slot], dict[str, Array]]:
        """Copy arrays to the arena; return where they are, and as they are there."""
        offsets = self._offsets([array.nbytes for array in arrays.values()])
        slots: dict[str, Slot] = {}
        views: dict[str, Array] = {}
        for (name, array), offset in zip(arrays.items(), offsets, strict=True):
            dtype, shape = array.dtype, array.shape
            slots[name] = (offset, dtype.name if dtype.kind == "V" else dtype.str, shape)
            views[name] = view = np.ndarray(shape, dtype, self._map, offset)
            view[...] = array
        return slots, views

    def _offsets(self, sizes: list[int]) -> list[int]:
        """Find room for arrays of so many bytes."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._require(end)
        return offsets

    def expose(self, slots: Iterable[Slot]) -> None:
        """Let this process use these slots; in an arena without guards it can use everything."""

    def neighbour(self, address: int, slots: Mapping[str, Slot]) -> str | None:
        """Say of which array, and on which side, an address lies that a guard keeps; None: it lies in none."""
        return None

    def view(self, slot: Slot) -> Array:
        """Return the array in a slot, which is not copied."""
        offset, name, shape = slot
        dtype = np.dtype(name)
        self._require(offset + math.prod(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, self._map, offset)

    def tidy(self) -> None:
        """Give back the pages of a large example, and those that a kernel has made in the file."""
        if self._map is not None and os.fstat(self.descriptor).st_blocks * 512 > _KEPT_BYTES and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE)

    def _require(self, size: int) -> None:
        if size <= self._size and self._map is not None:
            return
        wanted = max(size, 2 * self._size, 1 << 20)
        if os.fstat(self.descriptor).st_size < wanted:  # a kernel may have made it longer, which means nothing
            os.ftruncate(self.descriptor, wanted)
        self._map = mmap.mmap(self.descriptor, wanted)  # the old map goes with the last array in it
        self._size = wanted


class GuardedArena(Arena):
    """An arena in which pages without access surround each array, as far as a 32-bit index reaches.

    It is made before the kernel's process is forked, and lies at the same addresses in both. The judge can use all of it, the other
    what `expose` allows. Of the addresses only the pages that are touched exist. An array's last page ends in the middle of a lane.

    Raises:
        OSError: the system does not give that much address space.
    """

    def __init__(self) -> None:
        super().__init__(_LANES * _LANE_BYTES)
        self._require(_LANES * _LANE_BYTES)
        assert self._map is not None
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._exposed: dict[int, int] | None = None  # where each begins, by where it ends; None: everything is
        self._mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        self._mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def expose(self, slots: Iterable[Slot]) -> None:
        wanted = {end: begin for begin, end in map(_pages, slots) if begin < end}
        if self._exposed is None:
            self._protect(0, self._size, 0)
            self._exposed = {}
        old, self._exposed = self._exposed, wanted
        if wanted == old:
            return
        for end, begin in old.items():  # an array ends where another did, mostly: what they have in common stays as it is
            if begin < (least := wanted.get(end, end)):
                self._protect(begin, least, 0)
        for end, begin in wanted.items():
            if begin < (least := old.get(end, end)):
                self._protect(begin, least, mmap.PROT_READ | mmap.PROT_WRITE)

    def neighbour(self, address: int, slots: Mapping[str, Slot]) -> str | None:
        lane = self._lane(len(slots))
        for number, (name, slot) in enumerate(slots.items()):
            offset, (begin, end) = address - self._base, _pages(slot)
            if number * lane <= offset < (number + 1) * lane:
                of = name.partition(" ")[0]  # without the number of its run
                behind = f"{offset - end} bytes behind the last page of {of}"
                return behind if offset >= end else f"{begin - offset} bytes before the first page of {of}"
        return None

    def _offsets(self, sizes: list[int]) -> list[int]:
        lane, wholes = self._lane(len(sizes)), [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
        if sum(wholes) > _KEPT_BYTES:
            np.empty(sum(wholes), np.uint8)  # raises MemoryError past this process's limit, which has these addresses in it already
        return [number * lane + lane // 2 - whole for number, whole in enumerate(wholes)]

    def _lane(self, count: int) -> int:
        return self._size // max(_LANES, count) // (2 * mmap.PAGESIZE) * 2 * mmap.PAGESIZE

    def _protect(self, begin: int, end: int, rights: int) -> None:
        if self._mprotect(self._base + begin, end - begin, rights):
            raise MemoryError(f"no memory for {end - begin} bytes")


def _pages(slot: Slot) -> tuple[int, int]:
    """Return where the pages of a slot begin and end."""
    offset, name, shape = slot
    size = math.prod(shape) * np.dtype(name).itemsize
    return offset, offset + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _memory_file(size: int) -> int:
    if not hasattr(os, "memfd_create"):  # not Linux
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    descriptor = os.memfd_create("convt3d", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    if size:
        os.ftruncate(descriptor, size)
        seals |= fcntl.F_SEAL_GROW
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
