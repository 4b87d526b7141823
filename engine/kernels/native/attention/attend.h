/* Attention of one step over the paged KV pool: single tokens (decode.h) and tiles of prompts (prefill.h), divided
 * among the threads of a thread pool. */
#pragma once

#include "../thread_pool_start.h"
#include "decode.h"
#include "prefill.h"

template <bool LATENT, typename T, typename S> static void attend_tiles(const Plan &plan, const Tensors<T, S> &tensors) {
    parallel_for(plan.thread_pool, plan.num_tiles * plan.kv_heads, 1, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++) /* all tiles of a KV head in a row: its K and V stay cached */
            attend_tile<LATENT>(plan, tensors, plan.tiles[n % plan.num_tiles], n / plan.num_tiles);
    });
}

template <int64_t DIM, typename T, typename S> static void attend_pieces(const Plan &plan, const Tensors<T, S> &tensors) {
    const int64_t step = plan.heads * (plan.head_dim + 2);
    parallel_for(plan.thread_pool, plan.num_pieces, 1, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++) {
            const Piece *following = n + 1 < to ? plan.pieces + n + 1 : nullptr;
            attend_piece<DIM>(plan, tensors, plan.pieces[n], following, plan.partials + n * step);
        }
    });
    parallel_for(plan.thread_pool, plan.num_singles, SINGLES_AT_ONCE, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++) merge_pieces(plan, tensors, plan.singles[n]);
    });
}

template <typename T, typename S> static void attend(const Plan &plan, const Tensors<T, S> &tensors) {
    if (plan.num_tiles > 0) attend_tiles<false>(plan, tensors);
    if (plan.num_singles == 0) return;
    using R = typename Read<T, S>::Type;
    const R *keys = (const R *)tensors.keys, *values = (const R *)tensors.values;
    const Tensors<T, R> read = {tensors.queries, tensors.query_stride, keys, values, tensors.sinks, tensors.out};
    if (plan.head_dim == 64) attend_pieces<64>(plan, read);
    else attend_pieces<0>(plan, read);
}
