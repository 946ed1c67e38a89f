/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
multiplies_padding = true
[constants]
voxel_tiles = "ceil_div(residue_voxels, TILE_VOXELS)"
channel_tiles = "ceil_div(out_channels_per_group, TILE_CHANNELS)"
[search]
TILE_VOXELS = [64, 128, 256]
TILE_CHANNELS = [16, 32, 64]
TILE_DEPTH = [8, 16]
[cost]
steps = "in_channels_per_group * ceil_div(taps, residues)"
products = "TILE_VOXELS * TILE_CHANNELS"
bytes = "(TILE_VOXELS + TILE_CHANNELS) * itemsize"
[[launch]]
grid = "batch * groups * residues * voxel_tiles * channel_tiles"
block = "TILE_VOXELS // THREAD_VOXELS * (TILE_CHANNELS // THREAD_CHANNELS)"
*/
// The residue class as a tiled matrix product. A block owns TILE_VOXELS outputs of one class x TILE_CHANNELS channels of one
// group and runs over the class's taps and, for each, over the input channels in steps of TILE_DEPTH:
//
//   inputs [TILE_DEPTH][TILE_VOXELS]   = input[n, ci, q - offset(t)], zero outside the input
//   weights[TILE_DEPTH][TILE_CHANNELS] = weight[ci, co, t]
//
// are staged in shared memory, and a thread adds their products into THREAD_VOXELS x THREAD_CHANNELS sums in registers. Each
// staged value is used TILE_CHANNELS or TILE_VOXELS times, where fprop_residue reads it from memory for every product.
#include "convt3d.cuh"
#include "convt3d/epilogue/epilogue.cuh"

#ifndef TILE_VOXELS
#define TILE_VOXELS 128
#endif
#ifndef TILE_CHANNELS
#define TILE_CHANNELS 32
#endif
#ifndef TILE_DEPTH
#define TILE_DEPTH 8
#endif
#ifndef THREAD_VOXELS
#define THREAD_VOXELS 4
#endif
#ifndef THREAD_CHANNELS
#define THREAD_CHANNELS 8
#endif

