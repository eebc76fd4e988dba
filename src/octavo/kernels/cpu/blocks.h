// Weights in blocks of 32 along K with a scale each, as GGUF files have them: kept so in memory, and made
// elements where they are used, which costs less than reading elements from memory when rows are few.
#pragma once
#include "vectors.h"
#if defined ELEM_BF16 && defined __AMX_BF16__ && defined __AVX512BF16__ && defined __linux__
#define AMX
#endif

#define SIDE 16   // columns of a panel
#define DEPTH 32  // k of a block
enum { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8 };  // ggml's numbers of types

static int has_amx;  // then blocks become tiles of columns by k, else rows of k by columns

static long head_bytes(long kind) { return kind == Q4_1 ? 4 : 2; }  // scale, least value: half precision

static long block_bytes(long kind) { return head_bytes(kind) + (kind == Q8_0 ? DEPTH : DEPTH / 2); }

// rows: (columns, depth / 32) blocks -> as many bytes, (columns / 16, depth / 32): the heads of 16 columns
// side by side, then their numbers in the order of what they become; of 4 bits, those of 4 columns share a
// word (for AMX), or those of 2 k a byte.
static void pack_blocks(uint8_t *packed, const uint8_t *rows, long kind, long columns, long depth,
                        int threads) {
    long count = depth / DEPTH, bytes = block_bytes(kind), head = head_bytes(kind);
#pragma omp parallel for num_threads(threads)
    for (long panel = 0; panel < columns / SIDE; panel++)
        for (long block = 0; block < count; block++) {
            uint8_t *heads = packed + (panel * count + block) * bytes * SIDE, *to = heads + head * SIDE;
            memset(to, 0, (bytes - head) * SIDE);
            for (long c = 0; c < SIDE; c++) {
                const uint8_t *from = rows + ((panel * SIDE + c) * count + block) * bytes;
                for (long i = 0; i < head; i += 2) memcpy(heads + i * SIDE + c * 2, from + i, 2);
                from += head;
                for (long k = 0; k < DEPTH; k++) {
                    if (kind == Q8_0) {
                        to[has_amx ? c * DEPTH + k : k * SIDE + c] = from[k];
                        continue;
                    }
                    long place = has_amx ? c / 4 * 64 + k * 2 + c % 4 / 2 : k / 2 * SIDE + c;
                    int number = k < 16 ? from[k] & 15 : from[k - 16] >> 4;
                    to[place] |= number << (has_amx ? c : k) % 2 * 4;
                }
            }
        }
}

INLINE vf halves(const uint8_t *from) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
}

// Products of a scale and an integer are exact in fp32, so that they are fused with a sum changes no bit.
INLINE void expand_kind(elem *to, const uint8_t *from, const int kind, long depth) {
    for (long k = 0; k < depth; k += DEPTH) {
        vf scale = halves(from), least = kind == Q4_1 ? halves(from + 2 * SIDE) : (vf){};
        from += head_bytes(kind) * SIDE;
        for (int i = 0; i < DEPTH; i += kind == Q8_0 ? 1 : 2, from += SIDE) {
            __m128i bytes = _mm_loadu_si128((const void *)from);
            vi both = (vi)(kind == Q8_0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
            vi first = kind == Q8_0 ? both : (both & 15) - (kind == Q4_0 ? 8 : 0);
            vi second = (both >> 4) - (kind == Q4_0 ? 8 : 0);
            store(to + (k + i) * SIDE, __builtin_convertvector(first, vf) * scale + least);
            if (kind == Q8_0) continue;
            store(to + (k + i + 1) * SIDE, __builtin_convertvector(second, vf) * scale + least);
        }
    }
}

// One panel of 16 columns -> (depth, 16) elements.
static void expand(elem *to, const uint8_t *blocks, long kind, long depth) {
    if (kind == Q4_0) expand_kind(to, blocks, Q4_0, depth);
    if (kind == Q4_1) expand_kind(to, blocks, Q4_1, depth);
    if (kind == Q8_0) expand_kind(to, blocks, Q8_0, depth);
}

#ifdef AMX
// 16 blocks side by side -> (16 columns, 32 k) elements. Numbers of 4 bits have 16 values in a block: those
// are made once, and looked up.
INLINE void expand_tile(elem *to, const uint8_t *from, const int kind) {
    float scale[SIDE] __attribute__((aligned(64))), least[SIDE] __attribute__((aligned(64)));
    store_float(scale, halves(from));
    if (kind == Q4_1) store_float(least, halves(from + 2 * SIDE));
    __asm__ volatile("" ::: "memory");  // to be read one by one, which costs less than shuffles
    from += head_bytes(kind) * SIDE;
    if (kind == Q8_0) {
        for (int c = 0; c < SIDE; c++) {
            vf values[2];
            for (int i = 0; i < 2; i++) {
                __m128i bytes = _mm_loadu_si128((const void *)(from + c * DEPTH + i * LANES));
                values[i] = __builtin_convertvector((vi)_mm512_cvtepi8_epi32(bytes), vf) * scale[c];
            }
            __m512bh row = _mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
            memcpy(to + c * DEPTH, &row, sizeof row);
        }
        return;
    }
    vf numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = (float)(kind == Q4_0 ? i - 8 : i);
    const vu last = (vu)_mm512_set1_epi16(15), second = (vu)_mm512_set1_epi16(16);
#pragma GCC unroll 4
    for (int c = 0; c < SIDE; c += 4, from += 64) {
        vu four = (vu)_mm512_loadu_si512(from);  // words of 4 columns' numbers
        vf values[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            values[i] = numbers * scale[c + i];
            if (kind == Q4_1) values[i] += least[c + i];
        }
        // Two tables of 16 side by side: a lookup goes by the last 5 bits of a word.
        __m512i outer = (__m512i)_mm512_cvtne2ps_pbh((__m512)values[0], (__m512)values[3]);
        __m512i inner = (__m512i)_mm512_cvtne2ps_pbh((__m512)values[2], (__m512)values[1]);
        vu places[4] = {four | second, (vu)_mm512_srli_epi16((__m512i)four, 4) & last,
                        (vu)_mm512_srli_epi16((__m512i)four, 8) | second,
                        (vu)_mm512_srli_epi16((__m512i)four, 12)};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m512i table = i % 3 ? inner : outer;
            _mm512_storeu_si512(to + (c + i) * DEPTH, _mm512_permutexvar_epi16((__m512i)places[i], table));
        }
    }
}
#endif

// Room for elements that stays with its thread; null if there is no memory.
static elem *scratch(long count) {
    static _Thread_local elem *room;
    static _Thread_local long size;
    if (size < count) {
        free(room);
        room = aligned_alloc(64, (size_t)count * sizeof(elem));
        size = room ? count : 0;
    }
    return room;
}
