"""`convt3d calibrate`: what kernels and torch's own operator take on drawn layers, and the coefficients by which "auto" predicts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...cost import CardCosts, Costs, LibraryCosts
from ...kernel import Kernel
from .coefficients import HeldOut, fit, held_out
from .samples import Sample, Sweep, sweep

__all__ = ["HeldOut", "Sample", "Sweep", "calibrate", "fit", "held_out", "joined", "line", "sweep"]


def calibrate(sweeps: Sequence[Sweep], kernels: Mapping[str, Kernel], path: Path, *, library: bool = True) -> CardCosts:
    """Fit what sweeps have of these kernels, and of torch's operator, and put it into the file of costs at `path` as the first's card.

    What the file has of other cards and kernels stays, and with `library` false what is known of torch's operator.

    Raises:
        DataError: the file is damaged.
        MissingPackageError: scikit-learn is not installed.
        OSError: it cannot be written.
    """
    known = Costs.read(path)
    found = fit(joined(sweeps), kernels)
    if not library:
        found = replace(found, library=LibraryCosts())
    known.merged(found).save(path)
    return found


def joined(sweeps: Sequence[Sweep]) -> list[Sweep]:
    """Return the sweeps of each card as one; what was timed twice on a card counts with its shorter time."""
    cards: dict[str, Sweep] = {}
    samples: dict[str, dict[tuple[object, ...], Sample]] = {}
    for one in sweeps:
        cards.setdefault(one.card.device, one)
        found = samples.setdefault(one.card.device, {})
        for sample in one.samples:
            key = (
                *(getattr(sample, name) for name in ("pass_name", "problem", "layout", "kernel", "instance")),
                *sorted(sample.tunables.items()),
            )
            if key not in found or sample.ms < found[key].ms:
                found[key] = sample
    return [replace(one, samples=tuple(samples[device].values())) for device, one in cards.items()]


def line(found: HeldOut) -> str:
    """Return a row of the table that the command prints."""
    return (
        f"{found.precision:7s} {found.layout:13s} {found.layers:4d} layers  regret {found.regret:.3f} ({found.regret_95:.2f})  "
        f"torch / auto {found.speedup:.2f}x, worst {found.worst:.2f}x, {100 * found.losses:.0f}% of them below 0.95x"
    )
