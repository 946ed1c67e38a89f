"""What it costs to store an output in pieces of rows, measured with kernels that do nothing else. Needs a GPU.

    python benchmarks/store_pieces.py

The output is that of the layer kb73 in fp32: 4 x 32 channels of 63 x 127 rows of 255 elements. A warp writes, for each of some channels,
planes and rows, one piece of a row; then it goes on to a place that no other warp has. `aligned` rows have 256 elements. The
L2 is flushed before each launch, times are medians of 7.
"""

from __future__ import annotations

import statistics

CHANNELS, DEPTH, HEIGHT = 128, 63, 127
SOURCE = r"""
extern "C" __global__ void __launch_bounds__(256, 2) store(float* y, int items) {
  const int lane = threadIdx.x % 32, warps = gridDim.x * 8;
  const int pieces = (WIDTH + PIECE - 1) / PIECE, rows = (HEIGHT + ROWS - 1) / ROWS, planes = (DEPTH + PLANES - 1) / PLANES;
  for (int item = (blockIdx.x * 256 + threadIdx.x) / 32; item < items; item += warps) {
    int rest = item;
    const int w = rest % pieces * PIECE;
    rest /= pieces;
    const int h = rest % rows * ROWS;
    rest /= rows;
    const int d = rest % planes * PLANES, first_channel = rest / planes * CHANNELS;
    for (int p = 0; p < PLANES; ++p) {
      for (int q = 0; q < ROWS; ++q) {
        if (d + p >= DEPTH || h + q >= HEIGHT) continue;
        for (int c = 0; c < CHANNELS; ++c) {
          float* row = y + ((size_t)(first_channel + c) * DEPTH + d + p) * HEIGHT * WIDTH + (size_t)(h + q) * WIDTH + w;
#pragma unroll
          for (int i = lane; i < PIECE; i += 32) {
            if (w + i < WIDTH) row[i] = item;
          }
        }
      }
    }
  }
}
"""
# name, elements of a row, of a piece, channels, planes and rows of a warp
PATTERNS = (
    ("8 channels x 2 planes x 2 rows, pieces of 64", 255, 64, 8, 2, 2),
    ("the same, pieces of 128", 255, 128, 8, 2, 2),
    ("the same, whole rows", 255, 256, 8, 2, 2),
    ("the same, pieces of 64, aligned", 256, 64, 8, 2, 2),
    ("8 channels, whole rows", 255, 256, 8, 1, 1),
    ("1 channel, pieces of 64, 2 planes x 2 rows", 255, 64, 1, 2, 2),
    ("1 channel, whole rows", 255, 256, 1, 1, 1),
)


def main() -> None:
    """Print a line for each pattern: ms and TB/s."""
    import cupy

    flushed, blocks = cupy.empty(256 << 20, cupy.int8), 2 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    for name, width, piece, channels, planes, rows in PATTERNS:
        sizes = {
            "WIDTH": width,
            "PIECE": piece,
            "CHANNELS": channels,
            "PLANES": planes,
            "ROWS": rows,
            "DEPTH": DEPTH,
            "HEIGHT": HEIGHT,
        }
        module = cupy.RawModule(code=SOURCE, options=tuple(f"-D{key}={value}" for key, value in sizes.items()))
        kernel, output = module.get_function("store"), cupy.empty(CHANNELS * DEPTH * HEIGHT * width, cupy.float32)
        items = CHANNELS // channels * -(-DEPTH // planes) * -(-HEIGHT // rows) * -(-width // piece)
        times = []
        for value in range(7):
            flushed.fill(value)
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            kernel((blocks,), (256,), (output, items))
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end))
        took = statistics.median(times)
        print(f"{name:46}{took:7.3f} ms {output.nbytes / took / 1e9:6.2f} TB/s")


if __name__ == "__main__":
    main()
