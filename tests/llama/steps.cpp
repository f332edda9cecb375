#include "steps.hpp"

#include "session.hpp"

#include <ggml.h>
#include <gguf.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace {

constexpr llama_state_seq_flags none = LLAMA_STATE_SEQ_FLAGS_NONE;
constexpr llama_state_seq_flags partial_only = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
constexpr llama_state_seq_flags on_device = LLAMA_STATE_SEQ_FLAGS_ON_DEVICE;

long long number(size_t n) { return static_cast<long long>(n); }

// Decodes past a checkpoint, goes back to it, goes on.
Logits back_to(Session &session, const Bytes &checkpoint, llama_state_seq_flags flags, llama_pos n,
               Results &out, const std::string &name) {
    session.decode(saved_seq, n, 10);
    out.put("set_" + name, number(session.set(checkpoint, saved_seq, flags)));
    out.put("cut_" + name, llama_memory_seq_rm(session.memory(), saved_seq, n, -1));
    return session.go_on(saved_seq, n);
}

// A buffer that is too small is left alone; one that is large enough is written up to the size and no further.
void buffer_rules(Session &session, size_t size, Results &out) {
    Bytes buffer(size + 64, 0xa5);
    const auto untouched = [&](size_t from) {
        return std::all_of(buffer.begin() + static_cast<ptrdiff_t>(from), buffer.end(),
                           [](uint8_t byte) { return byte == 0xa5; });
    };
    out.put("get_short",
            number(llama_state_seq_get_data_ext(session.ctx(), buffer.data(), size - 1, saved_seq, none)));
    out.put("short_untouched", untouched(0));
    out.put("get_long",
            number(llama_state_seq_get_data_ext(session.ctx(), buffer.data(), buffer.size(), saved_seq, none)));
    out.put("long_untouched", untouched(size));
}

void round_trip(llama_model *model, const Case &the_case, Results &out) {
    Session never(model, the_case);
    never.fill(the_case.layout);
    const llama_pos n = never.pos_max(saved_seq) + 1;
    out.put("never", never.go_on(saved_seq, n));

    Session session(model, the_case);
    session.fill(the_case.layout);
    out.put("n_tokens", n);
    out.put("pos_min", session.pos_min(saved_seq));
    const Bytes state = session.get(saved_seq);
    const Bytes partial = session.get(saved_seq, partial_only);
    const Bytes whole = session.get_whole();
    const std::vector<llama_token> tokens = session.tokens(saved_seq, 50);
    const std::string slot = out.folder() / "slot.bin";
    out.put("save_file", number(llama_state_seq_save_file(session.ctx(), slot.c_str(), saved_seq, tokens.data(),
                                                          tokens.size())));
    out.put("none", state);
    out.put("partial", partial);
    out.put("whole", whole);
    buffer_rules(session, state.size(), out);

    const std::string nowhere = out.folder() / "missing" / "slot.bin";
    out.put("save_nowhere", number(llama_state_seq_save_file(session.ctx(), nowhere.c_str(), saved_seq,
                                                             tokens.data(), tokens.size())));

    // In place, with what the other sequences hold around it.
    const auto others = [&] { return std::pair{session.get(0), session.get(other_seq)}; };
    const auto others_before = others();
    llama_memory_seq_rm(session.memory(), saved_seq, -1, -1);
    out.put("set_in_place", number(session.set(state, saved_seq)));
    out.put("in_place_pos_min", session.pos_min(saved_seq));
    out.put("in_place", session.get(saved_seq));
    out.put("others_unchanged", others() == others_before);
    out.put("in_place", session.go_on(saved_seq, n));

    // Alone in an empty cache; over something else; as another sequence and back.
    llama_memory_clear(session.memory(), true);
    out.put("set_fresh", number(session.set(state, saved_seq)));
    out.put("fresh", session.get(saved_seq));
    out.put("fresh", session.go_on(saved_seq, n));
    llama_memory_clear(session.memory(), true);
    session.decode(saved_seq, 0, 20);
    out.put("set_over", number(session.set(state, saved_seq)));
    out.put("over_pos_max", session.pos_max(saved_seq));
    out.put("over", session.get(saved_seq));
    Bytes longer = state;
    longer.resize(state.size() + 100, 0x5a);
    out.put("set_with_bytes_behind", number(session.set(longer, saved_seq)));
    llama_memory_clear(session.memory(), true);
    out.put("set_there", number(session.set(state, other_seq)));
    out.put("there_pos_max", session.pos_max(other_seq));
    out.put("there_leaves_pos_max", session.pos_max(saved_seq));
    const Bytes there = session.get(other_seq);
    llama_memory_seq_rm(session.memory(), other_seq, -1, -1);
    out.put("set_back", number(session.set(there, saved_seq)));
    out.put("back", session.get(saved_seq));

    llama_memory_clear(session.memory(), true);
    std::vector<llama_token> loaded(512);
    size_t n_loaded = 0;
    out.put("count_tokens",
            number(llama_state_seq_load_file(session.ctx(), slot.c_str(), saved_seq, nullptr, 0, &n_loaded)));
    out.put("counted_tokens", n_loaded == tokens.size());
    out.put("load_file", number(llama_state_seq_load_file(session.ctx(), slot.c_str(), saved_seq, loaded.data(),
                                                          loaded.size(), &n_loaded)));
    loaded.resize(n_loaded);
    out.put("load_file_tokens", loaded == tokens);
    out.put("load_file", session.get(saved_seq));

    llama_memory_clear(session.memory(), true);
    out.put("set_whole", number(session.set_whole(whole)));
    out.put("again_whole", session.get_whole());
    out.put("whole", session.go_on(saved_seq, n));

    llama_memory_clear(session.memory(), true);
    session.fill(the_case.layout);
    out.put("checkpoint",
            back_to(session, session.get(saved_seq, partial_only), partial_only, n, out, "checkpoint"));
}

