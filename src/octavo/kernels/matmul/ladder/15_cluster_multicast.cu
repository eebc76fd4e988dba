// 15 Clusters and TMA multicast
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      Two CTAs with the same columns of C form a cluster. Each loads half of the B tile and the TMA
//            unit delivers it to both, so a CTA asks the L2 for 32 KB a stage instead of 48.
//            The price: a stage is empty only when the consumers of both CTAs have let go of it.
// Limiter:   At 4096^3 nothing is gained: the L2 moves 6% fewer sectors, but each CTA now also waits for its
//            peer, and tensor cores are active 78.1% of the cycles instead of 79.0% (ncu). It pays where power
//            or memory limits, at 8192^3 and under load. Then: zeroing, waiting, partial-sector stores.
// Predicted: 734 TFLOP/s (reported on an H100): a third less L2 traffic.
// Measured:  727 TFLOP/s at 4096^3, 790 TFLOP/s at 8192^3; 0.90, 0.98 x cuBLAS, cool; H200, ec36ff0.
// PTX:       cp.async.bulk.tensor .multicast::cluster, barrier.cluster, remote mbarrier.arrive.
#include "common/cluster.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 3;
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
    cluster_multicast(const __grid_constant__ GemmArgs args) {
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
        // Its rows of A, and half of B for both CTAs.
        produce_tile<false>(shared, ring, args, work, index, tile, blocks_k);
      }
    }
  } else {
    setmaxnreg_inc<232>();
    const int half = threadIdx.x / 128 - 1;
    for (int index = work.first; index < tiles_m * tiles_n; index += work.clusters) {
      const Tile tile = grouped_tile<GROUP_M>(index, tiles_m, tiles_n);
      float accumulators[BLOCK_N / 2] = {};
      for (int block = 0; block < blocks_k; ++block, ring.advance()) {
        mbarrier_wait(&shared.full[ring.stage], ring.phase);
        start_stage(accumulators, shared, ring.stage, half);
        wgmma_wait<0>();
        // B came from both CTAs, so both must know that this copy is no longer read.
        release_stage<CLUSTER>(shared, ring.stage);
      }
      store_registers<BLOCK_N>(accumulators, args, work.row(tile, BLOCK_M) + half * 64,
                               tile.n * BLOCK_N);
    }
  }
  cluster_sync();  // no CTA leaves while its peer may still arrive on its barriers
}
