/* Prefill: attention of tiles of neighbouring tokens to the cached prefix and to the chunk itself, both in the pool.
 *
 * A tile's rows are all its tokens times all query heads that share a KV head. Rows are lanes of vectors, so softmax
 * never works across lanes. Keys are broadcast word by word against transposed queries, then values against weights.
 * The same small kernel, whose sums stay in registers, computes both products. K and V are copied once per tile of
 * tokens, only as far as the tile sees them, into a few KiB that stay in the L1 cache. Softmax is online, in float32;
 * weights are rounded to the queries' dtype T before the product with V. S is the element type of the pool: codes are
 * converted to T when K and V are copied, and their scales are applied to scores and weights. A matrix unit computes both
 * products of bfloat16: words, then keys, are padded with zeros to whole steps of the unit.
 */
#pragma once

#include <type_traits>

#include "../tiles.h"
#include "plan.h"

constexpr int64_t KEY_TILE = 64;
constexpr int64_t KEY_WORDS = KEY_TILE / 2; /* of bfloat16 */
#if defined(__AVX512F__)
constexpr int64_t WIDTH = 3, HEIGHT = 8; /* of the small kernel: sums take 24 of 32 registers */
#else
constexpr int64_t WIDTH = 2, HEIGHT = 4;
#endif
constexpr int64_t MAX_ROWS = 192; /* of a tile */
constexpr int64_t STEP = TILE_BYTES / 4; /* words that the matrix unit multiplies at a time */
constexpr int64_t MAX_VECTORS = MAX_ROWS / LANES;
/* A hidden score. It is not lower because, in a tile that is all hidden, the rounding error of score · scale - highest
 * must stay small: the tile then adds finite values, whose factor becomes 0 once a token is seen. */
constexpr float HIDDEN = -1e9f;

/* Most elements of a key. */
template <bool LATENT> constexpr int64_t WIDEST = LATENT ? MAX_POOLED : MAX_HEAD_DIM;

/* Workspace of one tile of tokens and one KV head. Rows are in bands of WIDTH vectors; a band's part of `queries` and
 * `sums` is [words or dims, vectors in this band]. */
template <int64_t WIDEST> struct Workspace {
    Words queries[MAX_VECTORS * WIDEST];
    Floats sums[MAX_VECTORS * WIDEST];
    Floats highest[MAX_VECTORS], totals[MAX_VECTORS];
    Integers positions[MAX_VECTORS];
    Words keys[KEY_TILE * WIDEST / LANES];   /* [keys, words] */
    Words values[KEY_TILE * WIDEST / LANES]; /* [keys / PER_WORD, dims]: neighbouring keys share a word; by tiles [dims, 32] */
    float key_scales[KEY_TILE], value_scales[KEY_TILE]; /* of a quantised pool */
    Floats scores[KEY_TILE * WIDTH];
    Words weights[KEY_TILE * WIDTH];
};

/* Constants of the work on one tile. LATENT: see latents.h. */
template <typename T, typename S, bool LATENT> struct Work {
    const Plan &plan;
    const Tensors<T, S> &tensors;
    const Tile &tile;
    bool by_tiles;
    int64_t kv_head, group, words, dims; /* dims: head_dim, rounded up to a multiple of HEIGHT or TILE_ROWS */
    Workspace<WIDEST<LATENT>> &space;
};

template <bool LATENT, typename T, typename S>
static Work<T, S, LATENT> make_work(const Plan &plan, const Tensors<T, S> &tensors, const Tile &tile, int64_t kv_head,
                                    Workspace<WIDEST<LATENT>> &space, bool may_use_tiles = true) {
    const bool by_tiles = std::is_same_v<T, Bfloat16> && may_use_tiles && has_tiles();
    const int64_t words = up_to_multiple(words_per_head<T>(plan), by_tiles ? STEP : 1);
    const int64_t dims = up_to_multiple(plan.head_dim, by_tiles ? TILE_ROWS : HEIGHT);
    return {plan, tensors, tile, by_tiles, kv_head, plan.heads / plan.kv_heads, words, dims, space};
}