constexpr int VOXEL_THREADS = TILE_VOXELS / THREAD_VOXELS;
constexpr int THREADS = VOXEL_THREADS * (TILE_CHANNELS / THREAD_CHANNELS);
static_assert(TILE_VOXELS % THREAD_VOXELS == 0 && TILE_CHANNELS % THREAD_CHANNELS == 0, "threads share the tile evenly");
static_assert(TILE_VOXELS % THREADS == 0 || THREADS % TILE_VOXELS == 0, "a thread stages one column of voxels");

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    convt3d_fprop_tiled(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                        const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                        const int channel_tiles) {
  __shared__ accum_t inputs[TILE_DEPTH][TILE_VOXELS];
  __shared__ accum_t weights[TILE_DEPTH][TILE_CHANNELS];

  // blockIdx.x = (((n * groups + group) * residues + residue) * voxel_tiles + voxel tile) * channel_tiles + channel tile
  unsigned block = blockIdx.x;
  const int channel_base = static_cast<int>(block % channel_tiles) * TILE_CHANNELS;
  block /= channel_tiles;
  const index_t voxel_base = static_cast<index_t>(block % voxel_tiles) * TILE_VOXELS;
  block /= voxel_tiles;
  AxisClass axis[3];
  for (int a = 2; a >= 0; --a) {
    axis[a] = axis_class(problem, a, static_cast<int>(block % problem.stride[a]));
    block /= problem.stride[a];
  }
  const int group = static_cast<int>(block % problem.groups), n = static_cast<int>(block / problem.groups);
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const index_t class_voxels = static_cast<index_t>(axis[0].outputs) * axis[1].outputs * axis[2].outputs;
  if (voxel_base >= class_voxels) return;  // the whole block: classes differ in size

  // The voxel this thread stages: its position in the class gives q on each axis; past the class's end it reads nothing.
  constexpr int STAGE_ROWS = THREADS >= TILE_VOXELS ? THREADS / TILE_VOXELS : 1;
  constexpr int STAGE_COLUMNS = THREADS >= TILE_VOXELS ? 1 : TILE_VOXELS / THREADS;
  const int stage_row = static_cast<int>(threadIdx.x) / TILE_VOXELS;
  const int stage_column = static_cast<int>(threadIdx.x) % TILE_VOXELS;
  int q[STAGE_COLUMNS][3];
  for (int c = 0; c < STAGE_COLUMNS; ++c) {
    index_t position = voxel_base + stage_column + c * THREADS;
    const bool inside = position < class_voxels;
    for (int a = 2; a >= 0; --a) {
      const int o = axis[a].first_output + static_cast<int>(position % axis[a].outputs) * problem.stride[a];
      q[c][a] = inside ? (o + problem.padding[a]) / problem.stride[a] - axis[a].first_offset : -1;
      position /= axis[a].outputs;
    }
  }

  const int thread_voxel = static_cast<int>(threadIdx.x) % VOXEL_THREADS;
  const int thread_channel = static_cast<int>(threadIdx.x) / VOXEL_THREADS * THREAD_CHANNELS;
  const Epilogue epilogue{bias};
  accum_t sums[THREAD_VOXELS][THREAD_CHANNELS];
  for (int c = 0; c < THREAD_CHANNELS; ++c) {
    const int co = channel_base + thread_channel + c;
    const accum_t start = epilogue.start(group * out_channels + co, co < out_channels);
    for (int v = 0; v < THREAD_VOXELS; ++v) sums[v][c] = start;
  }

  for (int jd = 0; jd < axis[0].taps; ++jd) {
    for (int jh = 0; jh < axis[1].taps; ++jh) {
      for (int jw = 0; jw < axis[2].taps; ++jw) {
        const scalar_t* source[STAGE_COLUMNS];
        for (int c = 0; c < STAGE_COLUMNS; ++c) {
          const int id = q[c][0] - jd * axis[0].offset_step, ih = q[c][1] - jh * axis[1].offset_step,
                    iw = q[c][2] - jw * axis[2].offset_step;
          const bool live = id >= 0 && id < problem.input_size[0] && ih >= 0 && ih < problem.input_size[1] && iw >= 0 &&
                            iw < problem.input_size[2];
          source[c] = live ? input.at(n, group * channels, id, ih, iw) : nullptr;
        }
        const scalar_t* tap = weight.at(group * channels, channel_base, axis[0].first_tap + jd * axis[0].tap_step,
                                        axis[1].first_tap + jh * axis[1].tap_step, axis[2].first_tap + jw * axis[2].tap_step);
        for (int first = 0; first < channels; first += TILE_DEPTH) {
          __syncthreads();  // the last step's tiles have been read
          for (int row = stage_row; row < TILE_DEPTH; row += STAGE_ROWS) {
            const int ci = first + row;
            for (int c = 0; c < STAGE_COLUMNS; ++c) {
              const bool live = source[c] != nullptr && ci < channels;
              inputs[row][stage_column + c * THREADS] = live ? to_accum(source[c][ci * input.stride[1]]) : accum_t(0);
            }
          }
          for (int i = static_cast<int>(threadIdx.x); i < TILE_DEPTH * TILE_CHANNELS; i += THREADS) {
            const int ci = first + i / TILE_CHANNELS, co = i % TILE_CHANNELS;
            const bool live = ci < channels && channel_base + co < out_channels;
            weights[i / TILE_CHANNELS][co] = live ? to_accum(tap[ci * weight.stride[0] + co * weight.stride[1]]) : accum_t(0);
          }
          __syncthreads();
#pragma unroll
          for (int k = 0; k < TILE_DEPTH; ++k) {
            accum_t x[THREAD_VOXELS], w[THREAD_CHANNELS];
            for (int v = 0; v < THREAD_VOXELS; ++v) x[v] = inputs[k][thread_voxel + v * VOXEL_THREADS];
            for (int c = 0; c < THREAD_CHANNELS; ++c) w[c] = weights[k][thread_channel + c];
            for (int v = 0; v < THREAD_VOXELS; ++v) {
              for (int c = 0; c < THREAD_CHANNELS; ++c) sums[v][c] += x[v] * w[c];
            }
          }
        }
      }
    }
  }

  for (int v = 0; v < THREAD_VOXELS; ++v) {
    index_t position = voxel_base + thread_voxel + v * VOXEL_THREADS;
    if (position >= class_voxels) continue;
    int o[3];
    for (int a = 2; a >= 0; --a) {
      o[a] = axis[a].first_output + static_cast<int>(position % axis[a].outputs) * problem.stride[a];
      position /= axis[a].outputs;
    }
    scalar_t* y = output.at(n, group * out_channels + channel_base + thread_channel, o[0], o[1], o[2]);
    for (int c = 0; c < THREAD_CHANNELS; ++c, y += output.stride[1]) {
      if (channel_base + thread_channel + c < out_channels) *y = epilogue.finish(sums[v][c]);
    }
  }
}
