"""Pictures of transposed convolutions and of kernels; every function returns a matplotlib `Figure`.

The geometry of a problem: `tap_map`, `explore_taps` (with sliders), `contribution_count`, `residue_classes`. What was measured:
`speed_bars`, `roofline`, `error_histogram`, `error_map`, `tuning_landscape`, `volume_slices`.
"""

from .geometry import contribution_count, explore_taps, residue_classes, tap_map
from .results import error_histogram, roofline, speed_bars, volume_slices
from .trials import error_map, tuning_landscape

__all__ = [
    "contribution_count",
    "error_histogram",
    "error_map",
    "explore_taps",
    "residue_classes",
    "roofline",
    "speed_bars",
    "tap_map",
    "tuning_landscape",
    "volume_slices",
]
