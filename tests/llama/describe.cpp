#include "describe.hpp"

#include <algorithm>

Geometry read_geometry(const Model &model, const Bytes &state) {
    Geometry geometry;
    Cursor in(state, 8);
    if (model.memory == Memory::dsv4) in.skip(12);
    for (const char kind : sections_of(model.memory)) {
        if (kind == 'r') {
            geometry.recurrent = read_recurrent(in, model.recurrent);
        } else if (kind == 'c') {
            geometry.compressors = read_compressors(in);
        } else {
            const bool has_v = model.has_v && (kind != 'i' || model.memory == Memory::msa);
            geometry.attention.push_back(read_section(in, model.cell_ext, has_v));
        }
    }
    geometry.end = in.at();
    return geometry;
}

uint32_t elements(const TensorType &tensor) {
    if (tensor.n_embd != 0) return tensor.n_embd;
    const uint64_t block = kvs_row_size(tensor.type, 32);
    return static_cast<uint32_t>(tensor.row_size / block * 32);
}

namespace {

std::vector<kvs_kv_layer_params> kv_layers(const Section &section, const kvs_rope_params *rope) {
    std::vector<kvs_kv_layer_params> layers;
    for (size_t il = 0; il < section.k.size(); ++il) {
        kvs_kv_layer_params layer = kvs_kv_layer_default_params();
        layer.type_k = section.k[il].type;
        layer.n_embd_k_gqa = elements(section.k[il]);
        layer.rope = rope;
        if (il < section.v.size()) {
            layer.type_v = section.v[il].type;
            layer.n_embd_v_gqa = elements(section.v[il]);
        }
        layers.push_back(layer);
    }
    return layers;
}

std::vector<kvs_recurrent_layer_params> recurrent_layers(const std::vector<RecurrentLayer> &found) {
    std::vector<kvs_recurrent_layer_params> layers;
    for (const RecurrentLayer &of : found) {
        kvs_recurrent_layer_params layer = kvs_recurrent_layer_default_params();
        layer.has_r = of.r >= 0;
        layer.has_s = of.s >= 0;
        layer.n_embd_r = static_cast<uint32_t>(std::max<int64_t>(of.r, 0));
        layer.n_embd_s = static_cast<uint32_t>(std::max<int64_t>(of.s, 0));
        layer.n_embd_p = static_cast<uint32_t>(std::max<int64_t>(of.p, 0));
        layers.push_back(layer);
    }
    return layers;
}

kvs_dsv4_compressor_params compressor_params(const Compressor &of) {
    kvs_dsv4_compressor_params params = kvs_dsv4_compressor_default_params();
    params.ratio = of.ratio;
    params.kv_size = 256;  // 512 positions in rows of 4 or more, padded to 256 rows
    params.layers = of.layers.data();
    params.n_layer = static_cast<uint32_t>(of.layers.size());
    params.type_k = of.type_k;
    params.n_embd_k = of.n_embd_k;
    params.state_size = of.state_size;
    params.n_embd_state = of.n_embd_state;
    return params;
}

}  // namespace

Context context_for(const Case &the_case, const Geometry &geometry, const kvs_rope_params *rope) {
    const Model &model = *find_model(the_case.model);
    const std::string kinds = sections_of(model.memory);

    std::vector<std::vector<kvs_kv_layer_params>> layers;
    for (const Section &section : geometry.attention) layers.push_back(kv_layers(section, rope));
    std::vector<kvs_kv_params> kvs(kinds.size());
    const std::vector<kvs_recurrent_layer_params> recurrent_params = recurrent_layers(geometry.recurrent);
    kvs_recurrent_params recurrent = kvs_recurrent_default_params();
    recurrent.n_layer = static_cast<uint32_t>(recurrent_params.size());
    recurrent.layers = recurrent_params.data();
    std::vector<kvs_dsv4_compressor_params> compressors;
    for (const Compressor &of : geometry.compressors) compressors.push_back(compressor_params(of));
    kvs_dsv4_params dsv4 = kvs_dsv4_default_params();
    if (!compressors.empty()) {
        dsv4.csa = &compressors[0];
        dsv4.hca = &compressors[1];
        dsv4.lid = &compressors[2];
    }

    std::vector<kvs_section_params> sections;
    size_t i_attention = 0;
    for (const char kind : kinds) {
        if (kind == 'r') {
            sections.push_back(kvs_recurrent_section(&recurrent));
            continue;
        }
        if (kind == 'c') {
            sections.push_back(kvs_dsv4_section(&dsv4));
            continue;
        }
        const Section &section = geometry.attention[i_attention];
        kvs_kv_params &kv = kvs[i_attention];
        kv = kvs_kv_default_params();
        kv.kv_size = 512;
        kv.n_layer = static_cast<uint32_t>(layers[i_attention].size());
        kv.layers = layers[i_attention].data();
        kv.v_trans = section.v_trans;
        kv.cell_ext = model.cell_ext;
        kv.n_rot_k = section.n_rot_k;
        kv.n_rot_v = section.n_rot_v;
        if (kind == 'w') {
            kv.swa_type = model.swa_type;
            kv.n_swa = model.n_swa;
        }
        if (kind == 'i') kv.mirrors = 0;
        sections.push_back(kvs_kv_section(&kv));
        ++i_attention;
    }

    kvs_context_params params = kvs_context_default_params();
    params.n_seq_max = 4;
    // llama.cpp keeps the sequences of DSV4 apart in any case.
    params.unified = !(the_case.options & streams) && model.memory != Memory::dsv4;
    params.sections = sections.data();
    params.n_section = static_cast<uint32_t>(sections.size());
    params.arch = model.arch;
    kvs_context *raw = nullptr;
    if (kvs_context_new(&params, &raw) != KVS_STATUS_OK) throw std::runtime_error(kvs_last_error());
    return Context(raw, kvs_context_free);
}
