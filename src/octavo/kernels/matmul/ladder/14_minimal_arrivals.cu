// 14 One arrival a warpgroup
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      Nothing but the raw mbarrier operations that are needed. A full barrier counts one arrival,
//            the producer's expect_tx; consumers only test its parity. An empty barrier counts one
//            arrival a consumer warpgroup: its wgmma has finished as a whole, so one thread may speak.
// Limiter:   Every CTA reads its own copy of A and B from the L2: 48 KB for each K block, 6.3 MB for the chip.
// Predicted: 700 TFLOP/s (704 was reported on an H100): 513 arrivals a stage become 3.
// Measured:  732 TFLOP/s at 4096^3, 784 TFLOP/s at 8192^3; 0.91, 0.97 x cuBLAS, cool; H200, ec36ff0.
// PTX:       mbarrier.arrive, mbarrier.try_wait.parity.
#include "common/epilogue.cuh"
#include "common/pipeline.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 3;
constexpr int THREADS = 384;
constexpr int GROUP_M = 8;
constexpr int PERSISTENT = 1;
constexpr int SMEM_BYTES = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + 1024;

struct Shared : Operands<BLOCK_M, BLOCK_N, BLOCK_K, STAGES> {
  uint64 full[STAGES];
  uint64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    minimal_arrivals(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int tiles_m = ceil_div(args.m, BLOCK_M);
  const int tiles_n = ceil_div(args.n, BLOCK_N);
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  init_ring(shared.full, shared.empty, 1, 2);
  __syncthreads();

  Ring<STAGES> ring;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      for (int index = blockIdx.x; index < tiles_m * tiles_n; index += gridDim.x) {
        const Tile tile = grouped_tile<GROUP_M>(index, tiles_m, tiles_n);
        for (int block = 0; block < blocks_k; ++block, ring.advance()) {
          load_stage(shared, ring, args, block, tile.m * BLOCK_M, tile.n * BLOCK_N);
        }
      }
    }
  } else {
    setmaxnreg_inc<232>();
    const int half = threadIdx.x / 128 - 1;
    for (int index = blockIdx.x; index < tiles_m * tiles_n; index += gridDim.x) {
      const Tile tile = grouped_tile<GROUP_M>(index, tiles_m, tiles_n);
      float accumulators[BLOCK_N / 2] = {};
      for (int block = 0; block < blocks_k; ++block, ring.advance()) {
        mbarrier_wait(&shared.full[ring.stage], ring.phase);
        start_stage(accumulators, shared, ring.stage, half);
        wgmma_wait<0>();
        if (threadIdx.x % 128 == 0) mbarrier_arrive(&shared.empty[ring.stage]);
      }
      store_registers<BLOCK_N>(accumulators, args, tile.m * BLOCK_M + half * 64,
                               tile.n * BLOCK_N);
    }
  }
}
