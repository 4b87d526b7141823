/* A thread pool that works on the chunks of one job at a time: the caller, and helpers that sleep between jobs.
 *
 * Threads take chunks themselves: a helper that is still asleep or has lost its core costs nothing, because the caller
 * goes on alone and waits only for chunks in progress. So a pool on a busy machine is hardly slower than one thread. A
 * waiting thread spins for some microseconds, then sleeps and frees its core. The pool is in this header, not in a
 * library of its own, so that several libraries can share one pool by its address.
 */
#pragma once

#include <pthread.h>
#include <stdint.h>

#include <atomic>

constexpr int32_t SPINS = 1500; /* about 20 µs where a pause takes 65 cycles */
constexpr int64_t CHUNKS_PER_THREAD = 4;

typedef void (*Job)(const void *argument, int64_t chunk);

struct ThreadPool {
    int32_t num_threads;
    std::atomic<uint32_t> jobs;   /* number of jobs begun so far */
    std::atomic<uint64_t> ticket; /* number of the job; in the lower half, its chunks that no thread has taken */
    std::atomic<uint32_t> undone; /* chunks of the job that are not done */
    Job job;                      /* a thread reads these three after it took a chunk; they do not change then */
    const void *argument;
    uint32_t chunks;
    bool stopping;
    pthread_t threads[1]; /* num_threads - 1 */
};

static inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static inline void wait_while(const std::atomic<uint32_t> &value, uint32_t old) {
    for (int32_t spin = 0; spin < SPINS; spin++) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause_briefly();
    }
    value.wait(old, std::memory_order_acquire);
}

/* Takes and does one chunk. Returns false if no chunk is left to take. */
static inline bool take_chunk(ThreadPool *pool) {
    uint64_t ticket = pool->ticket.load(std::memory_order_relaxed);
    do {
        if ((uint32_t)ticket == 0) return false;
    } while (!pool->ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel));
    pool->job(pool->argument, pool->chunks - (uint32_t)ticket);
    if (pool->undone.fetch_sub(1, std::memory_order_acq_rel) == 1) pool->undone.notify_all();
    return true;
}

static inline void run_job(ThreadPool *pool, uint32_t chunks, Job job, const void *argument) {
    pool->job = job;
    pool->argument = argument;
    pool->chunks = chunks;
    pool->undone.store(chunks, std::memory_order_relaxed);
    const uint32_t number = pool->jobs.load(std::memory_order_relaxed) + 1;
    pool->ticket.store((uint64_t)number << 32 | chunks, std::memory_order_release);
    pool->jobs.store(number, std::memory_order_release);
    pool->jobs.notify_all();
    while (take_chunk(pool)) {
    }
    for (uint32_t undone; (undone = pool->undone.load(std::memory_order_acquire)) != 0;) wait_while(pool->undone, undone);
}

/* Calls work(from, to) until all of [0, count) is done, in parts of at least `grain`. One caller at a time. */
template <typename Work>
static inline void parallel_for(ThreadPool *pool, int64_t count, int64_t grain, const Work &work) {
    const int64_t most = pool->num_threads * CHUNKS_PER_THREAD, chunks = count / grain < most ? count / grain : most;
    if (pool->num_threads == 1 || chunks <= 1) return work((int64_t)0, count);
    struct Shared {
        const Work *work;
        int64_t count, chunks;
    } shared = {&work, count, chunks};
    const Job job = [](const void *argument, int64_t chunk) {
        const Shared *own = (const Shared *)argument;
        (*own->work)(own->count * chunk / own->chunks, own->count * (chunk + 1) / own->chunks);
    };
    run_job(pool, (uint32_t)chunks, job, &shared);
}
