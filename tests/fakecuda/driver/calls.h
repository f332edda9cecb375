// What every call of the driver has in common: the lock, counters, failures on request, the current context.
#pragma once
#include <map>
#include <mutex>
#include <string>

#include "cuda.h"

// Counters, and failures that a test asked for.
class Calls {
  public:
    // A call arrives. Not CUDA_SUCCESS: it has to fail with this. `counts`: for `fail_at`.
    CUresult arrive(const char *name, bool counts);
    void add(const std::string &name, uint64_t n) { counters_[name] += n; }
    uint64_t count(const std::string &name) const;
    // Counters and failures that have not come to pass.
    void reset();

    void fail(const std::string &name, unsigned nth, CUresult code);
    void fail_at(unsigned nth, CUresult code);
    // Failures that came to pass since they were asked for.
    unsigned injected() const { return injected_; }

  private:
    struct Failure {
        unsigned left;
        CUresult code;
    };
    CUresult due(Failure &failure);

    std::map<std::string, uint64_t> counters_;
    std::map<std::string, Failure> by_name_;
    Failure any_{};
    unsigned injected_ = 0;
};

enum class Needs {
    // Nothing: it must be possible at any time, as giving things back is. Not failed by `fail_at`.
    Nothing,
    // That cuInit was called.
    Init,
    // A current context without a fault.
    Context,
};

// Takes the lock, counts the call and looks whether it may go on.
class Call {
  public:
    Call(const char *name, Needs needs);
    CUresult refused() const { return refused_; }
    std::unique_lock<std::mutex> lock;

  private:
    CUresult refused_;
};

template <class Body> CUresult at_any_time(const char *name, Body body) {
    Call call(name, Needs::Nothing);
    return call.refused() ? call.refused() : body(call.lock);
}

template <class Body> CUresult initialised(const char *name, Body body) {
    Call call(name, Needs::Init);
    return call.refused() ? call.refused() : body(call.lock);
}

// The current context of the calling thread.
Context &current();

template <class Body> CUresult in_context(const char *name, Body body) {
    Call call(name, Needs::Context);
    return call.refused() ? call.refused() : body(call.lock, current());
}
