// The input as rows of a matrix: of each voxel the channels of a group side by side, in whole vectors of 16 bytes, zero from the last on. It
// may lie so in memory already; if not, a launch copies it.
#pragma once

#include "convt3d/core/advanced.cuh"
#include "convt3d/core/vector.cuh"
#include "convt3d/core/view.cuh"

enum { ROW_VECTOR = 16 / static_cast<int>(sizeof(scalar_t)) };  // a constant would be data of each binary
typedef Vector<ROW_VECTOR> RowVector;

// Whether channels of a voxel lie in whole vectors already.
__device__ __forceinline__ bool lies_in_rows(const Problem& problem, const View<const scalar_t>& input) {
  bool rows = input.stride[1] == 1 && problem.in_channels / problem.groups % ROW_VECTOR == 0 &&
              reinterpret_cast<unsigned long long>(input.data) % 16 == 0;
  rows = rows && (problem.batch == 1 || input.stride[0] % ROW_VECTOR == 0);
  for (int a = 0; a < 3; ++a) rows = rows && (problem.input_size[a] == 1 || input.stride[2 + a] % ROW_VECTOR == 0);
  return rows;
}

// The `index`th vector of rows [group][n, voxel][channel], for threads with neighbouring numbers: they read neighbours in memory.
__device__ __forceinline__ void lay_in_rows(const Problem& problem, const View<const scalar_t>& input, RowVector* rows,
                                            int index, int voxels, int row_channels) {
  const bool voxels_first = input.stride[1] != 1;
  const int cells = row_channels / ROW_VECTOR;
  const int row = voxels_first ? index % voxels : index / (cells * problem.groups);
  const int cell = voxels_first ? index / voxels % cells : index % cells;
  const int group = voxels_first ? index / voxels / cells : index / cells % problem.groups;
  const int (&size)[3] = problem.input_size;
  const int channels = problem.in_channels / problem.groups, first = cell * ROW_VECTOR;
  const scalar_t* from = input.at(row / size[2] / size[1] / size[0], group * channels + first,
                                  row / size[2] / size[1] % size[0], row / size[2] % size[1], row % size[2]);
  RowVector vector;
#pragma unroll
  for (int e = 0; e < ROW_VECTOR; ++e) {
    vector.element[e] = first + e < channels ? *from : to_scalar(accum_t(0));
    if (first + e + 1 < channels) from = advanced(from, input.stride[1] * static_cast<int>(sizeof(scalar_t)));
  }
  rows[(static_cast<index_t>(group) * voxels + row) * cells + cell] = vector;
}
