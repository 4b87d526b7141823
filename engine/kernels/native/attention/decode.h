/* Decode: attention of one query token per sequence. It is memory-bound, so K and V are read once, in place, for all
 * query heads that share them, and the next tile is prefetched meanwhile, some cache lines at a time: a core has few
 * loads in flight and stalls on more. Measured twice as fast as one burst per head over the whole of a longer tile.
 *
 * The context of a token is cut into pieces that depend on its length only and are merged in order: results depend
 * neither on the number of threads nor on the rest of the batch. Softmax is online, in float32. T is the element type
 * of the queries, S the element type of the pool.
 */
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "plan.h"

constexpr int64_t DECODE_TILE = LANES; /* tokens at a time, within one block */
constexpr int64_t MAX_SUMS = (MAX_HEAD_DIM + LANES - 1) / LANES;
constexpr int64_t SINGLES_AT_ONCE = 4; /* a thread merges at least this many: fewer cost less than waking it */
constexpr float NOTHING = -1e30f; /* a score whose weight is 0 */

/* Scales of queries that are rounded to integers, by head. */
template <bool ARE_INTEGERS> struct QueryScales {
    float query_scales[MAX_HEADS];
};
template <> struct QueryScales<false> {};

/* Online softmax of all heads of a row. For each vector of words of V, `sums` has the low, then the high elements. */
template <typename S> struct Running : QueryScales<INTEGERS<S>> {
    float highest[MAX_HEADS]; /* scaled score */
    Floats totals[MAX_HEADS];
    Floats sums[MAX_HEADS * MAX_SUMS];
    Words queries[MAX_HEADS * MAX_SUMS];
};

/* Tokens of one block, and the tokens of the next run (null if there is none). */
template <typename S> struct TokenRun {
    const S *keys, *values; /* of the first token and KV head */
    int64_t count;
    const S *next_keys, *next_values;
    int64_t next_count;
};

/* True on a Zen 5 (AMD's family 26 by CPUID), the only processor known to read faster when prefetching into L1. */
static bool prefers_l1() {
#if defined(__x86_64__)
    unsigned family, vendor, other, ignored;
    if (!__get_cpuid(0, &ignored, &vendor, &other, &ignored) || vendor != 0x68747541 /* "Auth", of AuthenticAMD */) return false;
    return __get_cpuid(1, &family, &ignored, &other, &ignored) && (family >> 8 & 15) + (family >> 20 & 255) == 26;
#else
    return false;
#endif
}
static const bool PREFERS_L1 = prefers_l1();
constexpr int64_t MOST_BYTES_IN_L1 = 24 << 10; /* of a run's K and V: half of a Zen 5's L1 */

/* Prefetches into L1 or into the L2 cache, which has more lines in flight (Zen 4: 1.4 to 1.9 times as fast). */
template <typename T> INLINE void fetch(const T *from, int64_t elements, int64_t rows, int64_t stride, bool into_l1) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t offset = 0; offset < elements * (int64_t)sizeof(T); offset += 64) {
            const char *line = (const char *)(from + row * stride) + offset;
            if (into_l1) __builtin_prefetch(line, 0, 3);
            else __builtin_prefetch(line, 0, 1);
        }
}

/* Returns the head size. A compile-time size, DIM, saves up to a tenth of the time; DIM 0 stands for any size. */
template <int64_t DIM> INLINE int64_t head_dim(const Plan &plan) { return DIM > 0 ? DIM : plan.head_dim; }

/* Returns the number of vectors of words of a head. */
template <typename S, int64_t DIM> INLINE int64_t num_vectors(const Plan &plan) {
    return (head_dim<DIM>(plan) + LANES * PER_WORD<S> - 1) / (LANES * PER_WORD<S>);
}

template <typename S, int64_t DIM> INLINE Words load_head(const Plan &plan, const S *head, int64_t vector) {
    const S *from = head + vector * LANES * PER_WORD<S>;
    const int64_t left = head_dim<DIM>(plan) - vector * LANES * PER_WORD<S>;
    if constexpr (INTEGERS<S>) return load_pairs(from, left);
    else if constexpr (QUANTISED<S>) return (Words)load_some(from, left);
    if (DIM % (LANES * PER_WORD<S>) == 0 && DIM > 0) return (Words) * (const LooseWords *)from;
    return load_words(from, left * (int64_t)sizeof(S));
}

