/* Attention to the latents of DeepSeek's models (section 2.1.2 of arXiv 2405.04434): one KV head, whose key is a token's
 * latents and its rotated key, and whose value is the latents alone. The pool has the first half of a key in place of K, and
 * the second one in place of V. A row of a quantised pool is rounded to T when it is loaded: all heads use it.
 *
 * All heads of a token are rows of a tile (prefill.h), so K is read once for them. A tile of a prompt attends to its whole
 * context, and the one of an output token to a piece at a time, whose results are merged in order as in decode.h.
 */
#pragma once

#include "attend.h"

/* Writes the piece's partial output, not normalized: per head its highest score, total and sums. */
template <typename T, typename S>
static void attend_latent_piece(const Plan &plan, const Tensors<T, S> &tensors, const Piece &piece, float *partial) {
    Workspace<MAX_POOLED> space;
    const Tile token = {piece.row, 1, piece.end - 1, piece.table};
    const auto work = make_work<true>(plan, tensors, token, 0, space, plan.heads > TILE_ROWS); /* fewer are not faster by tiles */
    attend_context(work, piece.first, piece.end);
    store_rows(work, [&](int64_t head, const float *sums, int64_t step) {
        float *to = partial + head * (plan.head_dim + 2);
        to[0] = ((const float *)space.highest)[head];
        to[1] = ((const float *)space.totals)[head];
        for (int64_t d = 0; d < plan.head_dim; d++) to[2 + d] = sums[d * step];
    });
}

template <typename T, typename S> static void attend_latents(const Plan &plan, const Tensors<T, S> &tensors) {
    const int64_t step = plan.heads * (plan.head_dim + 2);
    if (plan.num_tiles > 0) attend_tiles<true>(plan, tensors);
    parallel_for(plan.thread_pool, plan.num_pieces, 1, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++) attend_latent_piece(plan, tensors, plan.pieces[n], plan.partials + n * step);
    });
    parallel_for(plan.thread_pool, plan.num_singles, SINGLES_AT_ONCE, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++) merge_pieces<MAX_POOLED>(plan, tensors, plan.singles[n]);
    });
}
