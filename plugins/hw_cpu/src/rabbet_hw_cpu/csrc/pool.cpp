#include "pool.h"

#include <pthread.h>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace rabbet {
namespace {

// About 50 microseconds: longer than the gap between two kernels of a step, shorter than anybody notices.
constexpr int kSpins = 4000;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

struct Job {
    Task task = nullptr;
    void* data = nullptr;
    int64_t count = 0;
};

struct Pool {
    std::vector<std::thread> threads;
    Job job;
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<int> busy{0};
    std::atomic<bool> stop{false};

    ~Pool() {
        stop.store(true);
        epoch.fetch_add(1);
        epoch.notify_all();
        for (auto& thread : threads) thread.join();
    }

    void work(int thread) {
        const Job now = job;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < now.count;) now.task(now.data, i, thread);
    }

    void loop(int thread) {
        uint32_t seen = 0;
        for (;;) {
            for (int spin = 0; epoch.load(std::memory_order_acquire) == seen && spin < kSpins; ++spin) relax();
            if (epoch.load(std::memory_order_acquire) == seen) epoch.wait(seen, std::memory_order_acquire);
            seen = epoch.load(std::memory_order_acquire);
            if (stop.load()) return;
            work(thread);
            busy.fetch_sub(1, std::memory_order_release);
        }
    }
};

std::unique_ptr<Pool> pool;
// Kernels are called from one thread at a time; a second caller (a test, a second engine) waits its turn.
std::mutex gate;

void bind(pthread_t thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(thread, sizeof(set), &set);
}

}  // namespace

void pool_start(int num_threads, const int* cores) {
    std::lock_guard<std::mutex> lock(gate);
    if (pool && static_cast<int>(pool->threads.size()) == num_threads - 1) return;
    pool.reset();
    pool = std::make_unique<Pool>();
    for (int i = 1; i < num_threads; ++i) {
        pool->threads.emplace_back([i, p = pool.get()] { p->loop(i); });
        if (cores != nullptr) bind(pool->threads.back().native_handle(), cores[i]);
    }
}

int pool_size() { return pool ? static_cast<int>(pool->threads.size()) + 1 : 1; }

void pool_run(Task task, void* data, int64_t count) {
    if (!pool || pool->threads.empty() || count == 1) {
        for (int64_t i = 0; i < count; ++i) task(data, i, 0);
        return;
    }
    std::lock_guard<std::mutex> lock(gate);
    Pool& p = *pool;
    p.job = Job{task, data, count};
    p.next.store(0, std::memory_order_relaxed);
    p.busy.store(static_cast<int>(p.threads.size()), std::memory_order_relaxed);
    p.epoch.fetch_add(1, std::memory_order_release);
    p.epoch.notify_all();
    p.work(0);
    // A helper that lost its core to another process gets this one, rather than being waited for in a loop.
    for (int spin = 0; p.busy.load(std::memory_order_acquire) != 0; ++spin) {
        if (spin < kSpins) relax();
        else std::this_thread::yield();
    }
}

}  // namespace rabbet
