/* Decode: one query token per sequence. Bound by memory, so K and V are read once, where they lie, for all the query
 * heads that share them, and the next tile is fetched meanwhile, some lines at a time: a core waits for few at once, and
 * stops when more are asked for. Measured twice as fast as a burst for each head over all of a longer tile.
 *
 * What a token sees is cut into pieces that depend on its length alone, and merged in their order: results do not depend
 * on the number of threads, nor on what else is in the batch. Softmax is online, in float32.
 */
#pragma once

#include "paged.h"

constexpr int64_t DECODE_TILE = 16; /* tokens at a time, within one block */
constexpr int64_t MAX_SUMS = (MAX_HEAD_DIM + LANES - 1) / LANES;
constexpr int64_t SINGLES_AT_ONCE = 4; /* whose pieces a thread merges, at least: less than waking one costs */
constexpr float NOTHING = -1e30f; /* a score of which nothing remains */

/* Running softmax of all heads of a row. Of each vector of words of V, `sums` has the low elements, then the high ones. */
struct Running {
    float highest[MAX_HEADS]; /* scaled score */
    Floats totals[MAX_HEADS];
    Floats sums[MAX_HEADS * MAX_SUMS];
    Words queries[MAX_HEADS * MAX_SUMS];
};

/* Tokens of one block, and those that come next (none: null). */
template <typename T> struct Stretch {
    const T *keys, *values; /* of the first token and KV head */
    int64_t count;
    const T *next_keys, *next_values;
    int64_t next_count;
};

template <typename T> INLINE void fetch(const T *from, int64_t elements) {
    for (int64_t offset = 0; offset < elements * (int64_t)sizeof(T); offset += 64)
        __builtin_prefetch((const char *)from + offset, 0, 3);
}

/* A head size that the compiler knows, as DIM, is worth up to a tenth; 0 stands for any. */
template <int64_t DIM> INLINE int64_t head_dim(const Plan &plan) { return DIM > 0 ? DIM : plan.head_dim; }

/* Vectors of words of a head. */
template <typename T, int64_t DIM> INLINE int64_t num_vectors(const Plan &plan) {
    return (head_dim<DIM>(plan) + LANES * PER_WORD<T> - 1) / (LANES * PER_WORD<T>);
}

template <typename T, int64_t DIM> INLINE Words load_head(const Plan &plan, const T *head, int64_t vector) {
    const T *from = head + vector * LANES * PER_WORD<T>;
    if (DIM % (LANES * PER_WORD<T>) == 0 && DIM > 0) return (Words) * (const LooseWords *)from;
    return load_words(from, (head_dim<DIM>(plan) - vector * LANES * PER_WORD<T>) * (int64_t)sizeof(T));
}

/* scores[g][b]: 16 tokens' dot products with query head g. Tokens behind the last are the last one again. */
template <typename T, int64_t DIM, int HEADS>
INLINE void score(const Plan &plan, const Words *queries, const T *keys, int64_t count,
                  Floats (&scores)[HEADS][DECODE_TILE / LANES]) {
    constexpr int AT_ONCE = 4;
    const int64_t stride = plan.kv_heads * head_dim<DIM>(plan), vectors = num_vectors<T, DIM>(plan);
    for (int64_t batch = 0; batch * LANES < count; batch++) {
        Floats parts[HEADS][LANES];
        for (int64_t lane = 0; lane < LANES; lane += AT_ONCE) {
            const T *rows[AT_ONCE];
            Floats sums[HEADS][AT_ONCE];
#pragma GCC unroll 4
            for (int i = 0; i < AT_ONCE; i++) {
                rows[i] = keys + least(batch * LANES + lane + i, count - 1) * stride;
                for (int g = 0; g < HEADS; g++) sums[g][i] = Floats{};
            }
#pragma GCC unroll 8
            for (int64_t v = 0; v < vectors; v++)
#pragma GCC unroll 4
                for (int i = 0; i < AT_ONCE; i++) {
                    const Words row = load_head<T, DIM>(plan, rows[i], v);
#pragma GCC unroll 4
                    for (int g = 0; g < HEADS; g++)
                        sums[g][i] = accumulate((const T *)0, sums[g][i], row, queries[g * vectors + v]);
                }
#pragma GCC unroll 4
            for (int i = 0; i < AT_ONCE; i++)
                for (int g = 0; g < HEADS; g++) parts[g][lane + i] = sums[g][i];
        }
        for (int g = 0; g < HEADS; g++) scores[g][batch] = sum_rows(parts[g]);
    }
}

