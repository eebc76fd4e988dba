// 07 Warp tiling
//
// Problem:   C[M,N] = A[M,K] B[K,N], fp32, row-major, any M and N, K a multiple of 8.
// Idea:      A level between CTA and thread: each of 8 warps owns 64x32 of the tile, its lanes form 8x4,
//            and a lane owns 4x4 patches spread over it. What a warp reads at one time is then
//            contiguous, without conflicts: one wavefront for each 16-byte load.
// Limiter:   Latency of global memory: load, barrier, compute, barrier, nothing in flight meanwhile
//            but the other CTAs of the SM; and 4-way conflicts where A is written transposed.
// Predicted: 1.1x rung 06.
// Measured:  32.4 TFLOP/s at 4096^3; 0.63 x cuBLAS; H200, ec36ff0.
// PTX:       none; plain C++.
#include "common/sgemm.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 16;
constexpr int WARP_M = 64;
constexpr int WARP_N = 32;
constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    warp_tiling(int M, int N, int K, const float* A, const float* B, float* C) {
  using Tile = WarpTile<BLOCK_N / WARP_N, WARP_M, WARP_N, 8, 4>;
  __shared__ float tile_a[BLOCK_K][BLOCK_M];  // transposed
  __shared__ float tile_b[BLOCK_K][BLOCK_N];
  const Tile tile;
  const int first_row = blockIdx.y * BLOCK_M;
  const int first_col = blockIdx.x * BLOCK_N;
  float sums[Tile::ROWS][Tile::COLS] = {};
  for (int k = 0; k < K; k += BLOCK_K) {
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_M * BLOCK_K / 4; i += THREADS) {
      const int r = i / (BLOCK_K / 4), c = i % (BLOCK_K / 4) * 4;
      const float4 a4 = load4_or_zero(A, first_row + r, k + c, M, K);
      tile_a[c][r] = a4.x;
      tile_a[c + 1][r] = a4.y;
      tile_a[c + 2][r] = a4.z;
      tile_a[c + 3][r] = a4.w;
    }
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_K * BLOCK_N / 4; i += THREADS) {
      const int r = i / (BLOCK_N / 4), c = i % (BLOCK_N / 4) * 4;
      *reinterpret_cast<float4*>(&tile_b[r][c]) =
          load4_or_zero(B, k + r, first_col + c, K, N);
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < BLOCK_K; ++step) {
      float a[Tile::ROWS], b[Tile::COLS];
      load_fragment<Tile::ROWS, 32>(a, &tile_a[step][tile.row]);
      load_fragment<Tile::COLS, 16>(b, &tile_b[step][tile.col]);
      outer_product(sums, a, b);
    }
    __syncthreads();
  }
  tile.store(sums, C, M, N, first_row, first_col);
}
