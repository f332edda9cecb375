#include "queue.h"

#include <algorithm>
#include <unordered_set>

#include "driver.h"

namespace {

bool ready(const Op &op) {
    return std::all_of(op.after.begin(), op.after.end(), [](const OpP &before) { return before->done; });
}

void collect_ancestors(const OpP &op, std::unordered_set<const Op *> &found) {
    std::vector<const Op *> todo{op.get()};
    while (!todo.empty()) {
        const Op *next = todo.back();
        todo.pop_back();
        if (!found.insert(next).second) continue;
        for (const OpP &before : next->after) todo.push_back(before.get());
    }
}

} // namespace

StreamP Worker::add_stream(Context *context, bool blocking) {
    auto stream = std::make_shared<Stream>();
    stream->context = context;
    stream->blocking = blocking;
    streams_.push_back(stream);
    return stream;
}

void Worker::destroy(const StreamP &stream) {
    // What is queued still runs, as on a real device, whose destroy does not wait.
    stream->destroyed = true;
    if (stream->queue.empty()) streams_.erase(std::find(streams_.begin(), streams_.end(), stream));
}

OpP Worker::push(const StreamP &stream, Op work, std::vector<OpP> after) {
    start();
    auto op = std::make_shared<Op>(std::move(work));
    op->context = stream->context;
    op->after = std::move(after);
    op->not_before = some_time();
    const auto order = [&](const Stream &other) {
        if (other.last && !other.last->done) op->after.push_back(other.last);
    };
    order(*stream);
    const StreamP &legacy = stream->context->legacy;
    if (stream == legacy) {
        for (const StreamP &other : streams_) {
            if (other != stream && other->blocking && other->context == stream->context) order(*other);
        }
    } else if (stream->blocking) {
        order(*legacy);
    }
    stream->last = op;
    stream->queue.push_back(op);
    if (op->frees) ++pending_frees_;
    if (mode_ == Mode::Eager) work_.notify_one();
    return op;
}

void Worker::ask(const OpP &op) {
    if (!op || op->done) return;
    asked_.push_back(op);
    work_.notify_one();
}

void Worker::finish(Lock &lock, const OpP &op) {
    // By value: the stream may get further work while the lock is free.
    const OpP goal = op;
    while (goal && !goal->done) {
        if (busy_) {
            done_.wait(lock);
            continue;
        }
        busy_ = true;
        run_through(lock, goal);
        release_device();
    }
}

void Worker::release_device() {
    for (const auto &context : driver().contexts) context->memory.close();
    busy_ = false;
    done_.notify_all();
    if (!asked_.empty() || mode_ == Mode::Eager) work_.notify_one();
}

void Worker::finish_all(Lock &lock, const Context *context) {
    std::vector<OpP> goals;
    for (const StreamP &stream : streams_) {
        if (!context || stream->context == context) goals.push_back(stream->last);
    }
    for (const OpP &goal : goals) finish(lock, goal);
}

void Worker::set_mode(Mode mode, unsigned seed) {
    mode_ = mode;
    random_.seed(seed);
}

size_t Worker::pending() const {
    size_t sum = 0;
    for (const StreamP &stream : streams_) sum += stream->queue.size();
    return sum;
}

size_t Worker::unfinished_use(Range range, const OpP &but) const {
    std::unordered_set<const Op *> before;
    if (but) collect_ancestors(but, before);
    size_t sum = 0;
    for (const StreamP &stream : streams_) {
        for (const OpP &op : stream->queue) {
            const auto touches = [&](Range used) { return used.overlaps(range); };
            if (!before.count(op.get()) && std::any_of(op->uses.begin(), op->uses.end(), touches)) ++sum;
        }
    }
    return sum;
}

bool Worker::capturing(const Context *context) const {
    return std::any_of(streams_.begin(), streams_.end(), [&](const StreamP &stream) {
        return stream->context == context && stream->blocking && stream->capturing;
    });
}

// Eager: half of the work waits a while, so that whoever does not wait for it overtakes it.
Clock::time_point Worker::some_time() {
    if (mode_ == Mode::Lazy || random() % 2) return {};
    return Clock::now() + std::chrono::microseconds(random() % 300);
}

void Worker::start() {
    if (started_) return;
    started_ = true;
    std::thread([this] { loop(); }).detach();
}

void Worker::loop() {
    Lock lock(driver().lock);
    for (;;) {
        auto wake = Clock::time_point::max();
        if (busy_) {
            work_.wait(lock);
            continue;
        }
        busy_ = true;
        bool ran = true;
        if (!asked_.empty()) {
            const OpP goal = asked_.front();
            asked_.pop_front();
            run_through(lock, goal);
        } else {
            ran = mode_ == Mode::Eager && run_any(lock, &wake);
        }
        release_device();
        if (ran) continue;
        if (wake != Clock::time_point::max()) {
            work_.wait_until(lock, wake);
        } else {
            work_.wait(lock);
        }
    }
}

void Worker::execute(Lock &lock, const OpP &op) {
    if (op->run && op->context->sticky == CUDA_SUCCESS) {
        const CUresult result = op->run(lock);
        if (result != CUDA_SUCCESS) op->context->sticky = result;
    }
    if (op->frees) --pending_frees_;
    op->done = true;
    op->run = nullptr;
    op->after.clear();
    for (size_t i = 0; i < streams_.size(); ++i) {
        Stream &stream = *streams_[i];
        if (stream.queue.empty() || stream.queue.front() != op) continue;
        stream.queue.pop_front();
        if (stream.destroyed && stream.queue.empty()) streams_.erase(streams_.begin() + long(i));
        break;
    }
}

void Worker::run_through(Lock &lock, const OpP &goal) {
    run_ready_frees(lock);
    std::vector<OpP> todo{goal};
    while (!todo.empty()) {
        const OpP op = todo.back();
        const auto before = std::find_if(op->after.begin(), op->after.end(), [](const OpP &o) { return !o->done; });
        if (before != op->after.end()) {
            todo.push_back(*before);
            continue;
        }
        todo.pop_back();
        if (op->done) continue;
        execute(lock, op);
        run_ready_frees(lock);
    }
}

void Worker::run_ready_frees(Lock &lock) {
    if (pending_frees_ == 0) return;
    std::vector<OpP> frees;
    for (const StreamP &stream : streams_) {
        if (stream->queue.empty()) continue;
        const OpP &first = stream->queue.front();
        if (first->frees && ready(*first)) frees.push_back(first);
    }
    for (const OpP &op : frees) execute(lock, op);
}

bool Worker::run_any(Lock &lock, Clock::time_point *wake) {
    const auto now = Clock::now();
    std::vector<OpP> candidates;
    for (const StreamP &stream : streams_) {
        if (stream->queue.empty() || !ready(*stream->queue.front())) continue;
        const OpP &first = stream->queue.front();
        if (first->not_before <= now) {
            candidates.push_back(first);
        } else {
            *wake = std::min(*wake, first->not_before);
        }
    }
    if (candidates.empty()) return false;
    execute(lock, candidates[random() % candidates.size()]);
    return true;
}