/* Turns scores into weights by the new maximum of each head; returns in `rescale` what was summed so far is worth. */
template <int HEADS>
INLINE void weigh(float scale, int64_t count, float *highest, Floats *totals, Floats (&scores)[HEADS][DECODE_TILE / LANES],
                  float (&weights)[HEADS][DECODE_TILE], Floats (&rescale)[HEADS]) {
    const Integers lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int g = 0; g < HEADS; g++) {
        Floats best = splat(NOTHING);
        for (int64_t b = 0; b * LANES < count; b++) {
            scores[g][b] = select(lanes < (int32_t)(count - b * LANES), scores[g][b] * scale, splat(NOTHING));
            best = maximum(best, scores[g][b]);
        }
        const float top = highest_lane(best), now = top > highest[g] ? top : highest[g];
        rescale[g] = power_of_two(splat(highest[g] - now));
        highest[g] = now;
        totals[g] = totals[g] * rescale[g];
        for (int64_t b = 0; b * LANES < count; b++) {
            const Floats p = power_of_two(scores[g][b] - now);
            totals[g] = totals[g] + p;
            *(LooseFloats *)(weights[g] + b * LANES) = p;
        }
    }
}

template <typename T, int64_t DIM, int HEADS>
INLINE void add_values(const Plan &plan, const T *values, int64_t count, const float (&weights)[HEADS][DECODE_TILE],
                       const Floats (&rescale)[HEADS], Floats *sums) {
    constexpr int PARTS = PER_WORD<T>;
    const int64_t stride = plan.kv_heads * head_dim<DIM>(plan), vectors = num_vectors<T, DIM>(plan);
    for (int64_t v = 0; v < vectors; v++) {
        Floats own[HEADS][PARTS];
        for (int g = 0; g < HEADS; g++)
            for (int part = 0; part < PARTS; part++) own[g][part] = sums[(g * vectors + v) * PARTS + part] * rescale[g];
        for (int64_t t = 0; t < count; t++) {
            Floats parts[PARTS];
            split((const T *)0, load_head<T, DIM>(plan, values + t * stride, v), parts);
#pragma GCC unroll 4
            for (int g = 0; g < HEADS; g++)
                for (int part = 0; part < PARTS; part++)
                    own[g][part] = own[g][part] + parts[part] * splat(weights[g][t]);
        }
        for (int g = 0; g < HEADS; g++)
            for (int part = 0; part < PARTS; part++) sums[(g * vectors + v) * PARTS + part] = own[g][part];
    }
}

/* A part of the next stretch's K and V. */
template <typename T> struct Ahead {
    const T *keys, *values;
    int64_t elements; /* of each */
};

/* HEADS query heads from `head` on, which share one KV head, over one stretch. */
template <typename T, int64_t DIM, int HEADS>
INLINE void attend_heads(const Plan &plan, Running &running, int64_t head, const T *keys, const T *values, int64_t count,
                         const Ahead<T> &ahead) {
    const int64_t vectors = num_vectors<T, DIM>(plan);
    Floats scores[HEADS][DECODE_TILE / LANES], rescale[HEADS];
    float weights[HEADS][DECODE_TILE];
    fetch(ahead.keys, ahead.elements);
    score<T, DIM, HEADS>(plan, running.queries + head * vectors, keys, count, scores);
    fetch(ahead.values, ahead.elements / 2);
    weigh<HEADS>((float)plan.scale, count, running.highest + head, running.totals + head, scores, weights, rescale);
    fetch(ahead.values + ahead.elements / 2, ahead.elements - ahead.elements / 2);
    add_values<T, DIM, HEADS>(plan, values, count, weights, rescale, running.sums + head * vectors * PER_WORD<T>);
}

template <typename T, int64_t DIM>
INLINE void attend_stretch(const Plan &plan, Running &running, const Stretch<T> &at) {
    const int64_t group = plan.heads / plan.kv_heads, dim = head_dim<DIM>(plan), stride = plan.kv_heads * dim;
    const int64_t share = (at.next_count * stride + plan.kv_heads - 1) / plan.kv_heads;
    for (int64_t kv_head = 0; kv_head < plan.kv_heads; kv_head++) {
        const T *keys = at.keys + kv_head * dim, *values = at.values + kv_head * dim;
        Ahead<T> ahead = {at.next_keys + kv_head * share, at.next_values + kv_head * share, share};
        const int64_t end = (kv_head + 1) * group;
        for (int64_t head = end - group; head < end; head += 4, ahead.elements = 0) switch (least(4, end - head)) {
            case 1: attend_heads<T, DIM, 1>(plan, running, head, keys, values, at.count, ahead); break;
            case 2: attend_heads<T, DIM, 2>(plan, running, head, keys, values, at.count, ahead); break;
            case 3: attend_heads<T, DIM, 3>(plan, running, head, keys, values, at.count, ahead); break;
            default: attend_heads<T, DIM, 4>(plan, running, head, keys, values, at.count, ahead); break;
            }
    }
}

