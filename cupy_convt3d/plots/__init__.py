"""Pictures of transposed convolutions and of kernels; every function returns a matplotlib `Figure`.

The geometry of a problem: `tap_map`, `explore_taps` (with sliders), `contribution_count`, `residue_classes`. What was measured:
`speed_bars`, `roofline`, `ratio_distribution`, `error_histogram`, `error_map`, `tuning_landscape`, `volume_slices`.
"""

from ..errors import require

require("report", "cupy_convt3d.plots", "matplotlib")

from .geometry import contribution_count, explore_taps, residue_classes, tap_map  # noqa: E402
from .results import error_histogram, ratio_distribution, roofline, speed_bars, volume_slices  # noqa: E402
from .trials import error_map, tuning_landscape  # noqa: E402

__all__ = [
    "contribution_count",
    "error_histogram",
    "error_map",
    "explore_taps",
    "ratio_distribution",
    "residue_classes",
    "roofline",
    "speed_bars",
    "tap_map",
    "tuning_landscape",
    "volume_slices",
]