/* out[m][n] = keep[n] · out[m][n] + Σₖ left[m, k] · right[k][n] for HEIGHT m and VECTORS n. */
template <typename T, int VECTORS, bool KEEP>
INLINE void multiply(Floats *out, const Floats *keep, const uint32_t *left, int64_t left_row, int64_t left_step,
                     const Words *right, int64_t steps) {
    Floats sums[HEIGHT][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < HEIGHT; m++)
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++) sums[m][n] = KEEP ? out[m * VECTORS + n] * keep[n] : Floats{};
    for (int64_t k = 0; k < steps; k++) {
        Words row[VECTORS];
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++) row[n] = right[k * VECTORS + n];
#pragma GCC unroll 8
        for (int m = 0; m < HEIGHT; m++) {
            const uint32_t one = left[m * left_row + k * left_step];
#pragma GCC unroll 4
            for (int n = 0; n < VECTORS; n++) sums[m][n] = accumulate((const T *)0, sums[m][n], row[n], one);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < HEIGHT; m++)
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++) out[m * VECTORS + n] = sums[m][n];
}

#if TILES
/* The same for TILE_ROWS m by the matrix unit: out[m][n] = (KEEP ? out[m][n] : 0) + Σₖ left[m, k] · right[k][n], for `steps`
 * steps of k. */
template <int VECTORS, bool KEEP>
INLINE void multiply_tiles(Floats *out, const uint32_t *left, int64_t left_row, const Words *right, int64_t steps) {
    constexpr int64_t ROW = VECTORS * TILE_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    if constexpr (KEEP) _tile_loadd(0, out, ROW);
    if constexpr (KEEP && VECTORS > 1) _tile_loadd(1, out + 1, ROW);
    if constexpr (KEEP && VECTORS > 2) _tile_loadd(2, out + 2, ROW);
    for (int64_t step = 0; step < steps; step++, left += STEP, right += STEP * VECTORS) {
        _tile_loadd(3, left, left_row * 4);
        _tile_loadd(4, right, ROW);
        _tile_dpbf16ps(0, 3, 4);
        if constexpr (VECTORS > 1) {
            _tile_loadd(5, right + 1, ROW);
            _tile_dpbf16ps(1, 3, 5);
        }
        if constexpr (VECTORS > 2) {
            _tile_loadd(6, right + 2, ROW);
            _tile_dpbf16ps(2, 3, 6);
        }
    }
    _tile_stored(0, out, ROW);
    if constexpr (VECTORS > 1) _tile_stored(1, out + 1, ROW);
    if constexpr (VECTORS > 2) _tile_stored(2, out + 2, ROW);
}
#endif

/* -- filling the workspace */

/* Row r is token r / group with query head r % group. Lanes behind the last row repeat its token with zero queries. A
 * row with a sink begins as if it had seen that score, without a value. */
template <typename T, typename S, bool LATENT>
static void load_queries(const Work<T, S, LATENT> &work, int64_t num_vectors) {
    const Plan &plan = work.plan;
    const int64_t num_rows = work.tile.num_tokens * work.group;
    const float *sinks = work.tensors.sinks == nullptr ? nullptr : work.tensors.sinks + work.kv_head * work.group;
    for (int64_t band = 0; band < num_vectors; band += WIDTH) {
        const int64_t width = least(WIDTH, num_vectors - band);
        uint32_t *to = (uint32_t *)(work.space.queries + band * work.words);
        for (int64_t r = 0; r < width * LANES; r++) {
            const int64_t row = band * LANES + r, token = least(row, num_rows - 1) / work.group;
            uint32_t words[WIDEST<LATENT>];
            memset(words + plan.key_dim / PER_WORD<T>, 0, (work.words - plan.key_dim / PER_WORD<T>) * sizeof words[0]);
            if (row >= num_rows) memset(words, 0, work.words * sizeof words[0]);
            else {
                const int64_t head = work.kv_head * work.group + row % work.group;
                const T *from = work.tensors.queries + (work.tile.row + token) * work.tensors.query_stride;
                memcpy(words, from + head * plan.key_dim, plan.key_dim * sizeof(T));
            }
            for (int64_t w = 0; w < work.words; w++) to[w * width * LANES + r] = words[w];
            ((int32_t *)work.space.positions)[row] = (int32_t)(work.tile.position + token);
            if (sinks != nullptr) ((float *)work.space.highest)[row] = sinks[row % work.group];
        }
    }
    for (int64_t v = 0; v < num_vectors; v++) {
        if (sinks == nullptr) work.space.highest[v] = splat(HIDDEN);
        work.space.totals[v] = splat(sinks == nullptr ? 0.0f : 1.0f);
    }
    for (int64_t s = 0; s < num_vectors * work.dims; s++) work.space.sums[s] = Floats{};
}

