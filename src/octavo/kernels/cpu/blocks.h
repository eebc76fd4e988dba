// Weights in blocks of 32 along K with a scale each, as GGUF files have them: kept so in memory, and made
// elements where they are used, which costs less than reading elements from memory when rows are few.
#pragma once
#include "vectors.h"

#define SIDE 16   // columns of a panel
#define DEPTH 32  // k of a block
enum { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8 };  // ggml's numbers of types

static int has_amx;  // then an element's place is that of AMX: pairs of k by columns, else k by columns

static long head_bytes(long kind) { return kind == Q4_1 ? 4 : 2; }  // scale, least value: half precision

static long block_bytes(long kind) { return head_bytes(kind) + (kind == Q8_0 ? DEPTH : DEPTH / 2); }

static long element_place(long k, long column) {
    return has_amx ? (k / 2 * SIDE + column) * 2 + k % 2 : k * SIDE + column;
}

// rows: (columns, depth / 32) blocks -> as many bytes, (columns / 16, depth / 32): the heads of 16 columns
// side by side, then elements by their places, of 4 bits two in a byte: i and i + 16 of each 32.
void pack_blocks(uint8_t *packed, const uint8_t *rows, long kind, long columns, long depth, int threads) {
    long count = depth / DEPTH, bytes = block_bytes(kind), head = head_bytes(kind);
#pragma omp parallel for num_threads(threads)
    for (long panel = 0; panel < columns / SIDE; panel++)
        for (long block = 0; block < count; block++) {
            uint8_t *heads = packed + (panel * count + block) * bytes * SIDE, *to = heads + head * SIDE;
            memset(to, 0, (bytes - head) * SIDE);
            for (long column = 0; column < SIDE; column++) {
                const uint8_t *from = rows + ((panel * SIDE + column) * count + block) * bytes;
                for (long i = 0; i < head; i += 2) memcpy(heads + i * SIDE + column * 2, from + i, 2);
                from += head;
                for (long k = 0; k < DEPTH; k++) {
                    long place = element_place(k, column);
                    if (kind == Q8_0)
                        to[place] = from[k];
                    else
                        to[place / 32 * 16 + place % 16] |= (k < 16 ? from[k] & 15 : from[k - 16] >> 4)
                                                            << place % 32 / 16 * 4;
                }
            }
        }
}

INLINE void store_32(elem *to, vf first, vf second) {
#if defined ELEM_BF16 && defined __AVX512BF16__
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    memcpy(to, &both, sizeof both);
#else
    store(to, first);
    store(to + LANES, second);
#endif
}

INLINE vf halves(const uint8_t *from) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }

// Products of a scale and an integer are exact in fp32, so that they are fused with a sum changes no bit.
INLINE void expand_kind(elem *to, const uint8_t *from, const int kind, long depth) {
    vi columns[2];  // of the first and second 16 of each 32 elements
    for (int i = 0; i < LANES; i++) {
        columns[0][i] = has_amx ? i / 2 : i;
        columns[1][i] = has_amx ? 8 + i / 2 : i;
    }
    for (long k = 0; k < depth; k += DEPTH) {
        vf scale[2], least[2];
        for (int i = 0; i < 2; i++) {
            scale[i] = (vf)_mm512_permutexvar_ps((__m512i)columns[i], (__m512)halves(from));
            if (kind == Q4_1)
                least[i] = (vf)_mm512_permutexvar_ps((__m512i)columns[i], (__m512)halves(from + 2 * SIDE));
        }
        from += head_bytes(kind) * SIDE;
        for (int pair = 0; pair < DEPTH / 2; pair++, to += 2 * LANES) {
            vi first, second;
            __m128i bytes = _mm_loadu_si128((const void *)from);
            if (kind == Q8_0) {
                first = (vi)_mm512_cvtepi8_epi32(bytes);
                second = (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(from + LANES)));
            } else {
                vi both = (vi)_mm512_cvtepu8_epi32(bytes);
                first = (both & 15) - (kind == Q4_0 ? 8 : 0);
                second = (both >> 4) - (kind == Q4_0 ? 8 : 0);
            }
            from += kind == Q8_0 ? 2 * LANES : LANES;
            vf x = __builtin_convertvector(first, vf) * scale[0];
            vf y = __builtin_convertvector(second, vf) * scale[1];
            if (kind == Q4_1) x += least[0], y += least[1];
            store_32(to, x, y);
        }
    }
}

// One panel of 16 columns -> (depth, 16) elements by their places.
static void expand(elem *to, const uint8_t *blocks, long kind, long depth) {
    if (kind == Q4_0) expand_kind(to, blocks, Q4_0, depth);
    if (kind == Q4_1) expand_kind(to, blocks, Q4_1, depth);
    if (kind == Q8_0) expand_kind(to, blocks, Q8_0, depth);
}

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
