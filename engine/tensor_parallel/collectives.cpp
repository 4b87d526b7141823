/* Sums and gathers over the ranks of a worker, which are processes on one host, through memory that all of them map.
 *
 * A rank writes its part to its own slot and announces its arrival. When all have arrived, each rank reads all slots in
 * the order of ranks, so that a sum has the same bits at every rank every time. Rounds alternate between two sets of
 * slots: a rank that arrives at a round has read all slots of the round before, so no rank overwrites a slot that is
 * being read. A waiting rank spins for some microseconds, then sleeps, and checks now and then whether another rank has
 * died: its end of a socket is closed then.
 */
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../kernels/native/thread_pool.h"
#include "../kernels/native/simd.h"

constexpr int32_t MAX_RANKS = 16;
constexpr int64_t SLEEP_NS = 10'000'000;

enum Outcome : int32_t { OK = 0, PEER_DIED = 1, TIMED_OUT = 2 };

struct alignas(64) Arrival {
    std::atomic<uint32_t> rounds;
    std::atomic<uint32_t> sleepers; /* number of ranks that may sleep until `rounds` changes */
};

/* One rank's view. `memory`: an arrival for each rank, then slots [2][ranks][slot_bytes]; zeros at the start. */
struct Ranks {
    void *memory;
    int64_t slot_bytes, timeout_ns;
    int32_t rank, size;
    uint32_t rounds;            /* completed rounds of this rank */
    int32_t num_sockets;
    int32_t sockets[MAX_RANKS]; /* other ranks hold the other ends open as long as they live */
};

static Arrival *arrival(const Ranks *ranks, int32_t rank) { return (Arrival *)ranks->memory + rank; }

static char *slot(const Ranks *ranks, int32_t rank) {
    const int64_t place = (ranks->rounds & 1) * ranks->size + rank;
    return (char *)ranks->memory + ranks->size * sizeof(Arrival) + place * ranks->slot_bytes;
}

static long futex(std::atomic<uint32_t> *word, int operation, uint32_t value, const timespec *timeout) {
    return syscall(SYS_futex, (uint32_t *)word, operation, value, timeout, nullptr, 0); /* shared between processes */
}

static bool peer_died(const Ranks *ranks) {
    pollfd waiting[MAX_RANKS];
    for (int32_t n = 0; n < ranks->num_sockets; n++) waiting[n] = {ranks->sockets[n], POLLRDHUP, 0};
    return poll(waiting, ranks->num_sockets, 0) > 0;
}

/* Waits until `other` has arrived at the present round. */
static Outcome wait_for(const Ranks *ranks, Arrival *other) {
    const auto has_arrived = [&](uint32_t rounds) { return (int32_t)(rounds - ranks->rounds) > 0; };
    for (int32_t spin = 0; spin < SPINS; spin++) {
        if (has_arrived(other->rounds.load(std::memory_order_acquire))) return OK;
        pause_briefly();
    }
    const int64_t end = now_ns() + ranks->timeout_ns;
    Outcome outcome = TIMED_OUT;
    other->sleepers.fetch_add(1);
    for (;;) {
        const uint32_t rounds = other->rounds.load();
        if (has_arrived(rounds)) { outcome = OK; break; }
        if (peer_died(ranks)) { outcome = PEER_DIED; break; }
        if (now_ns() > end) break;
        const timespec sleep_time = {0, SLEEP_NS};
        futex(&other->rounds, FUTEX_WAIT, rounds, &sleep_time);
    }
    other->sleepers.fetch_sub(1);
    return outcome;
}

/* Writes this rank's part, and waits until the parts of all ranks are present. */
static Outcome exchange(Ranks *ranks, const void *part, int64_t nbytes) {
    memcpy(slot(ranks, ranks->rank), part, nbytes);
    Arrival *own = arrival(ranks, ranks->rank);
    own->rounds.store(ranks->rounds + 1);
    if (own->sleepers.load() > 0) futex(&own->rounds, FUTEX_WAKE, INT32_MAX, nullptr);
    for (int32_t rank = 0; rank < ranks->size; rank++)
        if (rank != ranks->rank)
            if (const Outcome outcome = wait_for(ranks, arrival(ranks, rank)); outcome != OK) return outcome;
    return OK;
}

/* Computes hidden[i] += Σ over ranks of part[i], in float32, rounded once. */
template <typename T> static int32_t add(Ranks *ranks, T *hidden, const T *part, int64_t count) {
    const int64_t at_once = ranks->slot_bytes / (int64_t)sizeof(T);
    for (int64_t first = 0; first < count; first += at_once) {
        const int64_t some = least(at_once, count - first);
        if (const Outcome outcome = exchange(ranks, part + first, some * sizeof(T)); outcome != OK) return outcome;
        const T *parts[MAX_RANKS];
        for (int32_t rank = 0; rank < ranks->size; rank++) parts[rank] = (const T *)slot(ranks, rank);
        for (int64_t i = 0; i < some; i += LANES) {
            Floats total = load_some(parts[0] + i, some - i);
            for (int32_t rank = 1; rank < ranks->size; rank++) total = total + load_some(parts[rank] + i, some - i);
            T *to = hidden + first + i;
            store_some(to, load_some(to, some - i) + total, some - i);
        }
        ranks->rounds++;
    }
    return OK;
}

extern "C" int32_t ranks_add_float32(Ranks *ranks, float *hidden, const float *part, int64_t count) {
    return add(ranks, hidden, part, count);
}

extern "C" int32_t ranks_add_bfloat16(Ranks *ranks, Bfloat16 *hidden, const Bfloat16 *part, int64_t count) {
    return add(ranks, hidden, part, count);
}

/* Writes all parts, `nbytes` each, to `out` at rank 0; other ranks pass null. */
extern "C" int32_t ranks_gather(Ranks *ranks, const char *part, int64_t nbytes, char *out) {
    for (int64_t first = 0; first < nbytes; first += ranks->slot_bytes) {
        const int64_t some = least(ranks->slot_bytes, nbytes - first);
        if (const Outcome outcome = exchange(ranks, part + first, some); outcome != OK) return outcome;
        for (int32_t rank = 0; out != nullptr && rank < ranks->size; rank++)
            memcpy(out + rank * nbytes + first, slot(ranks, rank), some);
        ranks->rounds++;
    }
    return OK;
}

extern "C" int64_t ranks_memory_bytes(int32_t size, int64_t slot_bytes) {
    return size * (int64_t)sizeof(Arrival) + 2 * size * slot_bytes;
}