void cut(llama_model *model, const Case &the_case, Results &out) {
    const llama_pos prompt = first_pos(the_case.layout) + 60;
    Session never(model, the_case);
    never.fill(the_case.layout);
    out.put("cut_never", llama_memory_seq_rm(never.memory(), saved_seq, prompt, -1));
    out.put("never", never.go_on(saved_seq, prompt));

    Session session(model, the_case);
    session.fill(the_case.layout);
    const Bytes state = session.get(saved_seq);
    llama_memory_clear(session.memory(), true);
    out.put("size", number(state.size()));
    out.put("set", number(session.set(state, saved_seq)));
    out.put("cut", llama_memory_seq_rm(session.memory(), saved_seq, prompt, -1));
    out.put("restored", session.go_on(saved_seq, prompt));
}

// Pending work and a slot file, and pending work and the whole context.
template <typename Pend>
void other_ways(llama_model *model, const Case &the_case, Pend pend, llama_seq_id seq, llama_pos n,
                Results &out) {
    Session session(model, the_case);
    session.fill(the_case.layout);
    pend(session);
    const std::string slot = out.folder() / "slot.bin";
    const llama_token token = 1;
    llama_state_seq_save_file(session.ctx(), slot.c_str(), seq, &token, 1);
    llama_memory_clear(session.memory(), true);
    llama_token loaded = 0;
    size_t n_loaded = 0;
    llama_state_seq_load_file(session.ctx(), slot.c_str(), seq, &loaded, 1, &n_loaded);
    out.put("restored_file", session.go_on(seq, n));

    llama_memory_clear(session.memory(), true);
    session.fill(the_case.layout);
    pend(session);
    const Bytes whole = session.get_whole();
    llama_memory_clear(session.memory(), true);
    session.set_whole(whole);
    out.put("restored_whole", session.go_on(seq, n));
}

void pending_shift(llama_model *model, const Case &the_case, Results &out) {
    Session never(model, the_case);
    out.put("can_shift", llama_memory_can_shift(never.memory()));
    const auto pend = [](Session &session) { llama_memory_seq_add(session.memory(), saved_seq, 0, -1, 7); };
    never.fill(the_case.layout);
    pend(never);
    const llama_pos n = never.pos_max(saved_seq) + 1;
    out.put("never", never.go_on(saved_seq, n));

    Session session(model, the_case);
    session.fill(the_case.layout);
    pend(session);
    const Bytes state = session.get(saved_seq);
    out.put("saved", session.go_on(saved_seq, n));
    other_ways(model, the_case, pend, saved_seq, n, out);
    llama_memory_clear(session.memory(), true);
    out.put("size", number(state.size()));
    out.put("set", number(session.set(state, saved_seq)));
    out.put("restored", session.go_on(saved_seq, n));
}

