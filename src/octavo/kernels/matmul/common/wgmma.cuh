// wgmma: D[64 x N] += A[64 x 16] B[N x 16]^T, bf16 in, fp32 accumulators in registers.
//
// Thread t of a warpgroup (warp w = t / 32, lane l = t % 32) holds in d[i] the element
//   row 16 w + l / 4 + 8 ((i / 2) % 2),  column 8 (i / 4) + 2 (l % 4) + i % 2.
#pragma once
#include "common/ptx.cuh"

// Shared-memory matrix descriptor of a K-major tile with 64 bf16 (128 bytes) a row in
// the 128-byte swizzle: 8-row groups are 1024 bytes apart (bits 32-45, in 16-byte units), the leading
// offset is unused (1), swizzle mode 1 (bits 62-63). The tile must start at a multiple of 1024 bytes;
// the next k16 slice is 32 bytes further on, because the hardware swizzles the address it forms.
DEVICE uint64 wgmma_descriptor(const bf16* tile) {
  const uint64 address = smem_address(tile);
  return ((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
constexpr uint64 DESCRIPTOR_K16 = 2;  // 16 bf16 = 32 bytes, in units of 16 bytes

DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// At most `PENDING` committed groups are still running.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Register lists of the asm statements below, 32 operands each.
#define WGMMA_REGISTERS_0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGISTERS_1 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_REGISTERS_2 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_REGISTERS_3 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_OUT4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_OUT16(d, i) \
  WGMMA_OUT4(d, i), WGMMA_OUT4(d, i + 4), WGMMA_OUT4(d, i + 8), WGMMA_OUT4(d, i + 12)
#define WGMMA_OUT32(d, i) WGMMA_OUT16(d, i), WGMMA_OUT16(d, i + 16)

// DESC_A, DESC_B and SCALE are the numbers of the three operands after the accumulators.
#define WGMMA_TEXT(SHAPE, REGISTERS, DESC_A, DESC_B, SCALE)            \
  "{\n"                                                                \
  ".reg .pred accumulate;\n"                                           \
  "setp.ne.b32 accumulate, " SCALE ", 0;\n"                            \
  "wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" REGISTERS   \
  "}, " DESC_A ", " DESC_B ", accumulate, 1, 1, 0, 0;\n"               \
  "}\n"

// One k16 step. `accumulate` 0 overwrites D, so accumulators need no zeroing.
template <int N>
DEVICE void wgmma_k16(float (&d)[N / 2], uint64 a, uint64 b, int accumulate) {
  static_assert(N == 64 || N == 128 || N == 192 || N == 256, "add the register list for this width");
  if constexpr (N == 64) {
    asm volatile(WGMMA_TEXT("m64n64k16", WGMMA_REGISTERS_0, "%32", "%33", "%34")
                 : WGMMA_OUT32(d, 0)
                 : "l"(a), "l"(b), "r"(accumulate));
  } else if constexpr (N == 128) {
    asm volatile(WGMMA_TEXT("m64n128k16", WGMMA_REGISTERS_0 ", " WGMMA_REGISTERS_1, "%64", "%65",
                            "%66")
                 : WGMMA_OUT32(d, 0), WGMMA_OUT32(d, 32)
                 : "l"(a), "l"(b), "r"(accumulate));
  } else if constexpr (N == 192) {
    asm volatile(WGMMA_TEXT("m64n192k16",
                            WGMMA_REGISTERS_0 ", " WGMMA_REGISTERS_1 ", " WGMMA_REGISTERS_2, "%96",
                            "%97", "%98")
                 : WGMMA_OUT32(d, 0), WGMMA_OUT32(d, 32), WGMMA_OUT32(d, 64)
                 : "l"(a), "l"(b), "r"(accumulate));
  } else {
    asm volatile(WGMMA_TEXT("m64n256k16",
                            WGMMA_REGISTERS_0 ", " WGMMA_REGISTERS_1 ", " WGMMA_REGISTERS_2
                                              ", " WGMMA_REGISTERS_3,
                            "%128", "%129", "%130")
                 : WGMMA_OUT32(d, 0), WGMMA_OUT32(d, 32), WGMMA_OUT32(d, 64), WGMMA_OUT32(d, 96)
                 : "l"(a), "l"(b), "r"(accumulate));
  }
}

// One BLOCK_K = 64 stage: four k16 steps over a 64-row A tile and an N-row B tile, committed as a group.
// The caller waits. `accumulate` 0 makes the first step overwrite D.
template <int N>
DEVICE void wgmma_stage(float (&d)[N / 2], const bf16* a, const bf16* b, int accumulate = 1) {
  const uint64 desc_a = wgmma_descriptor(a);
  const uint64 desc_b = wgmma_descriptor(b);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma_k16<N>(d, desc_a + step * DESCRIPTOR_K16, desc_b + step * DESCRIPTOR_K16,
                 step == 0 ? accumulate : 1);
  }
}

// A descriptor's low word: address and leading offset. The high word is the same for every tile.
DEVICE uint32 descriptor_low(const bf16* tile) {
  return (uint32)wgmma_descriptor(tile);
}

// wgmma_stage from uniform low words: the k16 steps are added in the uniform unit, where otherwise
// four words an instruction are computed in all 32 lanes and moved there.
template <int N>
DEVICE void wgmma_stage_uniform(float (&d)[N / 2], uint32 low_a, uint32 low_b, int accumulate) {
  constexpr uint64 HIGH = 64ull << 32 | 1ull << 62;
#pragma unroll
  for (uint32 step = 0; step < 4; ++step) {
    const uint32 further = step * (uint32)DESCRIPTOR_K16;
    wgmma_k16<N>(d, HIGH | (low_a + further), HIGH | (low_b + further),
                 step == 0 ? accumulate : 1);
  }
}
