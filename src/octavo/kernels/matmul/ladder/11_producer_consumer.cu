// 11 Producer and consumer
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      Roles. A producer warp keeps a ring of three stages filled by TMA; a consumer warpgroup
//            multiplies. Each stage has a full and an empty barrier, and every thread takes part, as a
//            block-wide barrier object would have it. Two CTAs fit an SM and hide each other's ends, but
//            their deep rings drift apart along K, and what drifts no longer meets in the L2: so tiles are
//            visited 8 rows deep, and those that run at once are near square in C.
// Limiter:   Bytes: an element of a 128x128 tile meets 128 others only. And 129 + 128 arrivals a stage.
// Predicted: 500 TFLOP/s (498 was reported on an H100): loads overlap the multiplication.
// Measured:  609 TFLOP/s at 4096^3, 635 TFLOP/s at 8192^3; 0.75, 0.78 x cuBLAS, cool; H200, ec36ff0.
// PTX:       mbarrier phases and parity, wgmma.wait_group.
#include "common/epilogue.cuh"
#include "common/pipeline.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 3;
constexpr int THREADS = 160;
constexpr int CONSUMERS = 128;
constexpr int GROUP_M = 8;
constexpr int SMEM_BYTES = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + 1024;

struct Shared : Operands<BLOCK_M, BLOCK_N, BLOCK_K, STAGES> {
  uint64 full[STAGES];
  uint64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    producer_consumer(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int index = blockIdx.y * gridDim.x + blockIdx.x;
  const Tile tile = grouped_tile<GROUP_M>(index, gridDim.y, gridDim.x);
  const int row = tile.m * BLOCK_M;
  const int col = tile.n * BLOCK_N;
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  init_ring(shared.full, shared.empty, CONSUMERS + 1, CONSUMERS);
  __syncthreads();

  Ring<STAGES> ring;
  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x != CONSUMERS) return;
    for (int block = 0; block < blocks_k; ++block, ring.advance()) {
      load_stage(shared, ring, args, block, row, col);
    }
  } else {
    float top[BLOCK_N / 2] = {};
    float bottom[BLOCK_N / 2] = {};
    for (int block = 0; block < blocks_k; ++block, ring.advance()) {
      mbarrier_arrive(&shared.full[ring.stage]);
      mbarrier_wait(&shared.full[ring.stage], ring.phase);
      wgmma_fence();
      wgmma_stage<BLOCK_N>(top, shared.a[ring.stage], shared.b[ring.stage]);
      wgmma_stage<BLOCK_N>(bottom, shared.a[ring.stage] + 64 * BLOCK_K, shared.b[ring.stage]);
      wgmma_commit();
      wgmma_wait<0>();
      mbarrier_arrive(&shared.empty[ring.stage]);
    }
    store_registers<BLOCK_N>(top, args, row, col);
    store_registers<BLOCK_N>(bottom, args, row + 64, col);
  }
}
