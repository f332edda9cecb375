// The exported state calls that the adapter takes over. What it does not know, it leaves to the original.

#include "access.h"
#include "identity.h"
#include "plan.h"

#include "llama-arch.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <dlfcn.h>

namespace {

// llama.cpp's own, behind ours.
template <typename F> F * original(F *, const char * name) {
    void * symbol = dlsym(RTLD_NEXT, name);
    if (!symbol) {
        throw std::runtime_error(std::string("no ") + name + " behind the adapter: it goes before libllama");
    }
    return reinterpret_cast<F *>(symbol);
}
#define ORIGINAL(name) original(name, #name)

constexpr size_t BLOB_HEADER_SIZE = 8; // magic, seq_id
constexpr llama_state_seq_flags KNOWN_FLAGS = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | LLAMA_STATE_SEQ_FLAGS_ON_DEVICE;

// In place of a sequence: the state of the whole context.
constexpr llama_seq_id WHOLE_CONTEXT = -1;

// No exception leaves an exported call: it fails as llama.cpp's does, with a line in the log.
template <typename F> size_t guarded(const char * call, F && body) {
    try {
        return body();
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", call, err.what());
    } catch (...) {
        LLAMA_LOG_ERROR("%s: unknown exception\n", call);
    }
    return 0;
}

// A sequence of the context; llama.cpp would abort on some others, and take -1 for all of them.
void check_call(llama_context & ctx, llama_seq_id seq_id, llama_state_seq_flags flags) {
    if (seq_id < 0 || (uint32_t) seq_id >= ctx.n_seq_max()) {
        throw std::runtime_error("seq_id " + std::to_string(seq_id) + " is out of range [0, " +
                std::to_string(ctx.n_seq_max()) + ")");
    }
    if (flags & ~KNOWN_FLAGS) {
        throw std::runtime_error("unknown state flags " + std::to_string(flags) + " (known: " +
                std::to_string(KNOWN_FLAGS) + ")");
    }
}

// Rotations of K and copies between streams that llama.cpp has put off until the next decode: the tensors are behind
// the cells as long as they wait. Devices are idle afterwards, since kvstate does not know the streams of ggml.
void apply_pending(llama_context & ctx) {
    ctx.synchronize();
    ctx.memory_update(false);
    ctx.synchronize();
}

// A sequence, or with -1 the whole context, which begins with the name of the architecture.
void collect(llama_context & ctx, writer_io & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    if (seq_id == WHOLE_CONTEXT) {
        io.write_string(llm_arch_name(ctx.get_model().arch));
    }
    if (llama_memory_t memory = ctx.get_memory()) {
        memory->state_write(io, seq_id, flags);
    }
}

void check_arch(llama_context & ctx, reader_io & io) {
    const std::string expected = llm_arch_name(ctx.get_model().arch);
    uint32_t size;
    io.read(&size, sizeof(size));
    std::string arch(std::min<size_t>({ size, kvs_state_reader_left(io.reader), 64 }), '\0');
    io.read(&arch[0], arch.size());
    if (arch != expected || size != expected.size()) {
        throw std::runtime_error("wrong model arch: '" + arch + "' instead of '" + expected + "'");
    }
}

// Nothing changes before all of the state is known to fit. False if the memory is of a kind that is not known here. planned looks
// at what is left then, and may refuse it.
bool restore(llama_context & ctx, reader_io & io, llama_seq_id seq_id, llama_state_seq_flags flags,
        const std::function<void()> & planned = {}) {
    llama_memory_t memory = ctx.get_memory();
    const auto begin = [&] {
        if (seq_id == WHOLE_CONTEXT) {
            check_arch(ctx, io);
        }
    };
    begin();
    if (!memory) {
        return true;
    }
    if (!plan_restore(*memory, io, seq_id, flags)) {
        static const bool said = (LLAMA_LOG_WARN("kvstate: this memory is of a kind that the adapter does not know: "
                "states are restored by llama.cpp, without a plan\n"), true);
        (void) said;
        return false;
    }
    if (planned) {
        planned();
    }
    // a pending copy into this sequence's stream would go over what is restored
    apply_pending(ctx);
    check(kvs_state_reader_rewind(io.reader));
    begin();
    io.planning = false;
    try {
        memory->state_read(io, seq_id, flags);
        check(kvs_state_reader_finish(io.reader));
    } catch (...) {
        if (seq_id == WHOLE_CONTEXT) {
            memory->clear(true);
            throw;
        }
        for (llama_kv_cache * kv : io.caches) {
            kv->state_clear(seq_id);
        }
        memory->seq_rm(seq_id, -1, -1);
        throw;
    }
    return true;
}

size_t get_data(llama_context & ctx, uint8_t * dst, size_t size, llama_seq_id seq_id, llama_state_seq_flags flags) {
    apply_pending(ctx);
    writer_io io(seq_id);
    collect(ctx, io, seq_id, flags);
    // a deprecated call says that the buffer is as large as it gets
    const size_t n = kvs_state_writer_get_data(io.writer, dst, std::min(size, io.n_bytes()));
    check(n ? KVS_STATUS_OK : kvs_last_status());
    return n;
}

// llama.cpp never syncs.
bool sync_files() { return !std::getenv("KVSTATE_UNSYNCED_FILES"); }

size_t save_whole_file(llama_context & ctx, const char * filepath, const llama_token * tokens, size_t n_token_count) {
    apply_pending(ctx);
    writer_io io(WHOLE_CONTEXT);
    collect(ctx, io, WHOLE_CONTEXT, LLAMA_STATE_SEQ_FLAGS_NONE);
    const size_t n = kvs_state_writer_save_file(io.writer, filepath, tokens, n_token_count, sync_files());
    check(n ? KVS_STATUS_OK : kvs_last_status());
    return n;
}

// With identity and checksums behind the state, which llama.cpp passes over.
size_t save_slot(llama_context & ctx, const char * filepath, llama_seq_id seq_id, const llama_token * tokens,
        size_t n_token_count) {
    apply_pending(ctx);
    writer_io io(seq_id);
    collect(ctx, io, seq_id, LLAMA_STATE_SEQ_FLAGS_NONE);
    const auto model = fingerprint_of(ctx);
    kvs_slot_save_params params = kvs_slot_save_default_params();
    params.tokens              = tokens;
    params.n_tokens            = n_token_count;
    params.identity.model      = model.data();
    params.identity.model_size = model.size();
    size_t n = 0;
    check(kvs_state_writer_save_slot(io.writer, filepath, &params, sync_files(), &n));
    return n;
}

// Only how many tokens a file has; the offset at which they begin.
size_t count_tokens(const char * filepath, llama_seq_id dest_seq_id, size_t * n_token_count_out) {
    kvs_state_reader * reader = nullptr;
    check(kvs_state_reader_open_file(dest_seq_id, filepath, SIZE_MAX, nullptr, &reader));
    reader_io io(reader);
    const llama_token * tokens = nullptr;
    check(kvs_state_reader_tokens(reader, &tokens, n_token_count_out));
    return 3 * sizeof(uint32_t);
}

std::runtime_error not_restored(const char * what, const std::exception & err) {
    const std::string prefix = std::string("failed to restore ") + what + ": ", reason = err.what();
    return std::runtime_error(reason.compare(0, prefix.size(), prefix) == 0 ? reason : prefix + reason);
}

size_t give_tokens(kvs_state_reader * reader, llama_token * tokens_out) {
    const llama_token * tokens = nullptr;
    size_t n_tokens = 0;
    check(kvs_state_reader_tokens(reader, &tokens, &n_tokens));
    if (n_tokens > 0) {
        std::memcpy(tokens_out, tokens, n_tokens * sizeof(llama_token));
    }
    return n_tokens;
}

// False if llama.cpp has to do it.
bool load_whole_file(llama_context & ctx, const char * filepath, llama_token * tokens_out, size_t n_token_capacity,
        size_t * n_token_count_out) {
    ctx.synchronize();
    kvs_state_reader * reader = nullptr;
    check(kvs_state_reader_open_file(WHOLE_CONTEXT, filepath, n_token_capacity, &backend_access(), &reader));
    reader_io io(reader);
    const auto check_end = [&] {
        if (const size_t left = kvs_state_reader_left(reader)) {
            throw std::runtime_error("did not read all of the session file data: " + std::to_string(left) +
                    " bytes behind the state");
        }
    };
    try {
        if (!restore(ctx, io, WHOLE_CONTEXT, LLAMA_STATE_SEQ_FLAGS_NONE, check_end)) {
            return false;
        }
    } catch (const std::exception & err) {
        throw not_restored("session", err);
    }
    *n_token_count_out = give_tokens(reader, tokens_out);
    return true;
}

// What is compared before anything changes; KVSTATE_VERIFY says less.
kvs_verify verify_level() {
    const char * level = std::getenv("KVSTATE_VERIFY");
    const std::string name = level ? level : "full";
    return name == "none" ? KVS_VERIFY_NONE : name == "headers" ? KVS_VERIFY_HEADERS : KVS_VERIFY_FULL;
}

// Of a file whose state has been planned: compares what could not be compared before, says what is amiss behind the state. The
// offset at which a server has appended to it: what the save has returned.
size_t look_behind(kvs_state_reader * reader) {
    kvs_slot_result result = kvs_slot_result_default();
    check(kvs_state_reader_slot(reader, &result));
    for (size_t i = 0; i < result.n_note; ++i) {
        LLAMA_LOG_WARN("kvstate: slot file: %s\n", result.notes[i]);
    }
    const size_t end = result.append_start;
    kvs_slot_result_free(&result);
    return end;
}

// The offset behind the state and its checksums; 0 if llama.cpp has to do it.
size_t load_slot(llama_context & ctx, const char * filepath, llama_seq_id dest_seq_id, llama_token * tokens_out,
        size_t n_token_capacity, size_t * n_token_count_out) {
    ctx.synchronize();
    const auto model = fingerprint_of(ctx);
    kvs_slot_load_params params = kvs_slot_load_default_params();
    params.n_token_capacity    = n_token_capacity;
    params.n_ctx_checkpoints   = 0; // they are the server's
    params.verify              = verify_level();
    params.identity.model      = model.data();
    params.identity.model_size = model.size();
    kvs_state_reader * reader = nullptr;
    check(kvs_state_reader_open_slot(dest_seq_id, filepath, &params, &backend_access(), &reader));
    reader_io io(reader);
    // without a memory nothing is planned
    size_t end = io.n_bytes();
    try {
        if (!restore(ctx, io, dest_seq_id, LLAMA_STATE_SEQ_FLAGS_NONE, [&] { end = look_behind(reader); })) {
            return 0;
        }
    } catch (const std::exception & err) {
        throw not_restored("sequence state", err);
    }
    *n_token_count_out = give_tokens(reader, tokens_out);
    return end;
}

// States that stay behind. Those whose tensors kvstate reaches, on the host or on CUDA devices, are kept here, by kvstate,
// where they are. Those of other devices stay there in llama.cpp's care, unless they are quantised: it keeps only a part
// of such tensors, and says nothing.
namespace on_device {

// The live state of a sequence.
struct kept_state {
    struct free_state {
        void operator()(kvs_device_state * state) const { kvs_device_state_free(state); }
    };
    // NULL: llama.cpp has it
    std::unique_ptr<kvs_device_state, free_state> state;
    // the seq_id field of its blob
    int32_t field = 0;
};

std::mutex mutex;
std::map<const llama_context *, std::map<llama_seq_id, kept_state>> states;

void forget(const llama_context * ctx) {
    const std::lock_guard<std::mutex> lock(mutex);
    states.erase(ctx);
}

// Tells the states of a sequence apart, in the bits that no sequence needs, as kvstate does.
int32_t next_field(llama_seq_id seq_id) {
    static std::atomic<uint32_t> next{ 1 };
    return int32_t(next++ * LLAMA_MAX_SEQ + seq_id);
}

size_t get_data(llama_context & ctx, uint8_t * dst, size_t size, llama_seq_id seq_id, llama_state_seq_flags flags) {
    apply_pending(ctx);
    writer_io io(seq_id);
    collect(ctx, io, seq_id, flags);
    const size_t need = kvs_state_writer_metadata_size(io.writer);
    if (need > size) {
        // noticed before the state that is kept is replaced
        throw std::runtime_error("buffer too small: the state has " + std::to_string(need) + " bytes, the buffer " +
                std::to_string(size));
    }
    kept_state kept;
    size_t n = 0;
    if (io.is_for_llama_cpp()) {
        n = ORIGINAL(llama_state_seq_get_data_ext)(&ctx, dst, size, seq_id, flags);
        if (n == 0) {
            return 0;
        }
        kept.field = next_field(seq_id);
        std::memcpy(dst + sizeof(uint32_t), &kept.field, sizeof(kept.field));
    } else {
        kvs_device_state * state = nullptr;
        n = kvs_state_writer_get_on_device(io.writer, dst, need, flags, &state);
        check(n ? KVS_STATUS_OK : kvs_last_status());
        kept.state.reset(state);
        std::memcpy(&kept.field, dst + sizeof(uint32_t), sizeof(kept.field));
    }
    const std::lock_guard<std::mutex> lock(mutex);
    states[&ctx][seq_id] = std::move(kept);
    return n;
}

// llama.cpp aborts, or throws out of a C call, where a state that it keeps does not fit. blob: with its own header.
size_t set_original_data(llama_context & ctx, const std::vector<uint8_t> & blob, llama_seq_id seq_id,
        llama_seq_id source, llama_state_seq_flags flags) {
    uint64_t n_kept = 0;
    for (const auto & [_, buffer] : (ctx.*member(llama_context_mem_storage{}))[source]) {
        n_kept += buffer.total_size;
    }
    size_t size = blob.size();
    kvs_state_reader * reader = nullptr;
    check(kvs_state_reader_new_on_device(seq_id, blob.data(), size, flags, nullptr, &backend_access(), &reader));
    reader_io io(reader);
    llama_memory_t memory = ctx.get_memory();
    if (memory && plan_restore(*memory, io, seq_id, flags)) {
        // without tensors llama.cpp leaves what it had, and looks at none of it
        const uint64_t n_planned = kvs_state_reader_tensor_bytes(reader);
        if (n_planned != 0 && n_planned != n_kept) {
            throw std::runtime_error("no device state of sequence " + std::to_string(source) + ": the blob has " +
                    std::to_string(n_planned) + " bytes of tensors, the live one " + std::to_string(n_kept));
        }
        // bytes behind the state are ignored
        size = kvs_state_reader_offset(reader);
    }
    apply_pending(ctx);
    return ORIGINAL(llama_state_seq_set_data_ext)(&ctx, blob.data(), size, seq_id, flags);
}

size_t set_data(llama_context & ctx, const uint8_t * src, size_t size, llama_seq_id seq_id,
        llama_state_seq_flags flags) {
    if (size < BLOB_HEADER_SIZE) {
        throw std::runtime_error("truncated state: a header has " + std::to_string(BLOB_HEADER_SIZE) + " bytes, " +
                std::to_string(size) + " are left");
    }
    int32_t field;
    std::memcpy(&field, src + sizeof(uint32_t), sizeof(field));
    const llama_seq_id source = field & (LLAMA_MAX_SEQ - 1);
    kvs_device_state * state = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto of_ctx = states.find(&ctx);
        const bool taken = of_ctx != states.end() && of_ctx->second.count(source);
        if (!taken || of_ctx->second.at(source).field != field) {
            throw std::runtime_error("no device state of sequence " + std::to_string(source) + ": " +
                    (taken ? "a later one has replaced it" : "none was taken"));
        }
        state = of_ctx->second.at(source).state.get();
    }
    if (!state) {
        std::vector<uint8_t> blob(src, src + size);
        std::memcpy(blob.data() + sizeof(uint32_t), &source, sizeof(source));
        return set_original_data(ctx, blob, seq_id, source, flags);
    }
    kvs_state_reader * reader = nullptr;
    check(kvs_state_reader_new_on_device(seq_id, src, size, flags, state, &backend_access(), &reader));
    reader_io io(reader);
    if (!restore(ctx, io, seq_id, flags)) {
        throw std::runtime_error("this memory is of a kind that the adapter does not know");
    }
    return io.n_bytes();
}

} // namespace on_device

} // namespace