/* Where sums have element d of a head. */
template <typename T> INLINE int64_t sums_place(int64_t d) {
    const int64_t vector = d / (LANES * PER_WORD<T>), part = d % PER_WORD<T>;
    return (vector * PER_WORD<T> + part) * LANES + d / PER_WORD<T> % LANES;
}

/* Where the stretch that starts at this token of the piece ends. */
INLINE int64_t stretch_end(const Plan &plan, const Piece &piece, int64_t token) {
    return least(least(piece.end, token + DECODE_TILE), (token / plan.block_size + 1) * plan.block_size);
}

template <typename T>
INLINE void announce(const Plan &plan, const Tensors<T> &tensors, const Piece &piece, int64_t token, Stretch<T> &before) {
    const int64_t at = place(plan, piece.table, token);
    before.next_keys = tensors.keys + at;
    before.next_values = tensors.values + at;
    before.next_count = stretch_end(plan, piece, token) - token;
}

/* The piece's part of the output, unweighted: per head its highest score, total and sums. `following`: the piece that
 * this thread will probably take next, or null. */
template <typename T, int64_t DIM>
static void attend_piece(const Plan &plan, const Tensors<T> &tensors, const Piece &piece, const Piece *following,
                         float *partial) {
    const int64_t vectors = num_vectors<T, DIM>(plan);
    Running running;
    for (int64_t h = 0; h < plan.heads; h++) {
        const T *query = tensors.queries + piece.row * tensors.query_stride + h * plan.head_dim;
        running.highest[h] = NOTHING;
        running.totals[h] = Floats{};
        for (int64_t v = 0; v < vectors; v++) running.queries[h * vectors + v] = load_head<T, DIM>(plan, query, v);
        for (int64_t s = 0; s < vectors * PER_WORD<T>; s++) running.sums[h * vectors * PER_WORD<T> + s] = Floats{};
    }
    int64_t end;
    for (int64_t token = piece.first; token < piece.end; token = end) {
        end = stretch_end(plan, piece, token);
        const int64_t here = place(plan, piece.table, token);
        Stretch<T> stretch = {tensors.keys + here, tensors.values + here, end - token, nullptr, nullptr, 0};
        if (end < piece.end) announce(plan, tensors, piece, end, stretch);
        else if (following != nullptr) announce(plan, tensors, *following, following->first, stretch);
        attend_stretch<T, DIM>(plan, running, stretch);
    }
    for (int64_t h = 0; h < plan.heads; h++) {
        const float *sums = (const float *)(running.sums + h * vectors * PER_WORD<T>);
        float *to = partial + h * (plan.head_dim + 2);
        to[0] = running.highest[h];
        to[1] = sum(running.totals[h]);
        for (int64_t d = 0; d < plan.head_dim; d++) to[2 + d] = sums[sums_place<T>(d)];
    }
}

/* One token's output from its pieces, in their order. */
template <typename T> static void merge_pieces(const Plan &plan, const Tensors<T> &tensors, const Single &single) {
    const int64_t entry = plan.head_dim + 2, step = plan.heads * entry;
    for (int64_t h = 0; h < plan.heads; h++) {
        const float *partial = plan.partials + single.first_piece * step + h * entry;
        float highest = NOTHING, total = 0.0f, sums[MAX_HEAD_DIM] = {};
        for (int64_t p = 0; p < single.num_pieces; p++)
            highest = partial[p * step] > highest ? partial[p * step] : highest;
        for (int64_t p = 0; p < single.num_pieces; p++) {
            const float *one = partial + p * step, worth = power_of_two(splat(one[0] - highest))[0];
            total += worth * one[1];
            for (int64_t d = 0; d < plan.head_dim; d++) sums[d] += worth * one[2 + d];
        }
        T *to = tensors.out + (single.row * plan.heads + h) * plan.head_dim;
        for (int64_t d = 0; d < plan.head_dim; d++) narrow(to + d, sums[d] / total);
    }
}
