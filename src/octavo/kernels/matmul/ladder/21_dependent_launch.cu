// 21 Programmatic dependent launch
//
// Problem:   C[M,N] = A[M,K] B[N,K]^T, bf16 in and out, fp32 accumulate, any M and N, K a multiple of 8.
// Idea:      A kernel need not wait for the one before it to end before it starts: CTAs move in as SMs fall
//            idle, set up barriers and fetch tensor maps, and only the producer's first load waits until
//            the previous kernel's writes are visible. Launch latency and set-up leave the critical path.
// Limiter:   As rung 20. Alone in a stream it changes nothing.
// Predicted: 2 us a launch: 1% at 4096^3, nothing at 8192^3.
// Measured:  823 TFLOP/s at 4096^3, 834 TFLOP/s at 8192^3; 1.02, 1.03 x cuBLAS, cool; H200, ec36ff0.
// PTX:       griddepcontrol.
#include "common/cluster.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 4;
constexpr int THREADS = 384;
constexpr int CLUSTER = 2;
constexpr int B_BOX_ROWS = BLOCK_N / CLUSTER;
constexpr int HILBERT = 1;
constexpr int CHUNKS = BLOCK_N / 64;
constexpr int SPACING = 4;  // K blocks from one chunk's store to the next
constexpr int PERSISTENT = 1;
constexpr int PROGRAMMATIC = 1;
constexpr int SMEM_BYTES = STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2 + 4 * 64 * 64 * 2 + 1024;

struct Shared : Operands<BLOCK_M, BLOCK_N, BLOCK_K, STAGES> {
  bf16 c[2][2][CHUNK_ELEMENTS];  // two chunks in turn for each consumer
  uint64 full[STAGES];
  uint64 empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dependent_launch(const __grid_constant__ GemmArgs args) {
  Shared& shared = dynamic_smem<Shared, SMEM_BYTES>();
  const int tiles = ceil_div(args.m, BLOCK_M * CLUSTER) * ceil_div(args.n, BLOCK_N);
  const int blocks_k = ceil_div(args.k, BLOCK_K);
  const ClusterWork<CLUSTER> work;
  init_cluster_ring<CLUSTER>(shared);
  griddepcontrol_launch_dependents();

  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      Ring<STAGES> ring;
      tma_prefetch_map(&args.a);
      tma_prefetch_map(&args.b);
      // All that this grid reads or writes, but for the constant table of tiles, comes after a load of
      // this thread, so it alone waits.
      griddepcontrol_wait();
      for (int index = work.first; index < tiles; index += work.clusters) {
        const Tile tile = unpack_tile(args.order[index]);
        produce_tile<true>(shared, ring, args, work, index, tile, blocks_k);
      }
    }
  } else {
    setmaxnreg_inc<232>();
    consume_tiles<CLUSTER, SPACING>(shared, args, work, tiles, blocks_k);
  }
  cluster_sync();  // no CTA leaves while its peer may still arrive on its barriers
}
