"""Real input: the MRI volume that nibabel ships, and the transposed convolution that upsamples it trilinearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

VOLUME = ("tests", "data", "example4d.nii.gz")  # in nibabel's package


def mri_volume() -> np.ndarray[Any, Any]:
    """Return the first volume of the MRI that nibabel ships, (depth, height, width) = (24, 96, 128), as fp32."""
    import nibabel

    path = Path(nibabel.__file__).parent.joinpath(*VOLUME)
    return np.ascontiguousarray(np.asarray(nibabel.load(path).dataobj[..., 0]).T.astype(np.float32))


def trilinear_weight() -> np.ndarray[Any, Any]:
    """Return the (1, 1, 4, 4, 4) weight that, with stride 2 and padding 1, upsamples trilinearly by 2."""
    line = np.array([0.25, 0.75, 0.75, 0.25], np.float32)
    return np.einsum("i,j,k->ijk", line, line, line)[None, None]


def trilinear(volume: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return `volume` upsampled by 2 as `torch.nn.functional.interpolate(mode="trilinear", align_corners=False)` does.

    Torch computes it where it is installed.
    """
    try:
        import torch
    except ImportError:
        for axis in range(3):
            edge = [(1, 1) if a == axis else (0, 0) for a in range(3)]
            moved = np.moveaxis(np.pad(volume, edge, mode="edge"), axis, -1)
            pairs = (0.25 * moved[..., :-2] + 0.75 * moved[..., 1:-1], 0.75 * moved[..., 1:-1] + 0.25 * moved[..., 2:])
            volume = np.moveaxis(np.stack(pairs, -1).reshape(*moved.shape[:-1], -1), -1, axis)
        return volume
    source = torch.from_numpy(volume)[None, None]
    return np.asarray(torch.nn.functional.interpolate(source, scale_factor=2, mode="trilinear", align_corners=False)[0, 0])
