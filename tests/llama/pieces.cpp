// Ranges of positions that kvstate writes without llama.cpp, and that llama.cpp reads as states of its own.

#include "describe.hpp"
#include "session.hpp"
#include "steps.hpp"

#include <stdexcept>

namespace {

size_t done(size_t size) {
    if (size == 0) throw std::runtime_error(kvs_last_error());
    return size;
}

Bytes get_range(const Context &context, llama_pos p0, llama_pos p1) {
    constexpr kvs_state_seq_flags none = KVS_STATE_SEQ_FLAGS_NONE;
    Bytes state(done(kvs_state_seq_get_size_range(context.get(), saved_seq, p0, p1, none)));
    done(kvs_state_seq_get_data_range(context.get(), state.data(), state.size(), saved_seq, p0, p1, none));
    return state;
}

}  // namespace

void pieces(llama_model *model, const Case &the_case, Results &out) {
    const Model &of = *find_model(the_case.model);
    Session session(model, the_case);
    session.fill(the_case.layout);
    const llama_pos n = session.pos_max(saved_seq) + 1;
    const Bytes state = session.get(saved_seq);
    const std::vector<llama_token> tokens = session.tokens(saved_seq, n);
    const Context context = context_for(the_case, read_geometry(of, state));
    const kvs_memory_t memory = kvs_get_memory(context.get());
    done(kvs_state_seq_set_data(context.get(), state.data(), state.size(), saved_seq));

    for (const Piece &piece : pieces_of(of.memory)) {
        const std::string name = piece.name, path = out.folder() / (name + ".slot");
        const llama_pos p0 = n * piece.from / 5, p1 = n * piece.to / 5;
        const Bytes range = get_range(context, p0, p1);
        out.put(name, range);
        done(kvs_state_seq_set_data(context.get(), range.data(), range.size(), other_seq));
        out.put("alone_pos_min_" + name, kvs_memory_seq_pos_min(memory, other_seq));
        out.put("p1_" + name, p1);

        llama_memory_clear(session.memory(), true);
        out.put("set_" + name, static_cast<long long>(session.set(range, saved_seq)));
        out.put("pos_min_" + name, session.pos_min(saved_seq));
        out.put("pos_max_" + name, session.pos_max(saved_seq));
        out.put("again_" + name, session.get(saved_seq));
        if (p0 == 0) {
            out.put(name, session.go_on(saved_seq, p1));
            Session never(model, the_case);
            never.fill(the_case.layout);
            llama_memory_seq_rm(never.memory(), saved_seq, p1, -1);
            out.put("never", never.go_on(saved_seq, p1));
        }

        llama_memory_clear(session.memory(), true);
        const auto n_tokens = static_cast<size_t>(p1 - p0);
        const size_t saved = done(kvs_state_seq_save_file_range(context.get(), path.c_str(), saved_seq, p0, p1,
                                                                tokens.data() + p0, n_tokens));
        out.put("save_file_" + name, static_cast<long long>(saved));
        std::vector<llama_token> loaded(tokens.size());
        size_t n_loaded = 0;
        out.put("load_file_" + name,
                static_cast<long long>(llama_state_seq_load_file(session.ctx(), path.c_str(), saved_seq,
                                                                 loaded.data(), loaded.size(), &n_loaded)));
        loaded.resize(n_loaded);
        out.put("tokens_" + name,
                loaded == std::vector<llama_token>(tokens.begin() + p0, tokens.begin() + p1));
        out.put("again_file_" + name, session.get(saved_seq));
    }
}
