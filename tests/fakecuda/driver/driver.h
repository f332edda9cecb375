// The state of the emulated driver, one for the process.
#pragma once
#include <cstdarg>

#include "calls.h"
#include "cuda.h"
#include "memory.h"
#include "module.h"
#include "queue.h"

// A device with its primary context, the only kind there is here.
struct Context {
    int ordinal = 0;
    unsigned retained = 0;
    // What a fault of the device leaves behind; every later call in the context returns it.
    CUresult sticky = CUDA_SUCCESS;
    Arena memory;
    StreamP legacy;
    std::map<std::thread::id, StreamP> per_thread;
};

struct Settings {
    int devices = 2;
    int driver_version = 12080;
    int compute_capability = 90;
    bool memory_pools = true;
    bool trace = false;
};

// Live things by handle. Handles start where nothing is mapped, so that a program which looks into one dies.
template <class Handle, class T> class Table {
  public:
    Handle add(T thing) {
        next_ += 16;
        things_[next_] = std::move(thing);
        return reinterpret_cast<Handle>(next_);
    }
    T find(Handle handle) const {
        const auto found = things_.find(uintptr_t(handle));
        return found == things_.end() ? T() : found->second;
    }
    bool remove(Handle handle) { return things_.erase(uintptr_t(handle)) == 1; }
    size_t size() const { return things_.size(); }

  private:
    uintptr_t next_ = 0x100;
    std::map<uintptr_t, T> things_;
};

struct Driver {
    std::mutex lock;
    Settings settings;
    bool initialised = false;
    std::vector<std::unique_ptr<Context>> contexts;
    Pinned pinned;
    Worker worker;
    Calls calls;
    Kernels kernels;
    Table<CUstream, StreamP> streams;
    Table<CUevent, EventP> events;
    Table<CUmodule, ModuleP> modules;
    Table<CUfunction, FunctionP> functions;

    Context *context_of(uintptr_t address) const;
};

// Never destroyed: its worker still waits in it while the process exits.
Driver &driver();

extern thread_local Context *current_context;

// Says on standard error what the program did wrong.
__attribute__((format(printf, 1, 2))) void report(const char *format, ...);