void k_shift(llama_model *model, const Case &the_case, Results &out) {
    const auto meta = [&](const std::string &key) {
        char value[64];
        const std::string name = std::string(find_model(the_case.model)->arch) + "." + key;
        if (llama_model_meta_val_str(model, name.c_str(), value, sizeof value) < 0) {
            throw std::runtime_error("the model has no " + name);
        }
        return std::stoll(value);
    };
    out.put("neox", llama_model_rope_type(model) == LLAMA_ROPE_TYPE_NEOX);
    out.put("n_embd_head", meta("attention.key_length"));
    out.put("n_rope_dims", meta("rope.dimension_count"));
    out.put("freq_base", meta("rope.freq_base"));

    Session session(model, the_case);
    session.fill(the_case.layout);
    out.put("before", session.get(saved_seq));
    llama_memory_seq_add(session.memory(), saved_seq, 0, -1, k_shift_by);
    session.decode(other_seq, 0, 1);  // it applies what is pending
    out.put("after", session.get(saved_seq));
}

void pending_copy(llama_model *model, const Case &the_case, Results &out) {
    const auto copy = [](Session &session) {
        // What lies in the destination's stream must not look like the source.
        session.decode(other_seq, 30, 100);
        llama_memory_seq_rm(session.memory(), other_seq, -1, -1);
        llama_memory_seq_cp(session.memory(), saved_seq, other_seq, -1, -1);
    };
    Session never(model, the_case);
    never.fill(the_case.layout);
    copy(never);
    const llama_pos n = never.pos_max(other_seq) + 1;
    out.put("never", never.go_on(other_seq, n));

    Session session(model, the_case);
    session.fill(the_case.layout);
    copy(session);
    const Bytes state = session.get(other_seq);
    llama_memory_clear(session.memory(), true);
    out.put("size", number(state.size()));
    out.put("set", number(session.set(state, other_seq)));
    out.put("restored", session.go_on(other_seq, n));
    other_ways(model, the_case, copy, other_seq, n, out);
}

// Others fill the window's cache: what is restored has to do without some of its masked cells.
void removals(llama_model *model, const Case &the_case, Results &out) {
    Session session(model, the_case);
    session.fill(the_case.layout);
    const Bytes state = session.get(saved_seq);
    out.put("none", state);
    for (const Range &range : ranges) {
        const std::string name = range.name;
        llama_memory_clear(session.memory(), true);
        session.set(state, saved_seq);
        out.put("removed_" + name, llama_memory_seq_rm(session.memory(), saved_seq, range.p0, range.p1));
        out.put("pos_min_" + name, session.pos_min(saved_seq));
        out.put("pos_max_" + name, session.pos_max(saved_seq));
    }
}

void crowded(llama_model *model, const Case &the_case, Results &out) {
    const auto crowd = [](Session &session) {
        session.decode(0, 0, 130);
        session.decode(other_seq, 0, 100);
    };
    constexpr uint32_t n_ctx = 1024;  // without a window there is room for all
    Session source(model, the_case, n_ctx);
    source.fill(the_case.layout);
    const llama_pos n = source.pos_max(saved_seq) + 1;
    const Bytes state = source.get(saved_seq);
    out.put("never", source.go_on(saved_seq, n));
    Session never(model, the_case, n_ctx);
    crowd(never);
    out.put("never_0", never.go_on(0, 130));
    out.put("never_other", never.go_on(other_seq, 100));

    Session session(model, the_case, n_ctx);
    crowd(session);
    out.put("size", number(state.size()));
    out.put("set", number(session.set(state, saved_seq)));
    out.put("pos_max", session.pos_max(saved_seq));
    out.put("n_tokens", n);
    out.put("restored", session.go_on(saved_seq, n));
    out.put("restored_0", session.go_on(0, 130));
    out.put("restored_other", session.go_on(other_seq, 100));
}

