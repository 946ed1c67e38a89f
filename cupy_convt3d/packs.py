"""A packed weight that is kept between calls: only of a weight that has been declared frozen, and only while it looks the same.

Some kernels read the weight in an order of their own, and their first launch brings it into that order. Nothing tells of every write to
a tensor (`weight.data`, NumPy, another library, the replay of a CUDA graph), so by default each call packs the weight anew.
`nn.freeze` is the promise that nobody writes. What torch counts as a change (`weight._version`), or puts in the weight's place, is
noticed all the same.

A call that is captured in a CUDA graph neither uses nor keeps a packed weight. Its packing is captured too, so each replay packs the
weight as it is then, and the graph owns all the memory that it touches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class _Kept(NamedTuple):
    weight: Any  # alive, so that no other tensor is taken for it
    made_for: tuple[object, int, int]  # the plan whose launch made it, and the weight's version and address before
    stream: int  # on which it was packed; 0 on the host
    joined: set[int]
    workspaces: Mapping[str, Any]


class PackedWeight:
    """The place for one frozen weight's packed form: that of the last plan that ran."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __reduce__(self) -> tuple[type[PackedWeight], tuple[()]]:
        return PackedWeight, ()  # a copy, or another process, packs anew

    def find(self, weight: Any, plan: object, stream: int, device: int | None) -> Mapping[str, Any]:
        """Return the workspaces that hold the weight as `plan` packed it, ready on `stream`; none if there are none.

        What no longer serves is dropped here, before memory for the next is taken.
        """
        kept = self._kept
        if kept is None:
            return {}
        if kept.weight is not weight or kept.made_for != _made_for(weight, plan):
            self._kept = None
            return {}
        if stream not in kept.joined:
            _join(kept, stream, device)
        return kept.workspaces

    def keep(self, weight: Any, plan: object, stream: int, workspaces: Mapping[str, Any]) -> None:
        """Keep what a launch of `plan` on `stream` has packed, in place of what was kept before."""
        if not weight.is_inference():  # which has no version
            self._kept = _Kept(weight, _made_for(weight, plan), stream, {stream}, workspaces)

    def drop(self) -> None:
        """Free what is kept."""
        self._kept = None


def _made_for(weight: Any, plan: object) -> tuple[object, int, int]:
    return plan, weight._version, weight.data_ptr()


def _join(kept: _Kept, stream: int, device: int | None) -> None:
    """Make a stream wait until the weight is packed, and the memory wait for the stream; the host waits for neither."""
    import torch

    here, packed = torch.cuda.current_stream(device), torch.cuda.Event()
    packed.record(torch.cuda.ExternalStream(kept.stream, device=device))
    here.wait_event(packed)
    for workspace in kept.workspaces.values():
        workspace.record_stream(here)
    kept.joined.add(stream)