INLINE void interleave(uint32_t *to, const float *const (&rows)[1], int64_t dims) {
    memcpy(to, rows[0], dims * sizeof(float));
}

INLINE void interleave(uint32_t *to, const Bfloat16 *const (&rows)[2], int64_t dims) {
    for (int64_t d = 0; d < dims; d++) to[d] = rows[0][d].bits | (uint32_t)rows[1][d].bits << 16;
}

/* Returns a token's K or V in place, or unpacked into `space` with the scale in `scale`. */
template <typename T> INLINE const T *head_of(const T *head, float *, T *, int64_t) { return head; }

template <typename T, typename S> INLINE const T *head_of(const S *row, float *scale, T *space, int64_t dim) {
    unpack(space, row, dim);
    *scale = scale_of(row, dim);
    return space;
}

/* Puts a half of a token's latents and rotated key, which is stored like a head, into `to`. */
template <typename T> INLINE void load_half(T *to, const T *half, int64_t dim) { memcpy(to, half, dim * sizeof(T)); }

template <typename T, typename S> INLINE void load_half(T *to, const S *half, int64_t dim) {
    const float scale = scale_of(half, dim);
    for (int64_t i = 0; i < dim; i += LANES) store_some(to + i, load_some(half + i, dim - i) * scale, dim - i);
}

/* Loads K and V of `count` tokens from `first` on. Tokens outside of [oldest, end), which no row sees, become 0. */
template <typename T, typename S, bool LATENT>
static void load_keys_and_values(const Work<T, S, LATENT> &work, int64_t first, int64_t count, int64_t oldest, int64_t end) {
    static const T zeros[WIDEST<LATENT>] = {};
    const Plan &plan = work.plan;
    Workspace<WIDEST<LATENT>> &space = work.space;
    const int64_t dim = plan.head_dim, whole = plan.key_dim / PER_WORD<T>; /* words */
    uint32_t *keys = (uint32_t *)space.keys, *values = (uint32_t *)space.values;
    uint32_t row_of_words[WIDEST<LATENT>];
    T key_space[MAX_HEAD_DIM], value_space[PER_WORD<T>][MAX_HEAD_DIM];
    const T *key, *rows[PER_WORD<T>];
    int64_t at = 0, left = 0; /* of this block */
    for (int64_t k = 0; k < count; k++) {
        const int64_t part = k % PER_WORD<T>;
        const bool seen = first + k >= oldest && first + k < end;
        if (seen && left == 0) {
            at = place(plan, work.tile.table, first + k) + work.kv_head * head_size<S>(dim);
            left = plan.block_size - (first + k) % plan.block_size;
        }
        key = rows[part] = zeros;
        space.key_scales[k] = space.value_scales[k] = 0.0f;
        if constexpr (LATENT) {
            T *to = (T *)(keys + k * work.words);
            key = nullptr;
            rows[part] = to;
            if (!seen) memset(to, 0, plan.key_dim * sizeof(T));
            else load_half(to, work.tensors.keys + at, plan.key_dim / 2);
            if (seen) load_half(to + plan.key_dim / 2, work.tensors.values + at, plan.key_dim / 2);
        } else if (seen) {
            key = head_of(work.tensors.keys + at, space.key_scales + k, key_space, dim);
            rows[part] = head_of(work.tensors.values + at, space.value_scales + k, value_space[part], dim);
        }
        if (seen) at += plan.slot_stride, left--;
        memset(keys + k * work.words + whole, 0, (work.words - whole) * sizeof *keys);
        if constexpr (!LATENT) {
            memcpy(keys + k * work.words, key, dim * sizeof(T));
        }
        if (part < PER_WORD<T> - 1) continue;
        uint32_t *to = work.by_tiles ? row_of_words : values + k / PER_WORD<T> * work.dims;
        interleave(to, rows, dim);
        for (int64_t d = dim; d < work.dims; d++) to[d] = 0;
        if (work.by_tiles)
            for (int64_t d = 0; d < work.dims; d++) values[d * KEY_WORDS + k / PER_WORD<T>] = to[d];
    }
}

