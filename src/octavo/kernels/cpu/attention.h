// Rotation, cache write and paged attention. Keys are taken in tiles of 64 at absolute positions from
// 0, with one running maximum, so the bits of a token's output depend on its own keys only.
#pragma once
#include "elementwise.h"

// Shapes of an attention layer and of its cache: (blocks, K or V, kv heads, ...), where K is
// (head_dim, block_size), so that 16 keys of one dimension lie side by side, and V is (block_size,
// head_dim). block_size and head_dim are multiples of 16 (rotation: of 32).
typedef struct {
    long heads, kv_heads, head_dim, block_size;
} shape;

INLINE void rotate(elem *head, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i += LANES) {
        vf a = load(head + i), b = load(head + half + i);
        vf c = load_float(cos + i), s = load_float(sin + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
}

// qkv: (tokens, heads + 2 * kv_heads, head_dim): heads of q and k are normalised (where there are
// weights for that) and rotated in place, and k and v go to their slot of the cache (none if < 0). A v
// that is not finite becomes 0 under a k of NaN: rows that do not see the key give v weight zero, which
// would still be NaN, and k is hidden from them by a mask.
// cos, sin: (tokens, head_dim / 2).
void rotate_and_write(elem *qkv, const float *cos, const float *sin, const elem *q_norm,
                      const elem *k_norm, float eps, int unit_offset, const int64_t *slots,
                      elem *cache, const shape *s, long tokens, int threads) {
    long dim = s->head_dim, both = s->heads + s->kv_heads, size = s->block_size;
    long half_block = s->kv_heads * size * dim;
#pragma omp parallel for num_threads(threads) if (tokens * both * dim > 16384)
    for (long token = 0; token < tokens; token++) {
        elem *row = qkv + token * (both + s->kv_heads) * dim;
        for (long head = 0; head < both; head++) {
            elem *x = row + head * dim;
            const elem *weight = head < s->heads ? q_norm : k_norm;
            if (weight) norm_row(x, x, weight, dim, eps, unit_offset);
            rotate(x, cos + token * dim / 2, sin + token * dim / 2, dim / 2);
        }
        if (slots[token] < 0) continue;
        elem *block = cache + slots[token] / size * 2 * half_block;
        long offset = slots[token] % size;
        for (long head = 0; head < s->kv_heads; head++) {
            const elem *key = row + (s->heads + head) * dim, *value = row + (both + head) * dim;
            elem *keys = block + head * size * dim + offset;
            elem *values = block + half_block + (head * size + offset) * dim;
            vf zeros = {};  // zero times what is not finite is NaN
            for (long i = 0; i < dim; i += LANES) zeros += load(value + i) * 0.0f;
            if (sum(zeros) == 0.0f) {
                for (long i = 0; i < dim; i++) keys[i * size] = key[i];
                memcpy(values, value, dim * sizeof(elem));
            } else {
                for (long i = 0; i < dim; i++) keys[i * size] = NOT_A_NUMBER;
                memset(values, 0, dim * sizeof(elem));
            }
        }
    }
}

#define TILE 64  // keys; tiles begin at multiples of it
#define GROUPS (TILE / LANES)
#define ROWS 4         // query rows worked on at once
#define ITEM_ROWS 64   // query rows of a work item, at most (or one token's)
#define FLOOR -3e38f   // below every score

// out[ROWS][columns of 16 * width] = out * decay + weights[ROWS][keys] V: a chain of additions over the
// tile's keys, added to what is there. One chain over all keys would lose bits with their number.
#define ADD_VALUES(width)                                                                   \
    static __attribute__((noinline)) void add_values_##width(                              \
        float *out, long dim, const float *weights, const elem *const *values,              \
        const elem *const *coming, int keys, vf decay) {                                    \
        vf acc[ROWS][width] = {};                                                           \
        for (int key = 0; key < keys; key++) {                                              \
            const elem *row = values[key / LANES] + key % LANES * dim;                      \
            const char *later = (const char *)(coming[key / LANES] + key % LANES * dim);    \
            for (int b = 0; b < width * LANES * (int)sizeof(elem); b += 64)                 \
                __builtin_prefetch(later + b, 0, 2);                                        \
            vf v[width];                                                                    \
            for (int c = 0; c < width; c++) v[c] = load(row + c * LANES);                   \
            for (int r = 0; r < ROWS; r++)                                                  \
                for (int c = 0; c < width; c++) acc[r][c] += v[c] * weights[r * TILE + key]; \
        }                                                                                   \
        for (int r = 0; r < ROWS; r++)                                                      \
            for (int c = 0; c < width; c++) {                                               \
                float *to = out + r * dim + c * LANES;                                      \
                vf sum = load_float(to) * decay[r] + acc[r][c];                             \
                memcpy(to, &sum, sizeof sum);                                               \
            }                                                                               \
    }
