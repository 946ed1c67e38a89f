"""How many bytes a cycle a multiprocessor can store, alone and when all do, in the shapes that fragments of wgmma make. Needs a GPU.

    python benchmarks/store_rate.py

Blocks of 256 threads, one to a multiprocessor, each with 64 rows of 4 KB of its own, which all together fit L2. The clock runs from a
block's first store until its last has been issued; in brackets until all are there (`__threadfence`). The last of three launches.
"""

from __future__ import annotations

REGION = 64 * 4096
SOURCE = r"""
struct alignas(4 * WORDS) Piece { unsigned words[WORDS]; };
extern "C" __global__ void __launch_bounds__(256, 1) store(char* memory, long long* cycles) {
  constexpr int PITCH = 4096, BYTES = 4 * WORDS, ACROSS = LANES * BYTES, ROWS = 32 / LANES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // LANES lanes write a piece of a row: those with equal lane % ROWS, as in a fragment, or neighbours.
  const int row = FRAGMENT ? lane % ROWS : lane / LANES, place = FRAGMENT ? lane / ROWS : lane % LANES;
  char* first = memory + blockIdx.x * (64LL * PITCH) + row * PITCH + warp * ACROSS + place * BYTES;
  Piece piece;
  for (int i = 0; i < WORDS; ++i) piece.words[i] = lane;
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int w = 0; w < PITCH; w += 8 * ACROSS) {
#pragma unroll
    for (int h = 0; h < 64; h += ROWS) *reinterpret_cast<Piece*>(first + w + h * PITCH) = piece;
  }
  __syncthreads();
  const long long issued = clock64();
  __threadfence();
  if (threadIdx.x == 0) cycles[blockIdx.x * 2] = issued - begin, cycles[blockIdx.x * 2 + 1] = clock64() - begin;
}
"""
# Words that a lane writes, lanes to a row, and whether these are those of a fragment.
SHAPES = ((1, 8, 1), (2, 8, 1), (2, 8, 0), (4, 4, 0), (4, 8, 1), (4, 8, 0), (2, 32, 0), (4, 32, 0))


def main() -> None:
    """Print a line for each shape."""
    import cupy

    multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    memory, cycles = cupy.empty(multiprocessors * REGION, cupy.int8), cupy.empty((multiprocessors, 2), cupy.int64)
    for words, lanes, fragment in SHAPES:
        options = (f"-DWORDS={words}", f"-DLANES={lanes}", f"-DFRAGMENT={fragment}")
        kernel = cupy.RawModule(code=SOURCE, options=options).get_function("store")
        rates = []
        for blocks in (1, multiprocessors // 4, multiprocessors):
            for _ in range(3):
                kernel((blocks,), (256,), (memory, cycles))
            issued, there = cycles.get()[:blocks].mean(0)
            rates.append(f"{REGION / issued:.1f} ({REGION / there:.1f})")
        how = "as in a fragment" if fragment else "neighbours"
        print(f"{4 * words:2} bytes a lane, {4 * words * lanes:3} a row, {how:16}: {', '.join(rates)} bytes a cycle", flush=True)


if __name__ == "__main__":
    main()
