"""`convt3d calibrate`: what kernels and torch's own operator take on drawn layers, and the coefficients by which "auto" predicts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...cost import CardCosts, Costs
from ...errors import DataError
from ...kernel import Kernel
from .coefficients import HeldOut, fit, held_out
from .samples import Sample, Sweep, sweep

__all__ = ["HeldOut", "Sample", "Sweep", "calibrate", "fit", "held_out", "joined", "line", "sweep"]


def calibrate(sweeps: Sequence[Sweep], kernels: Mapping[str, Kernel], path: Path, *, library: bool = True) -> CardCosts:
    """Fit what sweeps of one card have of these kernels, and of torch's operator, and put it into the file of costs at `path`.

    What the file has of other cards and kernels stays, and with `library` false what is known of torch's operator.

    Raises:
        DataError: the file is damaged, or the sweeps are of two cards.
        OSError: it cannot be written.
    """
    known = Costs.read(path)
    found = fit(joined(sweeps), kernels)
    if not library:
        found = replace(found, library=())
    known.merged(found).save(path)
    return found


def joined(sweeps: Sequence[Sweep]) -> Sweep:
    """Return sweeps of one card as one; what was timed twice counts with its shorter time.

    Raises:
        DataError: they are of two cards.
    """
    samples: dict[tuple[object, ...], Sample] = {}
    for one in sweeps:
        if one.card.device != sweeps[0].card.device:
            raise DataError(f"sweeps of {sweeps[0].card.device} and {one.card.device}: must be of one card")
        for sample in one.samples:
            key = (
                *(getattr(sample, name) for name in ("pass_name", "problem", "layout", "kernel", "instance")),
                *sorted(sample.tunables.items()),
            )
            if key not in samples or sample.ms < samples[key].ms:
                samples[key] = sample
    return Sweep(sweeps[0].card, tuple(samples.values()))


def line(found: HeldOut) -> str:
    """Return a row of the table that the command prints."""
    return (
        f"{found.precision:7s} {found.layout:13s} {found.layers:4d} layers  regret {found.regret:.3f} ({found.regret_95:.2f})  "
        f"torch / auto {found.speedup:.2f}x, worst {found.worst:.2f}x, {100 * found.losses:.0f}% of them below 0.95x"
    )