// Counts restores that were refused, and those that left every sequence as it was.
class Refusals {
public:
    Refusals(Session &session, Results &out) : session_(session), out_(out), before_(session.snapshot()) {}

    template <typename Restore>
    void expect(const std::string &what, Restore restore) {
        const long long consumed = number(restore());
        const bool unchanged = session_.snapshot() == before_;
        ++tries_[what];
        refused_[what] += consumed == 0;
        unchanged_[what] += unchanged;
        if (unchanged) return;
        session_.set_whole(before_.back());  // so that the next one has something to break, too
        before_ = session_.snapshot();
    }

    ~Refusals() {
        for (const auto &[what, tries] : tries_) {
            out_.put("tries_" + what, tries);
            out_.put("refused_" + what, refused_[what]);
            out_.put("unchanged_" + what, unchanged_[what]);
        }
    }

private:
    Session &session_;
    Results &out_;
    std::vector<Bytes> before_;
    std::map<std::string, long long> tries_, refused_, unchanged_;
};

Bytes first(const Bytes &bytes, size_t n) {
    return Bytes(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(n));
}

// Densely where the headers are, evenly after that, and all but the last byte.
std::vector<size_t> cuts_of(size_t size) {
    std::vector<size_t> cuts;
    for (size_t n = 0; n < std::min<size_t>(size, 64); n += 3) cuts.push_back(n);
    for (size_t i = 1; i < 40; ++i) cuts.push_back(size * i / 40);
    cuts.push_back(size - 1);
    return cuts;
}

// Sequences 0 to 2 hold something, and the saved one something else than the state says.
void fill_others(Session &session, llama_pos n, int n_other) {
    session.decode(0, 0, n_other);
    session.decode(other_seq, 0, 30);
    session.decode(saved_seq, n, 5);
}

void refusals(llama_model *model, const Case &the_case, Results &out) {
    const Memory memory = find_model(the_case.model)->memory;
    Session session(model, the_case);
    session.fill(the_case.layout);
    const llama_pos n = session.pos_max(saved_seq) + 1;
    const Bytes state = session.get(saved_seq);
    const Bytes whole = session.get_whole();
    const std::string slot = out.folder() / "slot.bin";
    const std::vector<llama_token> tokens = session.tokens(saved_seq, n);
    llama_state_seq_save_file(session.ctx(), slot.c_str(), saved_seq, tokens.data(), tokens.size());
    const Bytes file = read_file(slot);
    const bool attends = memory != Memory::recurrent && memory != Memory::dsv4;
    fill_others(session, n, 40);
    {
        Refusals refusals(session, out);
        for (const size_t n_bytes : cuts_of(state.size())) {
            refusals.expect("truncated", [&] { return session.set(first(state, n_bytes), saved_seq); });
        }
        for (size_t i = 0; i < 4; ++i) {
            Bytes bad = state;
            bad[i] ^= 0x10;
            refusals.expect("magic", [&] { return session.set(bad, saved_seq); });
        }
        for (const llama_seq_id seq : {-1, static_cast<llama_seq_id>(n_seq), 1 << 20}) {
            refusals.expect("as_sequence_" + std::to_string(seq), [&] { return session.set(state, seq); });
        }
        for (const llama_state_seq_flags flags : {4u, 1u << 31}) {
            refusals.expect("flags", [&] { return session.set(state, saved_seq, flags); });
        }
        for (const size_t n_bytes : cuts_of(whole.size())) {
            refusals.expect("whole_truncated", [&] { return session.set_whole(first(whole, n_bytes)); });
        }
        Bytes arch = whole;
        arch[4] ^= 1;  // the first letter of the architecture
        refusals.expect("whole_arch", [&] { return session.set_whole(arch); });

        const auto load = [&](const Bytes &bytes, size_t capacity) {
            const std::string path = out.folder() / "bad_slot.bin";
            write_file(path, bytes.data(), bytes.size());
            std::vector<llama_token> loaded(512);
            size_t n_loaded = 0;
            return llama_state_seq_load_file(session.ctx(), path.c_str(), saved_seq, loaded.data(), capacity,
                                             &n_loaded);
        };
        for (size_t i = 0; i < 20; ++i) {
            refusals.expect("file_truncated", [&] { return load(first(file, file.size() * i / 20), 512); });
        }
        for (const size_t i : {0, 4}) {  // magic, version
            Bytes bad = file;
            bad[i] ^= 0x10;
            refusals.expect("file_header", [&] { return load(bad, 512); });
        }
        const size_t end = without_checksums(file).size();
        for (size_t i = 0; i < 40; ++i) {
            Bytes bad = file;
            bad[end * i / 40] ^= 0x10;
            refusals.expect("file_flipped", [&] { return load(bad, 512); });
        }
        refusals.expect("file_capacity", [&] { return load(file, tokens.size() - 1); });

        // The same sequence in a cache of another type.
        if (attends) {
            Case other = the_case;
            other.types = the_case.options & flash ? "q8_0/q8_0" : "q8_0/f16";
            Session source(model, other);
            source.fill(the_case.layout);
            const Bytes bad = source.get(saved_seq);
            refusals.expect("type", [&] { return session.set(bad, saved_seq); });
        }
    }
    // With V the other way round: there and back without a loss.
    if (attends && memory != Memory::dsa && memory != Memory::dsa_iswa && memory != Memory::hybrid_idx) {
        Case other = the_case;
        other.options ^= flash;
        Session source(model, other);
        source.fill(the_case.layout);
        const Bytes other_v = source.get(saved_seq);
        out.put("other_v", other_v);
        out.put("set_other_v", number(session.set(other_v, saved_seq)));
        llama_memory_seq_rm(source.memory(), saved_seq, -1, -1);
        out.put("set_other_v_back", number(source.set(session.get(saved_seq), saved_seq)));
        out.put("other_v_back", source.get(saved_seq));
    }
    // What was refused has broken nothing.
    out.put("size", number(state.size()));
    out.put("set", number(session.set(state, saved_seq)));

    if (memory == Memory::recurrent) return;  // one row a sequence: it fits everywhere
    Session source(model, the_case);
    source.fill("long");
    const Bytes large = source.get(saved_seq);
    Session little(model, the_case, 256);
    fill_others(little, 0, 150);
    Refusals refusals(little, out);
    refusals.expect("too_small", [&] { return little.set(large, saved_seq); });
}

