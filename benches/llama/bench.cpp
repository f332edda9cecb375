// llama.cpp's own state and memory calls beside kvstate's: one process, one set of K and V, the same cells.
//
// A llama_context without weights has the cache, a kvs_context adopts its tensors, and both are told the same
// tokens. Before anything is timed, both have to write the same bytes, restore them, and agree on every cell.
//
//   bench-llama [--quick] [--only TEXT] [--json FILE] [--dir FOLDER] [--llama VERSION] [--kvstate VERSION]

#include <kvstate.h>

#include "ggml-cpp.h"
#include "llama-cpp.h"
#include "llama-kv-cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fs = std::filesystem;

namespace {

struct Options {
    bool quick = false;
    std::string only;
    std::string json;
    std::string dir = fs::temp_directory_path();
    std::string llama = "unknown";
    std::string kvstate = "unknown";

    int pairs() const { return quick ? 3 : 9; }
    // 32 layers x 8 heads x 128 in f16: 128 KiB a token. Below 2^13 tokens, because llama.cpp lists every element
    // of transposed V that has no neighbour, and 2^28 entries are 8 GiB.
    uint32_t n_tokens() const { return quick ? 512 : 8000; }
    uint32_t n_cells() const { return quick ? 16 << 10 : 256 << 10; }
};

void check(bool ok, const std::string & what) {
    if (!ok) {
        throw std::runtime_error(what);
    }
}

void check(kvs_status status) { check(status == KVS_STATUS_OK, kvs_last_error()); }

// --- measuring -----------------------------------------------------------------------------------------------

template <class F> double seconds(F && f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One call, or the mean of as many as the clock needs.
template <class F> double per_call(F && f) {
    const double once = seconds(f);
    if (once > 20e-6) {
        return once;
    }
    const int n = static_cast<int>(50e-6 / std::max(once, 1e-8));
    return seconds([&] {
               for (int i = 0; i < n; ++i) {
                   f();
               }
           }) / n;
}

struct Spread {
    double min, q1, median, q3, max;
};

Spread spread(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    const auto at = [&](double q) {
        const double i = q * static_cast<double>(samples.size() - 1);
        const double lo = samples[static_cast<size_t>(std::floor(i))];
        return lo + (samples[static_cast<size_t>(std::ceil(i))] - lo) * (i - std::floor(i));
    };
    return {samples.front(), at(0.25), at(0.5), at(0.75), samples.back()};
}

struct Row {
    std::string group, call;
    uint64_t bytes = 0;  // of the state; 0: none is moved
    std::string note;
    std::vector<double> stock, kvstate;

    // Of each pair, so that what slows the machine down for a while slows both sides.
    Spread ratio() const {
        std::vector<double> ratios;
        for (size_t i = 0; i < stock.size(); ++i) {
            ratios.push_back(stock[i] / kvstate[i]);
        }
        return spread(ratios);
    }
};

std::string time_text(double s) {
    char out[32];
    if (s < 1e-6) {
        snprintf(out, sizeof out, "%.0f ns", s * 1e9);
    } else if (s < 1e-3) {
        snprintf(out, sizeof out, "%.1f us", s * 1e6);
    } else if (s < 1) {
        snprintf(out, sizeof out, "%.1f ms", s * 1e3);
    } else {
        snprintf(out, sizeof out, "%.2f s", s);
    }
    return out;
}

std::string ratio_text(double r) {
    char out[32];
    snprintf(out, sizeof out, r < 10 ? "%.2f" : "%.0f", r);
    return out;
}

class Report {
  public:
    explicit Report(const Options & options) : options(options) {
        printf("| | call | llama.cpp | kvstate | llama.cpp / kvstate | quartiles | pairs |\n");
        printf("|---|---|---|---|---|---|---|\n");
    }

    // Pairs of samples, one of each side in turn; each side returns the seconds of its timed part.
    template <class S, class K> Row measure(Row row, S && stock, K && kvstate) {
        constexpr size_t LEAST_PAIRS = 3;
        constexpr double LIMIT = 60;  // seconds, for calls of many seconds
        double spent = 0;
        for (int i = 0; i < options.pairs() && (row.stock.size() < LEAST_PAIRS || spent < LIMIT); ++i) {
            spent += seconds([&] {
                row.stock.push_back(stock());
                row.kvstate.push_back(kvstate());
            });
        }
        return row;
    }

    void add(const Row & row) {
        const Spread ratio = row.ratio();
        printf("| %s | %s%s%s | %s | %s | %s | %s to %s | %zu |\n", row.group.c_str(), row.call.c_str(),
               row.note.empty() ? "" : ": ", row.note.c_str(), time_text(spread(row.stock).median).c_str(),
               time_text(spread(row.kvstate).median).c_str(), ratio_text(ratio.median).c_str(),
               ratio_text(ratio.q1).c_str(), ratio_text(ratio.q3).c_str(), row.stock.size());
        fflush(stdout);
        rows.push_back(row);
    }

    void write_json() const;

  private:
    const Options & options;
    std::vector<Row> rows;
};

std::string first_match(const char * file, const std::string & key) {
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) {
        if (line.rfind(key, 0) == 0) {
            return line.substr(line.find_first_not_of(" \t:", key.size()));
        }
    }
    return "";
}

uint64_t memory_bytes(const std::string & key) {
    return strtoull(first_match("/proc/meminfo", key).c_str(), nullptr, 10) << 10;
}

void Report::write_json() const {
    FILE * out = fopen(options.json.c_str(), "w");
    check(out != nullptr, "cannot write " + options.json);
    char date[16];
    const time_t now = time(nullptr);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    fprintf(out, "{\n  \"date\": \"%s\",\n", date);
    fprintf(out, "  \"machine\": {\"cpu\": \"%s\", \"cores\": %u, \"memory_gib\": %.0f},\n",
            first_match("/proc/cpuinfo", "model name").c_str(), std::thread::hardware_concurrency(),
            static_cast<double>(memory_bytes("MemTotal")) / (1 << 30));
    fprintf(out, "  \"builds\": {\"llama.cpp\": \"%s\", \"kvstate\": \"%s\", \"compiler\": \"%s\"},\n",
            options.llama.c_str(), options.kvstate.c_str(), __VERSION__);
    fprintf(out, "  \"quick\": %s,\n  \"rows\": [", options.quick ? "true" : "false");
    const char * separator = "";
    for (const Row & row : rows) {
        const auto print = [out](const char * name, const Spread & s, const char * end) {
            fprintf(out, "     \"%s\": {\"median\": %.4g, \"min\": %.4g, \"q1\": %.4g, \"q3\": %.4g, \"max\": %.4g}%s",
                    name, s.median, s.min, s.q1, s.q3, s.max, end);
        };
        fprintf(out, "%s\n    {\"group\": \"%s\", \"call\": \"%s\", \"note\": \"%s\", \"bytes\": %" PRIu64, separator,
                row.group.c_str(), row.call.c_str(), row.note.c_str(), row.bytes);
        fprintf(out, ", \"pairs\": %zu,\n", row.stock.size());
        print("llama.cpp_s", spread(row.stock), ",\n");
        print("kvstate_s", spread(row.kvstate), ",\n");
        print("ratio", row.ratio(), "}");
        separator = ",";
    }
    fprintf(out, "\n  ]\n}\n");
    check(fclose(out) == 0, "cannot write " + options.json);
}

// --- the two caches ------------------------------------------------------------------------------------------

struct Geometry {
    uint32_t n_layer, n_head, n_embd_head, kv_size, n_seq_max;
    ggml_type type;
    bool v_trans;
};

// The cache of a llama model that has this geometry and no weights: it is never evaluated.
llama_model_ptr model_of(const Geometry & g) {
    const gguf_context_ptr gguf(gguf_init_empty());
    gguf_set_val_str(gguf.get(), "general.architecture", "llama");
    gguf_set_val_str(gguf.get(), "tokenizer.ggml.model", "no_vocab");
    const auto set = [&](const char * key, uint32_t value) {
        gguf_set_val_u32(gguf.get(), (std::string("llama.") + key).c_str(), value);
    };
    set("vocab_size", 32);
    set("context_length", g.kv_size);
    set("embedding_length", 32);
    set("feed_forward_length", 32);
    set("block_count", g.n_layer);
    set("attention.head_count", g.n_head);
    set("attention.head_count_kv", g.n_head);
    set("attention.key_length", g.n_embd_head);
    set("attention.value_length", g.n_embd_head);
    set("rope.dimension_count", g.n_embd_head);
    gguf_set_val_f32(gguf.get(), "llama.attention.layer_norm_rms_epsilon", 1e-5f);

    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    llama_model_ptr model(llama_model_init_from_user(gguf.get(), [](ggml_tensor *, void *) {}, nullptr, params));
    check(model != nullptr, "llama.cpp does not take the model");
    return model;
}

// Tokens [p0, p1) of a sequence, for both.
class Ubatch {
  public:
    Ubatch(llama_seq_id seq_id, llama_pos p0, llama_pos p1) : seq_id(seq_id) {
        for (llama_pos p = p0; p < p1; ++p) {
            pos.push_back(p);
        }
        n_seq_id.assign(pos.size(), 1);
        seq_ids.assign(pos.size(), &this->seq_id);

        const auto n = static_cast<uint32_t>(pos.size());
        stock.b_equal_seqs = 1;
        stock.n_tokens = stock.n_seq_tokens = n;
        stock.n_seqs = stock.n_seqs_unq = stock.n_pos = 1;
        stock.pos = pos.data();
        stock.n_seq_id = n_seq_id.data();
        stock.seq_id = seq_ids.data();
        stock.seq_id_unq = &this->seq_id;

        kvstate.n_tokens = n;
        kvstate.pos = pos.data();
        kvstate.n_seq_id = n_seq_id.data();
        kvstate.seq_id = seq_ids.data();
    }
    Ubatch(const Ubatch &) = delete;

