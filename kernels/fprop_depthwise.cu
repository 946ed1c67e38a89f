/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[constants]
step_d = "stride_d // gcd(stride_d, dilation_d)"
step_h = "stride_h // gcd(stride_h, dilation_h)"
spread_d = "dilation_d // gcd(stride_d, dilation_d)"
spread_h = "dilation_h // gcd(stride_h, dilation_h)"
classes_h = "step_h * spread_h"
classes = "step_d * spread_d * classes_h"
taps_d = "ceil_div(kernel_d, step_d)"
taps_h = "ceil_div(kernel_h, step_h)"
taps_w = "ceil_div(kernel_w, stride_w)"
outputs_d = "ceil_div(output_d, stride_d * spread_d)"
outputs_h = "ceil_div(output_h, stride_h * spread_h)"
outputs_w = "(output_w - 1 + padding_w) // stride_w - padding_w // stride_w + 1"
tile_channels = 1
channel_tiles = "ceil_div(out_channels_per_group, tile_channels)"
thread_quads = "(4 if stride_w == 2 else 6) if itemsize < 8 else 2"
tile_quads = "32 * BLOCK_WARPS * thread_quads"
quads_w = "ceil_div(outputs_w + 3, 4)"
tiles = "ceil_div(outputs_d * outputs_h * quads_w, tile_quads)"
least_h = "max(1, output_h // (stride_h * spread_h))"
tile_rows = "min(ceil_div(tile_quads - 1, ceil_div(outputs_w, 4)) + 1, outputs_d * outputs_h)"
tile_span = "tile_rows + min(ceil_div(tile_rows - 1, least_h), outputs_d - 1) * (taps_h - 1) + taps_h - 1"
rows = "(taps_d - 1) * min(outputs_h + taps_h - 1, tile_span) + tile_span"
pitch = "ceil_div(4 * quads_w + taps_w - 1, 4) * 4"
weight_elements = "ceil_div(in_channels_per_group * taps_d * taps_h * taps_w * stride_w * tile_channels, 4) * 4"
packed_elements = "in_channels * channel_tiles * kernel_d * kernel_h * taps_w * stride_w * tile_channels"
row_slots = "ceil_div(rows, 2) * 2"
output_elements = "tile_quads * 4 * stride_w * tile_channels"
block_bytes = "8 * row_slots + max(itemsize, 4) * (weight_elements + max(in_channels_per_group * rows * pitch, output_elements))"
[restrictions]
"groups > 1 and in_channels_per_group == 1 and out_channels_per_group <= 4" = "it is for depthwise layers: one input channel a group, a multiplier of at most 4"
"stride_w in (1, 2) and dilation_w == 1" = "all residues of a row are computed together: it is for stride 1 or 2 and dilation 1 along w"
"step_d == stride_d and step_h == stride_h and kernel_d >= stride_d and kernel_h >= stride_h" = "every output row must have a tap"
"block_bytes <= 98 * 1024" = "the input rows of a group's tile must fit the 99 KiB of shared memory that every GPU has"
[workspace]
packed_weight = "packed_elements"
[[launch]]
symbol = "convt3d_fprop_depthwise_pack"
grid = "ceil_div(packed_elements, 256)"
block = 256
packs = "packed_weight"
[[launch]]
symbol = "convt3d_fprop_depthwise_w2"
when = "stride_w == 2"
grid = "classes * batch * tiles * groups * channel_tiles"
block = "32 * BLOCK_WARPS"
shared_bytes = "block_bytes"
[[launch]]
symbol = "convt3d_fprop_depthwise_w1"
when = "stride_w == 1"
grid = "classes * batch * tiles * groups * channel_tiles"
block = "32 * BLOCK_WARPS"
shared_bytes = "block_bytes"
*/
// Depthwise (groups = in_channels, with a channel multiplier of up to 4): a block owns a tile of one output channel, which reads one input channel; a
// thread owns several quads of neighbouring q, both residues of w where the stride is 2. See grouped_rows.cuh for the formula and
// the layouts. There is next to no arithmetic: input rows are read once, whole output rows are written once.
#include "convt3d.cuh"
#include "convt3d/copy_async.cuh"
#include "convt3d/dense_axis.cuh"
#include "convt3d/row_tile.cuh"
#include "convt3d/grouped_rows.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 4
#endif

extern "C" __global__ void __launch_bounds__(256)
    convt3d_fprop_depthwise_pack(const Problem problem, const View<const scalar_t> weight, accum_t* __restrict__ packed_weight,
                                 const int channel_tiles, const int tile_channels) {
  pack_rows(problem, weight, packed_weight, channel_tiles, tile_channels);
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, 4)
    convt3d_fprop_depthwise_w2(const Problem problem, const View<const scalar_t> input,
                               const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                               const View<scalar_t> output, const int row_slots, const int weight_elements, const int tiles,
                               const int channel_tiles, const int classes_h) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ RowTile tile;
  grouped_rows<2, 1, sizeof(accum_t) == 4 ? 4 : 2>(shared, tile, problem, input, packed_weight, bias, output, row_slots,
                                                   weight_elements, tiles, channel_tiles, classes_h);
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, 4)
    convt3d_fprop_depthwise_w1(const Problem problem, const View<const scalar_t> input,
                               const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                               const View<scalar_t> output, const int row_slots, const int weight_elements, const int tiles,
                               const int channel_tiles, const int classes_h) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ RowTile tile;
  grouped_rows<1, 1, sizeof(accum_t) == 4 ? 6 : 2>(shared, tile, problem, input, packed_weight, bias, output, row_slots,
                                                   weight_elements, tiles, channel_tiles, classes_h);
}