ADD_VALUES(1)
ADD_VALUES(4)

typedef struct {
    const elem *keys[GROUPS], *values[GROUPS];  // of 16 keys each
    long start;                                 // position of the first key
    int count;                                  // keys that the item's last row sees
} tile;

// One tile of keys for ROWS rows; the memory of the next is asked for in between. q: (ROWS, dim);
// position: of each row's token; peak, total: (ROWS).
static __attribute__((noinline)) void attend_tile(const tile *t, const tile *next, const float *q,
                                                  const long *position, float *peak, float *total,
                                                  float *out, long dim, long stride, long window) {
    vf scores[ROWS][GROUPS] = {};
    for (long d = 0; d < dim; d++) {
        vf k[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            k[g] = load(t->keys[g] + d * stride);
            __builtin_prefetch(next->keys[g] + d * stride, 0, 2);
        }
        for (int r = 0; r < ROWS; r++)
            for (int g = 0; g < GROUPS; g++) scores[r][g] += k[g] * q[r * dim + d];
    }
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float weights[ROWS * TILE], sums[ROWS];
    vf drop = {};  // by how much the peak of each row has risen, as an exponent
    for (int r = 0; r < ROWS; r++) {
        long hidden = position[r] - window - t->start;
        int last = (int)(position[r] - t->start), first = hidden < -1 ? -1 : (int)hidden;
        vf highest = splat(FLOOR);
        vi visible[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            vi key = lane + g * LANES;
            visible[g] = (key <= last) & (key > first);
            scores[r][g] = pick(visible[g], scores[r][g], splat(FLOOR));
            highest = larger(highest, scores[r][g]);
        }
        float old = peak[r], tallest = maximum(highest);
        peak[r] = tallest > old ? tallest : old;
        vf added = {};
        for (int g = 0; g < GROUPS; g++) {
            vf distance = larger(scores[r][g] - peak[r], splat(-87.0f));
            vf weight = pick(visible[g], exponential(distance), (vf){});
            memcpy(weights + r * TILE + g * LANES, &weight, sizeof weight);
            added += weight;
        }
        drop[r] = old - peak[r];
        sums[r] = sum(added);
    }
    const vf decay = exponential(larger(drop, splat(-87.0f)));
    for (int r = 0; r < ROWS; r++) total[r] = total[r] * decay[r] + sums[r];
    long column = 0;
    for (; column + 4 * LANES <= dim; column += 4 * LANES) {
        const elem *values[GROUPS], *coming[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            values[g] = t->values[g] + column;
            coming[g] = next->values[g] + column;
        }
        add_values_4(out + column, dim, weights, values, coming, t->count, decay);
    }
    for (; column < dim; column += LANES) {
        const elem *values[GROUPS], *coming[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            values[g] = t->values[g] + column;
            coming[g] = next->values[g] + column;
        }
        add_values_1(out + column, dim, weights, values, coming, t->count, decay);
    }
}

// The tile that begins at key `start`. Keys below `lowest` and above `last` are seen by nobody, and
// their blocks may be anybody's.
static tile find_tile(const elem *cache, const int32_t *table, const shape *s, long kv_head, long start,
                      long lowest, long last) {
    long dim = s->head_dim, size = s->block_size;
    tile t = {.start = start, .count = last - start < TILE ? (int)(last - start + 1) : TILE};
    for (int g = 0; g < GROUPS; g++) {
        long key = start + g * LANES;
        int there = key <= last && key + LANES > lowest;
        const elem *block = cache + (there ? table[key / size] : 0) * 2 * s->kv_heads * size * dim;
        t.keys[g] = block + kv_head * size * dim + key % size;
        t.values[g] = block + ((s->kv_heads + kv_head) * size + key % size) * dim;
    }
    return t;
}

