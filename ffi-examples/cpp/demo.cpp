// A server's day with kvstate: a prompt with checkpoints, an answer, an edit of the history, a slot file that
// is saved in the background too, another process that takes it over and edits the history again, a slot file
// of llama.cpp, and files that are damaged or another's. The server's cache is on the first CUDA device if
// there is one. Every step is compared, bit for bit, with a run in host memory that was never interrupted;
// the program fails if one differs.
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
constexpr size_t later_edit_at = 210;  // and again, after the restart
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

Tokens edited(Tokens prompt, size_t at, uint32_t seed) {
    const Tokens edit = typed(seed, n_edit);
    std::copy(edit.begin(), edit.end(), prompt.begin() + long(at));
    return prompt;
}

Tokens edited_prompt() {
    return edited(typed(1, n_prompt), edit_at, 2);
}

// What the second process makes of the prompt that it finds in the slot file.
Tokens prompt_edited_again(const Tokens &prompt) {
    return edited(prompt, later_edit_at, 6);
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

    // A row of what must not be equal.
    void control(const std::string &step, size_t computed, bool equal) {
        all_well = all_well && !equal;
        row(step, {{}, {}, computed, equal ? "YES?" : "no, as it must be"});
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

// Decodes a prompt from a token on, with a checkpoint after every ubatch.
struct Prompt {
    Transcript heard = {};
    double decode_ms = 0.0;
    double checkpoints_ms = 0.0;

    Prompt(Engine &engine, const Tokens &prompt, size_t from, Checkpoints &checkpoints) {
        for (size_t done = from; done < prompt.size(); done += n_ubatch) {
            const size_t end = std::min(prompt.size(), done + n_ubatch);
            const Timer decode;
            heard.add(listen(engine, user, part(prompt, done, end)));
            decode_ms += decode.ms();
            const Timer save;
            checkpoints[end] = engine.checkpoint(user);
            checkpoints_ms += save.ms();
        }
    }
};

// Decodes the first prompt, and answers it.
void prompt_and_answer(Engine &engine, Checkpoints &checkpoints, const Transcript &expected, Report &report) {
    const Prompt prompt(engine, typed(1, n_prompt), 0, checkpoints);
    const size_t n = checkpoints.size();
    report.row("prompt", {{}, prompt.decode_ms, n_prompt, report.must(equal(prompt.heard, expected, 0))});
    report.row(std::to_string(n) + " checkpoints of it, each",
               {checkpoints[n_ubatch].state.size(), prompt.checkpoints_ms / double(n)});

    const Timer timer;
    const Transcript said = answer(engine, user, prompt.heard.logits.back(), n_answer);
    report.row("answer", {{}, timer.ms(), n_answer, report.must(equal(said, expected, n_prompt))});
}

// What seq_rm alone gives: the window before the edit was in cells that have been used again.
Transcript with_seq_rm_alone(const Transformer &model, const Bytes &state, const Tokens &prompt, size_t at) {
    Engine engine = server_engine(model);
    engine.restore(user, state, KVS_STATE_SEQ_FLAGS_NONE);
    engine.remove_tail(user, kvs_pos(at));
    return listen(engine, user, part(prompt, at, prompt.size()));
}

// What came of an edit of the history.
struct Edited {
    // All of 8 bytes, so that it is written without padding.
    struct Figures {
        size_t at = 0;
        int64_t oldest = 0;  // position that the SWA cache still had
        size_t whole_bytes = 0;
        double whole_ms = 0.0;
        size_t from = 0;  // where the conversation went on
        size_t checkpoint_bytes = 0;
        double restore_ms = 0.0;
        double decode_ms = 0.0;
        double answer_ms = 0.0;
    };
    Figures figures = {};
    Transcript heard = {};
    Transcript said = {};
    Transcript with_seq_rm_alone = {};
};

// The user changes the history at a token: back to the newest checkpoint before it, and on from there.
Edited edit(Engine &engine, const Transformer &model, Checkpoints &checkpoints, const Tokens &prompt,
            size_t at) {
    Edited edited;
    Edited::Figures &figures = edited.figures;
    figures.at = at;
    figures.oldest = kvs_memory_seq_pos_min(engine.memory(), user);
    const Timer save;
    const Bytes whole = engine.save(user, KVS_STATE_SEQ_FLAGS_NONE);
    figures.whole_ms = save.ms();
    figures.whole_bytes = whole.size();
    edited.with_seq_rm_alone = with_seq_rm_alone(model, whole, prompt, at);

    const auto behind = checkpoints.upper_bound(at);
    if (behind == checkpoints.begin()) {
        throw std::runtime_error("no checkpoint is old enough");
    }
    const auto &[from, checkpoint] = *std::prev(behind);
    const Timer restore;
    engine.restore(user, checkpoint.state, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    engine.remove_tail(user, kvs_pos(from));
    figures.restore_ms = restore.ms();
    figures.from = from;
    figures.checkpoint_bytes = checkpoint.state.size();
    checkpoints.erase(behind, checkpoints.end());  // of a text that is no more

    const Prompt rest(engine, prompt, from, checkpoints);
    figures.decode_ms = rest.decode_ms;
    edited.heard = rest.heard;
    const Timer again;
    edited.said = answer(engine, user, rest.heard.logits.back(), n_answer);
    figures.answer_ms = again.ms();
    return edited;
}

// expected: the conversation with the edited prompt.
void report_edit(const Edited &edited, const std::string &who, const Transcript &expected, Report &report) {
    const Edited::Figures &figures = edited.figures;
    const size_t at = figures.at;
    const size_t from = figures.from;
    report.title(who + " edits token " + std::to_string(at) + ". Its window begins at " +
                 std::to_string(at + 1 - Engine::n_swa) + "; the SWA cache has forgotten all before " +
                 std::to_string(figures.oldest) + ".");
    report.row("the whole state in memory, for comparison", {figures.whole_bytes, figures.whole_ms});
    report.row("back to the checkpoint at " + std::to_string(from) + ", seq_rm behind it",
               {figures.checkpoint_bytes, figures.restore_ms});
    report.row("the rest of the prompt",
               {{}, figures.decode_ms, n_prompt - from, report.must(equal(edited.heard, expected, from))});
    report.row("  without kvstate it would have cost", {{}, {}, n_prompt});
    // A control: the checkpoint was needed, and the comparison can fail.
    report.control("  with seq_rm alone", n_prompt - at, equal(edited.with_seq_rm_alone, expected, at));
    report.row("another answer",
               {{}, figures.answer_ms, n_answer, report.must(equal(edited.said, expected, n_prompt))});
}

// What the second process hands back to the first.
struct Resumed {
    struct Figures {
        double load_ms = 0.0;
        double decode_ms = 0.0;
        int64_t verified = KVS_VERIFY_NONE;
        size_t n_note = 0;
    };
    Figures figures = {};
    Tokens tokens = {};       // of the slot file
    Tokens checkpoints = {};  // taken behind so many of them
    Transcript user = {};
    Transcript other_user = {};
    Edited edited = {};  // by the first user
};

template <typename T> void put(std::ostream &out, const T *values, size_t n) {
    out.write(reinterpret_cast<const char *>(values), std::streamsize(n * sizeof(T)));
}

template <typename T> void get(std::istream &in, T *values, size_t n) {
    in.read(reinterpret_cast<char *>(values), std::streamsize(n * sizeof(T)));
}

void put(std::ostream &out, const Tokens &tokens) {
    const size_t n = tokens.size();
    put(out, &n, 1);
    put(out, tokens.data(), n);
}

void get(std::istream &in, Tokens &tokens) {
    size_t n = 0;
    get(in, &n, 1);
    tokens.resize(n);
    get(in, tokens.data(), n);
}

void put(std::ostream &out, const Transcript &transcript) {
    put(out, transcript.tokens);
    for (const Vector &logits : transcript.logits) {
        put(out, logits.data(), Transformer::n_vocab);
    }
}

void get(std::istream &in, Transcript &transcript) {
    get(in, transcript.tokens);
    transcript.logits.assign(transcript.tokens.size(), Vector(Transformer::n_vocab));
    for (Vector &logits : transcript.logits) {
        get(in, logits.data(), Transformer::n_vocab);
    }
}

Tokens taken_at(const Checkpoints &checkpoints) {
    Tokens n_tokens;
    for (const auto &[at, checkpoint] : checkpoints) {
        n_tokens.push_back(kvs_token(at));
    }
    return n_tokens;
}

// The second process: it is already busy with another user, so that the restored sequence comes to lie in
// other cells than before. What it knows of the conversation is in the slot file.
void resume(const Transformer &model, const char *slot_file, const char *out_file) {
    Engine engine = server_engine(model);
    Resumed resumed;
    resumed.other_user = listen(engine, other_user, typed(4, n_other));

    const Fingerprint fingerprint = engine.fingerprint();
    const Timer load;
    const LoadedSlot slot(engine.ctx(), slot_file, user, careful(fingerprint));
    resumed.figures.load_ms = load.ms();
    resumed.figures.verified = slot->verified;
    resumed.figures.n_note = slot->n_note;
    resumed.tokens = slot.tokens();
    Checkpoints checkpoints = slot.checkpoints();
    resumed.checkpoints = taken_at(checkpoints);

    const Timer decode;
    resumed.user = listen(engine, user, typed(3, n_next));
    resumed.user.add(answer(engine, user, resumed.user.logits.back(), n_next_answer));
    resumed.figures.decode_ms = decode.ms();

    const Tokens prompt = prompt_edited_again(part(resumed.tokens, 0, n_prompt));
    resumed.edited = edit(engine, model, checkpoints, prompt, later_edit_at);
    resumed.other_user.add(listen(engine, other_user, typed(5, n_other_later)));

    std::ofstream out(out_file, std::ios::binary);
    put(out, &resumed.figures, 1);
    put(out, resumed.tokens);
    put(out, resumed.checkpoints);
    put(out, resumed.user);
    put(out, resumed.other_user);
    put(out, &resumed.edited.figures, 1);
    put(out, resumed.edited.heard);
    put(out, resumed.edited.said);
    put(out, resumed.edited.with_seq_rm_alone);
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
    get(in, &resumed.figures, 1);
    get(in, resumed.tokens);
    get(in, resumed.checkpoints);
    get(in, resumed.user);
    get(in, resumed.other_user);
    get(in, &resumed.edited.figures, 1);
    get(in, resumed.edited.heard);
    get(in, resumed.edited.said);
    get(in, resumed.edited.with_seq_rm_alone);
    if (!in) {
        throw std::runtime_error("the second process wrote too little");
    }
    return resumed;
}

// The runs that were never interrupted.
struct Expected {
    Transcript first;   // the prompt and its answer
    Transcript second;  // the prompt, edited, and on after the restart
    Transcript third;   // the prompt, edited again
    Transcript other;   // another user's conversation

    explicit Expected(const Transformer &model)
        : first(Uninterrupted(model).hears(typed(1, n_prompt)).says(n_answer).so_far()),
          second(Uninterrupted(model)
                     .hears(edited_prompt())
                     .says(n_answer)
                     .hears(typed(3, n_next))
                     .says(n_next_answer)
                     .so_far()),
          third(Uninterrupted(model).hears(prompt_edited_again(edited_prompt())).says(n_answer).so_far()),
          other(Uninterrupted(model).hears(typed(4, n_other)).hears(typed(5, n_other_later)).so_far()) {}
};

// The user's slot file again, while another user's prompt is decoded.
void save_in_background(Engine &engine, const SlotToSave &slot, const TemporaryDirectory &directory,
                        const Transcript &expected_of_other, Report &report) {
    report.title("Another user comes; the slot file is saved once more, in the background.");
    const std::string file = directory.file("background.slot");
    const Timer save;
    const Job job = engine.save_slot_start(file, user, slot);
    report.row("the slot copied, its save begun", {{}, save.ms()});

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

// "64, 128"
std::string list(const Tokens &numbers) {
    std::string text;
    for (const kvs_token number : numbers) {
        text += (text.empty() ? "" : ", ") + std::to_string(number);
    }
    return text;
}

void save_and_resume(Engine &engine, const Tokens &tokens, const Checkpoints &checkpoints,
                     const char *program, const TemporaryDirectory &directory, const Expected &expected,
                     Report &report) {
    const std::string slot_file = directory.file("user.slot");
    const Fingerprint fingerprint = engine.fingerprint();
    const SlotToSave slot(tokens, checkpoints, fingerprint);
    const Timer save;
    const size_t bytes = engine.save_slot(slot_file, user, slot);
    report.row("slot file written, synced and renamed", {bytes, save.ms()});

    save_in_background(engine, slot, directory, expected.other, report);
    const Resumed resumed = run_resume(program, slot_file, directory.file("resumed"));
    report.title("A second process, busy with another user, takes the slot file over.");
    const bool verified = resumed.figures.verified == KVS_VERIFY_FULL && resumed.figures.n_note == 0;
    const bool restored = resumed.tokens == tokens && resumed.checkpoints == taken_at(checkpoints);
    report.row("slot file loaded beside the other user's sequence",
               {bytes, resumed.figures.load_ms, {}, report.must(restored && verified)});
    report.note(std::to_string(resumed.tokens.size()) + " tokens; checkpoints at " +
                list(resumed.checkpoints) + "; " + (verified ? "every byte verified" : "not verified"));
    const size_t n = resumed.user.tokens.size();
    const std::string same = report.must(equal(resumed.user, expected.second, tokens.size()));
    report.row("the user's next message and its answer", {{}, resumed.figures.decode_ms, n, same});
    report.row("  without kvstate it would have cost", {{}, {}, tokens.size() + n});
    report_edit(resumed.edited, "There the user", expected.third, report);
    const std::string same_other = report.must(equal(resumed.other_user, expected.other, 0));
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

// Why a slot file is refused; empty: it was loaded.
std::string refusal(Engine &engine, const std::string &file, const kvs_slot_load_params &params) {
    try {
        const LoadedSlot loaded(engine.ctx(), file, user, params);
        return "";
    } catch (const std::exception &error) {
        return error.what();
    }
}

// Tries to load a file that must be refused, and looks whether that left a trace in the cache. reason: what
// has to be named.
void refuse(Engine &engine, const std::string &what, const std::string &file,
            const kvs_slot_load_params &params, const std::string &reason, Report &report) {
    const Bytes before = engine.save(user, KVS_STATE_SEQ_FLAGS_NONE);
    const Timer timer;
    const std::string refused = refusal(engine, file, params);
    const double ms = timer.ms();
    const bool named = refused.find(reason) != std::string::npos;
    const bool untouched = engine.save(user, KVS_STATE_SEQ_FLAGS_NONE) == before;
    report.row(what, {fs::file_size(file), ms, {}, report.must(named && untouched)});
    report.note(refused.empty() ? "it was loaded" : refused);
}

// The next message, of an engine that has loaded the user's slot.
bool equal_next(Engine &engine, const Transcript &expected) {
    return equal(listen(engine, user, typed(3, n_next)), expected, n_prompt + n_answer);
}

void refuse_damaged(Engine &engine, const Transformer &model, const TemporaryDirectory &directory,
                    const Transcript &expected, Report &report) {
    const Bytes good = read_file(directory.file("user.slot"));
    const Fingerprint fingerprint = engine.fingerprint();
    const kvs_slot_load_params params = careful(fingerprint);

    const std::string cut = directory.file("cut.slot");
    write_file(cut, Bytes(good.begin(), good.begin() + long(good.size() / 2)));
    refuse(engine, "half a file", cut, params, "truncated", report);

    // Where the parts of the file are: header and tokens, the state, the checkpoints, the checksums.
    size_t state_begin = 0;
    size_t checkpoints_begin = 0;
    {
        Engine other = server_engine(model);
        const LoadedSlot loaded(other.ctx(), directory.file("user.slot"), user, params);
        checkpoints_begin = loaded->append_start;
        state_begin = checkpoints_begin - loaded->target_size;
    }
    const auto flipped = [&](const char *name, size_t at) {
        Bytes bytes = good;
        bytes[at] ^= 0x01;
        const std::string file = directory.file(name);
        write_file(file, bytes);
        return file;
    };

    // The high byte of a float in the middle of the state, where K and V are.
    const std::string tensor = flipped("tensor.slot", (state_begin + checkpoints_begin) / 2 | 3);
    refuse(engine, "one bit flipped, in a tensor", tensor, params, "crc32c of the memory state", report);
    // A control: nothing but the checksum finds it, and the model would have said something else.
    Engine careless = server_engine(model);
    const LoadedSlot wrong(careless.ctx(), tensor, user, kvs_slot_load_default_params());
    report.control("  if nothing is verified, the next message", n_next, equal_next(careless, expected));

    const std::string appendix = flipped("appendix.slot", checkpoints_begin + 100);
    Engine another = server_engine(model);
    const Timer timer;
    const LoadedSlot loaded(another.ctx(), appendix, user, params);
    const double ms = timer.ms();
    const bool left_out = loaded->n_checkpoint == 0 && loaded->n_note == 1;
    report.row("one bit flipped, in a checkpoint: the state loads",
               {good.size(), ms, n_next, report.must(left_out && equal_next(another, expected))});
    for (size_t i = 0; i < loaded->n_note; ++i) {
        report.note(loaded->notes[i]);
    }
}

void refuse_others(Engine &engine, const std::string &slot_file_of_llama_cpp,
                   const TemporaryDirectory &directory, Report &report) {
    const Fingerprint fingerprint = engine.fingerprint();
    const kvs_slot_load_params params = careful(fingerprint);

    // The same sizes, other weights: the state would fit.
    const Transformer other_model(20250102);
    Engine other = server_engine(other_model);
    const Fingerprint fingerprint_of_other = other.fingerprint();
    const Tokens tokens = typed(1, n_ubatch);
    listen(other, user, tokens);
    const std::string file = directory.file("other.slot");
    other.save_slot(file, user, SlotToSave(tokens, {}, fingerprint_of_other));
    refuse(engine, "a file of a model with other weights", file, params, "model: the state has", report);

    refuse(engine, "llama.cpp's file, of another model", slot_file_of_llama_cpp, params,
           "mismatched key type", report);

    // This model's own state, in a file that does not say so.
    const std::string plain = directory.file("plain.slot");
    check(kvs_state_seq_save_file(engine.ctx(), plain.c_str(), user, nullptr, 0));
    refuse(engine, "a file without identity and checksums", plain, params, "are required", report);
}

int run(const Transformer &model, const char *program, const std::string &slot_file_of_llama_cpp) {
    const Expected expected(model);
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
    Checkpoints checkpoints;
    prompt_and_answer(engine, checkpoints, expected.first, report);
    const Edited edited = edit(engine, model, checkpoints, edited_prompt(), edit_at);
    report_edit(edited, "The user", expected.second, report);
    Tokens tokens = edited_prompt();
    tokens.insert(tokens.end(), edited.said.tokens.begin(), edited.said.tokens.end());
    save_and_resume(engine, tokens, checkpoints, program, directory, expected, report);
    report.title("A slot file that llama.cpp wrote.");
    show_llama_cpp(slot_file_of_llama_cpp, directory, report);
    report.title("Files that are damaged. The cache keeps what it held, byte for byte, when one is refused.");
    refuse_damaged(engine, model, directory, expected.second, report);
    report.title("Files that are another's, and are refused.");
    refuse_others(engine, slot_file_of_llama_cpp, directory, report);
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
