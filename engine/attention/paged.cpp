/* Attention of a step over the paged KV pool: single tokens (decode.h) and tiles of prompts (prefill.h), shared out among
 * a crew's threads.
 *
 * Compiled on first use by engine/attention/native.py, which is also who fills the plan.
 */
#include "../native/crew_life.h"
#include "decode.h"
#include "prefill.h"

template <typename T> static void attend_tiles(const Plan &plan, const Tensors<T> &tensors) {
    share(plan.crew, plan.num_tiles * plan.kv_heads, 1, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++) /* a KV head's tiles in a row: its K and V stay near */
            attend_tile(plan, tensors, plan.tiles[n % plan.num_tiles], n / plan.num_tiles);
    });
}

template <typename T, int64_t DIM> static void attend_pieces(const Plan &plan, const Tensors<T> &tensors) {
    const int64_t step = plan.heads * (plan.head_dim + 2);
    share(plan.crew, plan.num_pieces, 1, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++) {
            const Piece *following = n + 1 < to ? plan.pieces + n + 1 : nullptr;
            attend_piece<T, DIM>(plan, tensors, plan.pieces[n], following, plan.partials + n * step);
        }
    });
    share(plan.crew, plan.num_singles, SINGLES_AT_ONCE, [&](int64_t from, int64_t to) {
        for (int64_t n = from; n < to; n++) merge_pieces(plan, tensors, plan.singles[n]);
    });
}

template <typename T> static void attend(const Plan &plan, const Tensors<T> &tensors) {
    if (plan.num_tiles > 0) attend_tiles(plan, tensors);
    if (plan.num_singles == 0) return;
    if (plan.head_dim == 64) attend_pieces<T, 64>(plan, tensors);
    else attend_pieces<T, 0>(plan, tensors);
}

extern "C" void attend_float32(const float *queries, int64_t query_stride, const float *keys, const float *values,
                               float *out, const Plan *plan) {
    attend<float>(*plan, {queries, query_stride, keys, values, out});
}

extern "C" void attend_bfloat16(const Bfloat16 *queries, int64_t query_stride, const Bfloat16 *keys,
                                const Bfloat16 *values, Bfloat16 *out, const Plan *plan) {
    attend<Bfloat16>(*plan, {queries, query_stride, keys, values, out});
}
