// Microbenchmarks of the memory hierarchy. Each kernel does one thing; bench/device.py says what the
// numbers mean. `sink` is never written in practice: it keeps the compiler from dropping the loads.
#include "common/ptx.cuh"

DEVICE uint32 global_thread() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}

// 16 bytes a thread and step, neighbouring threads side by side: as coalesced as it gets.
extern "C" __global__ void copy(const uint4* from, uint4* to, int64 count) {
  const int64 step = (int64)gridDim.x * blockDim.x;
  for (int64 i = global_thread(); i < count; i += step) to[i] = from[i];
}

extern "C" __global__ void read(const uint4* from, uint32* sink, int64 count) {
  const int64 step = (int64)gridDim.x * blockDim.x;
  uint32 sum = 0;
  for (int64 i = global_thread(); i < count; i += 4 * step) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64 at = i + j * step;
      if (at < count) {
        const uint4 value = __ldcg(from + at);  // L2 only: a second pass must not hit the L1
        sum ^= value.x ^ value.y ^ value.z ^ value.w;
      }
    }
  }
  if (sum == 0x5EED1234) *sink = sum;
}

// One 4-byte word every `stride` words: a warp touches `stride` times the sectors that it needs.
extern "C" __global__ void read_strided(const uint32* from, uint32* sink, int64 words, int stride) {
  const int64 step = (int64)gridDim.x * blockDim.x;
  uint32 sum = 0;
  for (int64 i = global_thread(); i * stride < words; i += step) sum ^= __ldcg(from + i * stride);
  if (sum == 0x5EED1234) *sink = sum;
}

// Pointer chase: each load's address is the last load's value, so time / steps is the latency.
extern "C" __global__ void chase_global(const uint32* next, uint32* sink, int64* cycles, int steps) {
  uint32 at = 0;
  for (int i = 0; i < 64; ++i) at = __ldcg(next + at);  // tables and translations are warm
  const int64 start = clock64();
  for (int i = 0; i < steps; ++i) at = __ldcg(next + at);
  if (at == 0xFFFFFFFF) *sink = at;
  *cycles = clock64() - start;
}

extern "C" __global__ void chase_l1(const uint32* next, uint32* sink, int64* cycles, int steps) {
  uint32 at = 0;
  for (int i = 0; i < 4096; ++i) at = __ldca(next + at);
  const int64 start = clock64();
  for (int i = 0; i < steps; ++i) at = __ldca(next + at);
  if (at == 0xFFFFFFFF) *sink = at;
  *cycles = clock64() - start;
}

// .volatile: ptxas would lift a plain load out of a loop that stores nothing.
DEVICE uint32 load_shared(uint32 address) {
  uint32 value;
  asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

constexpr int RING_WORDS = 1024;

extern "C" __global__ void chase_shared(uint32* sink, int64* cycles, int steps) {
  __shared__ uint32 ring[RING_WORDS];
  for (int i = threadIdx.x; i < RING_WORDS; i += blockDim.x) {
    ring[i] = smem_address(&ring[(i + 33) % RING_WORDS]);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32 at = smem_address(ring);
  const int64 start = clock64();
  for (int i = 0; i < steps; ++i) at = load_shared(at);
  if (at == 0xFFFFFFFF) *sink = at;
  *cycles = clock64() - start;
}

// The same through a cluster of two: CTA 0 chases pointers that lie in CTA 1's shared memory.
extern "C" __global__ void chase_dsmem(uint32* sink, int64* cycles, int steps) {
  __shared__ uint32 ring[RING_WORDS];
  for (int i = threadIdx.x; i < RING_WORDS; i += blockDim.x) {
    uint32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 1;"
                 : "=r"(remote)
                 : "r"(smem_address(&ring[(i + 33) % RING_WORDS])));
    ring[i] = remote;
  }
  cluster_sync();
  if (cluster_cta_rank() == 0 && threadIdx.x == 0) {
    uint32 at = ring[0];
    const int64 start = clock64();
    for (int i = 0; i < steps; ++i) {
      asm volatile("ld.shared::cluster.b32 %0, [%0];" : "+r"(at)::"memory");
    }
    if (at == 0xFFFFFFFF) *sink = at;
    *cycles = clock64() - start;
  }
  cluster_sync();  // CTA 1 stays until its memory is no longer read
}

// One warp, lane l reads word l * stride: gcd(stride, 32) lanes share each bank that is touched.
// Stride 0 is a broadcast. Eight loads in flight, so the time is throughput, not latency.
extern "C" __global__ void shared_banks(uint32* sink, int64* cycles, int stride, int steps) {
  __shared__ uint32 words[32 * 32 + 8];
  for (int i = threadIdx.x; i < 32 * 32 + 8; i += 32) words[i] = i;
  __syncwarp();
  const uint32 address = smem_address(&words[threadIdx.x * stride]);
  uint32 sum = 0;
  const int64 start = clock64();
  for (int i = 0; i < steps; ++i) {
    uint32 value[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = load_shared(address + 4 * j);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum ^= value[j];
  }
  const int64 end = clock64();
  if (sum == 0x5EED1234) *sink = sum;
  if (threadIdx.x == 0) *cycles = end - start;
}

// All warps of all SMs read 16 bytes a lane from shared memory, without conflicts.
extern "C" __global__ void shared_bandwidth(uint32* sink, int steps) {
  __shared__ uint4 words[1024];
  words[threadIdx.x] = make_uint4(threadIdx.x, 1, 2, 3);
  __syncthreads();
  const uint32 address = smem_address(&words[threadIdx.x]);
  uint32 sum = 0;
  for (int i = 0; i < steps; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint32 a, b, c, d;
      asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                   : "r"(address ^ j * 16));
      sum ^= a ^ b ^ c ^ d;
    }
  }
  if (sum == 0x5EED1234) *sink = sum;
}