    llama_ubatch stock{};
    kvs_ubatch kvstate = kvs_ubatch_default();

  private:
    llama_seq_id seq_id;
    std::vector<llama_pos> pos;
    std::vector<int32_t> n_seq_id;
    std::vector<llama_seq_id *> seq_ids;
};

struct SlotFree {
    void operator()(kvs_slot * slot) const { kvs_slot_free(slot); }
};
using Slot = std::unique_ptr<kvs_slot, SlotFree>;

struct ContextFree {
    void operator()(kvs_context * ctx) const { kvs_context_free(ctx); }
};

// A llama_context and a kvs_context over its K and V.
class Caches {
  public:
    explicit Caches(const Geometry & g) : geometry(g), model(model_of(g)) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = g.kv_size;
        params.n_batch = params.n_ubatch = 128;  // at least a token of each sequence
        params.n_seq_max = g.n_seq_max;
        params.kv_unified = true;
        params.flash_attn_type = g.v_trans ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_ENABLED;
        params.type_k = params.type_v = g.type;
        params.offload_kqv = false;
        stock.reset(llama_init_from_model(model.get(), params));
        check(stock != nullptr, "llama.cpp makes no context");
        kv = dynamic_cast<llama_kv_cache *>(llama_get_memory(stock.get()));
        check(kv != nullptr && kv->get_size() == g.kv_size, "the llama_context has another cache than was asked for");
        adopt();
    }

