// Correlation of few channels a group, all input channels staged at once and all residues of a row along w in one thread, so that
// the output leaves in whole rows. For stride_w = RESIDUES and dilation_w = 1, where o + padding = q*RESIDUES + r and tap
// t = j*RESIDUES + r reads input q - j: the residues share their inputs, and only the weights differ.
#pragma once

// packed_weight[group][channel tile][class's taps before, of d and h][ci][kd from the last][kh from the last][j from the last][r]
// [channel of the tile]: what a block multiplies by is one contiguous piece. Where the taps along w are odd in number the last j has
// none for r = 1: its weights are zero, and are not multiplied.
__device__ inline void pack_rows(const Problem& problem, const View<const scalar_t>& weight, accum_t* packed_weight,
                                 int channel_tiles, int tile_channels) {
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int *kernel = problem.kernel_size, residues = problem.stride[2], row = ((kernel[2] - 1) / residues + 1) * residues;
  index_t index = static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<index_t>(problem.in_channels) * channel_tiles * kernel[0] * kernel[1] * row * tile_channels) return;
  const int lane = static_cast<int>(index % tile_channels);
  index /= tile_channels;
  const int position_w = static_cast<int>(index % row), r = position_w % residues;
  const int tap_w = (row / residues - 1 - position_w / residues) * residues + r;
  index /= row;
  int tap[2];
  PackedTap place[2];
  for (int a = 1; a >= 0; --a) {
    tap[a] = static_cast<int>(index % kernel[a]);
    index /= kernel[a];
    place[a] = packed_tap(problem, a, tap[a]);
  }
  const int ci = static_cast<int>(index % channels);
  const index_t tile = index / channels;  // group * channel_tiles + channel tile
  const int co = static_cast<int>(tile % channel_tiles) * tile_channels + lane, group = static_cast<int>(tile / channel_tiles);
  const index_t taps_before = static_cast<index_t>(place[0].before) * kernel[1] + place[0].class_taps * place[1].before;
  const index_t at = (tile * kernel[0] * kernel[1] + taps_before) * channels +
                     static_cast<index_t>(ci) * place[0].class_taps * place[1].class_taps +
                     place[0].position * place[1].class_taps + place[1].position;
  const bool live = tap_w < kernel[2] && co < out_channels;
  packed_weight[(at * row + position_w) * tile_channels + lane] =
      live ? to_accum(*weight.at(group * channels + ci, co, tap[0], tap[1], tap_w)) : accum_t(0);
}

// sums += J neighbouring j of each row of taps, for all channels; HALF: the first of them has no tap for r = 1.
template <int RESIDUES, int CHANNELS, int QUADS, int J, bool HALF>
__device__ __forceinline__ void multiply_rows(accum_t (&sums)[QUADS][4][RESIDUES][CHANNELS], const accum_t* inputs,
                                              const int (&quad)[QUADS], const accum_t* weights, int channels,
                                              const RowTile& tile) {
  constexpr int WIDTH = J == 1 ? 4 : 8, ALIGNED = CHANNELS * RESIDUES % VECTOR == 0 ? VECTOR : 1;
  const int pitch = tile.pitch, taps_h = tile.axis[1].taps, weight_row = tile.axis[2].taps * RESIDUES * CHANNELS;
  const int skipped = (tile.axis[0].taps - tile.taps_d) * taps_h * weight_row;
  weights += tile.first_kd * taps_h * weight_row;
#pragma unroll 1
  for (int ci = 0; ci < channels; ++ci, inputs += tile.plane, weights += skipped) {
#pragma unroll 1
    for (int kd = 0; kd < tile.taps_d; ++kd) {
      const accum_t* row = inputs + kd * tile.segment * pitch;
#pragma unroll 1
      for (int kh = 0; kh < taps_h; ++kh, row += pitch, weights += weight_row) {
        accum_t w[J][RESIDUES][CHANNELS];
#pragma unroll
        for (int i = 0; i < J * RESIDUES * CHANNELS; i += ALIGNED) {
          if constexpr (ALIGNED == VECTOR) {
            const Vector loaded = *reinterpret_cast<const Vector*>(weights + i);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) (&w[0][0][0])[i + e] = loaded.element[e];
          } else {
            (&w[0][0][0])[i] = weights[i];
          }
        }
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
          accum_t x[WIDTH];
#pragma unroll
          for (int i = 0; i < WIDTH; i += VECTOR) {
            const Vector loaded = *reinterpret_cast<const Vector*>(row + quad[q] + i);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) x[i + e] = loaded.element[e];
          }
#pragma unroll
          for (int j = 0; j < J; ++j) {
#pragma unroll
            for (int r = 0; r < RESIDUES; ++r) {
              if (HALF && j == 0 && r == 1) continue;
#pragma unroll
              for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) sums[q][i][r][c] += x[i + j] * w[j][r][c];
              }
            }
          }
        }
      }
    }
  }
}

