// A server's day with kvstate: a prompt with checkpoints, an answer, an edit of the history, a slot file that
// another process takes over, one that is saved in the background, a slot file of llama.cpp, and files that are
// refused. The server's cache is on the first CUDA device if there is one. Every step is compared, bit for bit,
// with a run in host memory that was never interrupted; the program fails if one differs.
//
//   demo SLOT_FILE_OF_LLAMA_CPP     the file is tests/fixtures/tiny2x64_kf16_vf16_n64_none.slot

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine.hpp"

extern char **environ;

namespace demo {

namespace fs = std::filesystem;

constexpr uint32_t n_ubatch = 64;
constexpr size_t n_prompt = 300;
constexpr size_t n_answer = 60;
constexpr size_t edit_at = 150;  // where the user rewrites n_edit tokens
constexpr size_t n_edit = 10;
constexpr size_t n_next = 12;  // tokens of the user's next message, after the restart
constexpr size_t n_next_answer = 40;
constexpr size_t n_other = 100;  // tokens of the other user before the slot file is loaded
constexpr size_t n_other_later = 20;
constexpr kvs_seq_id user = 0;
constexpr kvs_seq_id other_user = 1;

// What a person types: tokens that look random, the same in every process.
Tokens typed(uint32_t seed, size_t n) {
    std::mt19937 random(seed);
    Tokens tokens(n);
    for (kvs_token &token : tokens) {
        token = kvs_token(random() % Transformer::n_vocab);
    }
    return tokens;
}

Tokens part(const Tokens &tokens, size_t begin, size_t end) {
    return Tokens(tokens.begin() + long(begin), tokens.begin() + long(end));
}

Tokens edited_prompt() {
    Tokens prompt = typed(1, n_prompt);
    const Tokens edit = typed(2, n_edit);
    std::copy(edit.begin(), edit.end(), prompt.begin() + edit_at);
    return prompt;
}

// Tokens with the logits that were computed for each.
struct Transcript {
    Tokens tokens;
    std::vector<Vector> logits;

    void add(const Transcript &more) {
        tokens.insert(tokens.end(), more.tokens.begin(), more.tokens.end());
        logits.insert(logits.end(), more.logits.begin(), more.logits.end());
    }
};

Transcript listen(Engine &engine, kvs_seq_id seq, const Tokens &tokens) {
    return {tokens, engine.decode(seq, tokens)};
}

// n tokens, each the likeliest after the one before. logits: those of the last token that was heard.
Transcript answer(Engine &engine, kvs_seq_id seq, Vector logits, size_t n) {
    Transcript answer;
    for (size_t i = 0; i < n; ++i) {
        const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
        answer.add(listen(engine, seq, {kvs_token(best)}));
        logits = answer.logits.back();
    }
    return answer;
}

// A part of a conversation against the uninterrupted run of all of it. Floats are compared as bytes.
bool equal(const Transcript &part, const Transcript &whole, size_t at) {
    if (part.tokens.empty() || at + part.tokens.size() > whole.tokens.size()) {
        return false;
    }
    for (size_t i = 0; i < part.tokens.size(); ++i) {
        const Vector &a = part.logits[i];
        const Vector &b = whole.logits[at + i];
        if (part.tokens[i] != whole.tokens[at + i] ||
            std::memcmp(a.data(), b.data(), b.size() * sizeof(float)) != 0) {
            return false;
        }
    }
    return true;
}

// A run that is never interrupted: one token at a time, in a cache so large that no cell is used twice.
class Uninterrupted {
public:
    explicit Uninterrupted(const Transformer &model) : engine(model, 1, Engine::n_ctx) {}

    Uninterrupted &hears(const Tokens &tokens) {
        transcript.add(listen(engine, user, tokens));
        return *this;
    }
    Uninterrupted &says(size_t n) {
        transcript.add(answer(engine, user, transcript.logits.back(), n));
        return *this;
    }
    const Transcript &so_far() const { return transcript; }

private:
    Engine engine;
    Transcript transcript;
};

class Timer {
public:
    double ms() const {
        return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    }

private:
    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
};

// The table that the demo prints, and whether everything in it was as it must be.
class Report {
public:
    struct Row {
        std::optional<size_t> bytes = {};
        std::optional<double> ms = {};
        std::optional<size_t> computed = {};
        std::string verdict = {};
    };

