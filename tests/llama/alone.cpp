#include "alone.hpp"

#include "blob.hpp"

#include <kvstate.h>

#include <memory>

namespace {

using Context = std::unique_ptr<kvs_context, decltype(&kvs_context_free)>;

uint32_t elements(const TensorType &tensor) {
    if (tensor.n_embd != 0) return tensor.n_embd;
    const uint64_t block = kvs_row_size(tensor.type, 32);
    return static_cast<uint32_t>(tensor.row_size / block * 32);
}

// A context like the one that wrote `sections`.
Context context_for(const Case &the_case, const Model &model, const std::vector<Section> &sections) {
    std::vector<std::vector<kvs_kv_layer_params>> layers;
    std::vector<kvs_kv_params> kvs;
    std::vector<kvs_section_params> params;
    for (const Section &section : sections) {
        layers.emplace_back();
        for (size_t il = 0; il < section.k.size(); ++il) {
            kvs_kv_layer_params layer = kvs_kv_layer_default_params();
            layer.type_k = section.k[il].type;
            layer.n_embd_k_gqa = elements(section.k[il]);
            if (il < section.v.size()) {
                layer.type_v = section.v[il].type;
                layer.n_embd_v_gqa = elements(section.v[il]);
            }
            layers.back().push_back(layer);
        }
    }
    for (size_t i = 0; i < sections.size(); ++i) {
        kvs_kv_params kv = kvs_kv_default_params();
        kv.kv_size = 512;
        kv.n_layer = static_cast<uint32_t>(layers[i].size());
        kv.layers = layers[i].data();
        kv.v_trans = sections[i].v_trans;
        kv.cell_ext = model.cell_ext;
        kv.n_rot_k = sections[i].n_rot_k;
        kv.n_rot_v = sections[i].n_rot_v;
        if (has_window(model.memory) && i + 1 == sections.size()) {
            kv.swa_type = model.swa_type;
            kv.n_swa = model.n_swa;
        }
        kvs.push_back(kv);
    }
    for (const kvs_kv_params &kv : kvs) {
        kvs_section_params section = kvs_section_default_params();
        section.kv = &kv;
        params.push_back(section);
    }
    kvs_context_params context = kvs_context_default_params();
    context.n_seq_max = 4;
    context.unified = !(the_case.options & streams);
    context.sections = params.data();
    context.n_section = static_cast<uint32_t>(params.size());
    context.arch = model.arch;
    kvs_context *raw = nullptr;
    if (kvs_context_new(&context, &raw) != KVS_STATUS_OK) throw std::runtime_error(kvs_last_error());
    return Context(raw, kvs_context_free);
}

Bytes get(const Context &context, kvs_state_seq_flags flags) {
    Bytes state(kvs_state_seq_get_size_ext(context.get(), 1, flags));
    state.resize(kvs_state_seq_get_data_ext(context.get(), state.data(), state.size(), 1, flags));
    return state;
}

}  // namespace

void alone_takes(const Case &the_case, const std::string &leg, const Results &results, Report &report) {
    const Model &model = *find_model(the_case.model);
    const size_t n_section = attention_sections(model.memory);
    if (n_section == 0) return;
    const std::string alone = "alone, from " + leg;
    const Bytes state = results.bytes("none");

    // An empty state does not say what it is a state of: such a cache takes it all the same.
    std::vector<Section> sections;
    Cursor in(state, 8);
    while (sections.size() < n_section) sections.push_back(read_section(in, model.cell_ext, model.has_v));
    report.equal(alone + ": the sections end where the state does", in.at(), state.size());
    for (Section &section : sections) {
        if (!section.k.empty()) continue;
        section.k = section.v = {{KVS_TYPE_F16, 512, 0}};
    }
    const bool empty = sections[0].cells.empty();

    const Context context = context_for(the_case, model, sections);
    report.equal(alone + ": NONE is consumed",
                 kvs_state_seq_set_data(context.get(), state.data(), state.size(), 1), state.size());
    report.equal(alone + ": NONE is written again", get(context, KVS_STATE_SEQ_FLAGS_NONE), state);
    const Bytes partial = results.bytes("partial");
    if (has_window(model.memory)) {
        report.equal(alone + ": PARTIAL of what NONE restored", get(context, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY),
                     partial);
    } else {
        report.equal(alone + ": PARTIAL is 8 bytes", get(context, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY).size(), 8);
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
        results.bytes("slot").size());
    kvs_state_seq_save_file(context.get(), again.c_str(), 1, tokens.data(), n_token);
    report.equal(alone + ": the slot file is written again", results.bytes("alone_slot"),
                 results.bytes("slot"));

    if (empty) return;
    const Bytes whole = results.bytes("whole");
    report.equal(alone + ": the whole context is consumed",
                 kvs_state_set_data(context.get(), whole.data(), whole.size()), whole.size());
    Bytes whole_again(kvs_state_get_size(context.get()));
    whole_again.resize(kvs_state_get_data(context.get(), whole_again.data(), whole_again.size()));
    report.equal(alone + ": the whole context is written again", whole_again, whole);
}
