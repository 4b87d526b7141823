/* A thread pool that works on the chunks of one job at a time: the caller, and helpers that sleep between jobs.
 *
 * Threads take chunks themselves: a helper that is still asleep or has lost its core costs nothing, because the caller
 * goes on alone and waits only for chunks in progress. So a pool on a busy machine is hardly slower than one thread. A
 * waiting thread spins for some microseconds, then sleeps and frees its core. The pool is in this header, not in a
 * library of its own, so that several libraries can share one pool by its address.
 *
 * Borrowing threads are further helpers. They take chunks of long jobs while workers of this host let cores idle, which
 * all see in a table that they share. Between chunks they look whether their core is wanted again. One that loses its
 * core within a chunk is moved to the caller's, which sleeps meanwhile.
 */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

#include <atomic>

constexpr int32_t SPINS = 1500; /* about 20 µs where a pause takes 65 cycles */
constexpr int64_t CHUNKS_PER_THREAD = 4;
constexpr int64_t CHUNKS_WHEN_BORROWING = 32; /* per thread; short, so that a core is given back soon */
constexpr int64_t PATIENCE_NS = 100'000;      /* a borrowing thread that takes longer has probably lost its core */
constexpr int64_t AWAKE_NS = 500'000;         /* after a long job, a borrowing thread waits awake for the next one */
constexpr int32_t MOST_WORKERS = 64;          /* of a host */
constexpr int32_t MOST_BORROWERS = 256;

typedef void (*Job)(const void *argument, int64_t chunk);

/* A worker's row of the shared table. */
struct Worker {
    std::atomic<int64_t> computes_until; /* CLOCK_MONOTONIC, ns */
    std::atomic<int64_t> num_threads;
};

struct ThreadPool;

struct Helper {
    ThreadPool *pool;
    pthread_t thread;
    std::atomic<int32_t> id;      /* of the system; 0: not known yet */
    std::atomic<bool> is_working; /* a borrowing thread, on a chunk or about to take one */
};

struct ThreadPool {
    int32_t num_threads;
    int32_t num_borrowers; /* 0: the pool does not borrow */
    int32_t borrowed;      /* borrowing threads for the next jobs; written by the caller between jobs */
    const Worker *workers; /* MOST_WORKERS */
    cpu_set_t cores;       /* of the process */
    std::atomic<uint32_t> long_jobs; /* number of the last job for which threads were borrowed */
    std::atomic<uint32_t> jobs;   /* number of jobs begun so far */
    std::atomic<uint64_t> ticket; /* number of the job; in the lower half, its chunks that no thread has taken */
    std::atomic<uint32_t> undone; /* chunks of the job that are not done */
    Job job;                      /* a thread reads these three after it took a chunk; they do not change then */
    const void *argument;
    uint32_t chunks;
    bool stopping;
    Helper helpers[1]; /* num_threads - 1, then num_borrowers */
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

static inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

/* Returns how many threads the pool may borrow: its share of the cores that no worker computes on. */
static inline int32_t idle_cores(const ThreadPool *pool) {
    const int64_t now = now_ns();
    int64_t idle = CPU_COUNT(&pool->cores), computing = 0;
    for (int32_t each = 0; each < MOST_WORKERS; each++) {
        if (pool->workers[each].computes_until.load(std::memory_order_relaxed) <= now) continue;
        idle -= pool->workers[each].num_threads.load(std::memory_order_relaxed);
        computing++;
    }
    if (idle <= 0 || computing == 0) return 0;
    const int64_t share = idle / computing;
    return share < pool->num_borrowers ? (int32_t)share : pool->num_borrowers;
}

static inline Helper *borrower(ThreadPool *pool, int32_t number) { return &pool->helpers[pool->num_threads - 1 + number]; }

/* Waits for the chunks that borrowing threads have taken. */
static inline void wait_for_borrowers(ThreadPool *pool) {
    for (const int64_t since = now_ns(); now_ns() - since < PATIENCE_NS; pause_briefly())
        if (pool->undone.load(std::memory_order_acquire) == 0) return;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(sched_getcpu(), &own);
    int32_t moved[MOST_BORROWERS], count = 0;
    for (int32_t each = 0; each < pool->num_borrowers; each++)
        if (borrower(pool, each)->is_working.load(std::memory_order_acquire)) moved[count++] = borrower(pool, each)->id;
    for (int32_t each = 0; each < count; each++) sched_setaffinity(moved[each], sizeof own, &own);
    for (uint32_t undone; (undone = pool->undone.load(std::memory_order_acquire)) != 0;) pool->undone.wait(undone);
    for (int32_t each = 0; each < count; each++) sched_setaffinity(moved[each], sizeof own, &pool->cores);
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
    if (pool->borrowed > 0) {
        pool->long_jobs.store(number, std::memory_order_release);
        pool->long_jobs.notify_all();
    }
    while (take_chunk(pool)) {
    }
    if (pool->num_borrowers > 0) return wait_for_borrowers(pool);
    for (uint32_t undone; (undone = pool->undone.load(std::memory_order_acquire)) != 0;) wait_while(pool->undone, undone);
}

/* Calls work(from, to) until all of [0, count) is done, in parts of at least `grain`. One caller at a time. */
template <typename Work>
static inline void parallel_for(ThreadPool *pool, int64_t count, int64_t grain, const Work &work) {
    const int64_t threads = pool->num_threads + pool->borrowed;
    const int64_t most = threads * (pool->borrowed > 0 ? CHUNKS_WHEN_BORROWING : CHUNKS_PER_THREAD);
    const int64_t chunks = count / grain < most ? count / grain : most;
    if (threads == 1 || chunks <= 1) return work((int64_t)0, count);
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