    void title(const std::string &text) const { std::printf("%s\n", text.c_str()); }

    void note(const std::string &text) const { std::printf("    %s\n", text.c_str()); }

    void head() const { print("Step", "bytes", "time", "computed", "equal, bit for bit"); }

    void row(const std::string &step, const Row &row) const {
        char time[32] = "";
        if (row.ms) {
            std::snprintf(time, sizeof time, "%.2f ms", *row.ms);
        }
        print("  " + step, row.bytes ? grouped(*row.bytes) : "", time,
              row.computed ? grouped(*row.computed) : "", row.verdict);
    }

    // "yes" or "NO", and remembers a NO.
    std::string must(bool ok) {
        all_well = all_well && ok;
        return ok ? "yes" : "NO";
    }

    bool well() const { return all_well; }

    static std::string grouped(size_t n) {
        std::string digits = std::to_string(n);
        for (size_t i = digits.size(); i > 3; i -= 3) {
            digits.insert(i - 3, ",");
        }
        return digits;
    }

private:
    static void print(const std::string &step, const std::string &bytes, const std::string &time,
                      const std::string &computed, const std::string &verdict) {
        char line[256];
        std::snprintf(line, sizeof line, "%-52s %8s %10s %9s  %s", step.c_str(), bytes.c_str(), time.c_str(),
                      computed.c_str(), verdict.c_str());
        const std::string text = line;
        std::printf("%s\n", text.substr(0, text.find_last_not_of(' ') + 1).c_str());
    }

    bool all_well = true;
};

class TemporaryDirectory {
public:
    TemporaryDirectory() {
        std::string name = fs::temp_directory_path() / "kvstate-demo-XXXXXX";
        if (mkdtemp(name.data()) == nullptr) {
            throw std::runtime_error("no temporary directory: " + name);
        }
        path = name;
    }
    ~TemporaryDirectory() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
    TemporaryDirectory(const TemporaryDirectory &) = delete;
    TemporaryDirectory &operator=(const TemporaryDirectory &) = delete;

    std::string file(const char *name) const { return path / name; }

private:
    fs::path path;
};

Bytes read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw std::runtime_error("cannot read " + path);
    }
    return Bytes(std::istreambuf_iterator<char>(file), {});
}

void write_file(const std::string &path, const Bytes &bytes) {
    std::ofstream file(path, std::ios::binary);
    if (!file.write(reinterpret_cast<const char *>(bytes.data()), std::streamsize(bytes.size()))) {
        throw std::runtime_error("cannot write " + path);
    }
}

// Where servers have their caches: on device 0 if that can be used.
int32_t server_device() {
    static const int32_t device = kvs_device_check(0) == KVS_STATUS_OK ? 0 : KVS_DEVICE_HOST;
    return device;
}

// An engine as a server has it: the SWA section is as small as llama.cpp makes it.
Engine server_engine(const Transformer &model) {
    const uint32_t cells = kvs_swa_kv_size(Engine::n_ctx, Engine::n_swa, Engine::n_seq_max, n_ubatch, true);
    return Engine(model, n_ubatch, cells, server_device());
}

// Partial states, by the number of tokens before them.
using Checkpoints = std::map<size_t, Bytes>;

