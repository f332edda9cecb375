#include "alone.hpp"

#include "describe.hpp"

#include <ggml.h>

#include <algorithm>
#include <cmath>

namespace {

Bytes get(const Context &context, kvs_state_seq_flags flags) {
    Bytes state(kvs_state_seq_get_size_ext(context.get(), 1, flags));
    state.resize(kvs_state_seq_get_data_ext(context.get(), state.data(), state.size(), 1, flags));
    return state;
}

// K of a cell: the rows of all layers, one after the other.
std::vector<float> keys(const Section &section, const Bytes &cell) {
    std::vector<float> values;
    const uint8_t *row = cell.data();
    for (const TensorType &k : section.k) {
        const size_t start = values.size(), n = elements(k);
        values.resize(start + n);
        ggml_get_type_traits(static_cast<ggml_type>(k.type))->to_float(row, values.data() + start, n);
        row += k.row_size;
    }
    return values;
}

// How far K may be apart that was rounded to its type twice, in parts of the largest of 32 neighbours: one step.
double step(const Section &section) {
    switch (section.k[0].type) {
        case KVS_TYPE_F16: return 1.0 / 1024;
        case KVS_TYPE_Q8_0: return 1.0 / 127;
        case KVS_TYPE_Q4_0: return 1.0 / 8;
        default: throw std::runtime_error("no step of this type");
    }
}

// The largest difference between K of two states, in steps of the type; factor is applied to the second.
double apart(const std::vector<Section> &a, const std::vector<Section> &b, double factor) {
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i].cells.size() != b[i].cells.size()) return INFINITY;
        for (const auto &[pos, cell] : a[i].cells) {
            const auto other = b[i].cells.find(pos);
            if (other == b[i].cells.end()) return INFINITY;
            const std::vector<float> x = keys(a[i], cell), y = keys(b[i], other->second);
            for (size_t block = 0; block < x.size(); block += 32) {
                double largest = 0, off = 0;
                for (size_t j = block; j < block + 32; ++j) {
                    largest = std::max(largest, std::fabs(double{x[j]}));
                    off = std::max(off, std::fabs(x[j] - y[j] * factor));
                }
                most = std::max(most, off / (largest * step(a[i])));
            }
        }
    }
    return most;
}

std::string steps_text(double steps) {
    char text[48];
    std::snprintf(text, sizeof text, "%.3f steps of the type apart", steps);
    return text;
}

}  // namespace

void alone_shifts(const Case &the_case, const Results &results, Report &report) {
    const Model &model = *find_model(the_case.model);
    kvs_rope_params rope = kvs_rope_default_params();
    rope.rope_type = results.number("neox") ? KVS_ROPE_TYPE_NEOX : KVS_ROPE_TYPE_NORM;
    rope.n_embd_head = static_cast<uint32_t>(results.number("n_embd_head"));
    rope.n_rope_dims = static_cast<uint32_t>(results.number("n_rope_dims"));
    rope.n_embd_nope = model.has_v ? 0 : rope.n_embd_head - rope.n_rope_dims;
    rope.freq_base = static_cast<float>(results.number("freq_base"));
    const std::vector<float> factors = results.logits("rope_freqs");
    if (!factors.empty()) rope.freq_factors = factors.data();
    double magnitude = 1;  // llama.cpp scales K of a YaRN model again with each shift
    if (the_case.options & yarn) {
        rope.freq_scale = yarn_freq_scale;
        rope.ext_factor = 1;
        rope.n_ctx_orig = yarn_n_ctx_orig;
        magnitude = 1 + 0.1 * std::log(1 / yarn_freq_scale);
    }

    const Bytes before = results.bytes("before");
    const std::vector<Section> theirs = read_geometry(model, results.bytes("after")).attention;
    const Context context = context_for(the_case, read_geometry(model, before), &rope);
    report.equal("alone: the state before the shift is consumed",
                 kvs_state_seq_set_data(context.get(), before.data(), before.size(), 1), before.size());
    const std::vector<Section> unmoved = read_geometry(model, get(context, KVS_STATE_SEQ_FLAGS_NONE)).attention;
    kvs_memory_seq_add(kvs_get_memory(context.get()), 1, 0, -1, k_shift_by);
    const std::vector<Section> mine = read_geometry(model, get(context, KVS_STATE_SEQ_FLAGS_NONE)).attention;

    // The scale of a block is rounded as well, which the largest quants show.
    const double off = apart(mine, theirs, 1 / magnitude);
    report.holds("alone: K is rotated as by llama.cpp (" + steps_text(off) + ")", off <= 1.1, steps_text(off),
                 "at most one");
    std::vector<Section> renamed = unmoved;
    for (Section &section : renamed) {
        std::map<int32_t, Bytes> cells;
        for (const auto &[pos, cell] : section.cells) cells[pos + k_shift_by] = cell;
        section.cells = cells;
    }
    const double unturned = apart(renamed, theirs, 1 / magnitude);
    report.holds("alone: K that is not rotated differs (" + steps_text(unturned) + ")", unturned > 2,
                 steps_text(unturned), "more than two");
    if (magnitude != 1) {
        const double scaled = apart(mine, theirs, 1);
        report.holds("stock: the fault, a shift scales K of a YaRN model (" + steps_text(scaled) + ")",
                     scaled > 2, steps_text(scaled), "more than two");
    }
}

