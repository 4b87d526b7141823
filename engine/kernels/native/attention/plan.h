/* Inputs of both attention kernels for one step. One layer of the pool is keys and values [blocks, block_size,
 * kv_heads, head_dim], or some neighbouring heads of them; a sequence's token t is in the block at index t / block_size
 * of its block table. A quantised pool has rows of bytes instead of heads (quantise.h).
 *
 * Both kernels read only tokens of the pool that a query of the step sees.
 */
#pragma once

#include "../thread_pool.h"
#include "quantised_pool.h"
#include "softmax_simd.h"

constexpr int64_t MAX_HEADS = 128;
constexpr int64_t MAX_HEAD_DIM = 256;
constexpr int64_t MAX_POOLED = 640; /* of a token with latent attention; DeepSeek has 576 */

/* A part of the context of one single token: decode is split over the context. */
struct Piece {
    int64_t row;
    int64_t table;      /* where the sequence's block table starts in `Plan.tables` */
    int64_t first, end; /* tokens */
};

/* A single token and the pieces of its context. */
struct Single {
    int64_t row;
    int64_t first_piece, num_pieces;
};

/* Some neighbouring tokens of a prompt. */
struct Tile {
    int64_t row; /* of its first token */
    int64_t num_tokens;
    int64_t position; /* of its first token in the sequence */
    int64_t table;
};

struct Plan {
    int64_t block_size, heads, kv_heads;
    int64_t key_dim, head_dim; /* of queries and keys, of values; they differ with latent attention only (latents.h) */
    int64_t slot_stride; /* elements of the pool from one token to the next; at least kv_heads · head_size */
    int64_t window; /* number of tokens that a token sees, including itself */
    ThreadPool *thread_pool;
    const int64_t *tables;
    const Piece *pieces;
    int64_t num_pieces;
    const Single *singles;
    int64_t num_singles;
    const Tile *tiles;
    int64_t num_tiles;
    float *partials; /* [num_pieces, heads, head_dim + 2] */
    double scale;    /* of scores, times log2 e: softmax is computed with powers of two */
};

template <typename T, typename S = T> struct Tensors {
    const T *queries; /* [rows, heads, head_dim] */
    int64_t query_stride;
    const S *keys, *values; /* one layer of the pool */
    const float *sinks;     /* [heads], scaled like scores; null: none */
    T *out;                 /* [rows, heads, head_dim], contiguous */
};

constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns the index of the element at which a token's first KV head starts. */
INLINE int64_t place(const Plan &plan, int64_t table, int64_t token) {
    const int64_t block = plan.tables[table + token / plan.block_size];
    return (block * plan.block_size + token % plan.block_size) * plan.slot_stride;
}

template <typename T> INLINE int64_t words_per_head(const Plan &plan) {
    return (plan.key_dim + PER_WORD<T> - 1) / PER_WORD<T>;
}