template <int RESIDUES, int CHANNELS, int QUADS>
__device__ __forceinline__ void grouped_rows(unsigned char* shared, RowTile& tile, const Problem& problem,
                                             const View<const scalar_t>& input, const accum_t* packed_weight,
                                             const scalar_t* bias, const View<scalar_t>& output, int row_slots,
                                             int weight_elements, int tiles, int channel_tiles, int classes_h) {
  index_t* row_offset = reinterpret_cast<index_t*>(shared);
  accum_t* weights = reinterpret_cast<accum_t*>(shared + 8 * row_slots);
  accum_t* stage = weights + weight_elements;  // the input rows, and when they have been read the output rows
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);

  // blockIdx.x = (((class * batch + n) * tiles + tile) * groups + group) * channel_tiles + channel tile
  unsigned block = blockIdx.x;
  const int channel_tile = static_cast<int>(block % channel_tiles), first_out = channel_tile * CHANNELS;
  block /= channel_tiles;
  const int group = static_cast<int>(block % problem.groups);
  block /= problem.groups;
  const int tile_number = static_cast<int>(block % tiles);
  block /= tiles;
  const int n = static_cast<int>(block % problem.batch);
  block /= problem.batch;
  const int first_q = problem.padding[2] / RESIDUES;
  if (thread == 0) tile.axis[0] = dense_axis(problem, 0, static_cast<int>(block / classes_h));
  if (thread == 32) tile.axis[1] = dense_axis(problem, 1, static_cast<int>(block % classes_h));  // meanwhile, in another warp
  __syncthreads();
  if (thread == 0) {
    DenseAxis& w = tile.axis[2];
    w.taps = (problem.kernel_size[2] - 1) / RESIDUES + 1;
    w.outputs = (problem.output_size[2] - 1 + problem.padding[2]) / RESIDUES - first_q + 1;
    w.spread = 1;
    w.origin = first_q - (w.taps - 1);
    tile.first_quad = tile_number * threads * QUADS;
    lay_out(tile, problem, input, threads * QUADS);
  }
  __syncthreads();
  if (tile.first_quad >= tile.end_quad) return;  // the whole block: classes differ in size
  find_rows(tile, problem, input, row_offset);
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int *kernel = problem.kernel_size, dh_taps = tile.axis[0].taps * tile.axis[1].taps;
  const int weight_row = tile.axis[2].taps * RESIDUES * CHANNELS, block_weights = channels * dh_taps * weight_row;
  const index_t taps_before =
      static_cast<index_t>(tile.axis[0].taps_before) * kernel[1] + tile.axis[0].taps * tile.axis[1].taps_before;
  const index_t group_tile = static_cast<index_t>(group) * channel_tiles + channel_tile;
  const accum_t* packed = packed_weight + (group_tile * kernel[0] * kernel[1] + taps_before) * channels * weight_row;
  constexpr int WIDTH = CHANNELS % VECTOR == 0 ? VECTOR : 1;
  for (int i = thread * WIDTH; i < block_weights; i += threads * WIDTH) {
    if constexpr (WIDTH == VECTOR) {
      copy_async(reinterpret_cast<Vector*>(weights + i), reinterpret_cast<const Vector*>(packed + i), true);
    } else {
      copy_async(weights + i, packed + i, true);
    }
  }
  __syncthreads();
  stage_rows(tile, problem, input, input.data + n * input.stride[0] + static_cast<index_t>(group) * channels * input.stride[1],
             row_offset, channels, stage);

  int quad[QUADS];
  for (int q = 0; q < QUADS; ++q) {
    const int number = tile.first_quad + q * threads + thread;
    quad[q] = staged_quad(tile, number < tile.end_quad ? number : tile.first_quad);
  }
  accum_t sums[QUADS][4][RESIDUES][CHANNELS];
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    const bool has_bias = bias != nullptr && first_out + c < out_channels;
    const accum_t start = has_bias ? to_accum(bias[group * out_channels + first_out + c]) : accum_t(0);
