// A small persistent thread pool. Idle threads spin briefly and then sleep, so that an idle server costs nothing.
#pragma once
#include <atomic>
#include <cstdint>

namespace rabbet {

// Starts num_threads - 1 threads, bound to cores[1..]; the caller is thread 0. Restarting with other numbers is fine.
void pool_start(int num_threads, const int* cores);
int pool_size();

using Task = void (*)(void* data, int64_t index, int thread);

// Calls task(data, i, thread) for i in 0 .. count - 1, each once, handed out one by one.
void pool_run(Task task, void* data, int64_t count);

template <typename F>
void parallel_for(int64_t count, F&& body) {
    if (count <= 0) return;
    pool_run([](void* data, int64_t index, int thread) { (*static_cast<F*>(data))(index, thread); }, &body, count);
}

}  // namespace rabbet
