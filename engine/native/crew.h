/* Threads that work on one job together: the caller and `members - 1` others, which sleep between jobs.
 *
 * Whoever waits spins for some microseconds, since the next job or the others' part is mostly that near, and then
 * sleeps: a worker that has nothing to do leaves its core to others. All in this header, without a library of its own,
 * so that several libraries can share one crew by its address.
 */
#pragma once

#include <pthread.h>
#include <stdint.h>

#include <atomic>

constexpr int32_t SPINS = 1500; /* about 20 µs where a pause takes 65 cycles */

typedef void (*Job)(void *argument, int32_t member, int32_t members);

struct Crew {
    int32_t members;
    std::atomic<uint32_t> started, arrived, passed; /* jobs; members at the barrier; barriers passed */
    Job job;
    void *argument;
    bool leaving;
    pthread_t threads[1]; /* members - 1 */
};

struct Recruit {
    Crew *crew;
    int32_t member;
};

static inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static inline void wait_for_change(const std::atomic<uint32_t> &value, uint32_t old) {
    for (int32_t spin = 0; spin < SPINS; spin++) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause_briefly();
    }
    value.wait(old, std::memory_order_acquire);
}

/* Every member of a job calls it equally often; what they wrote before is seen by all behind it. */
static inline void meet(Crew *crew) {
    if (crew->members == 1) return;
    const uint32_t passed = crew->passed.load(std::memory_order_relaxed);
    if (crew->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t)crew->members) {
        crew->arrived.store(0, std::memory_order_relaxed);
        crew->passed.store(passed + 1, std::memory_order_release);
        crew->passed.notify_all();
    } else {
        wait_for_change(crew->passed, passed);
    }
}

/* Runs `job` in all members and returns when all are done. One caller at a time. */
static inline void work_together(Crew *crew, Job job, void *argument) {
    if (crew->members > 1) {
        crew->job = job;
        crew->argument = argument;
        crew->started.fetch_add(1, std::memory_order_release);
        crew->started.notify_all();
    }
    job(argument, 0, crew->members);
    meet(crew);
}