    void place_stock(const Ubatch & ubatch) { kv->apply_ubatch(kv->find_slot(ubatch.stock, false), ubatch.stock); }

    void place_kvstate(const Ubatch & ubatch) {
        const Slot slot = find_kvstate(ubatch);
        check(kvs_slot_commit(kvstate.get(), slot.get()));
    }

    void place(const Ubatch & ubatch) {
        place_stock(ubatch);
        place_kvstate(ubatch);
    }

    Slot find_kvstate(const Ubatch & ubatch) const {
        kvs_slot * slot = nullptr;
        check(kvs_slot_prepare(kvstate.get(), &ubatch.kvstate, &slot));
        return Slot(slot);
    }

    kvs_memory_t memory() const { return kvs_get_memory(kvstate.get()); }

    // The same bytes for the same seed.
    void fill(uint64_t seed) {
        for (const auto & [data, size] : planes) {
            for (size_t i = 0; i + 8 <= size; i += 8) {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                memcpy(data + i, &seed, 8);
            }
        }
    }

    void check_cells() const {
        const llama_kv_cells & cells = kv->get_cells(0);
        for (uint32_t c = 0; c < geometry.kv_size; ++c) {
            kvs_cell cell;
            check(kvs_cell_get(kvstate.get(), 0, 0, c, &cell));
            const llama_pos pos = cells.is_empty(c) ? -1 : cells.pos_get(c);
            check(pos == cell.pos, "cell " + std::to_string(c) + ": pos " + std::to_string(pos) + " in llama.cpp, " +
                                       std::to_string(cell.pos) + " in kvstate");
            for (uint32_t s = 0; s < geometry.n_seq_max; ++s) {
                check(cells.seq_has(c, static_cast<llama_seq_id>(s)) == ((cell.seqs[s / 64] >> s % 64 & 1) != 0),
                      "cell " + std::to_string(c) + ": llama.cpp and kvstate differ on sequence " + std::to_string(s));
            }
        }
    }

