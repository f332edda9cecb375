// Callbacks that throw: each is caught inside, and thrown again after the call has returned.

#include <kvstate.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            std::fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, kvs_last_error()); \
            std::exit(1);                                                                                             \
        }                                                                                                             \
    } while (0)

namespace {

constexpr uint32_t n_cell = 8;
constexpr uint32_t row    = 8; // 4 elements of f16

struct broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An exception on its way past the library.
class carried {
public:
    template <typename F> int run(F && body) noexcept {
        try {
            body();
            return 0;
        } catch (...) {
            exception = std::current_exception();
            return 1;
        }
    }

    void rethrow(kvs_status status) {
        if (exception) {
            CHECK(status == KVS_STATUS_CALLBACK);
            std::rethrow_exception(std::exchange(exception, nullptr));
        }
        if (status != KVS_STATUS_OK) {
            throw std::logic_error(kvs_last_error());
        }
    }

private:
    std::exception_ptr exception;
};

// A cache of one sequence, whose callback called `throwing` throws.
struct cache {
    std::vector<kvs_pos> pos = std::vector<kvs_pos>(n_cell, -1);
    std::vector<uint8_t> k = std::vector<uint8_t>(n_cell * row), v = k;
    std::string throwing;
    carried past;
    kvs_plane k_plane, v_plane;
    kvs_tensor_access access;
    kvs_kv_view view = kvs_kv_view_default();
    kvs_io io = kvs_io_default();
    std::vector<uint8_t> bytes;
    size_t offset = 0;

    explicit cache(kvs_pos n) {
        for (kvs_pos i = 0; i < n; ++i) {
            pos[i] = i;
        }
        for (size_t i = 0; i < k.size(); ++i) {
            k[i] = uint8_t(3 * i + 1);
            v[i] = uint8_t(5 * i + 2);
        }
        k_plane = {&k, nullptr, KVS_DEVICE_HOST, KVS_TYPE_F16, 4, 0, row, 0};
        v_plane = {&v, nullptr, KVS_DEVICE_HOST, KVS_TYPE_F16, 4, 0, row, 0};
        access = {this, get, set};
        view.user = this;
        view.kv_size = n_cell;
        view.n_layer = 1;
        view.k = &k_plane;
        view.v = &v_plane;
        view.access = &access;
        view.visit = visit;
        view.apply = apply;
        view.clear = clear;
        io.user = this;
        io.write = write;
        io.write_tensor = write_tensor;
        io.read = read;
        io.read_tensor = read_tensor;
    }

    void may_throw(const char * name) const {
        if (throwing == name) {
            throw broken(name + std::string(" is broken"));
        }
    }

    template <typename F> static int call(void * user, const char * name, F && body) {
        auto & self = *static_cast<cache *>(user);
        return self.past.run([&] {
            body(self);
            self.may_throw(name);
        });
    }

    static int visit(void * user, uint32_t, kvs_seq_id, kvs_visit_each each, void * arg) {
        int stop = 0;
        const int failed = call(user, "visit", [&](cache & self) {
            for (uint32_t i = 0; i < n_cell && stop == 0; ++i) {
                if (self.pos[i] >= 0) {
                    const kvs_cell cell = {i, self.pos[i], 0, 0, 0, -1, {1, 0, 0, 0}};
                    stop = each(arg, &cell);
                }
            }
        });
        return failed != 0 ? failed : stop;
    }

    static int apply(void * user, uint32_t, kvs_seq_id, uint32_t n, const kvs_cell * cells) {
        return call(user, "apply", [&](cache & self) {
            self.pos.assign(n_cell, -1);
            for (uint32_t i = 0; i < n; ++i) {
                self.pos.at(cells[i].idx) = cells[i].pos;
            }
        });
    }

    static int clear(void * user, kvs_seq_id) {
        return call(user, "clear", [&](cache & self) {
            self.pos.assign(n_cell, -1);
            self.k.assign(self.k.size(), 0);
            self.v.assign(self.v.size(), 0);
        });
    }

    static uint8_t * at(void * tensor, uint64_t offset, uint64_t n) {
        auto & data = *static_cast<std::vector<uint8_t> *>(tensor);
        CHECK(offset + n <= data.size());
        return data.data() + offset;
    }

    static int get(void * user, void * tensor, uint64_t offset, uint64_t n, void * dst) {
        return call(user, "get", [&](cache &) { std::memcpy(dst, at(tensor, offset, n), n); });
    }

    static int set(void * user, void * tensor, uint64_t offset, uint64_t n, const void * src) {
        return call(user, "set", [&](cache &) { std::memcpy(at(tensor, offset, n), src, n); });
    }

    void put(const void * src, size_t size) {
        const auto * from = static_cast<const uint8_t *>(src);
        bytes.insert(bytes.end(), from, from + size);
    }

    void take(void * dst, size_t size) {
        if (offset + size > bytes.size()) {
            throw std::out_of_range("the input has ended");
        }
        std::memcpy(dst, bytes.data() + offset, size);
        offset += size;
    }

    static int write(void * user, const void * src, size_t size) {
        return call(user, "write", [&](cache & self) { self.put(src, size); });
    }

    static int write_tensor(void * user, void * tensor, uint64_t offset, uint64_t n) {
        return call(user, "write_tensor", [&](cache & self) { self.put(at(tensor, offset, n), n); });
    }

