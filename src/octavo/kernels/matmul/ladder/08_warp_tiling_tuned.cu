// 08 Warp tiling, tuned
//
// Problem:   C[M,N] = A[M,K] B[K,N], fp32, row-major, any M and N, K a multiple of 8.
// Idea:      Rung 07 with two buffers: the next tile's global loads are issued before this tile's FMAs and
//            land in registers, then in the other buffer; one barrier a tile instead of two. A is written
//            transposed at row ^ 8 (k / 4 % 4), which spreads a warp's writes over all 32 banks.
// Limiter:   The FMA pipe: issue slots that go to anything but FFMA, and the clock under power.
// Predicted: 85% of cuBLAS or more.
// Measured:  not yet
// PTX:       none; plain C++.
#include "common/sgemm.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 16;
constexpr int WARP_M = 64;
constexpr int WARP_N = 64;
constexpr int THREADS = 128;
constexpr int A_LOADS = BLOCK_M * BLOCK_K / 4 / THREADS;
constexpr int B_LOADS = BLOCK_N * BLOCK_K / 4 / THREADS;

struct Staged {
  float4 a[A_LOADS], b[B_LOADS];
};

struct Buffer {
  float a[BLOCK_K][BLOCK_M];  // transposed, column swizzled
  float b[BLOCK_K][BLOCK_N];
};

DEVICE int swizzled(int k, int row) {
  return row ^ k / 4 % 4 * 8;
}

DEVICE void load_global(Staged& staged, const float* A, const float* B, int M, int N, int K,
                        int first_row, int first_col, int k) {
#pragma unroll
  for (int i = 0; i < A_LOADS; ++i) {
    const int index = threadIdx.x + i * THREADS;
    staged.a[i] = load4_or_zero(A, first_row + index / (BLOCK_K / 4),
                                k + index % (BLOCK_K / 4) * 4, M, K);
  }
#pragma unroll
  for (int i = 0; i < B_LOADS; ++i) {
    const int index = threadIdx.x + i * THREADS;
    staged.b[i] = load4_or_zero(B, k + index / (BLOCK_N / 4),
                                first_col + index % (BLOCK_N / 4) * 4, K, N);
  }
}

DEVICE void store_staged(Buffer& buffer, const Staged& staged) {
#pragma unroll
  for (int i = 0; i < A_LOADS; ++i) {
    const int index = threadIdx.x + i * THREADS;
    const int k = index % (BLOCK_K / 4) * 4;
    const int row = swizzled(k, index / (BLOCK_K / 4));
    buffer.a[k][row] = staged.a[i].x;
    buffer.a[k + 1][row] = staged.a[i].y;
    buffer.a[k + 2][row] = staged.a[i].z;
    buffer.a[k + 3][row] = staged.a[i].w;
  }
#pragma unroll
  for (int i = 0; i < B_LOADS; ++i) {
    const int index = threadIdx.x + i * THREADS;
    *reinterpret_cast<float4*>(
        &buffer.b[index / (BLOCK_N / 4)][index % (BLOCK_N / 4) * 4]) = staged.b[i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    warp_tiling_tuned(int M, int N, int K, const float* A, const float* B, float* C) {
  using Tile = WarpTile<BLOCK_N / WARP_N, WARP_M, WARP_N, 4, 8>;
  __shared__ Buffer buffers[2];
  const Tile tile;
  const int first_row = blockIdx.y * BLOCK_M;
  const int first_col = blockIdx.x * BLOCK_N;
  float sums[Tile::ROWS][Tile::COLS] = {};
  Staged staged;
  load_global(staged, A, B, M, N, K, first_row, first_col, 0);
  store_staged(buffers[0], staged);
  __syncthreads();
  for (int k = 0; k < K; k += BLOCK_K) {
    const bool more = k + BLOCK_K < K;
    const Buffer& now = buffers[k / BLOCK_K % 2];
    if (more) load_global(staged, A, B, M, N, K, first_row, first_col, k + BLOCK_K);
#pragma unroll
    for (int step = 0; step < BLOCK_K; ++step) {
      float a[Tile::ROWS], b[Tile::COLS];
#pragma unroll
      for (int piece = 0; piece < Tile::ROWS / 4; ++piece) {
        float(&four)[4] = *reinterpret_cast<float(*)[4]>(&a[piece * 4]);
        load_fragment<4, 0>(four, &now.a[step][swizzled(step, tile.row + piece * 16)]);
      }
      load_fragment<Tile::COLS, 32>(b, &now.b[step][tile.col]);
      outer_product(sums, a, b);
    }
    // The other buffer was last read before the previous barrier, so it is free to fill.
    if (more) store_staged(buffers[(k / BLOCK_K + 1) % 2], staged);
    __syncthreads();
  }
  tile.store(sums, C, M, N, first_row, first_col);
}
