"""What of a kernel can be run as an example: its configurations, element types, kinds of tensors, and problems it can do."""

from __future__ import annotations

import ast
import math
import random
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ... import registry
from ...kernel import HOST_MULTIPROCESSORS, Kernel, device_names
from ...problem import Problem
from ...source import code_alone
from .. import strategies
from ..run.verify import APART, SEEDS
from ..tensors import KINDS, SPECIAL_KINDS, kinds_of
from .corners import declared

# The tunables of a kernel that are tile sizes, and the quantity whose tails they have.
_TILES = {
    "TILE_VOXELS": "output_voxels",
    "TILE_CHANNELS": "out_channels_per_group",
    "TILE_DEPTH": "in_channels_per_group",
    "SPLIT_VOXELS": "input_voxels",
}
_LARGEST_TILE = 256  # its tails must be tiny problems still
# Ranges that a sum is split into: any length is right, and no tiny problem has two ranges of the shipped one. With fewer threads
# than voxels in a range each of them takes more than one.
_SHORT_SPLITS = {"SPLIT_VOXELS": 8, "BLOCK_THREADS": 4}
# Limits past which a kernel goes another way, which the tiny problems do not reach.
_LOW_LIMITS = {"MAX_HALO": 4, "STAGE_TAPS": 2}
# Whole vectors of every layout, where the problems of the tails have rows and channels that are none; the seed draws the layout.
_VECTORS = (
    "n2_c16to32_i2x3x8_k2_s2_bias",
    "n1_c16to24_i2x2x4_k1x2x4_s1x2x4",
    "n1_c32to16_i1x3x16_k3_s2_p1_op1",
    "n2_c32to16_i3x2x4_k3_p1_g2",
)
# Several of `strategies.FEATURES` at once, on every axis and with as many channels as fill more than one tile's row.
_COMBINED = (
    "n2_c4to6_i3x2x4_k3x3x2_s2x1x1_p1_g2_bias",
    "n1_c3to5_i2x3x3_k2x3x3_s1x2x2_p0x1x1_d2x1x1_bias",
    "n1_c9to4_i3x3x2_k3x2x3_s2_p1_op1x0x1_d1x2x2",
    "n2_c2to9_i3x3x3_k3x3x2_s2x2x3_p1_d2x3x1",
    "n1_c17to30_i2x3x5_k3_p1",
    "n2_c1to3_i3x4x3_k3x2x3_s3x1x2_p2x1x2_op1x0x0_bias",
    "n1_c1to2_i2x3x1_k2x4x4_s2_p1x5x3_op0x0x2_d3",
    "n1_c18to2_i1x3x4_k1x2x2_d1x3x1",
)
# Output channels of the tiles that the problems above leave out, with all taps.
_WIDE = ("n1_c18to16_i2x3x4_k3_p1", "n1_c18to24_i2x3x4_k3_s1x2x1_p1", "n1_c18to48_i2x3x4_k3_p1", "n1_c18to64_i2x3x2_k2x3x3_p1")
# More rows and columns than a block has threads, in classes with and without taps; and more taps than a step has, or as many
# as are in registers.
_LONG = (
    "n1_c1to2_i1x140x2_k1_s1x2x2",
    "n1_c2to1_i2x2x140_k1_s2x1x2",
    "n1_c2to3_i1x2x9_k1x2x9_p0x1x4",
    "n1_c2to3_i9x2x2_k9x2x1_p4x0x0",
    "n1_c1to2_i1x2x9_k1x2x8_p0x1x3",
    "n1_c1to2_i1x2x5_k1x1x8_s1x1x2_p0x0x3",
)
# Output channels stored as vectors in rows that end within a piece; more than one tile of positions, of 32 channels too; taps along h
# that reach as far as any; a tile that begins late in a plane; long rows of which the first input lies just before a vector; several
# tiles of output channels, and as many volumes; more than one octet of input channels where sums take more than one fragment; so many
# rows in a tile that few channels are staged at once; aligned rows of which an odd number of inputs before a vector is needed.
_MORE = (
    "n1_c2to8_i1x2x3_k1x1x3_s1x1x2",
    "n2_c1to2_i2x3x90_k1x1x2",
    "n1_c1to32_i1x2x150_k1x1x2",
    "n1_c1to2_i1x3x2_k1x2x1_s1x2x1_d1x97x1",
    "n1_c1to2_i6x42x2_k1x2x1",
    "n1_c1to2_i1x1x68_k1x1x2_s1x1x3_p0x0x9",
    "n1_c1to2_i1x1x72_k1x1x3_s1x1x2_p0x0x8_op0x0x1",
    "n2_c1to64_i1x2x3_k1x2x2_s1x2x1",
    "n1_c10to4_i1x2x3_k1x1x5_s1x1x4",
    "n1_c2to2_i3x40x16_k3_p1",
    "n1_c2to2_i1x2x8_k1x1x4_g2",
)
# With a low limit of the halo: rows enough for another tile if they were longer or more than they need be.
_MANY_ROWS = ("n1_c1to2_i8x2x29_k1x3x3_p0x1x1",)
# Tensors in which a gap leaves all but one axis aligned, see `verify.APART`; 17 channels are no whole vectors.
_APART = ("n2_c16to8_i2x8x8_k1x2x1", "n1_c17to8_i2x8x1_k1x2x1")
# Strides that look like those of another layout or of aligned vectors, or tensors that begin where no vector does, each with its seeds.
_DECEPTIVE = {
    "n1_c16to8_i8x1x2_k2x1x1": (APART + 2, APART + 7, APART + 17, APART + 44),
    "n1_c1to2_i2x6x7_k1x2x1": (APART + 7,),
    "n1_c1to2_i3x4x1_k1x2x1": (APART + 17, APART + 58),
    "n1_c4to8_i1x1x9_k1": (APART + 14,),
    "n2_c4to8_i2x2x3_k1x2x1": (APART + 20, APART + 25),
    "n1_c16to16_i1x2x4_k1x1x2_s1x1x2": (APART + 30, APART + 35),
    "n1_c2to3_i2x3x2_k2_s2": (APART + 57, APART + 58, APART + 59),
    "n1_c2to2_i1x3x5_k1x1x2_s1x1x2": (APART + 8, APART + 48),
    "n1_c2to2_i1x3x10_k1x1x2_s1x1x2": (0,),
    "n1_c5to3_i1x1x2_k1x1x2_s1x1x2": (APART + 4,),  # five channels, each voxel a multiple of four elements from the next
    "n1_c2to4_i1x1x2_k1x1x4_s1x1x4": (APART + 15, APART + 16),
    "n1_c2to2_i1x1x2_k1x1x4_s1x1x4": (APART + 5,),
    "n1_c2to2_i2x2x2_k2x1x2_s2x1x2": (APART + 54, APART + 57),
    "n1_c2to5_i1x1x2_k1": (APART + 4, APART + 5),
    "n1_c2to3_i1x1x2_k1": (APART + 15,),
    "n1_c1to2_i1_k1x1x3_s1x1x4": (APART + 8,),  # a stride of four that would be whole pairs, with taps for three of four outputs, or one
    "n1_c1to2_i1_k1_s1x1x4": (APART + 8,),
    # planes that could be copied in bulk but for one thing: a gap, where they begin, a size that is no whole vector; channels likewise
    "n1_c1to1_i1x256x1_k1": (APART + 8,),
    "n2_c4to1_i4x16x16_k1": tuple(APART + n for n in (2, 5, 6, 7, 10, 12, 13, 14, 15, 16, 17, 35, 59)),
    "n1_c1to1_i1x29x10_k1": (APART + 47,),
    "n1_c1to1_i1x17x17_k1": (APART + 7,),
    "n1_c1to1_i1x2x1_k1x1x2_d1x1x256": (APART + 47,),
    "n2_c4to2_i4x1x4_k1_g2": (APART + 7, APART + 16, APART + 25),  # planes, channels, volumes that begin where no vector does
    "n1_c2to14_i1_k2x1x2_s2x1x2": (APART + 42, APART + 43),  # a weight's planes, or rows, with a gap of one tap
    # taps two apart; the one channel's stride is that of taps side by side; planes as far apart as if they were square
    "n1_c1to1_i1_k2x1x2_s2x1x2": (12418, 17261),
    # rows of taps as far apart as there are planes, rows taken out, and one input channel with a stride of 1, which none needs
    "n1_c1to1_i1_k2x4x1_s2x4x1": (APART + 13, APART + 53, 1462),
    "n1_c1to1_i1x2x2_k4x1x1_s4x1x1": (APART + 12, APART + 48),  # planes of taps a gap apart; aligned rows shorter than vectors
    # a second volume that begins at a multiple of 6 elements, not of 4 or 8: where 6 is asked for in their place, one address
    # in three shows it, so there are several layouts; and two taps, no whole vector, that begin where one does
    "n2_c1to1_i1x1x128_k1x1x2_s1x1x2": tuple(range(APART + 45, APART + 49)),
    # a volume of one voxel, or of two, no whole vector, and a gap that makes the next one begin where a vector does; a plane of one
    # row that is as far from the next as its length squared
    "n2_c1to2_i1_k1": (APART + 6, APART + 7),
    "n2_c1to2_i1x2x1_k1": (APART + 46,),
    "n1_c1to2_i2x1x2_k1": (APART + 57,),
}
# Enough tiles for a block to have two, of one chunk of channels, of several, and of several output channels.
_MANY_TILES = (
    "n1_c256to16_i1x1x260_k1x1x2_s1x1x2_g16",
    "n1_c528to16_i1x1x260_k1x1x2_s1x1x2_g16",
    "n1_c16to32_i1x1x260_k1x1x2_s1x1x2_g16",
)
# A depth of hundreds of stages, whatever a stage has: a slot, or a parity, that is counted in too few bits is wrong after 256 of them.
# The sum is over input channels, over output channels in dgrad, and over voxels and volumes in wgrad.
_DEEP = {
    "fprop": {"n1_c8500to2_i1x1x2_k1": (0,), "n1_c4200to2_i1x1x2_k1x1x2_s1x1x2": (1,)},
    "dgrad": {"n1_c2to8500_i1x1x2_k1": (0,), "n1_c2to4200_i1x1x2_k1x1x2_s1x1x2": (1,)},
    "wgrad": {"n1_c1to2_i1x1x8500_k1": (0,), "n2_c2to1_i1x1x2100_k1x1x2_s1x1x2": (1,)},
}
# Blocks that stay, and take hundreds of tiles in turn, each of a stage or more.
_MANY_VOLUMES = {"n800_c1to2_i1x1x2_k1": (0,)}
_MOST_DEEP_THREADS = 2**21  # launches that lay out or pack have a thread for each channel, or for a few
_FEW = 64
_LONG_LIFE_SHARE = 32  # one example of fuzz in so many is as deep, or has as many tiles of a block
MOST_HOST_THREADS = 2**16  # of a larger problem: a wgrad kernel has a block for each weight
# channels_last are none, input and output, input and weight, weight and output; all are padded.
_LAYOUT_SEEDS = (0, 1, 19, 20, 21)
# Seeds other than 0 of which all tensors are contiguous: numbers that are not finite lie elsewhere with each.
_CONTIGUOUS_SEEDS = (11, 14, 63, 101, 114, 181, 288, 323, 328)
# Seeds of `verify.ALIKE` of which all tensors are channels_last.
CHANNELS_LAST_SEEDS = (42, 55, 60, 74, 76, 108)
# What a kernel that keeps weights, copies planes in bulk, stores pairs or fills does only where these meet, each with its seeds.
_MODES = {
    "n1_c16to16_i1x1x420_k1_g16": (1,),  # three tiles of a block where channels lie together
    # two tiles of each of two blocks, in classes that have one tap more along d and h than the stride goes into the kernel
    "n2_c2to10_i1x199x1_k3x3x1_s2x2x1_g2": (0, 1),
    "n1_c5to5_i1x2x1_k1x3x1_s1x2x1_g5": (0,),  # a block leaves a group of whose weights it used some
    "n1_c2to4_i2x2x1_k1x60x1_p0x30x0_g2": (0,),  # more rows of taps than are kept
    "n1_c2to2_i2x2x3_k1x7x10_s1x2x4_p0x2x3": (0,),  # more taps than are kept, in rows that are too long to be one piece
    "n2_c2to3_i2x1x3_k1x1x5_s1x1x4_p0x0x3": (0, 1),  # a padding that is no multiple of the stride, here and below
    "n2_c3to2_i2x1x3_k2x1x4_s2x1x2_p1x0x1": (0, 1),
    # pairs of which one thing is not as it must be: a stride, where the tensor begins, a row's length, channels of a group
    "n2_c3to2_i2x2x3_k2x1x4_s2x1x2_p1x0x0": (*range(APART + 4, APART + 10), APART + 30),
    "n2_c3to2_i2x2x3_k2x1x4_s2x1x2_p1x0x0_op0x0x1": (APART + 8,),
    "n2_c2to6_i2x1x3_k2x1x4_s2x1x2_p1x0x1_g2": (1,),
    # few output channels: more weights than a block has room for, also beside its sums; inputs read by pairs; an odd number of sums in a
    # row; several tiles of a block, whose classes of d have one tap more than the stride goes into the kernel; channels read by fours
    "n1_c150to7_i1x2x4_k3_p1": (0, 1),
    "n1_c90to1_i2x2x4_k9x3x3_p4x1x1": (0, 1),
    "n2_c12to2_i2x3x6_k3x4x8_s2x4x4_p1": (0, 1, 19),
    "n1_c4to5_i2x3x4_k3_s1x3x3_p1": (0, 1),
    "n1_c16to1_i4x24x40_k3x1x4_s2x1x1": (0, 1),
    "n2_c36to3_i2x3x8_k3_p1_bias": (0, 1, 19, 20, 21, *range(APART + 2, APART + 18), APART + 30, APART + 35),
    "n2_c51to3_i1x17x24_k1x3x3_p0x1x1": (0,),  # planes larger than a tile, two volumes in one, a last chunk with an odd channel
    "n3_c9to2_i1x16x22_k1x2x3_s1x1x2_p0x0x1": (0, 1),  # all positions of a tile are read
    "n1_c1to1_i1x1x257_k1x1x3_s1x1x2_p0x0x1": (0,),  # one position more than a tile
    "n1_c1to1_i1x2x2_k1x1x2_s1x1x2_p0x0x1_op0x0x2_d1x1x3": (0,),  # outputs further out than any input reaches
    "n2_c2to9_i2x3x5_k1_s2x2x1_bias": (0, 20, APART + 8, APART + 9),  # rows and planes without taps, in every layout
    "n1_c1to42_i1x2x2_k1_s1x2x1": (0,),  # rows without taps, of several tiles of channels that several warps share
    # three rows of taps or two, with columns that are the same in all classes; four taps or three in a row
    "n1_c1to2_i1x3x1_k1x5x1_s1x2x1_p0x2x0": (0,),
    "n1_c1to2_i1x1x3_k1x1x10_s1x1x3_p0x0x4": (0,),
    "n1_c2to133_i1x1x4_k1x1x2_s1x1x2": (0,),  # columns of a product that no three tiles of eights share out evenly
    # channels that lie together: two taps beside as many columns as eight taps have, and columns that are no whole runs of channels
    "n1_c2to32_i1x1x4_k1x1x2_s1x1x2": (1,),
    "n1_c2to40_i1x1x2_k2_s2": (1,),
    "n3_c8to168_i1x4x4_k1x1x2_s1x1x2": (0,),  # tiles of channels of as many volumes as there are multiprocessors
    "n1_c1to168_i1x1x2_k1x1x2_s1x1x2": (1,),  # as many as leave the second of two tiles half of its last 32 channels
    "n1_c2to2_i2_k2x2x3_s2x2x3": (41,),  # planes that lie together in the output, where pairs of channels could
    "n1_c3to12_i1_k1_g3": (1,),  # a vector of channels that lie together, of one tap, in a wider tile
    "n1_c2to11_i1x1x4_k1x1x2_s1x1x2": (0,),  # a last tile of 8 output channels that is not full, where rows have a stride
    # several chunks of channels, read as vectors of voxels and of channels, by all warps of two groups of 128 voxels
    "n1_c72to2_i1x1x136_k1x1x2_s1x1x2": (0, 1),
    # all voxels of a tile of 128, which that many groups ask for, with two chunks of channels that are read as vectors of channels
    "n1_c144to6_i1x1x128_k1_g6": (1,),
    "n1_c8to2_i1x1x500_k1x2x1": (0,),  # what follows the last position is not staged, and beyond shared memory
    "n1_c272to9_i2x8x5_k3x3x4_s2_p1_bias": (0, 1),  # more channels than shared memory keeps of a tile, in classes of several taps
    "n1_c9to9_i1x2x66_k1x3x3_s1x2x2_p0x1x1_bias": (0, 1),  # rows of more than 64 blocks, at any place in 16 bytes, through shared memory
    "n1_c1to676_i1_k1": (0,),  # columns that six tiles of 112 leave four of
    "n1_c6to216_i1x1x16_k1_g3": (0,),  # rows stored as vectors with one tap each, more columns than the threads take at once
    # two warps with as many channels as they can keep, the last ones half of a product's; voxels lie together, and channels do
    "n1_c124to2_i1x1x40_k1x1x2_s1x1x2": (0, 1),
    # planes copied in bulk: several full chunks of each, rows through shared memory; a tile that begins in the gap behind a volume, then a
    # smaller one, of whose last chunk one channel is copied in no run of eight
    "n1_c32to8_i4x16x22_k1x2x3_s1x1x2_p0x0x1": (0,),
    "n3_c33to2_i1x24x24_k1x3x1": (0,),
    "n2_c1to1_i1x20x9_k1x2x2_d1x1x14": (0,),  # planes larger than a tile, dilated beyond a row
    "n1_c72to1_i1x16x16_k1": (0,),  # chunks of six cells
    # several tiles of output channels, of positions and of taps, in two groups, with rows that have no tap
    "n1_c2to18_i1x2x130_k17x1x2_s1x2x1_p8x0x0_g2": (0,),
    # a class without taps beside others; stride and dilation with a common divisor, another on each axis
    "n1_c1to1_i1x1x2_k1x1x9_s1x1x10": (0,),
    "n1_c1to1_i1x2x2_k1x3x3_s1x2x4_d1x1x2": (0,),
    # outputs that are filled first: several tiles of channels, the last not full, two classes of rows, several planes; with gaps along w,
    # in several volumes, with tiles that begin within rows; a last tile that ends within a row; more planes than the input has, of taps
    # that are not kept; cropped rows past 2^31 elements of a plane
    "n1_c1to12_i1x2x2_k24x2x2_s1x3x2_p0x1x0_op0x0x1_d1x1x2": (0, 1),
    "n4_c1to5_i1x4x29_k1x1x2_s1x2x2_p0x0x1_op0x0x1_d1x1x2": (0,),
    "n1_c1to1_i1x1x262_k1_s1x2x1_p0x0x3_op0x1x0": (0,),
    "n1_c1to1_i1_k2x59x1_p0x29x0": (0,),
    "n1_c1to1_i1x1001x1_k1_s1x1000x1_p0x500000x0_op0x1x4999_d1x1x5000": (0,),
    # steps of three planes in two chains, several tiles of channels, odd rows of pairs; a bias for rows that no tap reaches, beside others;
    # a group's chunks of channels that end where a block leaves the group; as many sums as a thread can have
    "n1_c1to60_i2x2x2_k8x1x1_s3x2x2_d2x1x1_bias": (0, 1),
    "n1_c1to1_i3x1x2_k5x1x2_s1x2x6_p0x0x1_d1x1x3": (0,),
    "n1_c320to5_i1x2x1_k1x3x1_s1x2x1_g5": (0,),
    "n1_c1to96_i1_k2x2x1_s1x2x1": (0,),
    # inputs laid out as cells: a last chunk that is not full, where voxels lie together and channels do; more positions than 256 eights
    "n1_c56to1_i1x1x2_k1x2x1_s1x2x1": (0, 1),
    "n1_c1to1_i1x1x2000_k1x2x2_s1x2x1": (0,),
    # several blocks of channels, the last not full, of several tiles, volumes and residues of d
    "n2_c10to20_i2x1x560_k2x1x1_s2x1x1_g10": (0, 1),
    # windows of more channels than are kept for all classes, of which that of the last one begins late
    "n1_c128to1_i1x7x1_k1x3x20_s1x2x1": (0,),
    # more chunks of channels than a ring of stages has buffers, of weights that are read as vectors, in the smallest tile too
    "n1_c385to8_i1_k1": (0,),
    # the depth split among warps, of volumes that are no whole vectors: one, two and three of 27 voxels, a last chunk of channels that
    # is not full, groups; a gap behind volumes or channels, a late first element; volumes larger than a tile; more chunks of a warp
    # than it loads weights of at a time
    "n1_c80to5_i3_k2_s2_bias": (0, 1),
    "n2_c144to6_i3_k2_s2_g2": (0,),
    "n3_c40to3_i3_k1x1x2_s1x1x2": (0, APART + 5, APART + 6, APART + 7, APART + 35),
    "n2_c72to2_i1x5x15_k1x1x2_s1x1x2": (0, 1, APART + 6),
    "n2_c16to2_i3x1x3_k1x1x2_s1x1x2": (APART + 57,),  # planes, or rows, taken out from between the others
    "n2_c16to2_i3x3x1_k1x1x2_s1x1x2": (APART + 58,),
    "n1_c272to288_i1x1x3_k1": (0,),
    "n1_c784to216_i1x1x3_k1": (0,),  # two chunks at a time, of four
    "n1_c640to2_i1x1x40_k1x1x2_s1x1x2": (0,),  # three chunks of a warp, of more than 32 voxels in vectors
    # outputs put together before they are stored: rounds of channels through two buffers, the last of fewer; tiles that begin within rows
    # or hold several volumes; two planes without taps behind each, one row behind each, or none; planes that begin anywhere
    "n2_c1to40_i3x7x19_k2x3x3_s2_p1_d2_bias": (0, 1, APART + 7),
    "n9_c2to12_i2x3x2_k3x1x2_s3x2x1_p1x0x0_d3x1x1_g2": (0, 1),
    "n1_c1to9_i2x3x70_k2x3x1_s1x2x3_d1x2x1": (0,),
    # a tile that begins where no output does, behind a row; several tiles of channels, each in rounds of which the last has fewer
    "n1_c1to8_i1x16x20_k1_s1x2x1_p0x0x2": (0,),
    "n1_c1to80_i2x3x9_k3x1x1_s2x2x1_p1x0x0_d2x1x1": (2,),
    # an input laid out row by row, of a few positions more than four times 256; runs of which a lane stores several after others
    "n1_c1to1_i1x50x2_k1x3x3_s1x2x2_p0x1x1": (0,),
    "n1_c2to120_i2x1x8_k1x1x2_s1x1x2": (0,),
    # two classes of rows beside rows without taps, residues of w of the next position; odd rows of several tiles of channels
    "n1_c1to9_i1x3x4_k1x2x2_s1x4x3_p0x0x1_d1x2x3": (0,),
    "n1_c1to200_i1x1x3_k1x1x3_s1x1x2": (2,),
}
# What is loaded ahead where there is nothing, channels together; and more taps than a thread's work is unrolled for.
_SEARCHED_MODES = {"n1_c2to2_i4x1x1_k2x1x1_s2x1x1_op1x0x0_g2": 42, "n1_c2to4_i2_k5x8x8_p2x2x3_g2": 0}
_LOW_GRID = 2  # blocks in place of a number that a launch's grid is cut to
# A limit above the shipped one: a tile then has more columns than a block that packs weights has threads.
_HIGH_LIMITS = {"COLUMNS": 256}
_ATOMIC = re.compile(r"\batomic[A-Z]\w*\s*\(")
# Tunables that choose among the tiles of a kernel, or what a tile is of.
_TILE_TUNABLES = ("TILE", "VOXELS", "ROWS", "LAY_OUT", "MERGE_GROUPS")
# A kernel that declares no tile for a quantity may have one all the same, of a power of two; a thread may have several voxels.
_UNKNOWN_TILES = {
    "output_voxels": (5, 9, 17, 33, 65, 129, 511, 513),
    "in_channels_per_group": (5, 9, 17, 33, 65, 129),
    "out_channels_per_group": (5, 9, 17, 33, 65, 129),
}
_FITS: dict[tuple[object, ...], Problem | None] = {}
_MOST_FITS = 2**14
Refused = Callable[[Problem], object]
_CHANNEL_FACTORS = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Example:
    """One run of a kernel: what `Worker.verify` takes."""

    kernel: Kernel
    problem: Problem
    dtype: str
    kind: str
    seed: int