    const Geometry geometry;

  private:
    llama_model_ptr model;

  public:
    llama_context_ptr stock;
    llama_kv_cache * kv = nullptr;
    std::unique_ptr<kvs_context, ContextFree> kvstate;

  private:
    // K and V of each layer.
    std::vector<std::pair<uint8_t *, size_t>> planes;

    void adopt() {
        const uint32_t n_embd = geometry.n_head * geometry.n_embd_head;
        const size_t plane_bytes = ggml_row_size(geometry.type, n_embd) * geometry.kv_size;
        const ggml_context_ptr views(
            ggml_init({ggml_tensor_overhead() * (2 * geometry.n_layer + 2), nullptr, /*no_alloc*/ true}));
        const llama_kv_cache::slot_info stream0{0, 0, {0}, {{0}}};

        std::vector<kvs_kv_layer_params> layers(geometry.n_layer, kvs_kv_layer_default_params());
        for (uint32_t il = 0; il < geometry.n_layer; ++il) {
            kvs_kv_layer_params & layer = layers[il];
            layer.type_k = layer.type_v = geometry.type;
            layer.n_embd_k_gqa = layer.n_embd_v_gqa = n_embd;
            layer.k = kv->get_k(views.get(), static_cast<int32_t>(il), geometry.kv_size, stream0)->data;
            layer.v = kv->get_v(views.get(), static_cast<int32_t>(il), geometry.kv_size, stream0)->data;
            planes.emplace_back(static_cast<uint8_t *>(layer.k), plane_bytes);
            planes.emplace_back(static_cast<uint8_t *>(layer.v), plane_bytes);
        }
        const auto n_rot = [](const ggml_tensor * rotation) {
            return rotation == nullptr ? 0 : static_cast<uint32_t>(rotation->ne[0]);
        };
        kvs_kv_params params = kvs_kv_default_params();
        params.kv_size = geometry.kv_size;
        params.n_layer = geometry.n_layer;
        params.layers = layers.data();
        params.v_trans = geometry.v_trans;
        params.n_rot_k = n_rot(kv->build_input_k_rot(views.get()));
        params.n_rot_v = n_rot(kv->build_input_v_rot(views.get()));
        kvs_section_params section = kvs_section_default_params();
        section.kv = &params;
        kvs_context_params context = kvs_context_default_params();
        context.n_seq_max = geometry.n_seq_max;
        context.sections = &section;
        context.n_section = 1;
        context.shift_by_engine = 1;
        // as llama.cpp; the bench syncs where it says so
        context.unsynced_files = 1;
        kvs_context * ctx = nullptr;
        check(kvs_context_new(&context, &ctx));
        kvstate.reset(ctx);
    }
};

