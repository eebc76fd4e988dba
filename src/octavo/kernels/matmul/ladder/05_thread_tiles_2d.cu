// 05 Two-dimensional thread tiles
//
// Problem:   C[M,N] = A[M,K] B[K,N], fp32, row-major, any M and N, K a multiple of 8.
// Idea:      Each thread computes 8x8 elements as outer products: 16 shared loads feed 64 FMAs.
// Limiter:   Shared-memory conflicts and instruction count: loads are 4 bytes wide, a thread's 8 columns
//            lie next to each other, so the lanes of a warp read 8 floats apart and collide.
// Predicted: 2x rung 04.
// Measured:  24.3 TFLOP/s at 4096^3; 0.47 x cuBLAS; H200, ec36ff0.
// PTX:       none; plain C++.
#include "common/sgemm.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 8;
constexpr int THREAD_M = 8;
constexpr int THREAD_N = 8;
constexpr int THREADS = BLOCK_M * BLOCK_N / (THREAD_M * THREAD_N);

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    thread_tiles_2d(int M, int N, int K, const float* A, const float* B, float* C) {
  __shared__ float tile_a[BLOCK_M][BLOCK_K];
  __shared__ float tile_b[BLOCK_K][BLOCK_N];
  const int first_row = blockIdx.y * BLOCK_M;
  const int first_col = blockIdx.x * BLOCK_N;
  const int x = threadIdx.x % (BLOCK_N / THREAD_N) * THREAD_N;
  const int y = threadIdx.x / (BLOCK_N / THREAD_N) * THREAD_M;
  float sums[THREAD_M][THREAD_N] = {};
  for (int k = 0; k < K; k += BLOCK_K) {
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_M * BLOCK_K; i += THREADS) {
      const int r = i / BLOCK_K, c = i % BLOCK_K;
      tile_a[r][c] = load_or_zero(A, first_row + r, k + c, M, K);
    }
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_K * BLOCK_N; i += THREADS) {
      const int r = i / BLOCK_N, c = i % BLOCK_N;
      tile_b[r][c] = load_or_zero(B, k + r, first_col + c, K, N);
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < BLOCK_K; ++step) {
      float a[THREAD_M], b[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) a[i] = tile_a[y + i][step];
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) b[j] = tile_b[step][x + j];
      outer_product(sums, a, b);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      store_inside(C, first_row + y + i, first_col + x + j, M, N, sums[i][j]);
    }
  }
}