// Tokens [first, first + count) of a request, at positions from `position` on, and one kv head.
// scratch: floats, 2 * (padded rows) * head_dim + 2 * (padded rows).
static void attend_item(elem *out, const elem *query, long query_stride, const elem *cache,
                        const int32_t *table, const shape *s, long kv_head, long position, long count,
                        float scale, long window, float *scratch) {
    long dim = s->head_dim, group = s->heads / s->kv_heads;
    long rows = count * group, padded = (rows + ROWS - 1) / ROWS * ROWS;
    float *q = scratch, *acc = q + padded * dim, *peak = acc + padded * dim, *total = peak + padded;
    long last = position + count - 1, lowest = position - window + 1;
    long start = lowest > 0 ? lowest / TILE * TILE : 0;
    tile next = find_tile(cache, table, s, kv_head, start, lowest, last);
    memset(scratch, 0, (2 * padded * dim + 2 * padded) * sizeof(float));
    for (long row = 0; row < rows; row++) {
        const elem *from = query + row / group * query_stride + (kv_head * group + row % group) * dim;
        for (long i = 0; i < dim; i += LANES) {
            vf x = load(from + i) * scale;
            memcpy(q + row * dim + i, &x, sizeof x);
        }
    }
    for (long row = 0; row < padded; row++) peak[row] = FLOOR;
    for (; start <= last; start += TILE) {
        tile t = next;
        if (start + TILE <= last)
            next = find_tile(cache, table, s, kv_head, start + TILE, lowest, last);
        for (long row = 0; row < padded; row += ROWS) {
            long positions[ROWS];
            for (int r = 0; r < ROWS; r++) {
                long token = (row + r < rows ? row + r : rows - 1) / group;
                positions[r] = position + token;
            }
            if (positions[ROWS - 1] < start || positions[0] - window >= start + TILE - 1) continue;
            attend_tile(&t, &next, q + row * dim, positions, peak + row, total + row, acc + row * dim, dim,
                        s->block_size, window);
        }
    }
    for (long row = 0; row < rows; row++) {
        elem *to = out + (row / group * s->heads + kv_head * group + row % group) * dim;
        for (long i = 0; i < dim; i += LANES) store(to + i, load_float(acc + row * dim + i) / total[row]);
    }
}

// query: (tokens, heads, head_dim), rows query_stride apart; out: the same, dense. starts: (requests +
// 1); lens: keys of each request after this step; tables: (requests, table_stride). Rows of tokens
// past the last request become zero. Returns 0 if there is no memory.
int attend(elem *out, const elem *query, long query_stride, const elem *cache, const int32_t *starts,
           const int32_t *lens, const int32_t *tables, long table_stride, long requests,
           long num_tokens, const shape *s, float scale, long window, int threads) {
    long group = s->heads / s->kv_heads, tokens = group < ITEM_ROWS ? ITEM_ROWS / group : 1;
    long items = 0, rows = (tokens * group + ROWS - 1) / ROWS * ROWS, failed = 0;
    for (long r = 0; r < requests; r++) items += (starts[r + 1] - starts[r] + tokens - 1) / tokens;
    struct { int32_t request, first; } *list = malloc((items + 1) * sizeof *list);
    if (!list) return 0;
    memset(out + starts[requests] * s->heads * s->head_dim, 0,
           (num_tokens - starts[requests]) * s->heads * s->head_dim * sizeof(elem));
    items = 0;
    for (long r = 0; r < requests; r++)
        for (long first = 0; first < starts[r + 1] - starts[r]; first += tokens) {
            list[items].request = (int32_t)r;
            list[items++].first = (int32_t)first;
        }
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        float *scratch = malloc((2 * rows * s->head_dim + 2 * rows) * sizeof(float));
        failed += !scratch;
#pragma omp for schedule(dynamic, 1)
        for (long item = items * s->kv_heads - 1; item >= 0; item--) {
            if (!scratch) continue;
            long r = list[item / s->kv_heads].request, first = list[item / s->kv_heads].first;
            long length = starts[r + 1] - starts[r], token = starts[r] + first;
            attend_item(out + token * s->heads * s->head_dim, query + token * query_stride, query_stride,
                        cache, tables + r * table_stride, s, item % s->kv_heads, lens[r] - length + first,
                        length - first < tokens ? length - first : tokens, scale, window, scratch);
        }
        free(scratch);
    }
    free(list);
    return !failed;
}
