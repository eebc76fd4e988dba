// 09 TMA and wgmma
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      Hopper's two engines in their smallest form: one thread asks the TMA unit for a 64x64 box of
//            A and of B, swizzled 128 bytes wide; one warpgroup multiplies them with wgmma m64n64k16.
// Limiter:   Latency: load, wait, multiply, wait, with one stage nothing overlaps inside a CTA. Only
//            several CTAs an SM hide it. A 64x64 tile also reads each operand byte for only 64 FMAs.
// Predicted: 300-320 TFLOP/s (317 was reported for this step on an H100), ten times rung 08.
// Measured:  362 TFLOP/s at 4096^3, 305 TFLOP/s at 8192^3; 0.45, 0.38 x cuBLAS, cool; H200, ec36ff0.
// PTX:       cp.async.bulk.tensor, mbarrier, wgmma; "Swizzling modes", "Matrix descriptor".
#include "common/epilogue.cuh"
#include "common/pipeline.cuh"

constexpr int BLOCK_M = 64;
constexpr int BLOCK_N = 64;
constexpr int BLOCK_K = 64;
constexpr int THREADS = 128;
constexpr int SMEM_BYTES = (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + 1024;

struct Shared {
  bf16 a[BLOCK_M * BLOCK_K];
  bf16 b[BLOCK_N * BLOCK_K];
  uint64 loaded;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    tma_wgmma(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int row = blockIdx.y * BLOCK_M;
  const int col = blockIdx.x * BLOCK_N;
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.loaded, 1);
    fence_mbarrier_init();
  }
  __syncthreads();

  float accumulators[BLOCK_N / 2] = {};
  uint32 phase = 0;
  for (int k = 0; k < args.k; k += BLOCK_K) {
    load_and_wait(shared, args, k, row, col, phase);
    phase ^= 1;
    wgmma_fence();
    wgmma_stage<BLOCK_N>(accumulators, shared.a, shared.b);
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();  // every warp is done with the stage before it is overwritten
  }
  store_registers<BLOCK_N>(accumulators, args, row, col);
}