// --- state calls ---------------------------------------------------------------------------------------------

struct Layout {
    const char * name;
    bool v_trans;
    ggml_type type;
    uint32_t run;  // neighbouring cells of the saved sequence; 0: all of them
};

constexpr Layout LAYOUTS[] = {
    {"V rows, one run", false, GGML_TYPE_F16, 0},
    {"V rows, runs of 16", false, GGML_TYPE_F16, 16},
    {"V rows, every other cell", false, GGML_TYPE_F16, 1},
    {"V transposed, one run", true, GGML_TYPE_F16, 0},
    {"V transposed, runs of 16", true, GGML_TYPE_F16, 16},
    {"V transposed, every other cell", true, GGML_TYPE_F16, 1},
    {"q8_0 rows, every other cell", false, GGML_TYPE_Q8_0, 1},
};

// A folder that goes with everything in it.
class TemporaryFolder {
  public:
    explicit TemporaryFolder(const std::string & parent) : path(parent + "/bench-llama-XXXXXX") {
        check(mkdtemp(path.data()) != nullptr, "cannot make a folder in " + parent);
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
    TemporaryFolder(const TemporaryFolder &) = delete;

    std::string file(const char * name) const { return path + "/" + name; }

  private:
    std::string path;
};

void sync_file(const std::string & path) {
    const int fd = open(path.c_str(), O_RDONLY);
    check(fd >= 0 && fsync(fd) == 0 && close(fd) == 0, "cannot sync " + path);
}

bool equal_files(const std::string & a, const std::string & b) {
    std::ifstream fa(a, std::ios::binary), fb(b, std::ios::binary);
    std::vector<char> ba(1 << 20), bb(1 << 20);
    do {
        fa.read(ba.data(), static_cast<std::streamsize>(ba.size()));
        fb.read(bb.data(), static_cast<std::streamsize>(bb.size()));
        if (fa.gcount() != fb.gcount() || memcmp(ba.data(), bb.data(), static_cast<size_t>(fa.gcount())) != 0) {
            return false;
        }
    } while (fa.gcount() > 0);
    return true;
}

void state_rows(Report & report, const Options & options, const Layout & layout) {
    const uint32_t n_tokens = options.n_tokens();
    const Geometry geometry{32, 8, 128, (2 * n_tokens + 255) / 256 * 256, 2, layout.type, layout.v_trans};
    const uint64_t plane_bytes = ggml_row_size(layout.type, 8 * 128) * geometry.kv_size;
    const uint64_t n_pieces = layout.v_trans && layout.run > 0 ? uint64_t{32} * 1024 * n_tokens / layout.run : 0;
    // llama.cpp keeps 32 bytes for each piece until the call ends, and half as much again while the list grows.
    const uint64_t need = 64 * plane_bytes * 2 + n_pieces * 32 * 3 / 2;
    if (need > memory_bytes("MemAvailable")) {
        fprintf(stderr, "%s: skipped, it needs %.1f GiB of memory and %.1f are available\n", layout.name,
                static_cast<double>(need) / (1 << 30), static_cast<double>(memory_bytes("MemAvailable")) / (1 << 30));
        return;
    }

    Caches caches(geometry);
    llama_context * stock = caches.stock.get();
    kvs_context * kvstate = caches.kvstate.get();
    constexpr uint32_t NONE = LLAMA_STATE_SEQ_FLAGS_NONE;
    static_assert(NONE == KVS_STATE_SEQ_FLAGS_NONE &&
                  LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY == KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);

    // The holes belong to another sequence: a restore has to find the same cells again.
    const uint32_t run = layout.run == 0 ? n_tokens : layout.run;
    for (uint32_t p = 0; p < n_tokens; p += run) {
        for (const llama_seq_id seq_id : {0, 1}) {
            caches.place(Ubatch(seq_id, static_cast<llama_pos>(p), static_cast<llama_pos>(std::min(p + run, n_tokens))));
        }
    }
    caches.check_cells();
    caches.fill(1);

    // Both give the same bytes.
    const size_t size = llama_state_seq_get_size_ext(stock, 0, NONE);
    check(kvs_state_seq_get_size_ext(kvstate, 0, NONE) == size, "get_size differs");
    std::vector<uint8_t> state(size), out(size);
    check(llama_state_seq_get_data_ext(stock, state.data(), size, 0, NONE) == size, "llama.cpp's get_data failed");
    check(kvs_state_seq_get_data_ext(kvstate, out.data(), size, 0, NONE) == size, kvs_last_error());
    check(state == out, "get_data differs");

    // Both bring them back. The cells of one side are checked against the other's by reading with the other.
    uint64_t seed = 1;
    const auto check_restore = [&](const char * what, auto && restore) {
        caches.fill(++seed);
        restore();
        caches.check_cells();
        check(kvs_state_seq_get_data_ext(kvstate, out.data(), size, 0, NONE) == size && state == out,
              std::string(what) + " does not bring the state back");
    };
    const auto set_stock = [&] {
        check(llama_state_seq_set_data_ext(stock, state.data(), size, 0, NONE) == size, "llama.cpp's set_data failed");
    };
    const auto set_kvstate = [&] {
        check(kvs_state_seq_set_data_ext(kvstate, state.data(), size, 0, NONE) == size, kvs_last_error());
    };
    check_restore("llama.cpp's set_data", set_stock);
    check_restore("kvstate's set_data", set_kvstate);

    const TemporaryFolder folder(options.dir);
    const std::string stock_file = folder.file("stock"), kvstate_file = folder.file("kvstate");
    std::vector<llama_token> tokens(n_tokens), tokens_out(n_tokens);
    for (uint32_t i = 0; i < n_tokens; ++i) {
        tokens[i] = static_cast<llama_token>(i);
    }
    const auto save_stock = [&] {
        check(llama_state_seq_save_file(stock, stock_file.c_str(), 0, tokens.data(), n_tokens) > size,
              "llama.cpp's save_file failed");
    };
    const auto save_kvstate = [&] {
        check(kvs_state_seq_save_file(kvstate, kvstate_file.c_str(), 0, tokens.data(), n_tokens) > size,
              kvs_last_error());
    };
    size_t n_loaded = 0;
    const auto load_stock = [&] {
        check(llama_state_seq_load_file(stock, kvstate_file.c_str(), 0, tokens_out.data(), n_tokens, &n_loaded) > size,
              "llama.cpp's load_file failed");
    };
    const auto load_kvstate = [&] {
        check(kvs_state_seq_load_file(kvstate, kvstate_file.c_str(), 0, tokens_out.data(), n_tokens, &n_loaded) > size,
              kvs_last_error());
    };
    save_stock();
    save_kvstate();
    check(equal_files(stock_file, kvstate_file), "the files differ");
    fs::remove(stock_file);
    check_restore("llama.cpp's load_file", load_stock);
    check_restore("kvstate's load_file", load_kvstate);
    check(tokens_out == tokens && n_loaded == n_tokens, "load_file gives other tokens");

    const auto row = [&](const char * call) { return Row{layout.name, call, size, "", {}, {}}; };
    report.add(report.measure(
        row("get_size"), [&] { return per_call([&] { llama_state_seq_get_size_ext(stock, 0, NONE); }); },
        [&] { return per_call([&] { kvs_state_seq_get_size_ext(kvstate, 0, NONE); }); }));
    report.add(report.measure(
        row("get_data"),
        [&] { return seconds([&] { llama_state_seq_get_data_ext(stock, out.data(), size, 0, NONE); }); },
        [&] { return seconds([&] { kvs_state_seq_get_data_ext(kvstate, out.data(), size, 0, NONE); }); }));
    report.add(report.measure(
        row("set_data"), [&] { return seconds(set_stock); }, [&] { return seconds(set_kvstate); }));
    report.add(report.measure(
        row("load_file"), [&] { return seconds(load_stock); }, [&] { return seconds(load_kvstate); }));

    // One call gives both figures. Each file is synced before the other side's turn, which would wait for it.
    std::vector<double> stock_synced, kvstate_synced;
    const auto save_then_sync = [&](const std::string & file, auto && save, std::vector<double> & synced) {
        fs::remove(file);
        const double saved = seconds(save);
        synced.push_back(saved + seconds([&] { sync_file(file); }));
        return saved;
    };
    Row save = report.measure(
        row("save_file"), [&] { return save_then_sync(stock_file, save_stock, stock_synced); },
        [&] { return save_then_sync(kvstate_file, save_kvstate, kvstate_synced); });
    report.add(save);
    save.note = "then synced";
    save.stock = stock_synced;
    save.kvstate = kvstate_synced;
    report.add(save);

    constexpr uint32_t PARTIAL = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    check(kvs_state_seq_get_size_ext(kvstate, 0, PARTIAL) == 8, "a partial state of full attention is not 8 bytes");
    Row partial = row("get_data, PARTIAL_ONLY");
    partial.note = "llama.cpp writes it all, kvstate 8 bytes";
    report.add(report.measure(
        partial, [&] { return seconds([&] { llama_state_seq_get_data_ext(stock, out.data(), size, 0, PARTIAL); }); },
        [&] { return per_call([&] { kvs_state_seq_get_data_ext(kvstate, out.data(), size, 0, PARTIAL); }); }));
}

// --- memory calls --------------------------------------------------------------------------------------------

void memory_rows(Report & report, const Options & options, llama_seq_id n_seq) {
    constexpr llama_pos RUN = 64, UBATCH = 512, TAIL = 64;
    const uint32_t n_cells = options.n_cells();
    const llama_pos n_pos = static_cast<llama_pos>(n_cells - UBATCH) / n_seq;  // of each sequence
    const llama_seq_id seq = n_seq / 2, other = n_seq;

    Caches caches({1, 1, 32, n_cells, static_cast<uint32_t>(n_seq) + 1, GGML_TYPE_F16, false});
    llama_kv_cache & kv = *caches.kv;
    const kvs_memory_t mem = caches.memory();
    for (llama_pos p = 0; p < n_pos; p += RUN) {
        for (llama_seq_id s = 0; s < n_seq; ++s) {
            caches.place(Ubatch(s, p, std::min(p + RUN, n_pos)));
        }
    }
    caches.check_cells();

    const auto row = [&](const char * call) {
        return Row{std::to_string(n_cells >> 10) + "K cells, " + std::to_string(n_seq) +
                       (n_seq == 1 ? " sequence" : " sequences"),
                   call, 0, "", {}, {}};
    };
    // Each side does the call and then, untimed, takes it back; afterwards the cells have to be the same.
    const auto measure = [&](const char * call, auto && stock, auto && undo_stock, auto && kvstate,
                             auto && undo_kvstate) {
        const auto timed = [](auto && call, auto && undo) {
            const double t = seconds(call);
            undo();
            return t;
        };
        const Row done = report.measure(
            row(call), [&] { return timed(stock, undo_stock); }, [&] { return timed(kvstate, undo_kvstate); });
        caches.check_cells();
        report.add(done);
    };

    for (const auto & [call, p0] : {std::pair{"seq_rm, all of a sequence", llama_pos{0}},
                                    std::pair{"seq_rm, its last 64 positions", n_pos - TAIL}}) {
        const Ubatch removed(seq, p0, n_pos);
        const llama_pos from = p0;
        measure(
            call, [&] { kv.seq_rm(seq, from, -1); }, [&] { caches.place_stock(removed); },
            [&] { kvs_memory_seq_rm(mem, seq, from, -1); }, [&] { caches.place_kvstate(removed); });
    }
    measure(
        "seq_cp, all of a sequence", [&] { kv.seq_cp(seq, other, -1, -1); }, [&] { kv.seq_rm(other, -1, -1); },
        [&] { kvs_memory_seq_cp(mem, seq, other, -1, -1); }, [&] { kvs_memory_seq_rm(mem, other, -1, -1); });
    measure(
        "seq_add, all of a sequence", [&] { kv.seq_add(seq, -1, -1, 1); }, [&] { kv.seq_add(seq, -1, -1, -1); },
        [&] { kvs_memory_seq_add(mem, seq, -1, -1, 1); }, [&] { kvs_memory_seq_add(mem, seq, -1, -1, -1); });

    // seq_add has sent the search back to cell 0, as a context shift does, and the free cells are the last ones.
    const auto find = [&](const char * call, const Ubatch & ubatch) {
        const llama_kv_cache::slot_info found = kv.find_slot(ubatch.stock, false);
        std::vector<uint32_t> cells(found.size());
        check(kvs_slot_cells(caches.find_kvstate(ubatch).get(), 0, cells.data(), cells.size()));
        check(cells == found.idxs[0], std::string(call) + ": llama.cpp and kvstate find other cells");
        report.add(report.measure(
            row(call), [&] { return per_call([&] { kv.find_slot(ubatch.stock, false); }); },
            [&] { return per_call([&] { caches.find_kvstate(ubatch); }); }));
    };
    find("slot search, 512 cells behind the used ones", Ubatch(seq, n_pos, n_pos + UBATCH));

    const Ubatch next(seq, n_pos, n_pos + 1);
    caches.place(next);
    kv.seq_rm(seq, n_pos, -1);
    kvs_memory_seq_rm(mem, seq, n_pos, -1);
    find("slot search, the next cell", next);
}

Options parse(int argc, char ** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        const auto value = [&]() -> std::string {
            check(i + 1 < argc, name + " needs a value");
            return argv[++i];
        };
        if (name == "--quick") {
            options.quick = true;
        } else if (name == "--only") {
            options.only = value();
        } else if (name == "--json") {
            options.json = value();
        } else if (name == "--dir") {
            options.dir = value();
        } else if (name == "--llama") {
            options.llama = value();
        } else if (name == "--kvstate") {
            options.kvstate = value();
        } else {
            throw std::runtime_error("unknown option " + name);
        }
    }
    return options;
}

}  // namespace

int main(int argc, char ** argv) {
    try {
        const Options options = parse(argc, argv);
        llama_log_set(
            [](ggml_log_level level, const char * text, void *) {
                if (level == GGML_LOG_LEVEL_ERROR) {
                    fputs(text, stderr);
                }
            },
            nullptr);
        Report report(options);
        for (const Layout & layout : LAYOUTS) {
            if (std::string(layout.name).find(options.only) != std::string::npos) {
                state_rows(report, options, layout);
            }
        }
        for (const llama_seq_id n_seq : {1, 8, 64}) {
            if (std::string("sequences").find(options.only) != std::string::npos) {
                memory_rows(report, options, n_seq);
            }
        }
        if (!options.json.empty()) {
            report.write_json();
        }
        return 0;
    } catch (const std::exception & error) {
        fprintf(stderr, "bench-llama: %s\n", error.what());
        return 1;
    }
}
