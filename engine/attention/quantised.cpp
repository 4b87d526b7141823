/* Attention over a quantised pool (attend.h), for queries of type QUERIES over rows of POOL: flags say which, so that nobody
 * waits for the compiler to make what he does not have. */
#include "attend.h"

#if !defined(QUERIES) /* for who only reads this file */
#define QUERIES Bfloat16
#define POOL Int8
#endif

extern "C" void attend(const QUERIES *queries, int64_t query_stride, const POOL *keys, const POOL *values, QUERIES *out,
                       const Plan *plan) {
    attend<QUERIES, POOL>(*plan, {queries, query_stride, keys, values, out});
}
