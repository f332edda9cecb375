// Memory of a device, and host memory that is pinned.
#pragma once
#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "cuda.h"

// Bytes from an address on.
struct Range {
    uintptr_t start = 0;
    size_t bytes = 0;

    bool contains(Range other) const {
        return other.start >= start && other.start - start <= bytes && other.bytes <= bytes - (other.start - start);
    }
    bool overlaps(Range other) const {
        return start < other.start + other.bytes && other.start < start + bytes;
    }
    // What both have; they overlap.
    Range within(Range other) const {
        const uintptr_t from = std::max(start, other.start);
        return {from, std::min(start + bytes, other.start + other.bytes) - from};
    }
};

// The memory of one device. One sparse file seen twice: where the device sees it, at the addresses that programs hold,
// nothing is readable except while a kernel runs; where the driver sees it, copies go through.
// Addresses are never given twice, with a gap behind each allocation.
class Arena {
  public:
    Arena();

    // A fresh allocation, poisoned. `ready`: the device may use it at once; otherwise from `make_ready` on.
    CUresult allocate(size_t bytes, bool ready, CUdeviceptr *ptr);
    void make_ready(CUdeviceptr ptr);
    // The program has given the allocation back: it no longer counts, but the device may still have to do with it.
    void retire(CUdeviceptr ptr);
    // The end of the allocation: whatever uses it now is at fault.
    void release(CUdeviceptr ptr);

    // Whether the address belongs to this device, allocated or not.
    bool covers(uintptr_t address) const { return device_.contains({address, 1}); }
    // The allocation that the program may name for these bytes.
    std::optional<Range> held(Range range) const;
    // The allocation that the device finds there.
    std::optional<Range> usable(Range range) const;
    // Where the driver reads and writes what the device has at this address.
    char *view(uintptr_t address) const { return view_ + (address - device_.start); }

    // For the device, until it has nothing to do. What is readable then, around these bytes.
    Range open(Range range);
    void close();

    size_t limit;
    size_t live_bytes() const { return live_bytes_; }
    size_t live_count() const { return live_count_; }

  private:
    struct Allocation {
        size_t bytes;
        bool ready;
        bool retired;
    };
    using Allocations = std::map<uintptr_t, Allocation>;
    Allocations::const_iterator find(Range range) const;

    int file_;
    Range device_;
    char *view_;
    uintptr_t next_;
    // Windows of the device's view that are readable, by their starts.
    std::set<uintptr_t> opened_;
    Allocations allocations_;
    size_t live_bytes_ = 0;
    size_t live_count_ = 0;
};

// Host memory that the device may reach while the program goes on.
class Pinned {
  public:
    CUresult allocate(size_t bytes, void **ptr);
    CUresult free(void *ptr);
    CUresult add(Range range);
    CUresult remove(uintptr_t start);

    // The pinned range that holds these bytes.
    std::optional<Range> find(Range range) const;
    size_t count() const { return ranges_.size(); }
    size_t bytes() const;

  private:
    struct Entry {
        size_t bytes;
        bool allocated;
    };
    std::map<uintptr_t, Entry> ranges_;
};
