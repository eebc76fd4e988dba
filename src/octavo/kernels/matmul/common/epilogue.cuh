// From accumulators to C[M,N] bf16, row-major. See wgmma.cuh for the fragment layout.
#pragma once
#include "common/wgmma.cuh"

// Masked stores straight from registers: 4 bytes a thread, 16 bytes a row, for any M, N and ldc.
// `row` and `col` are the first of this warpgroup's 64 x N tile.
template <int N>
DEVICE void store_registers(const float (&d)[N / 2], const GemmArgs& args, int row, int col) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const bool pairs = args.ldc % 2 == 0;  // else every second row breaks 4-byte alignment
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + warp * 16 + lane / 4 + half * 8;
    if (r >= args.m) continue;
    bf16* out = args.out + r * args.ldc;
#pragma unroll
    for (int i = half * 2; i < N / 2; i += 4) {
      const int c = col + i / 4 * 8 + lane % 4 * 2;
      const uint32 packed = pack_bf16x2(d[i], d[i + 1]);
      if (pairs && c + 1 < args.n) {
        *reinterpret_cast<uint32*>(out + c) = packed;
      } else {
        if (c < args.n) out[c].bits = (uint16)packed;
        if (c + 1 < args.n) out[c + 1].bits = (uint16)(packed >> 16);
      }
    }
  }
}

// C passes through shared memory in 64 x 64 chunks of 128-byte rows, in the same 128-byte swizzle as
// the operands: 16-byte piece p of row r sits at piece p ^ (r % 8), so the 8 rows that a warp writes
// together fall into different banks, and the TMA unit undoes it.
constexpr int CHUNK_COLS = 64;
constexpr int CHUNK_ELEMENTS = 64 * CHUNK_COLS;

// Plain 4-byte stores of columns [64 chunk, 64 chunk + 64) of this warpgroup's tile.
template <int N>
DEVICE void stage_chunk(const float (&d)[N / 2], bf16* staging, int chunk) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int swizzle = row % 8;  // the same for row + 8
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    bf16* address = staging + row * CHUNK_COLS + (piece ^ swizzle) * 8 + lane % 4 * 2;
    const int i = chunk * 32 + piece * 4;
    store_shared(address, pack_bf16x2(d[i], d[i + 1]));
    store_shared(address + 8 * CHUNK_COLS, pack_bf16x2(d[i + 2], d[i + 3]));
  }
}

// The same with stmatrix: 16 bytes a thread, a quarter of the instructions. `packed`: the 16 registers
// of a thread's share of the chunk.
DEVICE void stage_packed_stmatrix(const uint32* packed, bf16* staging) {
  const int lane = threadIdx.x % 32;
  // Matrices 0..3 are (rows 0-7, piece 0), (rows 8-15, piece 0), (rows 0-7, piece 1), (rows 8-15, 1).
  const int row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const uint32 base = smem_address(staging + row * CHUNK_COLS);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const int piece = pair * 2 + lane / 16;
    stmatrix_x4(base + (piece ^ row % 8) * 16, packed[pair * 4], packed[pair * 4 + 1],
                packed[pair * 4 + 2], packed[pair * 4 + 3]);
  }
}

template <int N>
DEVICE void stage_chunk_stmatrix(const float (&d)[N / 2], bf16* staging, int chunk) {
  uint32 packed[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    packed[i] = pack_bf16x2(d[chunk * 32 + 2 * i], d[chunk * 32 + 2 * i + 1]);
  }
  stage_packed_stmatrix(packed, staging);
}

// Tile column `tile_n` of a CTA's tile through shared memory: both consumer warpgroups stage their 64 rows
// and one thread stores all, the first at `row`. It waits until its last store has read the staging,
// and a barrier tells the others; each writer's proxy fence comes before the second barrier, so that
// TMA reads what was written. The caller waits for all stores before the CTA ends.
template <int N>
DEVICE void store_strips(const float (&d)[N / 2], bf16 (&staging)[2][N / 64][CHUNK_ELEMENTS],
                         const GemmArgs& args, int half, int row, int tile_n) {
  constexpr int CHUNKS = N / CHUNK_COLS;
  if (threadIdx.x == 128) tma_store_wait_read<0>();
  named_barrier_sync<256>(1);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) stage_chunk<N>(d, staging[half][chunk], chunk);
  fence_proxy_async();
  named_barrier_sync<256>(1);
  if (threadIdx.x == 128) {
    for (int strip = 0; strip < 2; ++strip) {
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        tma_store(&args.c, staging[strip][chunk], tile_n * N + chunk * CHUNK_COLS,
                  row + strip * 64);
      }
    }
    tma_store_commit();
  }
}

// A finished tile of one warpgroup, rounded to bf16 and kept in registers until there is time to store
// it: chunk by chunk, through two staging buffers in turn, between the wgmmas of the next tile.
template <int N>
struct DeferredTile {
  const TensorMap& map;
  bf16 (&staging)[2][CHUNK_ELEMENTS];
  const int barrier;  // a named barrier of this warpgroup's own
  uint32 packed[N / 4];
  int row = 0, col = 0;
  bool waiting = false;

  DEVICE DeferredTile(const TensorMap& map, bf16 (&staging)[2][CHUNK_ELEMENTS], int barrier)
      : map(map), staging(staging), barrier(barrier) {}

  DEVICE void take(const float (&d)[N / 2], int first_row, int first_col) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) packed[i] = pack_bf16x2(d[2 * i], d[2 * i + 1]);
    row = first_row;
    col = first_col;
    waiting = true;
  }

  // Chunks go in order, 0 first. `chunk` must be known at compile time. The next tile's first chunk is to
  // find the other buffer, too.
  static_assert(N / CHUNK_COLS % 2 == 0, "an even number of chunks");
  DEVICE void store(int chunk) {
    bf16* target = staging[chunk % 2];
    if (threadIdx.x % 128 == 0) tma_store_wait_read<1>();  // only the other buffer may be in use
    named_barrier_sync<128>(barrier);
    stage_packed_stmatrix(packed + chunk * 16, target);
    fence_proxy_async();
    named_barrier_sync<128>(barrier);
    if (threadIdx.x % 128 == 0) {
      tma_store(&map, target, col + chunk * CHUNK_COLS, row);
      tma_store_commit();
    }
  }

  DEVICE void store_all() {
    if (!waiting) return;
#pragma unroll
    for (int chunk = 0; chunk < N / CHUNK_COLS; ++chunk) store(chunk);
    waiting = false;
  }
};
