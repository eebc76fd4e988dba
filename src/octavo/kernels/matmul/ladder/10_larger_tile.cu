// 10 Larger output tile
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      128x128 instead of 64x64: four times the FLOPs for twice the bytes of every stage, and the
//            wider m64n128k16 instruction reads the B tile from shared memory once for 128 columns.
// Limiter:   Still latency: one stage, nothing in flight while wgmma runs.
// Predicted: 400-430 TFLOP/s (423 was reported on an H100): bytes per FLOP halve.
// Measured:  572 TFLOP/s at 4096^3, 614 TFLOP/s at 8192^3; 0.71, 0.76 x cuBLAS, cool; H200, ec36ff0.
// PTX:       wgmma.mma_async with n = 128.
#include "common/epilogue.cuh"
#include "common/pipeline.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 64;
constexpr int THREADS = 128;
constexpr int SMEM_BYTES = (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + 1024;

struct Shared {
  bf16 a[BLOCK_M * BLOCK_K];
  bf16 b[BLOCK_N * BLOCK_K];
  uint64 loaded;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    larger_tile(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int row = blockIdx.y * BLOCK_M;
  const int col = blockIdx.x * BLOCK_N;
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.loaded, 1);
    fence_mbarrier_init();
  }
  __syncthreads();

  float top[BLOCK_N / 2] = {};  // rows 0-63 of the tile
  float bottom[BLOCK_N / 2] = {};
  uint32 phase = 0;
  for (int k = 0; k < args.k; k += BLOCK_K) {
    load_and_wait(shared, args, k, row, col, phase);
    phase ^= 1;
    wgmma_fence();
    wgmma_stage<BLOCK_N>(top, shared.a, shared.b);
    wgmma_stage<BLOCK_N>(bottom, shared.a + 64 * BLOCK_K, shared.b);
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();
  }
  store_registers<BLOCK_N>(top, args, row, col);
  store_registers<BLOCK_N>(bottom, args, row + 64, col);
}
