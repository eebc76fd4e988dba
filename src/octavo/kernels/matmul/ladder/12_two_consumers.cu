// 12 Two consumer warpgroups and setmaxnreg
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      A 128x256 tile, 64 rows for each of two consumer warpgroups. Each needs 128 accumulator
//            registers a thread, so the producer keeps 40 and the consumers
//            take 232. m64n256k16 is the widest instruction: the most FLOPs per byte of shared memory.
// Limiter:   One CTA an SM: while it stores its tile and the next one fills its ring, the tensor cores
//            rest. The last wave of tiles is partly empty.
// Predicted: 610 TFLOP/s (reported on an H100): L2 bytes per FLOP fall by a quarter.
// Measured:  669 TFLOP/s at 4096^3, 723 TFLOP/s at 8192^3; 0.83, 0.89 x cuBLAS, cool; H200, ec36ff0.
// PTX:       setmaxnreg, wgmma with n = 256.
#include "common/epilogue.cuh"
#include "common/pipeline.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 3;
constexpr int THREADS = 384;
constexpr int CONSUMERS = 256;
constexpr int GROUP_M = 8;
constexpr int SMEM_BYTES = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + 1024;

struct Shared : Operands<BLOCK_M, BLOCK_N, BLOCK_K, STAGES> {
  uint64 full[STAGES];
  uint64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    two_consumers(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int index = blockIdx.y * gridDim.x + blockIdx.x;
  const Tile tile = grouped_tile<GROUP_M>(index, gridDim.y, gridDim.x);
  const int row = tile.m * BLOCK_M;
  const int col = tile.n * BLOCK_N;
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  init_ring(shared.full, shared.empty, CONSUMERS + 1, CONSUMERS);
  __syncthreads();

  Ring<STAGES> ring;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      for (int block = 0; block < blocks_k; ++block, ring.advance()) {
        load_stage(shared, ring, args, block, row, col);
      }
    }
  } else {
    setmaxnreg_inc<232>();
    const int half = threadIdx.x / 128 - 1;  // which 64 rows
    float accumulators[BLOCK_N / 2] = {};
    for (int block = 0; block < blocks_k; ++block, ring.advance()) {
      mbarrier_arrive(&shared.full[ring.stage]);
      mbarrier_wait(&shared.full[ring.stage], ring.phase);
      start_stage(accumulators, shared, ring.stage, half);
      wgmma_wait<0>();
      mbarrier_arrive(&shared.empty[ring.stage]);
    }
    store_registers<BLOCK_N>(accumulators, args, row + half * 64, col);
  }
}