    static int read(void * user, void * dst, size_t size) {
        return call(user, "read", [&](cache & self) { self.take(dst, size); });
    }

    static int read_tensor(void * user, void * tensor, uint64_t offset, uint64_t n) {
        return call(user, "read_tensor", [&](cache & self) { self.take(at(tensor, offset, n), n); });
    }

    // What the adapter of a server looks like: status in, exception out.

    void state_write() { past.rethrow(kvs_kv_cache_state_write(&view, &io, 0, KVS_STATE_SEQ_FLAGS_NONE)); }

    void state_read() {
        past.rethrow(kvs_kv_cache_state_read_sinfo(&view, &io, 0, KVS_STATE_SEQ_FLAGS_NONE, nullptr, nullptr));
    }

    std::vector<uint8_t> get_data() {
        kvs_state_writer * raw = nullptr;
        past.rethrow(kvs_state_writer_new(0, nullptr, &raw));
        const std::unique_ptr<kvs_state_writer, decltype(&kvs_state_writer_free)> writer(raw, kvs_state_writer_free);
        past.rethrow(kvs_state_writer_write_kv_cache(writer.get(), &view, KVS_STATE_SEQ_FLAGS_NONE));
        std::vector<uint8_t> out(kvs_state_writer_size(writer.get()));
        kvs_clear_last_error();
        const size_t n = kvs_state_writer_get_data(writer.get(), out.data(), out.size());
        past.rethrow(kvs_last_status());
        CHECK(n == out.size());
        return out;
    }

    void set_data(const std::vector<uint8_t> & src) {
        kvs_state_reader * raw = nullptr;
        past.rethrow(kvs_state_reader_new(0, src.data(), src.size(), nullptr, &raw));
        const std::unique_ptr<kvs_state_reader, decltype(&kvs_state_reader_free)> reader(raw, kvs_state_reader_free);
        past.rethrow(
            kvs_state_reader_plan_kv_cache(reader.get(), &view, KVS_STATE_SEQ_FLAGS_NONE, nullptr, nullptr));
        past.rethrow(kvs_state_reader_rewind(reader.get()));
        past.rethrow(kvs_state_reader_read_kv_cache(reader.get(), &view, nullptr));
        past.rethrow(kvs_state_reader_finish(reader.get()));
    }
};

// The call throws what the callback of this name threw.
void throws(cache & c, const std::string & name, const std::function<void()> & call) {
    c.throwing = name;
    try {
        call();
        CHECK(!"nothing was thrown");
    } catch (const broken & error) {
        CHECK(error.what() == name + " is broken");
    }
    c.throwing.clear();
    CHECK(std::string(kvs_last_error()) == name + " of the caller failed: 1");
}

bool is_empty(const cache & c) {
    return c.pos == std::vector<kvs_pos>(n_cell, -1) && c.k == std::vector<uint8_t>(n_cell * row);
}

void an_exception_out_of_a_write_arrives() {
    for (const char * name : {"visit", "write", "write_tensor"}) {
        cache c(5);
        throws(c, name, [&] { c.state_write(); });
        c.bytes.clear();
        c.state_write(); // the next call is a new one
        CHECK(c.bytes.size() == 8 + 5 * 12 + 16 + 2 * (12 + 5 * row));
    }
}

void an_exception_out_of_a_read_arrives_and_the_destination_is_empty() {
    cache source(5);
    source.state_write();
    for (const char * name : {"visit", "apply", "read", "read_tensor"}) {
        cache c(3);
        c.bytes = source.bytes;
        throws(c, name, [&] { c.state_read(); });
        CHECK(is_empty(c));
        c.offset = 0;
        c.state_read();
        CHECK(c.pos == source.pos && std::memcmp(c.k.data(), source.k.data(), 5 * row) == 0);
    }
}

void input_that_ends_throws_at_every_call() {
    cache source(3);
    source.state_write();
    for (size_t size = 0; size < source.bytes.size(); ++size) {
        cache c(2);
        c.bytes.assign(source.bytes.begin(), source.bytes.begin() + size);
        try {
            c.state_read();
            CHECK(!"nothing was thrown");
        } catch (const std::out_of_range & error) {
            CHECK(std::string(error.what()) == "the input has ended");
        }
        CHECK(is_empty(c));
    }
}

void an_exception_out_of_a_tensor_arrives() {
    cache c(5);
    const std::vector<uint8_t> state = c.get_data();
    throws(c, "get", [&] { c.get_data(); });
    throws(c, "visit", [&] { c.get_data(); });
    CHECK(c.get_data() == state);
    throws(c, "set", [&] { c.set_data(state); });
    c.set_data(state);
    CHECK(c.get_data() == state);
}

void an_exception_out_of_a_plan_leaves_everything_as_it_was() {
    cache source(5), c(2);
    const std::vector<uint8_t> state = source.get_data(), before = c.get_data();
    throws(c, "visit", [&] { c.set_data(state); });
    CHECK(c.get_data() == before);
    throws(c, "apply", [&] { c.set_data(state); });
}

} // namespace

int main() {
    an_exception_out_of_a_write_arrives();
    an_exception_out_of_a_read_arrives_and_the_destination_is_empty();
    input_that_ends_throws_at_every_call();
    an_exception_out_of_a_tensor_arrives();
    an_exception_out_of_a_plan_leaves_everything_as_it_was();
    return 0;
}
