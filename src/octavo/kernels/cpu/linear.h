// y = x W^T + b from packed weights: in bfloat16 by the tile unit (AMX) of Xeon CPUs, else by vectors.
//
// An output is one chain of products over K in rising order (by vectors: a chain a slice of K, added in
// order), in fp32, rounded once at the end: its bits do not depend on the number of rows, on the
// blocking or on threads.
#pragma once
#include "blocks.h"
#include <omp.h>
#ifdef AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define BAND_BYTES (1 << 20)       // of x that the L2 cache keeps while all weights pass
#define SPAN 32                    // rows of x that the tile unit works on at once
#define RING 128                   // k of elements that the L1 cache keeps
#define STRIP 4                    // rows that vectors work on at once
#define SLICE 128                  // k whose products are one chain; one over all of K errs twice as much

typedef struct {
    const void *packed;  // elements by pack_linear, or blocks by pack_blocks
    long kind;           // of the blocks; 0: elements
    const float *bias;   // may be null
    long columns, depth;
} matrix;

// To be called first. Whether products are made by AMX: asks the system for the tile registers.
int start_linear(void) {
#ifdef AMX
    const int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    has_amx = syscall(SYS_arch_prctl, request, tile_data) == 0;
#endif
    return has_amx;
}

// weight: (columns, depth), columns a multiple of 16, depth of 32 -> (columns / 16, depth / 32, 512). AMX
// wants pairs of k by columns there, vectors k by columns. Or blocks, if there is a kind.
void pack_linear(void *to, const void *from, long kind, long columns, long depth, int threads) {
    const elem *weight = from;
    elem *packed = to;
    long group = has_amx ? 2 : 1;
    if (kind) {
        pack_blocks(to, from, kind, columns, depth, threads);
        return;
    }
#pragma omp parallel for num_threads(threads)
    for (long column = 0; column < columns; column++)
        for (long k = 0; k < depth; k++) {
            elem *panel = packed + column / SIDE * SIDE * depth;
            panel[(k / group * SIDE + column % SIDE) * group + k % group] = weight[column * depth + k];
        }
}

#ifdef AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

static void configure(long first_rows, long second_rows) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {  // 0 to 3: outputs; 4, 5: x; 6, 7: weights
        int second = i == 2 || i == 3 || i == 5;
        config.bytes[i] = 64;
        config.rows[i] = (uint8_t)(i > 5 ? SIDE : second ? second_rows : first_rows);
    }
    _tile_loadconfig(&config);
}

static void store_tile(elem *out, long stride, const float *sums, long rows, const float *bias) {
    for (long row = 0; row < rows; row++) {
        __m512 x = _mm512_load_ps(sums + row * SIDE);
        if (bias) x = _mm512_add_ps(x, _mm512_loadu_ps(bias));
        __m256bh half = _mm512_cvtneps_pbh(x);
        memcpy(out + row * stride, &half, sizeof half);
    }
}

// Up to 32 rows by 16 or 32 columns of outputs.
static void amx_outputs(elem *out, long out_stride, const elem *x, const elem *packed, const float *bias,
                        long depth, long rows, int wide) {
    const elem *below = x + SIDE * depth, *beside = packed + SIDE * depth;
    long first = rows < SIDE ? rows : SIDE, second = rows - first;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < depth; k += DEPTH) {
        const elem *tile = packed + k * SIDE;
        _tile_loadd(4, x + k, depth * 2);
        _tile_loadd(6, tile, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (wide) {
            _tile_loadd(7, beside + k * SIDE, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (second) {
            _tile_loadd(5, below + k, depth * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (wide) _tile_dpbf16ps(3, 5, 7);
        }
    }
    float sums[4][SIDE * SIDE] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    store_tile(out, out_stride, sums[0], first, bias);
    if (wide) {
        _tile_stored(1, sums[1], 64);
        store_tile(out + SIDE, out_stride, sums[1], first, bias ? bias + SIDE : 0);
    }
    if (!second) return;
    _tile_stored(2, sums[2], 64);
    store_tile(out + SIDE * out_stride, out_stride, sums[2], second, bias);
    if (wide) {
        _tile_stored(3, sums[3], 64);
        store_tile(out + SIDE * out_stride + SIDE, out_stride, sums[3], second, bias ? bias + SIDE : 0);
    }
}

// From blocks the weights are the first operand of the tile unit and x is the second: columns of weights
// need no shuffles then, x and the outputs do. Each output is the same chain of products.

// Swaps squares of that size: the upper right and the lower left of each four.
INLINE void swap(vi *v, const int size) {
    vi low, high;  // lanes of two rows, one after the other
    for (int i = 0; i < LANES; i++) {
        low[i] = i & size ? LANES + (i ^ size) : i;
        high[i] = i & size ? LANES + i : i | size;
    }
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++)
        if (!(i & size)) {
            vi above = v[i], below = v[i | size];
            v[i] = (vi)_mm512_permutex2var_epi32((__m512i)above, (__m512i)low, (__m512i)below);
            v[i | size] = (vi)_mm512_permutex2var_epi32((__m512i)above, (__m512i)high, (__m512i)below);
        }
}

// v: 16 rows of 16 -> their transpose.
INLINE void transpose(vi *v) {
    swap(v, 8);
    swap(v, 4);
    swap(v, 2);
    swap(v, 1);
}

// 32 k of up to 16 rows of x -> (16 pairs of k, rows).
static void pair_rows(elem *to, const elem *x, long depth, long rows) {
    vi v[SIDE];
#pragma GCC unroll 16
    for (long row = 0; row < SIDE; row++) memcpy(v + row, x + (row < rows ? row : 0) * depth, sizeof *v);
    transpose(v);
#pragma GCC unroll 16
    for (long pair = 0; pair < SIDE; pair++)
        _mm512_mask_storeu_epi32(to + pair * 2 * rows, (__mmask16)((1 << rows) - 1), (__m512i)v[pair]);
}

static void configure_blocks(long first_rows, long second_rows) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {  // 0 to 3: outputs; 4, 5: weights; 6, 7: x
        config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 64 : 4 * (i % 2 ? second_rows : first_rows));
        config.rows[i] = SIDE;
    }
    _tile_loadconfig(&config);
}