void alone_takes(const Case &the_case, const std::string &leg, const Results &results, Report &report) {
    const Model &model = *find_model(the_case.model);
    const std::string alone = "alone, from " + leg;
    const Bytes state = results.bytes("none");

    Geometry geometry = read_geometry(model, state);
    report.equal(alone + ": the sections end where the state does", geometry.end, state.size());
    // A cache without cells does not say what it is: any takes such a state.
    for (Section &section : geometry.attention) {
        if (section.cells.empty()) section.k = section.v = {{KVS_TYPE_F16, 512, 0}};
    }
    const bool empty = results.number("n_tokens") == 0;

    const Context context = context_for(the_case, geometry);
    const kvs_memory_t memory = kvs_get_memory(context.get());
    report.equal(alone + ": NONE is consumed",
                 kvs_state_seq_set_data(context.get(), state.data(), state.size(), 1), state.size());
    report.equal(alone + ": NONE is written again", get(context, KVS_STATE_SEQ_FLAGS_NONE), state);
    report.equal(alone + ": pos_min", kvs_memory_seq_pos_min(memory, 1), results.number("in_place_pos_min"));
    report.equal(alone + ": pos_max", kvs_memory_seq_pos_max(memory, 1), results.number("n_tokens") - 1);
    const Bytes partial = results.bytes("partial");
    if (all_full_attention(model.memory)) {
        report.equal(alone + ": PARTIAL is 8 bytes", get(context, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY).size(), 8);
    } else {
        report.equal(alone + ": PARTIAL of what NONE restored", get(context, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY),
                     partial);
    }
    report.equal(alone + ": PARTIAL is consumed",
                 kvs_state_seq_set_data_ext(context.get(), partial.data(), partial.size(), 1,
                                            KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY),
                 partial.size());

    const std::string slot = results.folder() / "slot.bin", again = results.folder() / "alone_slot.bin";
    std::vector<kvs_token> tokens(512);
    size_t n_token = 0;
    report.equal(
        alone + ": the slot file is loaded",
        kvs_state_seq_load_file(context.get(), slot.c_str(), 1, tokens.data(), tokens.size(), &n_token),
        without_checksums(results.bytes("slot")).size());
    kvs_state_seq_save_file(context.get(), again.c_str(), 1, tokens.data(), n_token);
    report.equal(alone + ": the slot file is written again", results.bytes("alone_slot"),
                 without_checksums(results.bytes("slot")));
    kvs_slot_load_params load = kvs_slot_load_default_params();
    load.verify = KVS_VERIFY_FULL;
    kvs_slot_result loaded = kvs_slot_result_default();
    report.equal(alone + ": the slot file is verified", kvs_slot_load(context.get(), slot.c_str(), 1, &load, &loaded),
                 KVS_STATUS_OK);
    report.equal(alone + ": what of it", loaded.verified, leg == "adapter" ? KVS_VERIFY_FULL : KVS_VERIFY_NONE);
    kvs_slot_result_free(&loaded);

    if (empty) return;
    const Bytes whole = results.bytes("whole");
    report.equal(alone + ": the whole context is consumed",
                 kvs_state_set_data(context.get(), whole.data(), whole.size()), whole.size());
    Bytes whole_again(kvs_state_get_size(context.get()));
    whole_again.resize(kvs_state_get_data(context.get(), whole_again.data(), whole_again.size()));
    report.equal(alone + ": the whole context is written again", whole_again, whole);
}

void alone_removes(const Case &the_case, const std::string &leg, const Results &results, Report &report) {
    const Model &model = *find_model(the_case.model);
    const Bytes state = results.bytes("none");
    const Context context = context_for(the_case, read_geometry(model, state));
    const kvs_memory_t memory = kvs_get_memory(context.get());
    size_t refused = 0;
    for (const Range &range : ranges) {
        const std::string name = range.name, what = "alone, from " + leg + ": removing " + name;
        kvs_state_seq_set_data(context.get(), state.data(), state.size(), 1);
        const bool can = kvs_memory_can_seq_rm(memory, 1, range.p0, range.p1);
        refused += !can;
        report.equal(what + " can be asked", can, results.number("removed_" + name));
        report.equal(what + ", the answer", kvs_memory_seq_rm(memory, 1, range.p0, range.p1), can);
        report.equal(what + ", pos_min", kvs_memory_seq_pos_min(memory, 1), results.number("pos_min_" + name));
        report.equal(what + ", pos_max", kvs_memory_seq_pos_max(memory, 1), results.number("pos_max_" + name));
    }
    // Attention gives up any cell; a recurrent or compressed state is of all its positions.
    const bool removes_any_range = sections_of(model.memory).find_first_of("rc") == std::string::npos;
    report.holds("alone, from " + leg + ": ranges that cannot be removed", (refused == 0) == removes_any_range,
                 std::to_string(refused), removes_any_range ? "0" : "some");
}