/* Loads a vector of a query in the layout in which heads of the pool are loaded. `scale`: of integers. */
template <typename S, int64_t DIM, typename T>
INLINE Words load_query(const Plan &plan, const T *query, int64_t vector, [[maybe_unused]] float scale) {
    if constexpr (INTEGERS<S>) {
        float parts[2 * LANES] = {};
        const int64_t first = vector * 2 * LANES, left = head_dim<DIM>(plan) - first;
        for (int64_t at = 0; at < least(2 * LANES, left); at += LANES)
            store_some(parts + at, load_some(query + first + at, left - at), left - at);
        Words words;
        for (int64_t lane = 0; lane < LANES; lane++)
            words[lane] = integer_pair(parts[2 * lane] / scale, parts[2 * lane + 1] / scale);
        return words;
    } else if constexpr (QUANTISED<S>) return (Words)load_some(query + vector * LANES, head_dim<DIM>(plan) - vector * LANES);
    else return load_head<T, DIM>(plan, query, vector);
}

/* Returns the scales of the tokens' heads. As in `score`, places behind the last token repeat the last one. */
template <typename S, int64_t DIM> INLINE Floats scales_of(const Plan &plan, const S *heads, int64_t count) {
    if constexpr (!QUANTISED<S>) return splat(1.0f);
    Floats scales;
    for (int64_t t = 0; t < DECODE_TILE; t++)
        scales[t] = scale_of(heads + least(t, count - 1) * plan.slot_stride, head_dim<DIM>(plan));
    return scales;
}

/* scores[g][b]: dot products of DECODE_TILE tokens with query head g. Places behind the last token repeat the last one. */
template <typename S, int64_t DIM, int HEADS>
INLINE void score(const Plan &plan, const Words *queries, const S *keys, int64_t count,
                  Floats (&scores)[HEADS][DECODE_TILE / LANES]) {
    constexpr int AT_ONCE = 4;
    const int64_t stride = plan.slot_stride, vectors = num_vectors<S, DIM>(plan);
    for (int64_t batch = 0; batch * LANES < count; batch++) {
        Floats parts[HEADS][LANES];
        for (int64_t lane = 0; lane < LANES; lane += AT_ONCE) {
            const S *rows[AT_ONCE];
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
                    const Words row = load_head<S, DIM>(plan, rows[i], v);
#pragma GCC unroll 4
                    for (int g = 0; g < HEADS; g++)
                        sums[g][i] = accumulate((const S *)0, sums[g][i], row, queries[g * vectors + v]);
                }
#pragma GCC unroll 4
            for (int i = 0; i < AT_ONCE; i++)
                for (int g = 0; g < HEADS; g++)
                    if constexpr (INTEGERS<S>) parts[g][lane + i] = __builtin_convertvector((Integers)sums[g][i], Floats);
                    else parts[g][lane + i] = sums[g][i];
        }
        for (int g = 0; g < HEADS; g++) scores[g][batch] = sum_rows(parts[g]);
    }
}

static_assert(DECODE_TILE == LANES, "scales are one vector");

/* Turns scores into weights by the new maximum of each head. `rescale` gets the factor of all earlier sums. The scores
 * are multiplied by `scales` and, if IS_SCALED, their head's query scale; the weights, but not the totals, by
 * `value_scales`. */
template <int HEADS, bool IS_SCALED>
INLINE void weigh(Floats scales, Floats value_scales, const float *query_scales, int64_t count, float *highest, Floats *totals,
                  Floats (&scores)[HEADS][DECODE_TILE / LANES], float (&weights)[HEADS][DECODE_TILE],
                  Floats (&rescale)[HEADS]) {
    Integers lanes = {};
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    for (int g = 0; g < HEADS; g++) {
        Floats best = splat(NOTHING);
        for (int64_t b = 0; b * LANES < count; b++) {
            const Floats scaled = scores[g][b] * (IS_SCALED ? scales * query_scales[g] : scales);
            scores[g][b] = select(lanes < (int32_t)(count - b * LANES), scaled, splat(NOTHING));
            best = maximum(best, scores[g][b]);
        }
        const float top = highest_lane(best), now = top > highest[g] ? top : highest[g];
        rescale[g] = power_of_two(splat(highest[g] - now));
        highest[g] = now;
        totals[g] = totals[g] * rescale[g];
        for (int64_t b = 0; b * LANES < count; b++) {
            const Floats p = power_of_two(scores[g][b] - now);
            totals[g] = totals[g] + p;
            *(LooseFloats *)(weights[g] + b * LANES) = p * value_scales;
        }
    }
}

