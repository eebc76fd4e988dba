// Thin wrappers, one PTX instruction each. Names follow the PTX ISA 9.0.
#pragma once
#include "common/types.cuh"

#define DEVICE __device__ __forceinline__

DEVICE uint32 smem_address(const void* pointer) {
  return (uint32)__cvta_generic_to_shared(pointer);
}

// ---- mbarrier ----------------------------------------------------------------------

DEVICE void mbarrier_init(uint64* barrier, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the async proxy and to the other CTAs of the cluster.
DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void mbarrier_arrive(uint64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives on the barrier at the same shared-memory offset in CTA `cta` of this cluster. Not
// .release.cluster: that compiles to MEMBAR.ALL.GPU, which cost rung 15 a third of its speed on an
// H200. What it would publish does not exist: a consumer only read the stage, through wgmma, and
// wgmma.wait_group has already ordered those reads before this instruction.
DEVICE void mbarrier_arrive_cluster(uint64* barrier, uint32 cta) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(cta)
      : "memory");
}

DEVICE void mbarrier_arrive_expect_tx(uint64* barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   smem_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Waits until the phase of the given parity has completed. A fresh barrier is in phase 0, so waiting
// for parity 1 returns at once: that is how a producer finds every slot of an unused ring empty.
DEVICE void mbarrier_wait(uint64* barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// ---- tensor copies, TMA ----------------------------------------------------------------

DEVICE void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Global -> shared, box at (x elements, y rows). Completes `barrier` by the box's full bytes, also
// where the box hangs over the edge: the outside reads as zero.
DEVICE void tma_load(void* destination, const TensorMap* map, uint64* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

// One read from L2, delivered at the same offset in every CTA of `mask`, completing each one's barrier.
DEVICE void tma_load_multicast(void* destination, const TensorMap* map, uint64* barrier, int x,
                               int y, uint16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

// Shared -> global; the outside of C is not written. Completion is tracked by bulk groups of the
// issuing thread, so commit and wait must run in that same thread.
DEVICE void tma_store(const TensorMap* map, const void* source, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   map),
               "r"(smem_address(source)), "r"(x), "r"(y)
               : "memory");
}

DEVICE void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most `PENDING` groups have yet to READ their shared memory: enough to overwrite the others.
template <int PENDING>
DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

DEVICE void tma_store_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Ordinary shared-memory writes before this are seen by later async-proxy reads (TMA, wgmma).
DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- CTAs, clusters, registers ----------------------------------------------------------------------

// The dynamic shared memory as a `Shared`. 1024 bytes is what the 128-byte swizzle asks of a tile.
template <class Shared, int SMEM_BYTES>
DEVICE Shared& dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char smem[];
  static_assert(sizeof(Shared) <= SMEM_BYTES, "host and device disagree");
  return *reinterpret_cast<Shared*>(smem);
}

DEVICE uint32 cluster_cta_rank() {
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all CTAs of the cluster: release before, acquire after. Not
// .aligned: after a role branch the threads of a warp may arrive apart.
DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;\n" ::
          : "memory");
}

// Barrier among `THREADS` threads of a CTA that name the same `id`; 0 is __syncthreads.
template <int THREADS>
DEVICE void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// The whole warpgroup gives registers back or claims them; multiples of 8.
template <int REGISTERS>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Programmatic dependent launch: the next kernel of the stream may start now / wait until
// the kernel before has finished and its writes are visible. Both do nothing without the attribute.
DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

DEVICE void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- values -------------------------------------------------------------------------------------------

// Two fp32 to packed bf16, round to nearest even; `low` lands at the lower address.
DEVICE uint32 pack_bf16x2(float low, float high) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The same value, in a form that ptxas trusts to be the same in all lanes: it may live in a uniform
// register, where wgmma reads its descriptors, and be computed with once a warp.
DEVICE uint32 uniform_word(uint32 value) {
  return __shfl_sync(0xFFFFFFFF, value, 0);
}

DEVICE void store_shared(void* address, uint32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem_address(address)), "r"(value) : "memory");
}

// Four 8x8 matrices of bf16 from a warp's fragments; lane 8j+i points at row i of matrix j.
DEVICE void stmatrix_x4(uint32 address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
