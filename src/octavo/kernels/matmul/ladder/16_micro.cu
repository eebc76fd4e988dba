// 16 Micro-optimisations
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      Small things. The first MMA of a tile overwrites the accumulators (scale-d = 0), so nothing
//            is zeroed; a stage's wgmma stays in flight while the next is issued (wait<1>), so the tensor
//            cores never run dry between stages; that holds each stage longer, so there is a fourth.
//            Hints to the L2, on A and B as on C, all lost a little: see the log.
// Limiter:   The epilogue: 4-byte stores that touch half a 32-byte sector each, tensor cores idle.
// Predicted: 747 TFLOP/s (reported on an H100).
// Measured:  733 TFLOP/s at 4096^3, 791 TFLOP/s at 8192^3; 0.91, 0.98 x cuBLAS, cool; H200, ec36ff0.
// PTX:       wgmma.mma_async scale-d, wgmma.wait_group with one group pending.
#include "common/cluster.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 4;
constexpr int THREADS = 384;
constexpr int CLUSTER = 2;
constexpr int B_BOX_ROWS = BLOCK_N / CLUSTER;
constexpr int GROUP_M = 8;
constexpr int PERSISTENT = 1;
constexpr int SMEM_BYTES = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + 1024;

struct Shared : Operands<BLOCK_M, BLOCK_N, BLOCK_K, STAGES> {
  uint64 full[STAGES];
  uint64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    micro(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int tiles_m = ceil_div(args.m, BLOCK_M * CLUSTER);
  const int tiles_n = ceil_div(args.n, BLOCK_N);
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  const ClusterWork<CLUSTER> work;
  init_cluster_ring<CLUSTER>(shared);

  Ring<STAGES> ring;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      for (int index = work.first; index < tiles_m * tiles_n; index += work.clusters) {
        const Tile tile = grouped_tile<GROUP_M>(index, tiles_m, tiles_n);
        produce_tile<false>(shared, ring, args, work, index, tile, blocks_k);
      }
    }
  } else {
    setmaxnreg_inc<232>();
    const int half = threadIdx.x / 128 - 1;
    for (int index = work.first; index < tiles_m * tiles_n; index += work.clusters) {
      const Tile tile = grouped_tile<GROUP_M>(index, tiles_m, tiles_n);
      float accumulators[BLOCK_N / 2];  // the first MMA of the tile overwrites them
      multiply_tile<CLUSTER>(accumulators, shared, ring, half, blocks_k);
      store_registers<BLOCK_N>(accumulators, args, work.row(tile, BLOCK_M) + half * 64,
                               tile.n * BLOCK_N);
    }
  }
  cluster_sync();  // no CTA leaves while its peer may still arrive on its barriers
}
