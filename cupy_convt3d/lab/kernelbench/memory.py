"""The values that the judge of `convt3d kernelbench` and its children hand to each other, in memory that both map.

A value (a model's inputs, its outputs, its state) is a tree of lists, dictionaries and numbers whose tensors are described in the
tree and lie one after the other in a region of memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import torch

from ...errors import BackendError
from .channel import Channel

_ALIGNMENT = 256
_CUDA_BLOCK = 2 << 20
_MOST_BITS = 4096  # of an integer: Python spells none of more than 4300 digits
Tree = dict[str, Any]


class Region:
    """Memory of the judge that a child maps too: a file without a name whose size is sealed, or on a GPU an allocation shared by CUDA IPC.

    Attributes:
        bytes: the memory as a tensor of bytes.

    Raises:
        BackendError: the system has no such files, or CuPy is missing; another RuntimeError where CUDA IPC does not work.
    """

    def __init__(self, size: int, device: str) -> None:
        size = max(size, 1)
        self._descriptor = self._pointer = 0
        self._handle = ""
        if device == "cuda":
            runtime = _cuda_runtime()
            # NOTE: CUDA cuts smaller allocations from one block of that size, and a process can open a block's handle only once.
            self._pointer = runtime.malloc(-(-size // _CUDA_BLOCK) * _CUDA_BLOCK)
            try:
                self._handle = runtime.ipcGetMemHandle(self._pointer).hex()
            except RuntimeError:
                runtime.free(self._pointer)
                raise
            self.bytes = _cuda_bytes(self._pointer, size)
        else:
            if not hasattr(os, "memfd_create"):
                raise BackendError("kernelbench needs Linux: it shares memory with its children through memfd_create")
            self._descriptor = os.memfd_create("kernelbench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, size)
            # A child that shortened the file would end the judge with SIGBUS.
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.bytes = _host_bytes(self._descriptor, size)

    def send(self, channel: Channel, name: str, number: int, deadline: float) -> None:
        """Have the child map it under a name."""
        message = {"do": "map", "number": number, "name": name, "size": len(self.bytes), "handle": self._handle}
        channel.send(message, *([] if self._handle else [self._descriptor]), deadline=deadline)

    def close(self) -> None:
        del self.bytes
        if self._pointer:
            _cuda_runtime().free(self._pointer)
        else:
            os.close(self._descriptor)


def map_region(channel: Channel, message: Tree) -> torch.Tensor:
    """Return the memory that `Region.send` has announced, as bytes."""
    if message["handle"]:
        return _cuda_bytes(_cuda_runtime().ipcOpenMemHandle(bytes.fromhex(message["handle"])), message["size"])
    (descriptor,) = channel.receive_descriptors(1)
    memory = _host_bytes(descriptor, message["size"])
    os.close(descriptor)
    return memory


def _host_bytes(descriptor: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _cuda_bytes(pointer: int, size: int) -> torch.Tensor:
    import cupy

    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, size, None), 0)
    return torch.as_tensor(cupy.ndarray(size, cupy.uint8, memory), device="cuda")


def _cuda_runtime() -> Any:
    try:
        import cupy
    except ImportError:
        raise BackendError("CuPy is not installed") from None
    torch.cuda.current_stream()  # torch makes its context first, which CuPy then takes
    return cupy.cuda.runtime


class Unfit(TypeError):
    """A value that cannot be handed to another process."""


def flatten(value: Any) -> tuple[Tree, list[torch.Tensor]]:
    """Return a value's tree, and its tensors in the order of their places.

    Raises:
        Unfit: it holds something that is neither a tensor, a number, a string, None, nor a list, tuple or dictionary of such.
    """
    tensors: list[torch.Tensor] = []
    try:
        tree = _node(value, tensors)
    except Unfit:
        raise
    except Exception as error:  # nested tensors and lazy parameters have no shape
        raise Unfit(f"a {type(value).__name__} cannot be handed to another process: {error}") from error
    place = 0
    for _, leaf in leaves(tree):
        leaf["at"] = place
        place += _aligned(_bytes_of(leaf))
    return tree, tensors


def _node(value: Any, tensors: list[torch.Tensor]) -> Tree:
    # Not a function within the other: that would refer to itself, and keep gigabytes of tensors until Python looks for cycles.
    if isinstance(value, float):
        return _node(torch.tensor(value, dtype=torch.float64), tensors) | {"type": "float"}
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor or type(value) is torch.nn.Parameter  # not by ==, which a metaclass may define
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            kind = f"{value.layout}{' (quantized)' * value.is_quantized}, device {value.device}"
            raise Unfit(f"a tensor of layout {kind} cannot be handed to another process")
        tensors.append(value)
        return {
            "type": "Tensor" if plain else f"subclass {type(value).__name__} of Tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "device": value.device.type,
            "at": 0,
        }
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise Unfit(f"an integer of {value.bit_length()} bits cannot be handed to another process")
    if value is None or isinstance(value, (bool, int, str)):
        return {"type": type(value).__name__, "value": value}
    if isinstance(value, (list, tuple)):
        return {"type": "tuple" if isinstance(value, tuple) else "list", "items": [_node(item, tensors) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        nodes = {key: _node(value[key], tensors) for key in sorted(value)}
        return {"type": "dict", "items": {key: nodes[key] for key in value}}
    what = f"{type(value).__name__} with keys that are not all strings" if isinstance(value, dict) else type(value).__name__
    raise Unfit(f"a {what} cannot be handed to another process")


def leaves(tree: Tree, name: str = "") -> list[tuple[str, Tree]]:
    """Return the tensors of a tree by name, such as "[0]['a']", in the order of their places."""
    if "at" in tree:
        return [(name, tree)]
    items = tree.get("items", [])
    pairs = sorted(items.items()) if isinstance(items, dict) else enumerate(items)  # whatever order a model makes them in
    return [leaf for key, item in pairs for leaf in leaves(item, f"{name}[{key!r}]")]


def size_of(tree: Tree) -> int:
    """Return how many bytes the tensors of a tree take."""
    return max((leaf["at"] + _aligned(_bytes_of(leaf)) for _, leaf in leaves(tree)), default=0)


def _bytes_of(leaf: Tree) -> int:
    return int(torch.Size(leaf["shape"]).numel()) * int(getattr(torch, leaf["dtype"]).itemsize)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def view(memory: torch.Tensor, leaf: Tree) -> torch.Tensor:
    """Return one tensor of a tree, in place."""
    dtype = getattr(torch, leaf["dtype"])
    return memory[leaf["at"] : leaf["at"] + _bytes_of(leaf)].view(dtype).view(leaf["shape"])


def unflatten(tree: Tree, memory: torch.Tensor) -> Any:
    """Return the value, its tensors in place."""
    if "at" in tree:
        tensor = view(memory, tree)
        return float(tensor) if tree["type"] == "float" else tensor
    if "items" not in tree:
        return tree["value"]
    items = tree["items"]
    if isinstance(items, dict):
        return {key: unflatten(item, memory) for key, item in items.items()}
    built = [unflatten(item, memory) for item in items]
    return tuple(built) if tree["type"] == "tuple" else built


def store(tensors: list[torch.Tensor], tree: Tree, memory: torch.Tensor) -> None:
    """Copy tensors to their places."""
    for tensor, (_, leaf) in zip(tensors, leaves(tree), strict=True):
        view(memory, leaf).copy_(tensor)