void on_device_steps(llama_model *model, const Case &the_case, Results &out) {
    Session never(model, the_case);
    never.fill(the_case.layout);
    const llama_pos n = never.pos_max(saved_seq) + 1;
    out.put("never", never.go_on(saved_seq, n));

    Session session(model, the_case);
    session.fill(the_case.layout);
    const Bytes state = session.get(saved_seq, on_device);
    out.put("none", state);
    out.put("size", number(state.size()));
    llama_memory_clear(session.memory(), true);
    out.put("set", number(session.set(state, saved_seq, on_device)));
    out.put("restored", session.go_on(saved_seq, n));
    Bytes longer = state;
    longer.resize(state.size() + 100, 0x5a);
    out.put("set_with_bytes_behind", number(session.set(longer, saved_seq)));
    llama_memory_clear(session.memory(), true);
    out.put("set_there", number(session.set(state, other_seq, on_device)));
    out.put("there_pos_max", session.pos_max(other_seq));

    llama_memory_clear(session.memory(), true);
    session.fill(the_case.layout);
    const Bytes checkpoint = session.get(saved_seq, partial_only | on_device);
    out.put("partial", checkpoint);
    out.put("size_checkpoint", number(checkpoint.size()));
    out.put("checkpoint", back_to(session, checkpoint, partial_only | on_device, n, out, "checkpoint"));
}

