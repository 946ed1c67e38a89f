"""Packed weights that are kept between calls on torch tensors: at most one for each weight, as long as the weight is the same.

Some kernels read the weight in an order of their own, and their first launch brings it into that order. What that launch made is kept
with the weight's `_version`, which every in-place operation of torch's counts up, and dropped with the weight, with its memory, and at
each step of an optimizer: fused optimizers do not count. Only an eager call that records no gradient keeps one; a training step
changes the weight anyway, and what a compiled graph allocates belongs to the graph.

A call that is captured in a CUDA graph neither uses nor keeps one. Its packing is captured too, so each replay packs the weight as it
is then, and the graph owns all the memory that it touches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

_packs: dict[int, Pack] = {}  # by the id of the weight, which the pack's weak references keep from being taken for another's
_watches_optimizers = False


def forget_packed_weights() -> None:
    """Drop every packed weight that calls on torch tensors have kept; the next call with each weight packs it anew.

    A kernel may read the weight in an order of its own; calls under `torch.no_grad()` keep the weight in that order for the next one.
    Whatever torch counts as a change of the weight (`weight._version`) or puts in its place is noticed: in-place operations, optimizers,
    `load_state_dict`, a new `weight.data`. Call this after a change that torch does not count: a write through `weight.data` or
    `weight.detach().numpy()`, by a kernel of another library, by the replay of a CUDA graph, or by a sharded model (FSDP) that has
    loaded other weights. It also ends the weak references, which `torch.utils.swap_tensors` does not take.
    """
    _packs.clear()


class Pack:
    """One packed weight.

    Args:
        weight: the tensor it was made from.
        owner: the plan whose launch made it, and the only one that can read it.
        version: the weight's `_version` before it was packed.
        stream: handle of the stream on which it was packed; 0 on the host.
        workspaces: the memory, by name.
    """

    def __init__(self, weight: Any, owner: object, version: int, stream: int, workspaces: Mapping[str, Any]) -> None:
        drop: Callable[[object], None] = partial(_drop, id(weight))
        # NOTE: two tensors over one memory can each count for itself (`weight.data`), so the tensor must be the same one. The memory is
        # watched too, because a tensor can get another (`weight.data = ...`) and its address may come back.
        self._alive = (weakref.ref(weight, drop), weakref.ref(weight.untyped_storage(), drop))
        self.trained = weight.requires_grad
        self.workspaces = workspaces
        self._made_for = (owner, version, weight.data_ptr())
        self._stream = stream
        self._joined = {stream}

    def serves(self, weight: Any, owner: object, version: int) -> bool:
        """Whether the weight is as it was packed, for this plan."""
        return self._made_for == (owner, version, weight.data_ptr())

    def join(self, stream: int, device: int | None) -> None:
        """Make a stream wait until the weight is packed, and the memory wait for the stream; the host waits for neither."""
        if stream in self._joined:
            return
        import torch

        here, packed = torch.cuda.current_stream(device), torch.cuda.Event()
        packed.record(torch.cuda.ExternalStream(self._stream, device=device))
        here.wait_event(packed)
        for workspace in self.workspaces.values():
            workspace.record_stream(here)
        self._joined.add(stream)


def find(weight: Any, owner: object, version: int, stream: int, device: int | None) -> Mapping[str, Any]:
    """Return the workspaces that hold a weight packed by `owner`, ready on `stream`; none if it has changed or was never packed.

    A pack that no longer serves is dropped here, before memory for the next is taken.
    """
    pack = _packs.get(id(weight))
    if pack is None:
        return {}
    if not pack.serves(weight, owner, version):
        _packs.pop(id(weight), None)
        return {}
    pack.join(stream, device)
    return pack.workspaces


def keep(weight: Any, owner: object, version: int, stream: int, workspaces: Mapping[str, Any]) -> None:
    """Keep a weight that has been packed on `stream`, in place of what was kept of it before."""
    _watch_optimizers()
    _packs[id(weight)] = Pack(weight, owner, version, stream, workspaces)


def _drop(key: int, _: object) -> None:
    _packs.pop(key, None)


def _watch_optimizers() -> None:
    global _watches_optimizers
    if not _watches_optimizers:
        _watches_optimizers = True
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    import torch

    if not torch.compiler.is_compiling():  # a compiled step counts what it changes
        for key, pack in list(_packs.items()):
            if pack.trained:
                _packs.pop(key, None)