/* -- one band of rows against one tile of keys */

template <int VECTORS>
INLINE void hide(Floats *scores, const Integers *positions, int64_t first, int64_t count, int64_t window) {
    const int32_t span = (int32_t)least(window, 1 << 30);
    for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++) {
            const Integers distance = positions[n] - (int32_t)(first + k);
            scores[k * VECTORS + n] =
                select((distance >= 0) & (distance < span), scores[k * VECTORS + n], splat(HIDDEN));
        }
}

INLINE Words as_weights(const float *, const Floats (&p)[1]) { return (Words)p[0]; }
INLINE Words as_weights(const Bfloat16 *, const Floats (&p)[2]) { return join(p[0], p[1]); }

/* Multiplies the scores by the scales of their keys. */
template <int VECTORS> INLINE void scale_scores(Floats *scores, const float *scales, int64_t count) {
    for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++) scores[k * VECTORS + n] = scores[k * VECTORS + n] * splat(scales[k]);
}

/* Turns `count` rows of scores into weights. `keep` gets the factor of all earlier sums. The weights, but not the
 * totals, are multiplied by `value_scales` if it is not null. */
template <typename T, int VECTORS>
INLINE void weigh_rows(const Floats *scores, Words *weights, int64_t count, Floats *highest, Floats *totals,
                       float scale, const float *value_scales, Floats *keep) {
    Floats best[VECTORS], total[VECTORS];
    for (int n = 0; n < VECTORS; n++) best[n] = splat(HIDDEN);
    for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++) best[n] = maximum(best[n], scores[k * VECTORS + n]);
    for (int n = 0; n < VECTORS; n++) {
        best[n] = maximum(highest[n], best[n] * scale);
        keep[n] = power_of_two(highest[n] - best[n]);
        highest[n] = best[n];
        total[n] = totals[n] * keep[n];
    }
    for (int64_t k = 0; k < count; k += PER_WORD<T>)
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++) {
            Floats p[PER_WORD<T>];
            for (int i = 0; i < PER_WORD<T>; i++) {
                p[i] = power_of_two(scores[(k + i) * VECTORS + n] * scale - best[n]);
                total[n] = total[n] + p[i];
                if (value_scales != nullptr) p[i] = p[i] * splat(value_scales[k + i]);
            }
            weights[k / PER_WORD<T> * VECTORS + n] = as_weights((const T *)0, p);
        }
    for (int n = 0; n < VECTORS; n++) totals[n] = total[n];
}

template <int VECTORS, typename T, typename S, bool LATENT>
static void attend_band(const Work<T, S, LATENT> &work, int64_t band, int64_t first, int64_t count, bool partly) {
    constexpr bool HAS_SCALES = QUANTISED<S> && !LATENT;
    Workspace<WIDEST<LATENT>> &space = work.space;
    const Words *queries = space.queries + band * work.words;
    Floats *sums = space.sums + band * work.dims, keep[VECTORS];
    const uint32_t *keys = (const uint32_t *)space.keys, *values = (const uint32_t *)space.values;
    if (!work.by_tiles)
        for (int64_t k = 0; k < count; k += HEIGHT)
            multiply<T, VECTORS, false>(space.scores + k * VECTORS, nullptr, keys + k * work.words, work.words, 1, queries, work.words);
#if TILES
    else
        for (int64_t k = 0; k < count; k += TILE_ROWS)
            multiply_tiles<VECTORS, false>(space.scores + k * VECTORS, keys + k * work.words, work.words, queries, work.words / STEP);
    ALL_MEMORY;
#endif
    if (HAS_SCALES) scale_scores<VECTORS>(space.scores, space.key_scales, count);
    if (partly) hide<VECTORS>(space.scores, space.positions + band, first, count, work.plan.window);
    weigh_rows<T, VECTORS>(space.scores, space.weights, count, space.highest + band, space.totals + band,
                           (float)work.plan.scale, HAS_SCALES ? space.value_scales : nullptr, keep);
    if (!work.by_tiles)
        for (int64_t d = 0; d < work.dims; d += HEIGHT)
            multiply<T, VECTORS, true>(sums + d * VECTORS, keep, values + d, 1, work.dims, space.weights, count / PER_WORD<T>);
#if TILES
    else {
        for (int64_t d = 0; d < work.dims; d++)
#pragma GCC unroll 4
            for (int n = 0; n < VECTORS; n++) sums[d * VECTORS + n] = sums[d * VECTORS + n] * keep[n];
        ALL_MEMORY;
        for (int64_t d = 0; d < work.dims; d += TILE_ROWS)
            multiply_tiles<VECTORS, true>(sums + d * VECTORS, values + d * KEY_WORDS, KEY_WORDS, space.weights, count / 2 / STEP);
        ALL_MEMORY;
    }
#endif
}

