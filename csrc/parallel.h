// Threads: those that torch already has. A second pool beside it would spin against it for the same cores.
//
// The caller hands over the address of GOMP_parallel of the OpenMP runtime that torch has loaded (libgomp, or libomp
// and libiomp5, which have it too). Without one, threads are started for each call. The runtime may give fewer threads
// than were asked for: work is handed out by tickets, so that any number of threads does all of it.
#pragma once
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace fastff {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
inline std::atomic<GompParallel> gomp_parallel{nullptr};

// f() on several threads at once, if it is `useful` to more than one. One thread never touches OpenMP, which does not
// survive a fork. OpenMP is always asked for all `threads`: libgomp ends those that a smaller team leaves out, and has
// to start them again for the next.
template <class F>
void parallel(int useful, int threads, F&& f) {
    if (useful <= 1) return f();
    auto call = [](void* g) { (*static_cast<std::remove_reference_t<F>*>(g))(); };
    if (GompParallel run = gomp_parallel.load(std::memory_order_relaxed)) return run(call, &f, unsigned(threads), 0);
    std::vector<std::thread> team;
    try {
        for (int i = 1; i < useful; i++) team.emplace_back(call, &f);
    } catch (const std::system_error&) {
        // No more threads to be had: those that are there do all of it.
    }
    f();
    for (auto& thread : team) thread.join();
}

// The numbers 0, 1, ..., end - 1, each to one taker. A taker starts in a share of its own, so that it gets neighbours
// and, from one call to the next, mostly the same ones: they are still in its cache. When its share is empty, it goes
// on with another's.
class Tickets {
   public:
    Tickets(int64_t end, int takers) : end_(end), shares_(takers < MOST ? takers : MOST) {}

    class Taker {
       public:
        explicit Taker(Tickets& tickets) : tickets_(tickets), home_(tickets.takers_++ % tickets.shares_) {}
        bool take(int64_t& ticket) {
            for (; visited_ < tickets_.shares_; visited_++) {
                int share = (home_ + visited_) % tickets_.shares_;
                ticket = tickets_.first(share) + tickets_.taken_[share].count.fetch_add(1, std::memory_order_relaxed);
                if (ticket < tickets_.first(share + 1)) return true;
            }
            return false;
        }

       private:
        Tickets& tickets_;
        int home_, visited_ = 0;
    };

   private:
    static constexpr int MOST = 16;
    int64_t first(int share) const { return end_ * share / shares_; }
    const int64_t end_;
    const int shares_;
    std::atomic<int> takers_{0};
    struct alignas(64) {
        std::atomic<int64_t> count{0};
    } taken_[MOST];
};

}  // namespace fastff