void on_device_refusals(llama_model *model, const Case &the_case, Results &out) {
    Session session(model, the_case);
    session.fill(the_case.layout);
    const llama_pos n = session.pos_max(saved_seq) + 1;
    const Bytes shorter = session.get(saved_seq, on_device);
    Bytes never_taken = shorter;
    const llama_seq_id elsewhere = 3;
    std::memcpy(never_taken.data() + 4, &elsewhere, sizeof elsewhere);
    session.decode(saved_seq, n, 5);
    const Bytes unmoved = session.get(saved_seq, on_device);
    if (llama_memory_can_shift(session.memory())) {
        // As long as the one before, but not the same.
        llama_memory_seq_add(session.memory(), saved_seq, 0, -1, 7);
    }
    const Bytes live = session.get(saved_seq, on_device);
    const Bytes host = session.get(saved_seq);
    fill_others(session, session.pos_max(saved_seq) + 1, 40);
    {
        Refusals refusals(session, out);
        refusals.expect("never_taken", [&] { return session.set(never_taken, saved_seq, on_device); });
        refusals.expect("replaced", [&] { return session.set(shorter, saved_seq, on_device); });
        if (live != unmoved) {
            refusals.expect("replaced_by_one_as_long",
                            [&] { return session.set(unmoved, saved_seq, on_device); });
        }
        refusals.expect("device_as_host", [&] { return session.set(live, saved_seq, none); });
        refusals.expect("host_as_device", [&] { return session.set(host, saved_seq, on_device); });
        refusals.expect("truncated",
                        [&] { return session.set(first(live, live.size() / 2), saved_seq, on_device); });
    }
    out.put("size", number(live.size()));
    out.put("set", number(session.set(live, saved_seq, on_device)));
}

}  // namespace

void run_steps(llama_model *model, const Case &the_case, Results &out) {
    const std::map<std::string, void (*)(llama_model *, const Case &, Results &)> steps = {
        {"round_trip", round_trip},
        {"cut", cut},
        {"pending_shift", pending_shift},
        {"pending_copy", pending_copy},
        {"k_shift", k_shift},
        {"removals", removals},
        {"crowded", crowded},
        {"refusals", refusals},
        {"on_device", on_device_steps},
        {"on_device_refusals", on_device_refusals},
        {"exceptions", exceptions},
        {"pieces", pieces},
    };
    steps.at(the_case.steps)(model, the_case, out);
}

void take_steps(llama_model *model, const Case &the_case, const Results &from, Results &out) {
    const auto n = static_cast<llama_pos>(from.number("n_tokens"));
    Session session(model, the_case);
    out.put("set_none", number(session.set(from.bytes("none"), saved_seq)));
    out.put("pos_min", session.pos_min(saved_seq));
    out.put("none", session.get(saved_seq));
    out.put("partial", session.get(saved_seq, partial_only));
    out.put("go_on", session.go_on(saved_seq, n));

    // A cache of another size, and another number of streams.
    for (const auto &[name, option] : {std::pair{"other_swa", swa_full}, std::pair{"other_streams", streams}}) {
        Case other = the_case;
        other.options ^= option;
        Session elsewhere(model, other);
        out.put(std::string("set_") + name, number(elsewhere.set(from.bytes("none"), saved_seq)));
        out.put(name, elsewhere.go_on(saved_seq, n));
    }

    llama_memory_clear(session.memory(), true);
    out.put("set_whole", number(session.set_whole(from.bytes("whole"))));
    out.put("whole", session.get_whole());

    llama_memory_clear(session.memory(), true);
    const std::string slot = from.folder() / "slot.bin";
    std::vector<llama_token> loaded(512);
    size_t n_loaded = 0;
    out.put("load_file", number(llama_state_seq_load_file(session.ctx(), slot.c_str(), saved_seq, loaded.data(),
                                                          loaded.size(), &n_loaded)));
    loaded.resize(n_loaded);
    const std::string again = out.folder() / "slot.bin";
    llama_state_seq_save_file(session.ctx(), again.c_str(), saved_seq, loaded.data(), loaded.size());

    llama_memory_clear(session.memory(), true);
    session.fill(the_case.layout);
    out.put("checkpoint", back_to(session, from.bytes("partial"), partial_only, n, out, "checkpoint"));
}

Logits rope_freqs(const std::string &path) {
    ggml_context *tensors = nullptr;
    gguf_context *file = gguf_init_from_file(path.c_str(), {/* .no_alloc = */ false, /* .ctx = */ &tensors});
    if (!file) throw std::runtime_error("cannot read " + path);
    gguf_free(file);
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> owner(tensors, ggml_free);
    const ggml_tensor *factors = ggml_get_tensor(tensors, "rope_freqs.weight");
    if (!factors) return {};
    const auto *first = static_cast<const float *>(factors->data);
    return Logits(first, first + ggml_nelements(factors));
}