/* Attends from all bands to the keys from `first` on, of which the tile sees [oldest, end). */
template <typename T, typename S, bool LATENT>
static void attend_keys(const Work<T, S, LATENT> &work, int64_t num_vectors, int64_t first, int64_t oldest, int64_t end) {
    const int64_t count = least(KEY_TILE, up_to_multiple(end - first, work.by_tiles ? 2 * STEP : HEIGHT)), window = work.plan.window;
    const int32_t *positions = (const int32_t *)work.space.positions;
    load_keys_and_values(work, first, count, oldest, end);
    for (int64_t band = 0; band < num_vectors; band += WIDTH) {
        const int64_t width = least(WIDTH, num_vectors - band);
        const int64_t from = positions[band * LANES], to = positions[(band + width) * LANES - 1];
        if (first > to || from - (first + count - 1) >= window) continue;
        const bool partly = first + count - 1 > from || to - first >= window;
        if (width == 1) attend_band<1>(work, band, first, count, partly);
        if (WIDTH > 1 && width == 2) attend_band<least(2, WIDTH)>(work, band, first, count, partly);
        if (WIDTH > 2 && width == 3) attend_band<least(3, WIDTH)>(work, band, first, count, partly);
    }
}

/* Calls store(r, sums, step): row r's sums, not normalized, are `step` apart. */
template <typename T, typename S, bool LATENT, typename Store>
static void store_rows(const Work<T, S, LATENT> &work, const Store &store) {
    const int64_t num_rows = work.tile.num_tokens * work.group;
    const int64_t num_vectors = (num_rows + LANES - 1) / LANES;
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t band = r / LANES / WIDTH * WIDTH, width = least(WIDTH, num_vectors - band);
        store(r, (const float *)(work.space.sums + band * work.dims) + r - band * LANES, width * LANES);
    }
}

/* Attends from all rows of the tile to tokens [oldest, end). */
template <typename T, typename S, bool LATENT>
static void attend_context(const Work<T, S, LATENT> &work, int64_t oldest, int64_t end) {
    const int64_t num_vectors = (work.tile.num_tokens * work.group + LANES - 1) / LANES;
    load_queries(work, num_vectors);
#if TILES
    if (work.by_tiles) shape_tiles(TILE_ROWS, TILE_BYTES);
    ALL_MEMORY;
#endif
    /* Tiles of keys start at multiples of their size, so that no bit of a result depends on the prompt's chunks. */
    for (int64_t first = oldest / KEY_TILE * KEY_TILE; first < end; first += KEY_TILE)
        attend_keys(work, num_vectors, first, oldest, end);
#if TILES
    if (work.by_tiles) _tile_release();
#endif
}

template <bool LATENT, typename T, typename S>
static void attend_tile(const Plan &plan, const Tensors<T, S> &tensors, const Tile &tile, int64_t kv_head) {
    Workspace<WIDEST<LATENT>> space;
    const auto work = make_work<LATENT>(plan, tensors, tile, kv_head, space);
    attend_context(work, most(0, tile.position - plan.window + 1), tile.position + tile.num_tokens);
    store_rows(work, [&](int64_t r, const float *sums, int64_t step) {
        const float factor = 1.0f / ((const float *)space.totals)[r];
        const int64_t row = tile.row + r / work.group, head = kv_head * work.group + r % work.group;
        T *to = tensors.out + (row * plan.heads + head) * plan.head_dim;
        for (int64_t d = 0; d < plan.head_dim; d++) narrow(to + d, sums[d * step] * factor);
    });
}
