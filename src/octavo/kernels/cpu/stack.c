// The layers of a decoder in one call: the kernels of the headers in the order of a layer, without
// Python between them.
#include "attention.h"
#include "linear.h"

typedef struct {
    const elem *input_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm, *q_norm, *k_norm;
    matrix qkv, out, gate_up, down;  // the last two without weights: the MLP is the caller's
    long window, group;              // group: which of the steps is its
} layer;                             // all norms but input_norm and mlp_norm may be null

typedef struct {
    const float *cos, *sin;
    const int64_t *slots;
    const int32_t *tables;
    long table_stride;
} step;  // what layers of one KV group share

typedef struct {
    long tokens, requests, hidden, gelu, unit_offset, threads;
    const int32_t *starts, *lens;
    float eps, scale;
} batch;

static int product(elem *out, const elem *x, const matrix *m, const batch *b) {
    return run_linear(out, x, m, b->tokens, (int)b->threads);
}

static void norm(elem *out, elem *total, const elem *x, const elem *residual, const elem *weight,
                 const batch *b) {
    rms_norm(out, total, x, residual, weight, b->tokens, b->hidden, b->eps, (int)b->unit_offset,
             (int)b->threads);
}

// Layers [first, last). x: (tokens, hidden), output of the layer before, then of the last one; residual:
// the same shape, the embeddings if first is 0, the sum of all before x. buffers: (tokens, hidden),
// (tokens, widest of a layer) and again. After a layer without MLP: the first buffer is what its MLP
// gets, and x is free. Returns 0 if there is no memory.
int run_layers(elem *x, elem *residual, elem *const *buffers, const layer *layers, long first, long last,
               elem *const *caches, const step *steps, const shape *s, const batch *b) {
    elem *normed = buffers[0], *wide = buffers[1], *narrow = buffers[2];
    for (long i = first; i < last; i++) {
        const layer *l = layers + i;
        const step *now = steps + l->group;
        if (i)
            norm(normed, residual, x, residual, l->input_norm, b);
        else
            norm(normed, 0, residual, 0, l->input_norm, b);
        if (!product(wide, normed, &l->qkv, b)) return 0;
        rotate_and_write(wide, now->cos, now->sin, l->q_norm, l->k_norm, b->eps, (int)b->unit_offset,
                         now->slots, caches[i], s, b->tokens, (int)b->threads);
        if (!attend(narrow, wide, l->qkv.columns, caches[i], b->starts, b->lens, now->tables,
                    now->table_stride, b->requests, b->tokens, s, b->scale, l->window, (int)b->threads))
            return 0;
        if (!product(x, narrow, &l->out, b)) return 0;
        if (l->attention_out_norm) norm(x, 0, x, 0, l->attention_out_norm, b);
        norm(normed, residual, x, residual, l->mlp_norm, b);
        if (!l->gate_up.columns) continue;
        if (!product(wide, normed, &l->gate_up, b)) return 0;
        silu_and_mul(narrow, wide, b->tokens, l->down.depth, (int)b->gelu, (int)b->threads);
        if (!product(x, narrow, &l->down, b)) return 0;
        if (l->mlp_out_norm) norm(x, 0, x, 0, l->mlp_out_norm, b);
    }
    return 1;
}