#pragma unroll
    for (int i = 0; i < QUADS * 4 * RESIDUES; ++i) sums[i / (4 * RESIDUES)][i / RESIDUES % 4][i % RESIDUES][c] = start;
  }
  cp_async_wait_all();
  __syncthreads();

  const int taps = tile.axis[2].taps;
  for (int j = 0; j < taps; j += 4) {
    const accum_t *inputs = stage + j, *taps_from = weights + j * RESIDUES * CHANNELS;
    const int some = min(4, taps - j);
    if (RESIDUES == 2 && j == 0 && problem.kernel_size[2] % 2 == 1) {
      if (some == 1) multiply_rows<RESIDUES, CHANNELS, QUADS, 1, true>(sums, inputs, quad, taps_from, channels, tile);
      if (some == 2) multiply_rows<RESIDUES, CHANNELS, QUADS, 2, true>(sums, inputs, quad, taps_from, channels, tile);
      if (some == 3) multiply_rows<RESIDUES, CHANNELS, QUADS, 3, true>(sums, inputs, quad, taps_from, channels, tile);
      if (some == 4) multiply_rows<RESIDUES, CHANNELS, QUADS, 4, true>(sums, inputs, quad, taps_from, channels, tile);
    } else {
      if (some == 1) multiply_rows<RESIDUES, CHANNELS, QUADS, 1, false>(sums, inputs, quad, taps_from, channels, tile);
      if (some == 2) multiply_rows<RESIDUES, CHANNELS, QUADS, 2, false>(sums, inputs, quad, taps_from, channels, tile);
      if (some == 3) multiply_rows<RESIDUES, CHANNELS, QUADS, 3, false>(sums, inputs, quad, taps_from, channels, tile);
      if (some == 4) multiply_rows<RESIDUES, CHANNELS, QUADS, 4, false>(sums, inputs, quad, taps_from, channels, tile);
    }
  }

  // The sums become rows [channel][quad of the tile][4*RESIDUES], which warps then write, neighbouring lanes to neighbouring outputs.
  __syncthreads();  // all inputs have been read
  constexpr int SPAN = 4 * RESIDUES;
  const int channel_span = threads * QUADS * SPAN;
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
      for (int i = 0; i < SPAN; i += VECTOR) {
        Vector part;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) part.element[e] = sums[q][(i + e) / RESIDUES][(i + e) % RESIDUES][c];
        *reinterpret_cast<Vector*>(stage + c * channel_span + (q * threads + thread) * SPAN + i) = part;
      }
    }
  }
  __syncthreads();
  const int warp = thread / 32, lane = thread % 32, warps = threads / 32, quads_w = tile.quads_w;
  const int first_row = tile.first_quad / quads_w, rows = (tile.end_quad - 1) / quads_w - first_row + 1;
  const int live_channels = min(CHANNELS, out_channels - first_out);
  for (int i = warp; i < rows * live_channels; i += warps) {
    const int c = i % live_channels, row = first_row + i / live_channels;
    const int d = tile.axis[0].first_output + row / tile.axis[1].outputs * tile.axis[0].step;
    const int h = tile.axis[1].first_output + row % tile.axis[1].outputs * tile.axis[1].step;
    // Output w lies at column w + before of its row of quads, of which this tile has [first, end).
    const int before = tile.shift * RESIDUES + problem.padding[2] % RESIDUES;
    const int first = max(tile.first_quad - row * quads_w, 0) * SPAN, end = min(tile.end_quad - row * quads_w, quads_w) * SPAN;
    const accum_t* from = stage + c * channel_span + (row * quads_w - tile.first_quad) * SPAN;
    scalar_t* y = output.at(n, group * out_channels + first_out + c, d, h, 0);
    for (int w = max(first - before, 0) + lane; w < min(end - before, problem.output_size[2]); w += 32) {
      y[w * output.stride[4]] = to_scalar(from[w + before]);
    }
  }
}
