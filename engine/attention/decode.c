/* Decode attention over the paged KV pool: one query token per row, K and V read in place.
 *
 * Softmax is computed online, block by block, in float32 whatever the pool's dtype. Plain C that compilers turn into
 * vector code; no header beyond the standard library, so that it compiles in a second on any machine with a C compiler.
 */
#include <float.h>
#include <stdint.h>
#include <string.h>

#define MAX_HEADS 128
#define MAX_HEAD_DIM 256
#define MAX_BLOCK_SIZE 512
#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef struct {
    int64_t rows, max_blocks, block_size;
    int64_t heads, kv_heads, head_dim;
    int64_t query_stride; /* elements between rows of queries; heads of a row are contiguous */
    float scale;
    int32_t num_threads;
} Shape;

/* exp for x <= 0 (Cephes expf: range reduction by ln 2 and a polynomial of degree 6), written so that it vectorises. */
ALWAYS_INLINE float exp_nonpositive(float x) {
    x = x < -87.0f ? -87.0f : x;
    int32_t n = (int32_t)(x * 1.44269504088896341f - 0.5f); /* truncation rounds to nearest for x <= 0 */
    float r = x - (float)n * 0.693359375f + (float)n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } power = {.i = (n + 127) << 23};
    return p * power.f;
}

ALWAYS_INLINE float load(const void *base, int64_t index, int is_bfloat16) {
    if (!is_bfloat16) return ((const float *)base)[index];
    union { uint32_t i; float f; } wide = {.i = (uint32_t)((const uint16_t *)base)[index] << 16};
    return wide.f;
}

ALWAYS_INLINE void store(void *base, int64_t index, float value, int is_bfloat16) {
    if (!is_bfloat16) {
        ((float *)base)[index] = value;
        return;
    }
    union { float f; uint32_t i; } bits = {.f = value};
    bits.i += 0x7fff + ((bits.i >> 16) & 1); /* round to nearest, ties to even */
    ((uint16_t *)base)[index] = (uint16_t)(bits.i >> 16);
}

/* Running softmax of one query head. */
typedef struct {
    float highest, total;
    float query[MAX_HEAD_DIM], sums[MAX_HEAD_DIM];
} Head;

/* The tokens [from, to) of one block, whose K and V for this head start at element `base`. */
ALWAYS_INLINE void attend_block(Head *head, const void *keys, const void *values, int64_t base, int64_t from,
                                int64_t to, int64_t token_stride, int64_t head_dim, int is_bfloat16) {
    float scores[MAX_BLOCK_SIZE];
    float highest = head->highest;
    for (int64_t t = from; t < to; t++) {
        float score = 0.0f;
        for (int64_t d = 0; d < head_dim; d++)
            score += head->query[d] * load(keys, base + t * token_stride + d, is_bfloat16);
        scores[t] = score;
        highest = score > highest ? score : highest;
    }
    const float rescale = exp_nonpositive(head->highest - highest);
    float total = head->total * rescale;
    for (int64_t t = from; t < to; t++) {
        scores[t] = exp_nonpositive(scores[t] - highest);
        total += scores[t];
    }
    head->highest = highest;
    head->total = total;
    float sums[MAX_HEAD_DIM];
    for (int64_t d = 0; d < head_dim; d++) sums[d] = head->sums[d] * rescale;
    for (int64_t t = from; t < to; t++)
        for (int64_t d = 0; d < head_dim; d++)
            sums[d] += scores[t] * load(values, base + t * token_stride + d, is_bfloat16);
    memcpy(head->sums, sums, sizeof(float) * head_dim);
}

/* The pool is larger than any cache and its blocks are scattered: without this each one starts with a miss. */
ALWAYS_INLINE void prefetch(const void *base, int64_t num_bytes) {
    for (int64_t offset = 0; offset < num_bytes; offset += 64) __builtin_prefetch((const char *)base + offset, 0, 2);
}

/* The tokens [first, end) of one row, numbered from the row's first block, for all its heads. */
ALWAYS_INLINE void attend_row(const void *queries, const void *keys, const void *values, void *out,
                              const int64_t *blocks, const int64_t *ranges, const Shape *shape, int64_t row,
                              int64_t head_dim, int is_bfloat16) {
    const int64_t group = shape->heads / shape->kv_heads, block_size = shape->block_size;
    const int64_t token_stride = shape->kv_heads * head_dim, first = ranges[2 * row], end = ranges[2 * row + 1];
    const int64_t piece_bytes = block_size * token_stride * (is_bfloat16 ? 2 : 4);
    const int64_t *table = blocks + row * shape->max_blocks;
    Head heads[MAX_HEADS];
    for (int64_t h = 0; h < shape->heads; h++) {
        heads[h].highest = -FLT_MAX;
        heads[h].total = 0.0f;
        for (int64_t d = 0; d < head_dim; d++) {
            heads[h].sums[d] = 0.0f;
            heads[h].query[d] = shape->scale * load(queries, row * shape->query_stride + h * head_dim + d, is_bfloat16);
        }
    }
    for (int64_t block = first / block_size; block * block_size < end; block++) {
        const int64_t base = table[block] * block_size * token_stride, start = block * block_size;
        const int64_t from = first > start ? first - start : 0;
        const int64_t to = end < start + block_size ? end - start : block_size;
        if (start + block_size < end) {
            prefetch((const char *)keys + table[block + 1] * piece_bytes, piece_bytes);
            prefetch((const char *)values + table[block + 1] * piece_bytes, piece_bytes);
        }
        for (int64_t h = 0; h < shape->heads; h++)
            attend_block(&heads[h], keys, values, base + h / group * head_dim, from, to, token_stride, head_dim,
                         is_bfloat16);
    }
    for (int64_t h = 0; h < shape->heads; h++)
        for (int64_t d = 0; d < head_dim; d++)
            store(out, (row * shape->heads + h) * head_dim + d, heads[h].sums[d] / heads[h].total, is_bfloat16);
}

/* queries [rows, heads, head_dim], keys and values: one layer of the pool, out [rows, heads, head_dim] contiguous,
 * blocks [rows, max_blocks], ranges [rows, 2]: tokens seen, numbered from the row's first block. */
#define DEFINE(NAME, IS_BFLOAT16)                                                                                      \
    void NAME(const void *queries, const void *keys, const void *values, void *out, const int64_t *blocks,             \
              const int64_t *ranges, const Shape *shape) {                                                             \
        _Pragma("omp parallel for schedule(dynamic) num_threads(shape->num_threads) if (shape->num_threads > 1)")      \
        for (int64_t row = 0; row < shape->rows; row++) {                                                              \
            if (shape->head_dim == 64)                                                                                 \
                attend_row(queries, keys, values, out, blocks, ranges, shape, row, 64, IS_BFLOAT16);                   \
            else if (shape->head_dim == 128)                                                                           \
                attend_row(queries, keys, values, out, blocks, ranges, shape, row, 128, IS_BFLOAT16);                  \
            else                                                                                                       \
                attend_row(queries, keys, values, out, blocks, ranges, shape, row, shape->head_dim, IS_BFLOAT16);      \
        }                                                                                                              \
    }

DEFINE(decode_float32, 0)
DEFINE(decode_bfloat16, 1)