def configurations(kernel: Kernel, *, low_grid: bool = False) -> list[Kernel]:
    """Return the kernel, and with it the same as tiny problems would not meet it.

    That is with short splits, where its own are too long for two of them; with low limits and a high one; with each tile that
    a tunable forces, where a tiny problem gets the smallest. `low_grid`: and with a grid that stops growing early, where it stops at a
    number; no tunable says so, so that only `check` can repeat it.
    """
    found = [kernel]
    if kernel.tunables.get("SPLIT_VOXELS", 0) > _LARGEST_TILE:
        found.append(kernel.replace_tunables(**{name: n for name, n in _SHORT_SPLITS.items() if name in kernel.tunables}))
    limits = {**_LOW_LIMITS, **_HIGH_LIMITS}
    found += [kernel.replace_tunables(**{name: n}) for name, n in limits.items() if name in kernel.tunables]
    for name in _TILE_TUNABLES:
        found += [kernel.replace_tunables(**{name: n}) for n in kernel.search.get(name, ()) if n != kernel.tunables[name]]
    low = limit_grid(kernel) if low_grid else kernel
    return found if low is kernel else [*found, low]


def searched(kernel: Kernel) -> list[Kernel]:
    """Return the kernel with the smallest value that `[search]` lists of each tunable, and with the largest.

    Where it takes few problems then, values that leave it fewer than half of its edge problems are left out. Configurations that
    are in `configurations` are not among them.
    """
    known = [configuration.tunables for configuration in configurations(kernel)]
    found: list[Kernel] = []
    for pick in (min, max):
        chosen = kernel.replace_tunables(**{name: pick(values) for name, values in kernel.search.items()})
        if not _takes_half(kernel, chosen):
            chosen = kernel
            for name, values in kernel.search.items():
                changed = chosen.replace_tunables(**{name: pick(values)})
                chosen = changed if _takes_half(kernel, changed) else chosen
        if chosen.tunables not in known:
            known.append(chosen.tunables)
            found.append(chosen)
    return found


