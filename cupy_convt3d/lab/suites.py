"""The named problems that kernels are timed on, and the same problems scaled down to what one CPU core computes in an instant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from numbers import Real

from ..errors import ProblemError, ProblemTypeError, shown
from ..problem import AXES, Problem, Triple

HOST_FLOP_LIMIT = 4_000_000  # what the named problems are scaled down to on the host

# KernelBench level 1. Its 73 passes `groups` where its reference takes `output_padding` and then ignores it, so the file runs
# with one group (kb73_g1); kb73 is what its title says.
_KERNELBENCH = {
    "kb58": Problem(16, 32, 16, (16, 32, 64), (3, 5, 7)),
    "kb61": Problem(8, 48, 48, (64, 64, 64), (3, 3, 3)),
    "kb68": Problem(16, 32, 64, (64, 64, 64), (3, 5, 5)),
    "kb70": Problem(8, 48, 24, (96, 96, 96), (3, 3, 3)),
    "kb72": Problem(8, 32, 32, (12, 24, 48), (3, 5, 7), (2, 2, 2), (1, 2, 3), (1, 1, 1), groups=4),
    "kb73": Problem(4, 32, 32, (32, 64, 128), (3, 3, 3), (2, 2, 2), (1, 1, 1), groups=4),
    "kb73_g1": Problem(4, 32, 32, (32, 64, 128), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
    "kb77": Problem(16, 32, 64, (16, 32, 32), (3, 3, 3), (2, 2, 2), (1, 1, 1), dilation=(2, 2, 2)),
}

# Layers of real networks: two decoder levels of a 3D U-Net, a GAN's generator, a video autoencoder's decoder.
_LAYERS = {
    "unet_up1": Problem(2, 64, 32, (64, 64, 64), (2, 2, 2), (2, 2, 2)),
    "unet_up2": Problem(2, 320, 256, (16, 16, 16), (2, 2, 2), (2, 2, 2)),
    "gan_4s2p1": Problem(16, 256, 128, (16, 16, 16), (4, 4, 4), (2, 2, 2), (1, 1, 1)),
    "vae_3s2": Problem(1, 128, 128, (16, 64, 64), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
}

_DEPTHWISE = {"depthwise": Problem(4, 128, 128, (32, 32, 32), (4, 4, 4), (2, 2, 2), (1, 1, 1), groups=128)}


def _upsamplings(network: str, levels: tuple[tuple[int, int, Triple, Triple], ...]) -> dict[str, Problem]:
    """Return each level (Cin, Cout, input size, kernel = stride) at batch 1 and 2, as medical networks run."""
    return {
        f"{network}_{ins}to{outs}_n{batch}": Problem(batch, ins, outs, size, kernel, kernel)
        for ins, outs, size, kernel in levels
        for batch in (1, 2)
    }


# nnU-Net's decoder; where voxels are flat its last levels leave the depth alone (kernel and stride (1, 2, 2)).
_NNUNET = _upsamplings(
    "nnunet",
    (
        (320, 320, (8, 10, 12), (2, 2, 2)),
        (256, 128, (16, 20, 24), (2, 2, 2)),
        (128, 64, (32, 40, 48), (2, 2, 2)),
        (64, 32, (64, 80, 96), (2, 2, 2)),
    ),
) | _upsamplings("nnunet_flat", ((64, 32, (16, 128, 128), (1, 2, 2)),))

# SwinUNETR with 48 features on patches of 96^3.
_SWINUNETR = _upsamplings(
    "swinunetr",
    (
        (768, 384, (3, 3, 3), (2, 2, 2)),
        (384, 192, (6, 6, 6), (2, 2, 2)),
        (192, 96, (12, 12, 12), (2, 2, 2)),
        (96, 48, (24, 24, 24), (2, 2, 2)),
        (48, 48, (48, 48, 48), (2, 2, 2)),
    ),
)

# PSMNet's stacked hourglass on a cost volume.
_PSMNET = {
    "psmnet_64to64": Problem(1, 64, 64, (12, 16, 32), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    "psmnet_64to32": Problem(1, 64, 32, (24, 32, 64), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
}

# One to seven channels in, out or both: what a generator, an autoencoder and a segmentation network end with, and what may come first.
_FEW_CHANNELS = {
    "few_64to3_k4s2": Problem(16, 64, 3, (32, 32, 32), (4, 4, 4), (2, 2, 2), (1, 1, 1)),
    "few_128to1_k4s2": Problem(4, 128, 1, (32, 32, 32), (4, 4, 4), (2, 2, 2), (1, 1, 1)),
    "few_128to3_k3": Problem(1, 128, 3, (16, 64, 64), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    "few_32to1_k3s2": Problem(2, 32, 1, (48, 48, 48), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    "few_32to4_k2s2": Problem(2, 32, 4, (64, 64, 64), (2, 2, 2), (2, 2, 2)),
    "few_16to2_k2s2": Problem(2, 16, 2, (64, 64, 64), (2, 2, 2), (2, 2, 2)),
    "few_1to32_k3": Problem(2, 1, 32, (64, 64, 64), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    "few_3to64_k4s2": Problem(8, 3, 64, (32, 32, 32), (4, 4, 4), (2, 2, 2), (1, 1, 1)),
    "few_4to32_k2s2": Problem(2, 4, 32, (64, 64, 64), (2, 2, 2), (2, 2, 2)),
    "few_5to7_k3": Problem(4, 5, 7, (64, 64, 64), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    "few_7to5_k3s2": Problem(4, 7, 5, (48, 48, 48), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    "few_3to3_k5": Problem(4, 3, 3, (64, 64, 64), (5, 5, 5), (1, 1, 1), (2, 2, 2)),
}

# Layers as networks have them on which no configuration was searched: odd rows, few voxels, short rows, odd channels, flat kernels.
_ORDINARY = {
    "odd_rows_k3": Problem(8, 48, 96, (16, 40, 40), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
    "odd_rows_k5": Problem(8, 24, 48, (24, 24, 24), (5, 5, 5), (2, 2, 2), (2, 2, 2)),
    "odd_rows_few_in": Problem(64, 3, 24, (12, 28, 28), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
    "few_voxels_k4": Problem(16, 384, 192, (4, 4, 4), (4, 4, 4), (2, 2, 2), (1, 1, 1)),
    "few_voxels_1024": Problem(4, 1024, 256, (2, 2, 2), (4, 4, 4), (2, 2, 2), (1, 1, 1)),
    "latent_1x1x1": Problem(32, 256, 384, (1, 1, 1), (4, 4, 4)),
    "short_rows": Problem(2, 320, 256, (20, 20, 3), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    "kernel_1": Problem(4, 12, 2, (40, 40, 40), (1, 1, 1)),
    "patch_244": Problem(1, 256, 4, (8, 120, 240), (2, 4, 4), (2, 4, 4)),
    "depthwise_k5": Problem(2, 96, 96, (40, 48, 40), (5, 5, 5), (2, 2, 2), (2, 2, 2), groups=96),
    "odd_channels": Problem(2, 100, 50, (30, 30, 30), (4, 4, 4), (2, 2, 2), (1, 1, 1)),
    "mri_k2": Problem(1, 72, 40, (46, 55, 46), (2, 2, 2), (2, 2, 2)),
    "video_144": Problem(2, 128, 64, (8, 32, 32), (3, 4, 4), (1, 2, 2), (1, 1, 1)),
}

SUITES: dict[str, dict[str, Problem]] = {
    "kernelbench": _KERNELBENCH,
    "layers": _LAYERS,
    "core": {name: problem for name, problem in {**_KERNELBENCH, **_LAYERS}.items() if name != "kb73_g1"},
    "nnunet": _NNUNET,
    "swinunetr": _SWINUNETR,
    "psmnet": _PSMNET,
    "few_channels": _FEW_CHANNELS,
    "ordinary": _ORDINARY,
    "named": {**_KERNELBENCH, **_LAYERS, **_DEPTHWISE, **_NNUNET, **_SWINUNETR, **_PSMNET},
}


def suite(name: str) -> dict[str, Problem]:
    """Return the problems of a suite by their names; "core" has the eleven that summaries are given for.

    "named" has all but "few_channels" and "ordinary".

    Raises:
        ProblemError: there is no such suite.
    """
    if not isinstance(name, str) or name not in SUITES:
        raise ProblemError(f"suite={shown(name)}: must be one of {', '.join(SUITES)}")
    return dict(SUITES[name])


def named_problem(name: str) -> Problem:
    """Return a suite's problem by its name, or the one that a short name such as "n1_c1to2_i3_k3_s2" spells.

    Raises:
        ProblemError: it is neither.
    """
    known = (problems[name] for problems in SUITES.values() if name in problems) if isinstance(name, str) else ()
    return next(iter(known), None) or Problem.parse(name)


def scaled_down(problem: Problem, flop_limit: int) -> Problem:
    """Return a problem of at most `flop_limit` useful FLOP with the same kernel, stride, padding, dilation and bias.

    Batch, volume and channels are halved, always the one that is largest for its kind; groups only when nothing else is left.
    A problem that is small enough comes back as it is; one that can't get below the limit comes back as small as it gets.

    Raises:
        ProblemTypeError: `problem` is no Problem, or `flop_limit` no number.
    """
    if not isinstance(problem, Problem):
        raise ProblemTypeError(f"problem={shown(problem)}: must be a Problem")
    if not isinstance(flop_limit, Real):
        raise ProblemTypeError(f"flop_limit={shown(flop_limit)}: must be a number")
    while problem.flop > flop_limit:
        smaller = max(_reductions(problem), key=lambda reduction: reduction[0], default=None)
        if smaller is None:
            break
        problem = smaller[1]
    return problem


def _reductions(problem: Problem) -> Iterator[tuple[float, Problem]]:
    """Yield the problems one halving away, each with how far what is halved is above its own small size."""
    ins, outs = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    changes: list[tuple[float, dict[str, int | Triple]]] = []
    if problem.batch > 1:
        changes.append((problem.batch, {"batch": problem.batch // 2}))
    if ins > 1:
        changes.append((ins / 4, {"in_channels": ins // 2 * problem.groups}))
    if outs > 1:
        changes.append((outs / 4, {"out_channels": outs // 2 * problem.groups}))
    for axis in range(len(AXES)):
        size = list(problem.input_size)
        if size[axis] > 1:
            above = size[axis] / (problem.kernel_size[axis] + problem.stride[axis])
            size[axis] //= 2
            changes.append((above, {"input_size": (size[0], size[1], size[2])}))
    if problem.groups > 1 and problem.groups % 2 == 0:
        half = problem.groups // 2
        changes.append((0.0, {"groups": half, "in_channels": ins * half, "out_channels": outs * half}))
    for above, change in changes:
        try:
            yield above, replace(problem, **change)  # type: ignore[arg-type]
        except ProblemError:  # the padding would leave nothing of so small a volume
            continue