extern "C" {

size_t llama_state_get_size(llama_context * ctx) {
    return guarded(__func__, [&] {
        writer_io io(WHOLE_CONTEXT);
        collect(*ctx, io, WHOLE_CONTEXT, LLAMA_STATE_SEQ_FLAGS_NONE);
        return io.n_bytes();
    });
}

size_t llama_state_get_data(llama_context * ctx, uint8_t * dst, size_t size) {
    return guarded(__func__, [&] { return get_data(*ctx, dst, size, WHOLE_CONTEXT, LLAMA_STATE_SEQ_FLAGS_NONE); });
}

size_t llama_state_set_data(llama_context * ctx, const uint8_t * src, size_t size) {
    return guarded(__func__, [&]() -> size_t {
        ctx->synchronize();
        // the deprecated call does not know how long the state is
        if (size != SIZE_MAX) {
            kvs_state_reader * reader = nullptr;
            check(kvs_state_reader_new(WHOLE_CONTEXT, src, size, &backend_access(), &reader));
            reader_io io(reader);
            if (restore(*ctx, io, WHOLE_CONTEXT, LLAMA_STATE_SEQ_FLAGS_NONE)) {
                return io.n_bytes();
            }
        }
        return ORIGINAL(llama_state_set_data)(ctx, src, size);
    });
}

bool llama_state_load_file(llama_context * ctx, const char * path_session, llama_token * tokens_out,
        size_t n_token_capacity, size_t * n_token_count_out) {
    return guarded(__func__, [&]() -> size_t {
        return load_whole_file(*ctx, path_session, tokens_out, n_token_capacity, n_token_count_out) ||
            ORIGINAL(llama_state_load_file)(ctx, path_session, tokens_out, n_token_capacity, n_token_count_out);
    });
}

bool llama_state_save_file(llama_context * ctx, const char * path_session, const llama_token * tokens,
        size_t n_token_count) {
    return guarded(__func__, [&] { return save_whole_file(*ctx, path_session, tokens, n_token_count); });
}

size_t llama_state_seq_get_size_ext(llama_context * ctx, llama_seq_id seq_id, llama_state_seq_flags flags) {
    return guarded(__func__, [&] {
        check_call(*ctx, seq_id, flags);
        writer_io io(seq_id);
        collect(*ctx, io, seq_id, flags);
        return flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE ? kvs_state_writer_metadata_size(io.writer) : io.n_bytes();
    });
}

size_t llama_state_seq_get_data_ext(llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id,
        llama_state_seq_flags flags) {
    return guarded(__func__, [&] {
        check_call(*ctx, seq_id, flags);
        return flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE ?
            on_device::get_data(*ctx, dst, size, seq_id, flags) :
            get_data(*ctx, dst, size, seq_id, flags);
    });
}

size_t llama_state_seq_set_data_ext(llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq_id,
        llama_state_seq_flags flags) {
    return guarded(__func__, [&]() -> size_t {
        check_call(*ctx, seq_id, flags);
        ctx->synchronize();
        if (flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) {
            return on_device::set_data(*ctx, src, size, seq_id, flags);
        }
        kvs_state_reader * reader = nullptr;
        check(kvs_state_reader_new(seq_id, src, size, &backend_access(), &reader));
        reader_io io(reader);
        if (!restore(*ctx, io, seq_id, flags)) {
            return ORIGINAL(llama_state_seq_set_data_ext)(ctx, src, size, seq_id, flags);
        }
        return io.n_bytes();
    });
}

// Its ON_DEVICE states go with it.
void llama_free(llama_context * ctx) {
    on_device::forget(ctx);
    ORIGINAL(llama_free)(ctx);
}

size_t llama_state_seq_save_file(llama_context * ctx, const char * filepath, llama_seq_id seq_id,
        const llama_token * tokens, size_t n_token_count) {
    return guarded(__func__, [&] {
        check_call(*ctx, seq_id, LLAMA_STATE_SEQ_FLAGS_NONE);
        return save_slot(*ctx, filepath, seq_id, tokens, n_token_count);
    });
}

size_t llama_state_seq_load_file(llama_context * ctx, const char * filepath, llama_seq_id dest_seq_id,
        llama_token * tokens_out, size_t n_token_capacity, size_t * n_token_count_out) {
    return guarded(__func__, [&]() -> size_t {
        check_call(*ctx, dest_seq_id, LLAMA_STATE_SEQ_FLAGS_NONE);
        if (!tokens_out) {
            return count_tokens(filepath, dest_seq_id, n_token_count_out);
        }
        const size_t n = load_slot(*ctx, filepath, dest_seq_id, tokens_out, n_token_capacity, n_token_count_out);
        return n ? n : ORIGINAL(llama_state_seq_load_file)(ctx, filepath, dest_seq_id, tokens_out,
                n_token_capacity, n_token_count_out);
    });
}

} // extern "C"

namespace {

// How to see that the adapter is there.
__attribute__((constructor)) void say_active() {
    std::fprintf(stderr, "kvstate: llama.cpp adapter active (built for llama.cpp %s)\n", KVSTATE_LLAMA_BUILD);
}

} // namespace
