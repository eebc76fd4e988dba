// y = x W^T + b from packed weights: in bfloat16 by the tile unit (AMX) of Xeon CPUs, else by vectors.
//
// An output is one chain of products over K in rising order (by vectors: a chain a slice of K, added in
// order), in fp32, rounded once at the end: its bits do not depend on the number of rows, on the
// blocking or on threads.
#pragma once
#include "blocks.h"
#if defined ELEM_BF16 && defined __AMX_BF16__ && defined __AVX512BF16__ && defined __linux__
#include <sys/syscall.h>
#include <unistd.h>
#define AMX
#endif

#define BAND_BYTES (1 << 20)       // of x that the L2 cache keeps while all weights pass
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
// wants pairs of k by columns there, vectors k by columns.
void pack_linear(elem *packed, const elem *weight, long columns, long depth, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long column = 0; column < columns; column++)
        for (long k = 0; k < depth; k++) {
            elem *panel = packed + column / SIDE * SIDE * depth;
            panel[element_place(k, column % SIDE)] = weight[column * depth + k];
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
    long band = BAND_BYTES / ((long)sizeof(elem) * depth) / 32 * 32;
    if (band < 32) band = 32;
    long bands = (rows + band - 1) / band, panels = (columns + width - 1) / width;
    long panel_bytes = depth / DEPTH * block_bytes(m->kind) * SIDE;
    int enough = 1;
#pragma omp parallel num_threads(threads)
    {
        long configured = 0;
#pragma omp for collapse(2) schedule(static)
        for (long b = 0; b < bands; b++)
            for (long panel = 0; panel < panels; panel++) {
                long column = panel * width, end = (b + 1) * band < rows ? (b + 1) * band : rows;
                const elem *packed = (const elem *)m->packed + column * depth;
                const float *bias = m->bias ? m->bias + column : 0;
                int wide = column + width <= columns;
                if (m->kind) {
                    elem *room = scratch(width * depth);
                    if (!room) {
                        enough = 0;
                        continue;
                    }
                    const uint8_t *blocks = (const uint8_t *)m->packed + column / SIDE * panel_bytes;
                    for (int i = 0; i <= wide; i++)
                        expand(room + i * SIDE * depth, blocks + i * panel_bytes, m->kind, depth);
                    packed = room;
                }
                for (long row = b * band; row < end; row += 32) {
                    long count = end - row < 32 ? end - row : 32;
                    elem *to = out + row * columns + column;
                    const elem *from = x + row * depth;
#ifdef AMX
                    if (has_amx) {
                        if (count != configured)
                            configure(count < SIDE ? count : SIDE, count > SIDE ? count - SIDE : 1);
                        configured = count;
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
        (void)configured;
    }
    return enough;
}