/* Adds the values of a tile in integers: pairs of tokens, with weights rounded to a share of the tile's highest. */
template <typename S, int64_t DIM, int HEADS>
INLINE void add_integer_values(const Plan &plan, const S *values, int64_t count, const float (&weights)[HEADS][DECODE_TILE],
                               const Floats (&rescale)[HEADS], Floats *sums) {
    const int64_t stride = plan.slot_stride, vectors = num_vectors<S, DIM>(plan);
    float units[HEADS];
    uint32_t pairs[HEADS][DECODE_TILE / 2];
    for (int g = 0; g < HEADS; g++) {
        const Floats all = *(const LooseFloats *)weights[g];
        const float highest = highest_lane(all);
        units[g] = highest / HIGHEST_INTEGER;
        const float factor = highest > 0.0f ? HIGHEST_INTEGER / highest : 0.0f;
        for (int t = 0; t < DECODE_TILE / 2; t++)
            pairs[g][t] = integer_pair(weights[g][2 * t] * factor, weights[g][2 * t + 1] * factor);
    }
    for (int64_t v = 0; v < vectors; v++) {
        Words own[HEADS][2] = {};
        for (int64_t t = 0; t < count; t += 2) {
            const Words first = load_head<S, DIM>(plan, values + t * stride, v);
            const Words second = t + 1 < count ? load_head<S, DIM>(plan, values + (t + 1) * stride, v) : Words{};
            Words low, high;
            pair_rows(first, second, low, high);
#pragma GCC unroll 4
            for (int g = 0; g < HEADS; g++) {
                own[g][0] = add_products(own[g][0], low, splat_word(pairs[g][t / 2]));
                own[g][1] = add_products(own[g][1], high, splat_word(pairs[g][t / 2]));
            }
        }
        for (int g = 0; g < HEADS; g++)
            for (int part = 0; part < 2; part++) {
                Floats &sum = sums[(g * vectors + v) * 2 + part];
                sum = sum * rescale[g] + __builtin_convertvector((Integers)own[g][part], Floats) * units[g];
            }
    }
}

template <typename S, int64_t DIM, int HEADS>
INLINE void add_values(const Plan &plan, const S *values, int64_t count, const float (&weights)[HEADS][DECODE_TILE],
                       const Floats (&rescale)[HEADS], Floats *sums) {
    constexpr int PARTS = PER_WORD<S>;
    const int64_t stride = plan.slot_stride, vectors = num_vectors<S, DIM>(plan);
    for (int64_t v = 0; v < vectors; v++) {
        Floats own[HEADS][PARTS];
        for (int g = 0; g < HEADS; g++)
            for (int part = 0; part < PARTS; part++) own[g][part] = sums[(g * vectors + v) * PARTS + part] * rescale[g];
        for (int64_t t = 0; t < count; t++) {
            Floats parts[PARTS];
            split((const S *)0, load_head<S, DIM>(plan, values + t * stride, v), parts);
#pragma GCC unroll 4
            for (int g = 0; g < HEADS; g++)
                for (int part = 0; part < PARTS; part++)
                    own[g][part] = own[g][part] + parts[part] * splat(weights[g][t]);
        }
        for (int g = 0; g < HEADS; g++)
            for (int part = 0; part < PARTS; part++) sums[(g * vectors + v) * PARTS + part] = own[g][part];
    }
}

/* A part of the next run's K and V to prefetch: rows of elements. */
template <typename S> struct PrefetchPart {
    const S *keys, *values;
    int64_t elements, rows, stride;
    bool into_l1;
};

