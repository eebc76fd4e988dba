// 04 One-dimensional thread tiles
//
// Problem:   C[M,N] = A[M,K] B[K,N], fp32, row-major, any M and N, K a multiple of 8.
// Idea:      Each thread computes 8 elements of a column: one value of B in a register serves 8 FMAs, so
//            9 shared loads (the 8 of A are broadcasts) feed 8 FMAs instead of 16.
// Limiter:   Still more than one shared load for each FMA.
// Predicted: 2x rung 03.
// Measured:  18.4 TFLOP/s at 4096^3; 0.36 x cuBLAS; H200, ec36ff0.
// PTX:       none; plain C++.
#include "common/sgemm.cuh"

constexpr int BLOCK_M = 64;
constexpr int BLOCK_N = 64;
constexpr int BLOCK_K = 8;
constexpr int THREAD_M = 8;
constexpr int THREADS = BLOCK_M * BLOCK_N / THREAD_M;

extern "C" __global__ void __launch_bounds__(THREADS)
    thread_tiles_1d(int M, int N, int K, const float* A, const float* B, float* C) {
  static_assert(THREADS == BLOCK_M * BLOCK_K && THREADS == BLOCK_K * BLOCK_N,
                "each thread loads one element of both tiles");
  __shared__ float tile_a[BLOCK_M][BLOCK_K];
  __shared__ float tile_b[BLOCK_K][BLOCK_N];
  const int first_row = blockIdx.y * BLOCK_M;
  const int first_col = blockIdx.x * BLOCK_N;
  const int x = threadIdx.x % BLOCK_N;
  const int y = threadIdx.x / BLOCK_N * THREAD_M;
  float sums[THREAD_M] = {};
  for (int k = 0; k < K; k += BLOCK_K) {
    const int a_row = threadIdx.x / BLOCK_K, a_col = threadIdx.x % BLOCK_K;
    const int b_row = threadIdx.x / BLOCK_N, b_col = threadIdx.x % BLOCK_N;
    tile_a[a_row][a_col] = load_or_zero(A, first_row + a_row, k + a_col, M, K);
    tile_b[b_row][b_col] = load_or_zero(B, k + b_row, first_col + b_col, K, N);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < BLOCK_K; ++step) {
      const float b = tile_b[step][x];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) sums[i] += tile_a[y + i][step] * b;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    store_inside(C, first_row + y + i, first_col + x, M, N, sums[i]);
  }
}