// Decodes a prompt, with a checkpoint after every ubatch, and answers it.
Checkpoints prompt_and_answer(Engine &engine, const Transcript &expected, Report &report) {
    const Tokens prompt = typed(1, n_prompt);
    Checkpoints checkpoints;
    Transcript heard;
    double decode_ms = 0.0;
    double save_ms = 0.0;
    for (size_t done = 0; done < n_prompt; done += n_ubatch) {
        const size_t end = std::min(n_prompt, done + n_ubatch);
        const Timer decode;
        heard.add(listen(engine, user, part(prompt, done, end)));
        decode_ms += decode.ms();
        const Timer save;
        checkpoints[end] = engine.save(user, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        save_ms += save.ms();
    }
    const size_t n = checkpoints.size();
    report.row("prompt", {{}, decode_ms, n_prompt, report.must(equal(heard, expected, 0))});
    report.row(std::to_string(n) + " checkpoints of it, each",
               {checkpoints[n_ubatch].size(), save_ms / double(n)});

    const Timer timer;
    const Transcript said = answer(engine, user, heard.logits.back(), n_answer);
    report.row("answer", {{}, timer.ms(), n_answer, report.must(equal(said, expected, n_prompt))});
    return checkpoints;
}

// What seq_rm alone gives: the window before the edit was in cells that have been used again.
bool equal_with_seq_rm_alone(const Transformer &model, const Bytes &state, const Transcript &expected) {
    Engine engine = server_engine(model);
    engine.restore(user, state, KVS_STATE_SEQ_FLAGS_NONE);
    engine.remove_tail(user, edit_at);
    return equal(listen(engine, user, part(edited_prompt(), edit_at, n_prompt)), expected, edit_at);
}

// The user changes the history: back to the newest checkpoint before the edit, and on from there. Gives the
// tokens that the cache holds then.
Tokens edit(Engine &engine, const Transformer &model, const Checkpoints &checkpoints,
            const Transcript &expected, Report &report) {
    const Timer save;
    const Bytes whole = engine.save(user, KVS_STATE_SEQ_FLAGS_NONE);
    report.row("the whole state in memory, for comparison", {whole.size(), save.ms()});

    const kvs_pos oldest = kvs_memory_seq_pos_min(engine.memory(), user);
    report.title("The user edits token " + std::to_string(edit_at) + ". Its window begins at " +
                 std::to_string(edit_at + 1 - Engine::n_swa) + "; the SWA cache has forgotten all before " +
                 std::to_string(oldest) + ".");
    const auto &[from, checkpoint] = *std::prev(checkpoints.upper_bound(edit_at));
    const Timer restore;
    engine.restore(user, checkpoint, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    engine.remove_tail(user, kvs_pos(from));
    report.row("back to the checkpoint at " + std::to_string(from) + ", seq_rm behind it",
               {checkpoint.size(), restore.ms()});

    const Timer decode;
    const Transcript heard = listen(engine, user, part(edited_prompt(), from, n_prompt));
    const double ms = decode.ms();
    report.row("the rest of the prompt",
               {{}, ms, n_prompt - from, report.must(equal(heard, expected, from))});
    report.row("  without kvstate it would have cost", {{}, {}, n_prompt});
    // A control: the checkpoint was needed, and the comparison can fail.
    const bool lucky = equal_with_seq_rm_alone(model, whole, expected);
    report.must(!lucky);
    report.row("  with seq_rm alone", {{}, {}, n_prompt - edit_at, lucky ? "YES?" : "no, as it must be"});

    const Timer again;
    const Transcript said = answer(engine, user, heard.logits.back(), n_answer);
    report.row("another answer", {{}, again.ms(), n_answer, report.must(equal(said, expected, n_prompt))});

    Tokens tokens = edited_prompt();
    tokens.insert(tokens.end(), said.tokens.begin(), said.tokens.end());
    return tokens;
}

// What the second process hands back to the first.
struct Resumed {
    double load_ms = 0.0;
    double decode_ms = 0.0;
    Transcript user;
    Transcript other_user;
};

template <typename T> void put(std::ostream &out, const T *values, size_t n) {
    out.write(reinterpret_cast<const char *>(values), std::streamsize(n * sizeof(T)));
}

template <typename T> void get(std::istream &in, T *values, size_t n) {
    in.read(reinterpret_cast<char *>(values), std::streamsize(n * sizeof(T)));
}

void put(std::ostream &out, const Transcript &transcript) {
    const size_t n = transcript.tokens.size();
    put(out, &n, 1);
    put(out, transcript.tokens.data(), n);
    for (const Vector &logits : transcript.logits) {
        put(out, logits.data(), Transformer::n_vocab);
    }
}

void get(std::istream &in, Transcript &transcript) {
    size_t n = 0;
    get(in, &n, 1);
    transcript.tokens.resize(n);
    get(in, transcript.tokens.data(), n);
    transcript.logits.assign(n, Vector(Transformer::n_vocab));
    for (Vector &logits : transcript.logits) {
        get(in, logits.data(), Transformer::n_vocab);
    }
}

// The second process: it is already busy with another user, so that the restored sequence comes to lie in
// other cells than before.
void resume(const Transformer &model, const char *slot_file, const char *out_file) {
    Engine engine = server_engine(model);
    Resumed resumed;
    resumed.other_user = listen(engine, other_user, typed(4, n_other));

    const Timer load;
    size_t n_tokens = 0;
    check(kvs_state_seq_load_file(engine.ctx(), slot_file, user, nullptr, 0, &n_tokens));
    Tokens tokens(n_tokens);
    check(kvs_state_seq_load_file(engine.ctx(), slot_file, user, tokens.data(), tokens.size(), &n_tokens));
    resumed.load_ms = load.ms();

    const Timer decode;
    resumed.user = listen(engine, user, typed(3, n_next));
    resumed.user.add(answer(engine, user, resumed.user.logits.back(), n_next_answer));
    resumed.decode_ms = decode.ms();
    resumed.other_user.add(listen(engine, other_user, typed(5, n_other_later)));

    std::ofstream out(out_file, std::ios::binary);
    put(out, &resumed.load_ms, 1);
    put(out, &resumed.decode_ms, 1);
    put(out, resumed.user);
    put(out, resumed.other_user);
    if (!out.flush()) {
        throw std::runtime_error(std::string("cannot write ") + out_file);
    }
}

Resumed run_resume(const char *program, const std::string &slot_file, const std::string &out_file) {
    const char *argv[] = {program, "resume", slot_file.c_str(), out_file.c_str(), nullptr};
    pid_t child = 0;
    int status = 0;
    if (posix_spawnp(&child, program, nullptr, nullptr, const_cast<char **>(argv), environ) != 0 ||
        waitpid(child, &status, 0) != child || status != 0) {
        throw std::runtime_error("the second process failed");
    }
    std::ifstream in(out_file, std::ios::binary);
    Resumed resumed;
    get(in, &resumed.load_ms, 1);
    get(in, &resumed.decode_ms, 1);
    get(in, resumed.user);
    get(in, resumed.other_user);
    if (!in) {
        throw std::runtime_error("the second process wrote too little");
    }
    return resumed;
}

// The user's slot file again, from a snapshot, while another user's prompt is decoded.
void save_in_background(Engine &engine, const Tokens &tokens, const TemporaryDirectory &directory,
                        const Transcript &expected_of_other, Report &report) {
    report.title("Another user comes; the slot file is saved once more, in the background.");
    const std::string file = directory.file("background.slot");
    const Timer take;
    const Snapshot snapshot = engine.snapshot(user);
    report.row("snapshot taken", {kvs_snapshot_size(snapshot.get()), take.ms()});

    kvs_job *started = nullptr;
    const Timer save;
    check(kvs_snapshot_save_file_start(snapshot.get(), file.c_str(), tokens.data(), tokens.size(), nullptr,
                                       &started));
    const Job job(started);
    const Timer decode;
    const Transcript heard = listen(engine, other_user, typed(4, n_other));
    const double ms = decode.ms();
    report.row("the other user's prompt, meanwhile",
               {{}, ms, n_other, report.must(equal(heard, expected_of_other, 0))});
    size_t bytes = 0;
    check(kvs_job_wait(job.get(), &bytes));
    const bool same = read_file(file) == read_file(directory.file("user.slot"));
    report.row("slot file saved in the background, by then", {bytes, save.ms(), {}, report.must(same)});
}

void save_and_resume(Engine &engine, const Tokens &tokens, const char *program,
                     const TemporaryDirectory &directory, const Transcript &expected,
                     const Transcript &expected_of_other, Report &report) {
    const std::string slot_file = directory.file("user.slot");
    const Timer save;
    const size_t bytes =
        check(kvs_state_seq_save_file(engine.ctx(), slot_file.c_str(), user, tokens.data(), tokens.size()));
    report.row("slot file written, synced and renamed", {bytes, save.ms()});

    save_in_background(engine, tokens, directory, expected_of_other, report);
    const Resumed resumed = run_resume(program, slot_file, directory.file("resumed"));
    report.title("A second process, busy with another user, takes the slot file over.");
    report.row("slot file loaded beside the other user's sequence", {bytes, resumed.load_ms});
    const size_t n = resumed.user.tokens.size();
    const std::string same = report.must(equal(resumed.user, expected, tokens.size()));
    report.row("the user's next message and its answer", {{}, resumed.decode_ms, n, same});
    report.row("  without kvstate it would have cost", {{}, {}, tokens.size() + n});
    const std::string same_other = report.must(equal(resumed.other_user, expected_of_other, 0));
    report.row("the other user, before and after", {{}, {}, resumed.other_user.tokens.size(), same_other});
}

std::string describe(const kvs_plane &plane) {
    const std::string type =
        plane.ggml_type == KVS_TYPE_F16 ? "f16" : "type " + std::to_string(plane.ggml_type);
    return std::to_string(plane.n_embd) + " x " + type;
}

// Tells what a loaded sequence 0 consists of, and whether each token has its cell.
bool describe(const kvs_context *ctx, const Tokens &tokens, uint32_t n_layer, const Report &report) {
    uint32_t n_kv = 0;
    check(kvs_n_kv(ctx, 0, 0, 1, &n_kv));
    std::map<kvs_pos, uint32_t> cell_of;
    for (uint32_t i = 0; i < n_kv; ++i) {
        kvs_cell cell;
        check(kvs_cell_get(ctx, 0, 0, i, &cell));
        if (cell.seqs[0] == 1) {
            cell_of[cell.pos] = i;
        }
    }
    std::string text = std::to_string(tokens.size()) + " tokens:";
    for (size_t i = 0; i < std::min<size_t>(tokens.size(), 12); ++i) {
        text += " " + std::to_string(tokens[i]);
    }
    report.note(text + " ...");
    if (cell_of.empty()) {
        return false;
    }
    report.note(std::to_string(cell_of.size()) + " cells of sequence 0, positions " +
                std::to_string(cell_of.begin()->first) + " to " + std::to_string(cell_of.rbegin()->first) +
                ", n_kv " + std::to_string(n_kv));
    text.clear();
    for (uint32_t il = 0; il < n_layer; ++il) {
        kvs_plane k;
        kvs_plane v;
        check(kvs_kv_plane(ctx, 0, 0, il, &k, &v));
        text += (il == 0 ? "layer " : "; layer ") + std::to_string(il) + ": K " + describe(k) + ", V " +
                describe(v);
    }
    report.note(text);
    return cell_of.size() == tokens.size();
}

// Loads a slot file that llama.cpp wrote, tells what is in it and writes it again.
void show_llama_cpp(const std::string &slot_file, const TemporaryDirectory &directory, Report &report) {
    const uint32_t n_layer = 2;
    const auto layers = layer_params(n_layer, KVS_TYPE_F16, 64);
    const Context context = new_context({kv_params(256, layers)}, 1, "llama");

    const Timer load;
    Tokens tokens(256);
    size_t n_tokens = 0;
    const size_t bytes = check(kvs_state_seq_load_file(context.get(), slot_file.c_str(), 0, tokens.data(),
                                                       tokens.size(), &n_tokens));
    tokens.resize(n_tokens);
    report.row("loaded", {bytes, load.ms()});
    const bool whole = describe(context.get(), tokens, n_layer, report);

    const std::string copy = directory.file("copy.slot");
    const Timer save;
    const size_t written =
        check(kvs_state_seq_save_file(context.get(), copy.c_str(), 0, tokens.data(), tokens.size()));
    const double ms = save.ms();
    const bool same = read_file(copy) == read_file(slot_file);
    report.row("written again", {written, ms, {}, report.must(whole && same)});
}

// Tries to load a file that must be refused, and looks whether that left a trace in the cache.
void refuse(Engine &engine, const std::string &what, const std::string &file, Report &report) {
    const Bytes before = engine.save(user, KVS_STATE_SEQ_FLAGS_NONE);
    Tokens tokens(Engine::n_ctx);
    size_t n_tokens = 0;
    const Timer timer;
    const bool refused = kvs_state_seq_load_file(engine.ctx(), file.c_str(), user, tokens.data(),
                                                 tokens.size(), &n_tokens) == 0;
    const double ms = timer.ms();
    const std::string reason = refused ? kvs_last_error() : "it was loaded";
    const bool untouched = engine.save(user, KVS_STATE_SEQ_FLAGS_NONE) == before;
    report.row(what, {fs::file_size(file), ms, {}, report.must(refused && untouched)});
    report.note(reason);
}

void refusals(Engine &engine, const std::string &slot_file_of_llama_cpp, const TemporaryDirectory &directory,
              Report &report) {
    const Bytes good = read_file(directory.file("user.slot"));
    const size_t n_tokens = n_prompt + n_answer;

    const std::string cut = directory.file("cut.slot");
    write_file(cut, Bytes(good.begin(), good.begin() + long(good.size() / 2)));
    refuse(engine, "half a file", cut, report);

    Bytes bytes = good;
    // Magic, version, token count, tokens, n_stream: the next four bytes are the number of cells.
    bytes[12 + 4 * n_tokens + 4 + 2] ^= 0x01;
    const std::string damaged = directory.file("damaged.slot");
    write_file(damaged, bytes);
    refuse(engine, "one bit flipped, in the number of cells", damaged, report);

    refuse(engine, "llama.cpp's file, of another model", slot_file_of_llama_cpp, report);
}

int run(const Transformer &model, const char *program, const std::string &slot_file_of_llama_cpp) {
    const Transcript first = Uninterrupted(model).hears(typed(1, n_prompt)).says(n_answer).so_far();
    const Transcript second = Uninterrupted(model)
                                  .hears(edited_prompt())
                                  .says(n_answer)
                                  .hears(typed(3, n_next))
                                  .says(n_next_answer)
                                  .so_far();
    const Transcript other =
        Uninterrupted(model).hears(typed(4, n_other)).hears(typed(5, n_other_later)).so_far();

    const TemporaryDirectory directory;
    Report report;
    if (server_device() == KVS_DEVICE_HOST) {
        report.title(std::string("The server's cache is in host memory: ") + kvs_last_error() + ".");
    } else {
        report.title("The server's cache is on CUDA device " + std::to_string(server_device()) + ".");
    }
    report.head();
    report.title("A server, with a transformer of 2 full and 2 SWA layers and a window of 64.");
    Engine engine = server_engine(model);
    const Checkpoints checkpoints = prompt_and_answer(engine, first, report);
    const Tokens tokens = edit(engine, model, checkpoints, second, report);
    save_and_resume(engine, tokens, program, directory, second, other, report);
    report.title("A slot file that llama.cpp wrote.");
    show_llama_cpp(slot_file_of_llama_cpp, directory, report);
    report.title("Files that are refused; the cache keeps what it held, byte for byte.");
    refusals(engine, slot_file_of_llama_cpp, directory, report);
    report.title(report.well() ? "All as in a run that was never interrupted."
                               : "FAILED: see the last column.");
    return report.well() ? 0 : 1;
}

}  // namespace demo

int main(int argc, char **argv) {
    try {
        const demo::Transformer model(20250101);
        if (argc == 4 && std::strcmp(argv[1], "resume") == 0) {
            demo::resume(model, argv[2], argv[3]);
            return 0;
        }
        if (argc == 2) {
            return demo::run(model, argv[0], argv[1]);
        }
        std::fprintf(stderr, "usage: %s SLOT_FILE_OF_LLAMA_CPP\n", argv[0]);
        return 2;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
        return 1;
    }
}
