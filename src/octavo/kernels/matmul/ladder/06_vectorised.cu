// 06 Vectorised loads
//
// Problem:   C[M,N] = A[M,K] B[K,N], fp32, row-major, any M and N, K a multiple of 8.
// Idea:      16 bytes an instruction everywhere: float4 from global memory, A transposed on its way into
//            shared memory so that a thread's 8 rows are contiguous too, float4 out of it and to C.
// Limiter:   A thread's 8 columns still lie together, so lanes read 32 bytes apart: two wavefronts where
//            one would do. And nothing overlaps the global loads but other CTAs.
// Predicted: 1.2x rung 05: a quarter of the load instructions.
// Measured:  31.7 TFLOP/s at 4096^3; 0.62 x cuBLAS; H200, ec36ff0.
// PTX:       none; ld.global.v4 and ld.shared.v4 come from float4.
#include "common/sgemm.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 8;
constexpr int THREAD_M = 8;
constexpr int THREAD_N = 8;
constexpr int THREADS = BLOCK_M * BLOCK_N / (THREAD_M * THREAD_N);

extern "C" __global__ void __launch_bounds__(THREADS)
    vectorised(int M, int N, int K, const float* A, const float* B, float* C) {
  static_assert(THREADS * 4 == BLOCK_M * BLOCK_K && THREADS * 4 == BLOCK_K * BLOCK_N,
                "each thread loads four elements of both tiles");
  __shared__ float tile_a[BLOCK_K][BLOCK_M];  // transposed
  __shared__ float tile_b[BLOCK_K][BLOCK_N];
  const int first_row = blockIdx.y * BLOCK_M;
  const int first_col = blockIdx.x * BLOCK_N;
  const int x = threadIdx.x % (BLOCK_N / THREAD_N) * THREAD_N;
  const int y = threadIdx.x / (BLOCK_N / THREAD_N) * THREAD_M;
  const int a_row = threadIdx.x / (BLOCK_K / 4), a_col = threadIdx.x % (BLOCK_K / 4) * 4;
  const int b_row = threadIdx.x / (BLOCK_N / 4), b_col = threadIdx.x % (BLOCK_N / 4) * 4;
  float sums[THREAD_M][THREAD_N] = {};
  for (int k = 0; k < K; k += BLOCK_K) {
    const float4 a4 = load4_or_zero(A, first_row + a_row, k + a_col, M, K);
    tile_a[a_col][a_row] = a4.x;
    tile_a[a_col + 1][a_row] = a4.y;
    tile_a[a_col + 2][a_row] = a4.z;
    tile_a[a_col + 3][a_row] = a4.w;
    *reinterpret_cast<float4*>(&tile_b[b_row][b_col]) =
        load4_or_zero(B, k + b_row, first_col + b_col, K, N);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < BLOCK_K; ++step) {
      float a[THREAD_M], b[THREAD_N];
      load_fragment<THREAD_M, 4>(a, &tile_a[step][y]);
      load_fragment<THREAD_N, 4>(b, &tile_b[step][x]);
      outer_product(sums, a, b);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
    for (int j = 0; j < THREAD_N; j += 4) {
      store4_inside(C, first_row + y + i, first_col + x + j, M, N,
                    make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]));
    }
  }
}
