// y = x W^T + b in bfloat16 by the tile unit (AMX) of Xeon CPUs, from packed weights.
//
// An output is one chain of tile products over K in rising order, in fp32, rounded once at the end:
// its bits do not depend on the number of rows, on the blocking or on threads.
#ifdef __AMX_BF16__
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SIDE 16                    // rows and columns of a tile of outputs
#define DEPTH 32                   // k of a tile product
#define TILE_ELEMS (SIDE * DEPTH)  // a tile of weights: 1 KB
#define BAND_BYTES (1 << 20)       // of x that the L2 cache keeps while all weights pass

typedef uint16_t elem;

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

// Asks the kernel for the tile registers, once a process. 0 if it does not give them.
int amx_available(void) {
    const int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

// weight: (out_features, in_features) -> tiles (out_features / 16, in_features / 32, 1 KB), in a tile
// pairs of k by columns, as the tile product wants it.
void amx_pack(elem *packed, const elem *weight, long out_features, long in_features, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long column = 0; column < out_features / SIDE; column++)
        for (long k = 0; k < in_features; k += DEPTH) {
            elem *tile = packed + column * SIDE * in_features + k * SIDE;
            for (long i = 0; i < SIDE; i++)
                for (long pair = 0; pair < DEPTH / 2; pair++)
                    memcpy(tile + (pair * SIDE + i) * 2,
                           weight + (column * SIDE + i) * in_features + k + pair * 2, 4);
        }
}

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
static void outputs(elem *out, long out_stride, const elem *x, const elem *packed, const float *bias,
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
    float sums[4][TILE_ELEMS / 2] __attribute__((aligned(64)));
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

// x: (rows, depth), dense -> out: (rows, columns), dense. bias: (columns) floats or null. columns: a
// multiple of 16, depth: of 32.
void amx_linear(elem *out, const elem *x, const elem *packed, const float *bias, long rows, long columns,
                long depth, int threads) {
    long band = BAND_BYTES / (2 * depth) / 32 * 32, width = 2 * SIDE;
    if (band < 32) band = 32;
    long bands = (rows + band - 1) / band, panels = (columns + width - 1) / width;
#pragma omp parallel num_threads(threads)
    {
        long configured = 0;
#pragma omp for collapse(2) schedule(static)
        for (long b = 0; b < bands; b++)
            for (long panel = 0; panel < panels; panel++) {
                long column = panel * width, end = (b + 1) * band < rows ? (b + 1) * band : rows;
                for (long row = b * band; row < end; row += 32) {
                    long count = end - row < 32 ? end - row : 32;
                    if (count != configured) {
                        configured = count;
                        configure(count < SIDE ? count : SIDE, count > SIDE ? count - SIDE : 1);
                    }
                    outputs(out + row * columns + column, columns, x + row * depth,
                            packed + column * depth, bias ? bias + column : 0, depth, count,
                            column + width <= columns);
                }
            }
        if (configured) _tile_release();
    }
}
#endif