def evaluated_otherwise(kernel: Kernel, dtypes: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the first of the dtypes for each set of numbers that none of the known dtypes has in the declaration."""
    words = {word for text in (*declared(kernel), *map(str, kernel.specialize.values())) for word in re.findall(r"\w+", text)}

    def numbers(dtype: str) -> tuple[int, ...]:
        return tuple(value for name, value in device_names(dtype, HOST_MULTIPROCESSORS).items() if name in words)

    seen = {numbers(dtype) for dtype in known}
    found = {numbers(dtype): dtype for dtype in reversed(dtypes)}
    return [dtype for dtype in dtypes if dtype in found.values() and numbers(dtype) not in seen]


def _takes_half(kernel: Kernel, changed: Kernel) -> bool:
    def count(one: Kernel) -> int:
        return sum(fitting(one, problem, kernel.dtypes[0]) is not None for problem in strategies.EDGE_PROBLEMS)

    return 2 * count(changed) >= max(1, count(kernel))


def limit_grid(kernel: Kernel, most: int = _LOW_GRID) -> Kernel:
    """Return the kernel with `most` in place of the larger numbers that a `min` cuts a launch's grid to.

    A number that the code or the rest of the declaration names too stays: it may be more than a limit of the grid.
    """
    code, elsewhere = code_alone(kernel.source), " ".join((*declared(kernel), *map(str, kernel.specialize.values())))

    def lowered(text: str | int) -> str | int:
        if not isinstance(text, str):
            return text
        tree = ast.parse(text.strip(), mode="eval")
        for literal in _grid_limits(tree.body):
            number = int(str(literal.value))
            named = rf"(?<![\w.]){number}(?!\w)"
            if number > most and not re.search(named, code) and len(re.findall(named, elsewhere)) == counts[str(number)]:
                literal.value = most
        return text if ast.unparse(tree) == ast.unparse(ast.parse(text.strip(), mode="eval")) else ast.unparse(tree)

    sizes = [size for launch in kernel.launches for size in launch.grid]
    named = {str(size): text for size in sizes if isinstance(text := kernel.constants.get(str(size)), str)}
    counts = Counter(n for text in (*map(str, sizes), *named.values()) for n in re.findall(r"(?<![\w.])\d+(?!\w)", text))
    launches = tuple(replace(launch, grid=tuple(map(lowered, launch.grid))) for launch in kernel.launches)
    constants = {name: lowered(text) if name in named else text for name, text in kernel.constants.items()}
    same = launches == kernel.launches and constants == dict(kernel.constants)
    return kernel if same else replace(kernel, launches=launches, constants=constants)


def _grid_limits(node: ast.expr) -> Iterator[ast.Constant]:
    """Yield the numbers in each `min` that a grid is, or is a multiple of."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        for argument in node.args:
            if node.func.id == "min" and isinstance(argument, ast.Constant) and type(argument.value) is int:
                yield argument
            yield from _grid_limits(argument)
    elif isinstance(node, ast.IfExp):
        yield from (*_grid_limits(node.body), *_grid_limits(node.orelse))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from (*_grid_limits(node.left), *_grid_limits(node.right))


def has_low_grid(kernel: Kernel) -> bool:
    """Return whether it comes from `limit_grid`."""
    sizes = [str(size) for launch in kernel.launches for size in launch.grid]
    return any(text not in kernel.source for size in sizes for text in (size, str(kernel.constants.get(size, ""))))


def calls_atomics(kernel: Kernel) -> bool:
    """Return whether the source, or a header beside it, calls atomic functions."""
    return any(_ATOMIC.search(code_alone(text)) for text in (kernel.source, *kernel.headers.values()))


def is_forced(kernel: Kernel) -> bool:
    """Return whether it is a configuration for a way that tiny problems do not take: it gets fewer of them than the shipped one."""
    return has_low_grid(kernel) or not kernel.changed_tunables.keys().isdisjoint((*_TILE_TUNABLES, *_LOW_LIMITS, *_HIGH_LIMITS))


def tiles(kernel: Kernel) -> dict[str, int]:
    """Return the kernel's tile sizes by the quantity that they cut, as `strategies.problems` takes them."""
    return {_TILES[name]: size for name, size in kernel.tunables.items() if name in _TILES and size <= _LARGEST_TILE}


def tails(kernel: Kernel, dtype: str, refused: Refused = lambda _: None) -> list[Problem]:
    """Return the smallest problems at the tails of the kernel's tiles that it can do: one less than a tile, one, one more, two.

    The voxels lie on the last axis, and once more on all three with a stride, where residue classes differ in size. `refused` is
    called with each that it can do no variant of.
    """
    found: dict[Problem, None] = {}
    known = {quantity: (tile - 1, tile, tile + 1, 2 * tile + 1) for quantity, tile in tiles(kernel).items()}
    unknown = {quantity: sizes[-1:] if is_forced(kernel) else sizes for quantity, sizes in _UNKNOWN_TILES.items()}
    for quantity, sizes in {**unknown, **known}.items():
        for size in sizes:
            if quantity.endswith("voxels"):
                one = Problem(1, 1, 1, (1, 1, max(1, size)), (1, 1, 2))
                drawn = [one, replace(one, stride=(1, 1, 2), kernel_size=(1, 1, 3), batch=2)]
            else:
                ins, outs = (size, 2) if quantity == "in_channels_per_group" else (2, size)
                one = Problem(1, max(1, ins), max(1, outs), (1, 1, 2), (1, 1, 2), bias=kernel.pass_name == "fprop")
                drawn = [one, replace(one, in_channels=2 * one.in_channels, out_channels=2 * one.out_channels, groups=2)]
            found |= dict.fromkeys(_fits(kernel, drawn, dtype, refused))
    return list(found)


def layouts(kernel: Kernel, dtype: str, refused: Refused = lambda _: None) -> list[tuple[Problem, int]]:
    """Return larger problems that the kernel can do, of vectors and of several features, each with seeds for several layouts.

    `refused` is as in `tails`.
    """
    forced = is_forced(kernel)
    chosen: list[tuple[tuple[str, ...], tuple[int, ...]]] = [(_VECTORS, _LAYOUT_SEEDS[1:3] if forced else _LAYOUT_SEEDS)]
    chosen += [] if forced else [((name,), seeds) for name, seeds in _MODES.items()]
    if kernel.changed_tunables.keys().isdisjoint((*_TILE_TUNABLES, *_HIGH_LIMITS)):
        chosen.append((_COMBINED, _LAYOUT_SEEDS[1:3] if forced else _LAYOUT_SEEDS))
    if "MAX_HALO" in kernel.changed_tunables:
        chosen.append((_MANY_ROWS, _LAYOUT_SEEDS[:1]))
    if not forced:
        chosen += [(_WIDE, _LAYOUT_SEEDS[:2]), (_LONG, _LAYOUT_SEEDS[:1]), (_MORE, _LAYOUT_SEEDS[:2]), (_MANY_TILES, (0,))]
        chosen += [(_APART, tuple(range(APART, APART + 10))), *(((name,), seeds) for name, seeds in _DECEPTIVE.items())]
    found: dict[tuple[Problem, int], None] = {}
    for names, seeds in chosen:
        for problem in _fits(kernel, map(Problem.parse, names), dtype, refused):
            found |= dict.fromkeys((problem, seed) for seed in seeds)
    return list(found)


def modes(kernel: Kernel, dtype: str) -> list[tuple[Problem, int]]:
    """Return problems of modes that the kernel can do, each with one seed, and such that values to search make modes of their own."""
    seeds = {name: first for name, (first, *_) in _MODES.items()} | _SEARCHED_MODES
    fits = ((fitting(kernel, Problem.parse(name), dtype), seed) for name, seed in seeds.items())
    return list({fit: (fit, seed) for fit, seed in fits if fit is not None}.values())


def spoilt_seed(seed: int, number: int) -> int:
    """Return a seed of the same layout, if that is the contiguous one, by which numbers that are not finite lie elsewhere."""
    return seed or _CONTIGUOUS_SEEDS[number % len(_CONTIGUOUS_SEEDS)]


def deep(kernel: Kernel, dtype: str, refused: Refused = lambda _: None) -> list[tuple[Problem, int]]:
    """Return problems of hundreds of stages, and of hundreds of tiles where blocks stay, as `layouts` does; none for what is forced.

    They are as deep as the kernel can do, and as the host can in a moment.
    """
    if is_forced(kernel):
        return []
    chosen = {**_DEEP[kernel.pass_name], **(_MANY_VOLUMES if kernel.is_persistent else {})}
    found: dict[tuple[Problem, int], None] = {}
    for name, seeds in chosen.items():
        problem = Problem.parse(name)
        done = [fit for fit in _halves(problem) if kernel.why_not(fit, dtype) is None]
        fits = [fit for fit in done if _threads(kernel, fit, dtype) <= _MOST_DEEP_THREADS]
        for fit in fits[:1] or _fits(kernel, [problem], dtype, refused):
            found |= dict.fromkeys((fit, seed) for seed in seeds)
    return list(found)


def _halves(problem: Problem) -> Iterator[Problem]:
    """Yield a problem, then it with half and a quarter of what it has most of, and so on, down to some."""
    while True:
        yield problem
        sizes = {"batch": problem.batch, "in_channels": problem.in_channels, "out_channels": problem.out_channels}
        name = max(sizes, key=lambda field: sizes[field])
        if max(sizes[name], problem.input_size[2]) < _FEW:
            return
        half: dict[str, Any] = {name: sizes[name] // 2}
        if problem.input_size[2] > sizes[name]:
            half = {"input_size": (*problem.input_size[:2], problem.input_size[2] // 2)}
        problem = replace(problem, **half)


def _threads(kernel: Kernel, problem: Problem, dtype: str) -> int:
    return sum(math.prod(launch.grid) * math.prod(launch.block) for launch in kernel.plan(problem, dtype).launches)


def _fits(kernel: Kernel, problems: Iterable[Problem], dtype: str, refused: Refused) -> Iterator[Problem]:
    for problem in problems:
        fit = fitting(kernel, problem, dtype)
        if fit is None:
            refused(problem)
        else:
            yield fit


def combinations(dtypes: Sequence[str], kinds: Sequence[str] = (*KINDS, *SPECIAL_KINDS)) -> list[tuple[str, str]]:
    """Return (kind, dtype), exact before random and what is not finite last; some kinds are for some dtypes only."""
    known = {dtype: kinds_of(dtype) for dtype in dtypes}  # once: fuzz asks for each example
    return [(kind, dtype) for kind in (*KINDS, *SPECIAL_KINDS) if kind in kinds for dtype in dtypes if kind in known[dtype]]


def drawn_combinations(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs as a random example gets one: three of four are of `KINDS`, as far as there are such."""
    special = [pair for pair in pairs if pair[0] in SPECIAL_KINDS]
    plain = [pair for pair in pairs if pair not in special]
    return [*plain * (3 * len(special)), *special * len(plain)] or list(pairs)


@lru_cache(maxsize=64)
def _drawn_pairs(dtypes: tuple[str, ...]) -> list[tuple[str, str]]:
    return drawn_combinations(combinations(dtypes))


def variants(problem: Problem) -> Iterator[Problem]:
    """Yield the problem, then what is near it, for kernels with restrictions.

    More channels in each group, for those that ask for multiples of a tile; the same in two groups, or with one input channel each,
    for those that are for groups; and a kernel that is its stride, with no padding, at last of 2 along w.
    """
    yield from _wider(problem)
    grouped = []
    if problem.groups == 1:
        grouped.append(replace(problem, in_channels=2 * problem.in_channels, out_channels=2 * problem.out_channels, groups=2))
        grouped.append(replace(problem, in_channels=2, out_channels=2 * problem.out_channels, groups=2))
    zeros, ones = (0, 0, 0), (1, 1, 1)
    patches = [
        replace(shape, stride=shape.kernel_size, padding=zeros, output_padding=zeros, dilation=ones) for shape in (problem, *grouped)
    ]
    pairs = [replace(shape, kernel_size=(*shape.kernel_size[:2], 2), stride=(*shape.stride[:2], 2)) for shape in patches]
    for shape in dict.fromkeys((*grouped, *patches, *pairs)):
        yield from _wider(shape)


def _wider(problem: Problem) -> Iterator[Problem]:
    yield problem
    for factor in _CHANNEL_FACTORS:
        yield replace(problem, in_channels=problem.in_channels * factor, out_channels=problem.out_channels * factor)


def fitting(kernel: Kernel, problem: Problem, dtype: str) -> Problem | None:
    """Return the first variant of the problem that the kernel can do, or None."""
    tables = (kernel.tunables, kernel.specialize, kernel.constants, kernel.restrictions, kernel.workspace)
    tables_of = (kernel.dtypes, kernel.launches, *(tuple(table.items()) for table in tables))
    asked = (tables_of, problem, dtype)  # mutants of a kernel, and its configurations, ask again and again
    if asked not in _FITS:
        if len(_FITS) >= _MOST_FITS:
            _FITS.clear()
        _FITS[asked] = next((variant for variant in variants(problem) if kernel.why_not(variant, dtype) is None), None)
    return _FITS[asked]


def host_threads(kernel: Kernel, problem: Problem, dtype: str) -> int:
    """Return how many threads the launches of a problem have on the host."""
    return sum(math.prod(launch.grid) * math.prod(launch.block) for launch in kernel.plan(problem, dtype).launches)


def largest_block(kernel: Kernel, problem: Problem, dtype: str) -> int:
    """Return the threads of the largest block of a problem's launches."""
    return max((math.prod(launch.block) for launch in kernel.plan(problem, dtype).launches), default=0)


def draw_example(kernel: Kernel, seed: str) -> Example | None:
    """Return the example that a seed stands for, the same for the same arguments; None: the kernel cannot do it."""
    generator = random.Random(seed)
    kind, dtype = generator.choice(_drawn_pairs(kernel.dtypes))
    if random.Random(f"{seed}/long life").randrange(_LONG_LIFE_SHARE) == 0:  # its own, so that the others stay what they were
        problem = _long_life(kernel, strategies.draw_long_life(generator.randint, kernel.pass_name), dtype)
    else:
        drawn = strategies.draw_problem(generator.randint, kernel.pass_name, tiles=tiles(kernel))
        problem = fitting(kernel, drawn, dtype)
    return None if problem is None else Example(kernel, problem, dtype, kind, generator.randrange(SEEDS))


def _long_life(kernel: Kernel, drawn: Problem, dtype: str) -> Problem | None:
    """Return what fits of a long life, shorter where the kernel's blocks live no longer by it, and there are only more of them."""
    while True:
        problem, shorter = fitting(kernel, drawn, dtype), strategies.half_as_long(drawn)
        if problem is None or shorter == drawn or host_threads(kernel, problem, dtype) <= MOST_HOST_THREADS:
            return problem
        drawn = shorter


def reproduce(example: Example, backend: str, sanitize: str | None) -> str:
    """Return the shell line that runs an example again."""
    kernel = example.kernel
    shipped = registry.kernels().get(kernel.name)
    what = kernel.name if kernel.path is None or (shipped is not None and shipped.path == kernel.path) else str(kernel.path)
    options = [f"--sanitize {sanitize}"] if sanitize else []
    options += [f"--tunable {name}={value}" for name, value in kernel.changed_tunables.items()]
    options += [f"--grid-limit {_LOW_GRID}"] if has_low_grid(kernel) else []
    options += [f"--problem {example.problem} --dtype {example.dtype} --kind {example.kind} --seed {example.seed}"]
    return " ".join([f"convt3d check {shlex.quote(what)} --backend {backend}", *options])
