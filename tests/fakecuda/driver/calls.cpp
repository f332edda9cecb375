#include "calls.h"

#include "driver.h"

CUresult Calls::due(Failure &failure) {
    if (failure.left == 0 || --failure.left != 0) return CUDA_SUCCESS;
    ++injected_;
    return failure.code;
}

CUresult Calls::arrive(const char *name, bool counts) {
    ++counters_[name];
    ++counters_["calls"];
    if (const auto found = by_name_.find(name); found != by_name_.end()) {
        if (const CUresult code = due(found->second)) return code;
    }
    return counts ? due(any_) : CUDA_SUCCESS;
}

uint64_t Calls::count(const std::string &name) const {
    const auto found = counters_.find(name);
    return found == counters_.end() ? 0 : found->second;
}

void Calls::reset() {
    counters_.clear();
    by_name_.clear();
    any_ = {};
    injected_ = 0;
}

void Calls::fail(const std::string &name, unsigned nth, CUresult code) {
    by_name_[name] = {nth, code};
    injected_ = 0;
}

void Calls::fail_at(unsigned nth, CUresult code) {
    any_ = {nth, code};
    injected_ = 0;
}

Call::Call(const char *name, Needs needs) : lock(driver().lock) {
    Driver &driver = ::driver();
    if (driver.settings.trace) report("%s", name);
    refused_ = driver.calls.arrive(name, needs != Needs::Nothing);
    if (refused_ || needs == Needs::Nothing) return;
    if (!driver.initialised) {
        refused_ = CUDA_ERROR_NOT_INITIALIZED;
    } else if (needs == Needs::Context) {
        const Context *context = current_context;
        refused_ = context && context->retained ? context->sticky : CUDA_ERROR_INVALID_CONTEXT;
    }
}

Context &current() { return *current_context; }
