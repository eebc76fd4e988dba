// 13 Persistent CTAs
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      One CTA an SM lives for the whole product and walks over tiles. The producer runs ahead into
//            the next tile while the consumers still store this one; CTA starts and barrier set-up are
//            paid once. The grid is ours: the fewest CTAs that need no more rounds, for an SM that idles in
//            the last round would have had its power better spent on the clock of the others.
// Limiter:   Barrier traffic: 257 + 256 arrivals a stage. So nothing is gained yet: at 8192^3 the tensor cores
//            are active 76.7% of the cycles instead of 78.8% (ncu), 128 busy SMs of 132; that is 3.1% more
//            cycles at a clock 1.2% higher. What the overlap of stores buys shows from rung 14 on.
// Predicted: 660 TFLOP/s (reported on an H100).
// Measured:  669 TFLOP/s at 4096^3, 709 TFLOP/s at 8192^3; 0.83, 0.88 x cuBLAS, cool; H200, ec36ff0.
// PTX:       none new.
#include "common/epilogue.cuh"
#include "common/pipeline.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 3;
constexpr int THREADS = 384;
constexpr int CONSUMERS = 256;
constexpr int GROUP_M = 8;
constexpr int PERSISTENT = 1;
constexpr int SMEM_BYTES = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + 1024;

struct Shared : Operands<BLOCK_M, BLOCK_N, BLOCK_K, STAGES> {
  uint64 full[STAGES];
  uint64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    persistent(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int tiles_m = ceil_div(args.m, BLOCK_M);
  const int tiles_n = ceil_div(args.n, BLOCK_N);
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  init_ring(shared.full, shared.empty, CONSUMERS + 1, CONSUMERS);
  __syncthreads();

  Ring<STAGES> ring;  // goes on from tile to tile
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
        mbarrier_arrive(&shared.full[ring.stage]);
        mbarrier_wait(&shared.full[ring.stage], ring.phase);
        start_stage(accumulators, shared, ring.stage, half);
        wgmma_wait<0>();
        mbarrier_arrive(&shared.empty[ring.stage]);
      }
      store_registers<BLOCK_N>(accumulators, args, tile.m * BLOCK_M + half * 64,
                               tile.n * BLOCK_N);
    }
  }
}