/* Returns one of `kv_heads` parts. The run is one row if the pool has no other heads between its tokens. */
template <typename S> INLINE PrefetchPart<S> prefetch_part(const Plan &plan, const TokenRun<S> &at, int64_t own, int64_t part) {
    const int64_t parts = plan.kv_heads, stride = plan.slot_stride;
    const bool into_l1 = PREFERS_L1 && 2 * DECODE_TILE * own * (int64_t)sizeof(S) <= MOST_BYTES_IN_L1;
    if (own == stride) {
        const int64_t share = (at.next_count * own + parts - 1) / parts;
        return {at.next_keys + part * share, at.next_values + part * share, share, 1, 0, into_l1};
    }
    const int64_t first = at.next_count * part / parts, end = at.next_count * (part + 1) / parts;
    return {at.next_keys + first * stride, at.next_values + first * stride, own, end - first, stride, into_l1};
}

/* Attends from HEADS query heads that share one KV head, starting at `head`, to one run. */
template <typename S, int64_t DIM, int HEADS>
INLINE void attend_heads(const Plan &plan, Running<S> &running, int64_t head, const S *keys, const S *values, int64_t count,
                         const PrefetchPart<S> &prefetch) {
    const int64_t vectors = num_vectors<S, DIM>(plan);
    Floats scores[HEADS][DECODE_TILE / LANES], rescale[HEADS];
    float weights[HEADS][DECODE_TILE];
    fetch(prefetch.keys, prefetch.elements, prefetch.rows, prefetch.stride, prefetch.into_l1);
    score<S, DIM, HEADS>(plan, running.queries + head * vectors, keys, count, scores);
    fetch(prefetch.values, prefetch.elements / 2, prefetch.rows, prefetch.stride, prefetch.into_l1);
    const Floats scales = scales_of<S, DIM>(plan, keys, count) * (float)plan.scale;
    const Floats value_scales = scales_of<S, DIM>(plan, values, count);
    const float *query_scales = nullptr;
    if constexpr (INTEGERS<S>) query_scales = running.query_scales + head;
    weigh<HEADS, INTEGERS<S>>(scales, value_scales, query_scales, count, running.highest + head, running.totals + head,
                              scores, weights, rescale);
    fetch(prefetch.values + prefetch.elements / 2, prefetch.elements - prefetch.elements / 2, prefetch.rows, prefetch.stride,
          prefetch.into_l1);
    Floats *sums = running.sums + head * vectors * PER_WORD<S>;
    if constexpr (INTEGERS<S>) add_integer_values<S, DIM, HEADS>(plan, values, count, weights, rescale, sums);
    else add_values<S, DIM, HEADS>(plan, values, count, weights, rescale, sums);
}

template <typename S, int64_t DIM>
INLINE void attend_run(const Plan &plan, Running<S> &running, const TokenRun<S> &at) {
    const int64_t group = plan.heads / plan.kv_heads, size = head_size<S>(head_dim<DIM>(plan));
    for (int64_t kv_head = 0; kv_head < plan.kv_heads; kv_head++) {
        const S *keys = at.keys + kv_head * size, *values = at.values + kv_head * size;
        PrefetchPart<S> prefetch = prefetch_part(plan, at, plan.kv_heads * size, kv_head);
        const int64_t end = (kv_head + 1) * group;
        for (int64_t head = end - group; head < end; head += 4, prefetch.elements = 0) switch (least(4, end - head)) {
            case 1: attend_heads<S, DIM, 1>(plan, running, head, keys, values, at.count, prefetch); break;
            case 2: attend_heads<S, DIM, 2>(plan, running, head, keys, values, at.count, prefetch); break;
            case 3: attend_heads<S, DIM, 3>(plan, running, head, keys, values, at.count, prefetch); break;
            default: attend_heads<S, DIM, 4>(plan, running, head, keys, values, at.count, prefetch); break;
            }
    }
}

/* Returns the place of a head's element d in `sums`. */
template <typename S> INLINE int64_t sums_place(int64_t d) {
    const int64_t vector = d / (LANES * PER_WORD<S>), part = d % PER_WORD<S>;
    if constexpr (INTEGERS<S>) /* `pair_rows` */
        return (vector * 2 + d % 8 / 4) * LANES + d % (2 * LANES) / 8 * 4 + d % 4;
    return (vector * PER_WORD<S> + part) * LANES + d / PER_WORD<S> % LANES;
}

