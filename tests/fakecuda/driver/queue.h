// Streams as queues of work, events, and the worker that is the device.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "cuda.h"
#include "memory.h"

using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

struct Op;
struct Stream;
using OpP = std::shared_ptr<Op>;
using StreamP = std::shared_ptr<Stream>;

// A piece of queued work.
struct Op {
    // Called with the lock held; lets go of it while bytes move. Empty: only a point in the order.
    std::function<CUresult(Lock &)> run;
    // Memory that the work is known to touch.
    std::vector<Range> uses;
    // Gives memory back: runs as soon as what it is ordered after has run, so that work which it is not ordered after
    // finds the memory gone.
    bool frees = false;

    Context *context = nullptr;
    std::vector<OpP> after;
    Clock::time_point not_before;
    bool done = false;
};

struct Stream {
    Context *context;
    // Ordered against the context's legacy default stream.
    bool blocking;
    bool capturing = false;
    bool destroyed = false;
    std::deque<OpP> queue;
    OpP last;
};

struct Event {
    Context *context;
    OpP recorded;
};
using EventP = std::shared_ptr<Event>;

enum class Mode {
    // Work runs when a synchronize or a poll asks for it, and only what that is ordered after: what nobody waited for
    // has not happened.
    Lazy,
    // Work runs on its own, streams in random order, often late: buffers that are used again too early change under it.
    Eager,
};

class Worker {
  public:
    StreamP add_stream(Context *context, bool blocking);
    void destroy(const StreamP &stream);
    OpP push(const StreamP &stream, Op work, std::vector<OpP> after = {});

    // Runs the work and what it is ordered after. The waiting thread lends itself to the device if that is idle:
    // two switches of threads for every small copy would take longer than the copy.
    void finish(Lock &lock, const OpP &op);
    void finish(Lock &lock, const Stream &stream) { finish(lock, stream.last); }
    void finish_all(Lock &lock, const Context *context = nullptr);
    // Has it run some time, without waiting.
    void ask(const OpP &op);

    void set_mode(Mode mode, unsigned seed);
    size_t pending() const;
    // Queued work that touches the range; `but`: work that is ordered before this does not count.
    size_t unfinished_use(Range range, const OpP &but = nullptr) const;
    bool capturing(const Context *context) const;

    unsigned random() { return unsigned(random_()); }

  private:
    void start();
    void loop();
    void execute(Lock &lock, const OpP &op);
    void run_through(Lock &lock, const OpP &goal);
    void release_device();
    void run_ready_frees(Lock &lock);
    bool run_any(Lock &lock, Clock::time_point *wake);
    Clock::time_point some_time();

    Mode mode_ = Mode::Lazy;
    std::mt19937 random_;
    bool started_ = false;
    // A thread runs work; never two at a time.
    bool busy_ = false;
    std::condition_variable work_, done_;
    std::deque<OpP> asked_;
    std::vector<StreamP> streams_;
    size_t pending_frees_ = 0;
};
