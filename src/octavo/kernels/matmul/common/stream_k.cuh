// Sharing out the K blocks of some tiles so that all clusters finish together.
#pragma once
#include "common/epilogue.cuh"
#include "common/pipeline.cuh"

// K blocks [begin, end) of a tile, `tile` counting in the visiting order.
struct Piece {
  int tile, begin, end;
};

// What one cluster works on. The first `streamed` tiles lie end to end, as a line of K blocks, of which
// every cluster gets an equal run, longer than a tile; the other tiles are taken whole, in turn. A run
// begins with the tail of a tile and ends with the head of another. Tails come first and their sums
// wait in memory; heads come late, at a time that differs from cluster to cluster, add the tail's
// sum and finish the tile: nobody waits, and not all read at once. Twin: stream.py.
struct StreamSchedule {
  const int tiles, blocks, clusters, streamed, cluster, head_slot;
  int at, last;  // 32 bits: the host streams nothing where they would not do
  int whole = 0;  // whole tiles taken so far

  DEVICE StreamSchedule(int tiles, int blocks, int clusters, int streamed, int cluster)
      : tiles(tiles),
        blocks(blocks),
        clusters(clusters),
        streamed(streamed),
        cluster(cluster),
        head_slot(cluster % max((tiles - streamed) / clusters, 1)),
        at(streamed * blocks * cluster / clusters),
        last(streamed * blocks * (cluster + 1) / clusters) {}

  DEVICE bool next(Piece& piece) {
    if (at < last) {
      const int tile = at / blocks;
      const int begin = at - tile * blocks;
      const int end = min(blocks, begin + last - at);
      if (end == blocks || whole == head_slot) {
        at += end - begin;
        piece = {tile, begin, end};
        return true;
      }
    }
    const int tile = streamed + cluster + whole * clusters;
    if (tile >= tiles) return false;
    ++whole;
    piece = {tile, 0, blocks};
    return true;
  }
};

// The sum of a tail, from the warpgroup that computed it to the one that has the head: 16 bytes a
// thread and step, in the threads' own order, because both ends have the same fragment layout.
template <int N>
struct PartialSum {
  float4* sums;
  int* flag;

  DEVICE PartialSum(const GemmArgs& args, int warpgroup)
      : sums(reinterpret_cast<float4*>(args.partials) + (int64)warpgroup * (N / 8) * 128 +
             threadIdx.x % 128),
        flag(args.flags + warpgroup) {}

  DEVICE void publish(const float (&d)[N / 2], int barrier) const {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      __stcg(sums + i * 128, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
    }
    __threadfence();
    named_barrier_sync<128>(barrier);
    if (threadIdx.x % 128 == 0) {
      asm volatile("st.release.gpu.b32 [%0], 1;" ::"l"(flag) : "memory");
    }
  }

  // Adds and leaves the flag as it was before the launch.
  DEVICE void add_to(float (&d)[N / 2], int barrier) const {
    if (threadIdx.x % 128 == 0) {
      int ready = 0;
      while (!ready) asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(ready) : "l"(flag) : "memory");
      *flag = 0;
    }
    named_barrier_sync<128>(barrier);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float4 sum = __ldcg(sums + i * 128);
      d[4 * i] += sum.x;
      d[4 * i + 1] += sum.y;
      d[4 * i + 2] += sum.z;
      d[4 * i + 3] += sum.w;
    }
  }
};
