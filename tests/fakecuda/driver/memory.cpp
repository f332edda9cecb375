#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr size_t PAGE = 4096;
constexpr size_t WINDOW = 64 << 10;
// All that a process may ever allocate on a device; sanitizers leave no room for much more.
constexpr size_t ARENA_BYTES = size_t(256) << 30;
constexpr size_t DEFAULT_LIMIT = size_t(8) << 30;
constexpr unsigned char POISON = 0xCD;

size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

[[noreturn]] void die(const char *what) {
    perror(what);
    abort();
}

uintptr_t map_file(int file, int protection) {
    void *at = mmap(nullptr, ARENA_BYTES, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) die("fakecuda: no address space for the memory of a device");
    // A core file would otherwise hold every page of it.
    madvise(at, ARENA_BYTES, MADV_DONTDUMP);
    return uintptr_t(at);
}

} // namespace

Arena::Arena() : limit(DEFAULT_LIMIT), file_(memfd_create("fakecuda", MFD_CLOEXEC)) {
    if (file_ < 0 || ftruncate(file_, off_t(ARENA_BYTES)) != 0) die("fakecuda: no memory for a device");
    device_ = {map_file(file_, PROT_NONE), ARENA_BYTES};
    view_ = reinterpret_cast<char *>(map_file(file_, PROT_READ | PROT_WRITE));
    // Windows lie inside.
    next_ = (device_.start / WINDOW + 1) * WINDOW + PAGE;
}

CUresult Arena::allocate(size_t bytes, bool ready, CUdeviceptr *ptr) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const size_t span = whole_pages(bytes) + PAGE;
    if (bytes > limit || live_bytes_ > limit - bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    if (span + PAGE > device_.bytes - (next_ - device_.start)) {
        fprintf(stderr, "fakecuda: every address of the device has been used\n");
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    // 256 bytes are what the real driver aligns to; more would hide code that counts on more.
    const uintptr_t start = next_ + 256;
    next_ += span + PAGE;
    memset(view(start), POISON, bytes);
    allocations_[start] = {bytes, ready, false};
    live_bytes_ += bytes;
    live_count_ += 1;
    *ptr = start;
    return CUDA_SUCCESS;
}

void Arena::make_ready(CUdeviceptr ptr) {
    const auto found = allocations_.find(ptr);
    if (found != allocations_.end()) found->second.ready = true;
}

void Arena::retire(CUdeviceptr ptr) {
    Allocation &allocation = allocations_.at(ptr);
    allocation.retired = true;
    live_bytes_ -= allocation.bytes;
    live_count_ -= 1;
}

void Arena::release(CUdeviceptr ptr) {
    const size_t offset = (ptr - device_.start) / PAGE * PAGE;
    const size_t bytes = whole_pages(allocations_.at(ptr).bytes + PAGE);
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(bytes));
    allocations_.erase(ptr);
}

Arena::Allocations::const_iterator Arena::find(Range range) const {
    auto next = allocations_.upper_bound(range.start);
    if (next == allocations_.begin()) return allocations_.end();
    --next;
    return Range{next->first, next->second.bytes}.contains(range) ? next : allocations_.end();
}

std::optional<Range> Arena::held(Range range) const {
    const auto found = find(range);
    if (found == allocations_.end() || found->second.retired) return std::nullopt;
    return Range{found->first, found->second.bytes};
}

std::optional<Range> Arena::usable(Range range) const {
    const auto found = find(range);
    if (found == allocations_.end() || !found->second.ready) return std::nullopt;
    return Range{found->first, found->second.bytes};
}

// Page tables are what it costs, so only windows that a kernel comes to are opened.
Range Arena::open(Range range) {
    const uintptr_t first = range.start / WINDOW * WINDOW, end = (range.start + range.bytes + WINDOW - 1) / WINDOW * WINDOW;
    for (uintptr_t at = first; at < end; at += WINDOW) {
        if (opened_.insert(at).second) mprotect(reinterpret_cast<void *>(at), WINDOW, PROT_READ | PROT_WRITE);
    }
    return {first, end - first};
}

void Arena::close() {
    for (const uintptr_t at : opened_) mprotect(reinterpret_cast<void *>(at), WINDOW, PROT_NONE);
    opened_.clear();
}

CUresult Pinned::allocate(size_t bytes, void **ptr) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(at, POISON, bytes);
    ranges_[uintptr_t(at)] = {bytes, true};
    *ptr = at;
    return CUDA_SUCCESS;
}

CUresult Pinned::free(void *ptr) {
    const auto found = ranges_.find(uintptr_t(ptr));
    if (found == ranges_.end() || !found->second.allocated) return CUDA_ERROR_INVALID_VALUE;
    munmap(ptr, whole_pages(found->second.bytes));
    ranges_.erase(found);
    return CUDA_SUCCESS;
}

CUresult Pinned::add(Range range) {
    if (range.start == 0 || range.bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    for (const auto &[start, entry] : ranges_) {
        if (Range{start, entry.bytes}.overlaps(range)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    ranges_[range.start] = {range.bytes, false};
    return CUDA_SUCCESS;
}

CUresult Pinned::remove(uintptr_t start) {
    const auto found = ranges_.find(start);
    if (found == ranges_.end() || found->second.allocated) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    ranges_.erase(found);
    return CUDA_SUCCESS;
}

std::optional<Range> Pinned::find(Range range) const {
    auto next = ranges_.upper_bound(range.start);
    if (next == ranges_.begin()) return std::nullopt;
    --next;
    const Range found{next->first, next->second.bytes};
    return found.contains(range) ? std::optional(found) : std::nullopt;
}

size_t Pinned::bytes() const {
    size_t sum = 0;
    for (const auto &[start, entry] : ranges_) sum += entry.bytes;
    return sum;
}