// sums: (16 columns, rows).
static void store_transposed(elem *out, long stride, const float *sums, long rows, const float *bias) {
    if (rows == 1) {
        store_tile(out, stride, sums, 1, bias);
        return;
    }
    union {
        vi v[SIDE];
        float f[SIDE * SIDE];
    } tile;
#pragma GCC unroll 16
    for (long i = 0; i < SIDE; i++)
        tile.v[i] = (vi)_mm512_maskz_loadu_epi32((__mmask16)((1 << rows) - 1), sums + i * rows);
    transpose(tile.v);
    store_tile(out, stride, tile.f, rows, bias);
}

// As amx_outputs. pairs: x by pair_rows; kind: of the blocks that are made elements in `room` on the way,
// those of k at k & mask; or 0: they are there.
INLINE void block_outputs(elem *out, long out_stride, const elem *pairs, const uint8_t *blocks,
                          elem *room, long mask, const float *bias, long depth, long rows,
                          const int wide, const int kind) {
    long first = rows < SIDE ? rows : SIDE, second = rows - first, bytes = block_bytes(kind) * SIDE;
    long panel_bytes = depth / DEPTH * bytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < depth; k += DEPTH) {
        elem *tile = room + (k & mask) * 2 * SIDE;
        if (kind) {
            for (int i = 0; i <= wide; i++) {
                const uint8_t *from = blocks + i * panel_bytes + k / DEPTH * bytes;
                for (long line = 0; line < bytes; line += 64)
                    __builtin_prefetch(from + 2 * panel_bytes + line);  // of the next panels
                expand_tile(tile + i * SIDE * DEPTH, from, kind);
            }
            __asm__ volatile("" ::: "memory");  // tile loads are not known to read
        }
        _tile_loadd(6, pairs + k * first, first * 4);
        _tile_loadd(4, tile, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (wide) {
            _tile_loadd(5, tile + SIDE * DEPTH, 64);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (second) {
            _tile_loadd(7, pairs + SIDE * depth + k * second, second * 4);
            _tile_dpbf16ps(1, 4, 7);
            if (wide) _tile_dpbf16ps(3, 5, 7);
        }
    }
    float sums[SIDE * SIDE] __attribute__((aligned(64)));
    const float *other = bias ? bias + SIDE : 0;
    _tile_stored(0, sums, first * 4);
    store_transposed(out, out_stride, sums, first, bias);
    if (wide) {
        _tile_stored(2, sums, first * 4);
        store_transposed(out + SIDE, out_stride, sums, first, other);
    }
    if (!second) return;
    out += SIDE * out_stride;
    _tile_stored(1, sums, second * 4);
    store_transposed(out, out_stride, sums, second, bias);
    if (wide) {
        _tile_stored(3, sums, second * 4);
        store_transposed(out + SIDE, out_stride, sums, second, other);
    }
}

#define BLOCK_OUTPUTS(KIND)                                                                              \
    if (kind == KIND && wide)                                                                            \
        block_outputs(out, out_stride, pairs, blocks, room, mask, bias, depth, rows, 1, KIND);           \
    if (kind == KIND && !wide)                                                                           \
        block_outputs(out, out_stride, pairs, blocks, room, mask, bias, depth, rows, 0, KIND);

static void amx_block_outputs(elem *out, long out_stride, const elem *pairs, const uint8_t *blocks,
                              elem *room, long mask, const float *bias, long depth, long rows, int wide,
                              long kind) {
    BLOCK_OUTPUTS(0)
    BLOCK_OUTPUTS(Q4_0)
    BLOCK_OUTPUTS(Q4_1)
    BLOCK_OUTPUTS(Q8_0)
}
#endif

// STRIP rows, those past `rows` repeating the last, by 16 or 32 columns of outputs. One function for all
// numbers of rows: compilers need not fuse the same operations in two.
INLINE void strip(elem *out, long out_stride, const elem *x, const elem *packed, const float *bias,
                  long depth, long rows, const int panels) {
    vf total[STRIP][2] = {};
    for (long start = 0; start < depth; start += SLICE) {
        long length = depth - start < SLICE ? depth - start : SLICE;
        float wide[STRIP][SLICE];
        for (int r = 0; r < STRIP; r++) {
            const elem *from = x + (r < rows ? r : rows - 1) * depth + start;
            for (long k = 0; k < length; k += LANES) store_float(wide[r] + k, load(from + k));
        }
        vf acc[STRIP][2] = {};
        for (long k = 0; k < length; k++)
            for (int p = 0; p < panels; p++) {
                vf w = load(packed + (p * depth + start + k) * SIDE);
                for (int r = 0; r < STRIP; r++) acc[r][p] += w * wide[r][k];
            }
        for (int r = 0; r < STRIP; r++)
            for (int p = 0; p < panels; p++) total[r][p] += acc[r][p];
    }
    for (int r = 0; r < STRIP && r < rows; r++)
        for (int p = 0; p < panels; p++) {
            vf y = total[r][p];
            if (bias) y += load_float(bias + p * SIDE);
            store(out + r * out_stride + p * SIDE, y);
        }
}

static __attribute__((noinline)) void vector_outputs(elem *out, long out_stride, const elem *x,
                                                     const elem *packed, const float *bias,
                                                     long depth, long rows, int wide) {
    for (long row = 0; row < rows; row += STRIP)
        if (wide)
            strip(out + row * out_stride, out_stride, x + row * depth, packed, bias, depth, rows - row, 2);
        else
            strip(out + row * out_stride, out_stride, x + row * depth, packed, bias, depth, rows - row, 1);
}

// x: (rows, depth), dense -> out: (rows, columns), dense. Returns 0 if there is no memory.
int run_linear(elem *out, const elem *x, const matrix *m, long rows, int threads) {
    long columns = m->columns, depth = m->depth, width = 2 * SIDE;
    long band = BAND_BYTES / ((long)sizeof(elem) * depth) / SPAN * SPAN;
    if (band < SPAN) band = SPAN;
    long bands = (rows + band - 1) / band, panels = (columns + width - 1) / width;
    long panel_bytes = depth / DEPTH * block_bytes(m->kind) * SIDE;
    elem *rooms = 0, *pairs = (elem *)x;  // a single row is pairs as it is
    if (m->kind) {
        long copied = has_amx && rows > 1 ? rows * depth : 0;
        rooms = scratch(threads * width * depth + copied);
        if (!rooms) return 0;
        if (copied) pairs = rooms + threads * width * depth;
    }
#pragma omp parallel num_threads(threads)
    {
        long configured = 0;
        elem *room = rooms ? rooms + omp_get_thread_num() * width * depth : 0;
#ifdef AMX
        if (pairs != x) {
#pragma omp for collapse(2) schedule(static)
            for (long row = 0; row < rows; row += SIDE)
                for (long k = 0; k < depth; k += DEPTH) {
                    long count = rows - row < SIDE ? rows - row : SIDE;
                    pair_rows(pairs + row * depth + k * count, x + row * depth + k, depth, count);
                }
        }
#endif
#pragma omp for collapse(2) schedule(static)
        for (long b = 0; b < bands; b++)
            for (long panel = 0; panel < panels; panel++) {
                long column = panel * width, end = (b + 1) * band < rows ? (b + 1) * band : rows;
                const elem *packed = (const elem *)m->packed + column * depth;
                const uint8_t *blocks = (const uint8_t *)m->packed + column / SIDE * panel_bytes;
                const float *bias = m->bias ? m->bias + column : 0;
                int wide = column + width <= columns;
                long kind = m->kind;  // 0: there are elements
                if (kind && !has_amx) {
                    for (int i = 0; i <= wide; i++)
                        expand(room + i * SIDE * depth, blocks + i * panel_bytes, kind, depth);
                    packed = room;
                }
                for (long row = b * band; row < end; row += SPAN) {
                    long count = end - row < SPAN ? end - row : SPAN;
                    elem *to = out + row * columns + column;
                    const elem *from = x + row * depth;
#ifdef AMX
                    if (has_amx) {
                        long first = count < SIDE ? count : SIDE, second = count > SIDE ? count - SIDE : 1;
                        if (count != configured) {
                            if (m->kind)
                                configure_blocks(first, second);
                            else
                                configure(first, second);
                        }
                        configured = count;
                        if (m->kind) {
                            long mask = end - b * band > SPAN ? -1 : RING - 1;
                            amx_block_outputs(to, columns, pairs + row * depth, blocks, room, mask, bias,
                                              depth, count, wide, kind);
                            kind = 0;
                        } else
                            amx_outputs(to, columns, from, packed, bias, depth, count, wide);
                        continue;
                    }
#endif
                    vector_outputs(to, columns, from, packed, bias, depth, count, wide);
                }
            }
#ifdef AMX
        if (configured) _tile_release();
#endif
        (void)configured, (void)pairs;
    }
    return 1;
}
