#include "pool.h"

#include <pthread.h>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace rabbet {
namespace {

// Longer than the gap between two kernels of a step, shorter than anybody notices.
constexpr auto kSpinTime = std::chrono::microseconds(60);

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// Spins while the condition holds, for kSpinTime at most.
template <typename F>
void spin_while(F&& condition) {
    const auto start = std::chrono::steady_clock::now();
    while (condition()) {
        for (int i = 0; i < 32 && condition(); ++i) relax();
        if (std::chrono::steady_clock::now() - start > kSpinTime) return;
    }
}

struct Pool {
    std::vector<std::thread> threads;
    // The job. Written by the caller only while no task is left, read by whoever holds a ticket of its epoch.
    std::atomic<Task> task{nullptr};
    std::atomic<void*> data{nullptr};
    std::atomic<int64_t> count{0};
    // High half: number of the job; low half: tasks that nobody has taken. A thread that wakes late finds none, so the
    // caller waits for tasks that are being worked on, and never for a thread that has no core.
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> done{0};
    alignas(64) std::atomic<uint32_t> epoch{0};
    std::atomic<bool> stop{false};

    ~Pool() {
        stop.store(true);
        epoch.fetch_add(1);
        epoch.notify_all();
        for (auto& thread : threads) thread.join();
    }

    void work(int thread) {
        for (uint64_t seen = ticket.load(std::memory_order_acquire); (seen & 0xFFFFFFFF) != 0;) {
            const Task now = task.load(std::memory_order_relaxed);
            void* const argument = data.load(std::memory_order_relaxed);
            const int64_t index = count.load(std::memory_order_relaxed) - static_cast<int64_t>(seen & 0xFFFFFFFF);
            // Success means that the ticket is unchanged since it was read, and so the job read in between is its own.
            if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            now(argument, index, thread);
            done.fetch_add(1, std::memory_order_release);
            seen = ticket.load(std::memory_order_acquire);
        }
    }

    void loop(int thread) {
        uint32_t seen = 0;
        for (;;) {
            spin_while([&] { return epoch.load(std::memory_order_acquire) == seen; });
            epoch.wait(seen, std::memory_order_acquire);
            seen = epoch.load(std::memory_order_acquire);
            if (stop.load()) return;
            work(thread);
        }
    }
};

Pool* pool = nullptr;
// Kernels are called from one thread at a time; a second caller (a test, a second engine) waits its turn.
std::mutex gate;

void bind(pthread_t thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(thread, sizeof(set), &set);
}

// A forked child has none of the threads: it computes alone, and the parent's pool is left behind untouched.
void forget_after_fork() {
    pool = nullptr;
    new (&gate) std::mutex;
}

struct Exit {
    ~Exit() { delete pool; }
} at_exit;

}  // namespace

void pool_start(int num_threads, const int* cores) {
    std::lock_guard<std::mutex> lock(gate);
    static const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);
    static_cast<void>(registered);
    if (pool && static_cast<int>(pool->threads.size()) == num_threads - 1) return;
    delete pool;
    pool = new Pool;
    for (int i = 1; i < num_threads; ++i) {
        pool->threads.emplace_back([i, p = pool] { p->loop(i); });
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
    const uint32_t number = p.epoch.load(std::memory_order_relaxed) + 1;
    p.task.store(task, std::memory_order_relaxed);
    p.data.store(data, std::memory_order_relaxed);
    p.count.store(count, std::memory_order_relaxed);
    p.done.store(0, std::memory_order_relaxed);
    p.ticket.store(static_cast<uint64_t>(number) << 32 | static_cast<uint64_t>(count), std::memory_order_release);
    p.epoch.store(number, std::memory_order_release);
    p.epoch.notify_all();
    p.work(0);
    // A thread that lost its core in the middle of a task gets this one, rather than being waited for in a loop.
    while (p.done.load(std::memory_order_acquire) != count) {
        spin_while([&] { return p.done.load(std::memory_order_acquire) != count; });
        if (p.done.load(std::memory_order_acquire) != count) std::this_thread::yield();
    }
}

}  // namespace rabbet
