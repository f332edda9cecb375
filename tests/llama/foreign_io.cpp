// A program that passes an io of its own to state_write and state_read, as llama.cpp's rollback test does, and
// whose io throws. Needs llama.cpp's private headers for the two classes; everything else is public.

#include "session.hpp"
#include "steps.hpp"

#include <ggml-backend.h>

#include "llama-io.h"
#include "llama-memory.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace {

// Not derived from std::exception: nobody but its thrower can know it.
struct Thrown {
    int call;
};

// Counts calls and throws at the one with number `at`; 0: never.
struct Fuse {
    int at = 0;
    int calls = 0;

    void burn() {
        if (++calls == at) throw Thrown{calls};
    }
};

class Writer : public llama_io_write_i {
public:
    explicit Writer(Fuse &fuse) : fuse_(fuse) {}

    void write(const void *src, size_t size) override {
        fuse_.burn();
        const auto *bytes = static_cast<const uint8_t *>(src);
        out_.insert(out_.end(), bytes, bytes + size);
    }
    void write_tensor(ggml_tensor *tensor, size_t offset, size_t size) override {
        fuse_.burn();
        out_.resize(out_.size() + size);
        ggml_backend_tensor_get(tensor, out_.data() + out_.size() - size, offset, size);
    }
    size_t n_bytes() override { return out_.size(); }

    const Bytes &bytes() const { return out_; }

private:
    Fuse &fuse_;
    Bytes out_;
};

class Reader : public llama_io_read_i {
public:
    Reader(const Bytes &in, Fuse &fuse) : in_(in), fuse_(fuse) {}

    void read(void *dst, size_t size) override {
        fuse_.burn();
        std::memcpy(dst, in_.data() + n_, size);
        n_ += size;
    }
    void read_tensor(ggml_tensor *tensor, size_t offset, size_t size) override {
        fuse_.burn();
        ggml_backend_tensor_set(tensor, in_.data() + n_, offset, size);
        n_ += size;
    }
    size_t n_bytes() override { return n_; }

private:
    const Bytes &in_;
    Fuse &fuse_;
    size_t n_ = 0;
};

// Every call at first, then some, and the last.
template <typename Throw>
void throw_everywhere(const std::string &what, int n_calls, Throw attempt, Results &out) {
    int tries = 0, arrived = 0, failed = 0;
    for (int at = 1; at <= n_calls; at = at < 80 || at == n_calls ? at + 1 : std::min(at + 37, n_calls)) {
        ++tries;
        try {
            attempt(at);
        } catch (const Thrown &thrown) {
            arrived += thrown.call == at;
        } catch (const std::exception &) {
            ++failed;
        }
    }
    out.put(what + "_calls", n_calls);
    out.put(what + "_thrown", tries);
    out.put(what + "_arrived", arrived);
    out.put(what + "_failed", failed);
}

}  // namespace

void exceptions(llama_model *model, const Case &the_case, Results &out) {
    Session session(model, the_case);
    session.fill(the_case.layout);
    session.decode(other_seq, 0, 10);
    const Bytes saved = session.get(saved_seq);
    const Bytes other = session.get(other_seq);
    llama_memory_i *memory = session.memory();

    Fuse fuse;
    Writer writer(fuse);
    memory->state_write(writer, saved_seq, 0);
    const Bytes state = writer.bytes();
    // The blob is the memory's state behind a magic and the sequence.
    out.put("write_equal", state == Bytes(saved.begin() + 8, saved.end()));
    throw_everywhere(
        "write", fuse.calls,
        [&](int at) {
            Fuse short_fuse{at};
            Writer throwing(short_fuse);
            memory->state_write(throwing, saved_seq, 0);
        },
        out);
    out.put("write_unchanged", session.get(saved_seq) == saved);

    Fuse read_fuse;
    Reader reader(state, read_fuse);
    memory->state_read(reader, saved_seq, 0);
    out.put("read_all", reader.n_bytes() == state.size());
    throw_everywhere(
        "read", read_fuse.calls,
        [&](int at) {
            Fuse short_fuse{at};
            Reader throwing(state, short_fuse);
            memory->state_read(throwing, saved_seq, 0);
        },
        out);
    out.put("other_unchanged", session.get(other_seq) == other);
    out.put("size", static_cast<long long>(saved.size()));
    out.put("set", static_cast<long long>(session.set(saved, saved_seq)));
    out.put("restored_equal", session.get(saved_seq) == saved);
}