/* Returns the end of the run that starts at `token`. */
INLINE int64_t run_end(const Plan &plan, const Piece &piece, int64_t token) {
    return least(least(piece.end, token + DECODE_TILE), (token / plan.block_size + 1) * plan.block_size);
}

template <typename T, typename S>
INLINE void set_next(const Plan &plan, const Tensors<T, S> &tensors, const Piece &piece, int64_t token, TokenRun<S> &before) {
    const int64_t at = place(plan, piece.table, token);
    before.next_keys = tensors.keys + at;
    before.next_values = tensors.values + at;
    before.next_count = run_end(plan, piece, token) - token;
}

/* Writes the piece's partial output, not normalized: per head its highest score, total and sums. `following`: the piece
 * that this thread probably takes next, or null. */
template <int64_t DIM, typename T, typename S>
static void attend_piece(const Plan &plan, const Tensors<T, S> &tensors, const Piece &piece, const Piece *following,
                         float *partial) {
    const int64_t vectors = num_vectors<S, DIM>(plan);
    Running<S> running;
    for (int64_t h = 0; h < plan.heads; h++) {
        const T *query = tensors.queries + piece.row * tensors.query_stride + h * plan.head_dim;
        running.highest[h] = NOTHING;
        running.totals[h] = Floats{};
        const float scale = INTEGERS<S> ? (highest_magnitude(query, plan.head_dim) + 1e-30f) / HIGHEST_INTEGER : 1.0f;
        if constexpr (INTEGERS<S>) running.query_scales[h] = scale;
        for (int64_t v = 0; v < vectors; v++) running.queries[h * vectors + v] = load_query<S, DIM>(plan, query, v, scale);
        for (int64_t s = 0; s < vectors * PER_WORD<S>; s++) running.sums[h * vectors * PER_WORD<S> + s] = Floats{};
    }
    int64_t end;
    for (int64_t token = piece.first; token < piece.end; token = end) {
        end = run_end(plan, piece, token);
        const int64_t here = place(plan, piece.table, token);
        TokenRun<S> run = {tensors.keys + here, tensors.values + here, end - token, nullptr, nullptr, 0};
        if (end < piece.end) set_next(plan, tensors, piece, end, run);
        else if (following != nullptr) set_next(plan, tensors, *following, following->first, run);
        attend_run<S, DIM>(plan, running, run);
    }
    for (int64_t h = 0; h < plan.heads; h++) {
        const float *sums = (const float *)(running.sums + h * vectors * PER_WORD<S>);
        float *to = partial + h * (plan.head_dim + 2);
        to[0] = running.highest[h];
        to[1] = sum(running.totals[h]);
        for (int64_t d = 0; d < plan.head_dim; d++) to[2 + d] = sums[sums_place<S>(d)];
    }
}

/* Computes one token's output from its pieces, in their order. A sink is a score without a value. */
template <int64_t WIDEST = MAX_HEAD_DIM, typename T, typename S>
static void merge_pieces(const Plan &plan, const Tensors<T, S> &tensors, const Single &single) {
    const int64_t entry = plan.head_dim + 2, step = plan.heads * entry;
    for (int64_t h = 0; h < plan.heads; h++) {
        const float *partial = plan.partials + single.first_piece * step + h * entry;
        const float sink = tensors.sinks == nullptr ? NOTHING : tensors.sinks[h];
        float highest = sink, total = 0.0f, sums[WIDEST] = {};
        for (int64_t p = 0; p < single.num_pieces; p++)
            highest = partial[p * step] > highest ? partial[p * step] : highest;
        for (int64_t p = 0; p < single.num_pieces; p++) {
            const float *one = partial + p * step, worth = power_of_two(splat(one[0] - highest))[0];
            total += worth * one[1];
            for (int64_t d = 0; d < plan.head_dim; d++) sums[d] += worth * one[2 + d];
        }
        if (tensors.sinks != nullptr) total += power_of_two(splat(sink - highest))[0];
        T *to = tensors.out + (single.row * plan.heads + h) * plan.head_dim;
        for (int64_t d = 0; d < plan.head_dim; d++) narrow(to + d, sums[d] / total);
    }
}
