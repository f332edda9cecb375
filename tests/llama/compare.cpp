#include "compare.hpp"

#include "alone.hpp"
#include "blob.hpp"

#include <kvstate.h>

#include <algorithm>
#include <cmath>

void Report::line(bool ok, const std::string &what, const std::string &is, const std::string &should) {
    ++(ok ? passed_ : failed_);
    if (ok) {
        std::printf("ok %s: %s\n", name_.c_str(), what.c_str());
    } else {
        std::printf("FAIL %s: %s: %s instead of %s\n", name_.c_str(), what.c_str(), is.c_str(), should.c_str());
    }
    std::fflush(stdout);
}

void Report::equal(const std::string &what, const Bytes &is, const Bytes &should) {
    const auto [a, b] = std::mismatch(is.begin(), is.end(), should.begin(), should.end());
    const auto describe = [](const Bytes &bytes, Bytes::const_iterator at) {
        std::string text = std::to_string(bytes.size()) + " bytes";
        if (at != bytes.end())
            text += " (" + std::to_string(*at) + " at " + std::to_string(at - bytes.begin()) + ")";
        return text;
    };
    line(is == should, what, describe(is, a), describe(should, b));
}

namespace {

// Largest difference, in parts of the largest logit. Infinite where one of them is missing.
double difference(const Logits &a, const Logits &b) {
    if (a.empty() || a.size() != b.size()) return INFINITY;
    double apart = 0, largest = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        if (std::isnan(a[i]) || std::isnan(b[i])) return INFINITY;
        apart = std::max(apart, std::fabs(double{a[i]} - b[i]));
        largest = std::max(largest, std::fabs(double{b[i]}));
    }
    return apart / largest;
}

// The same cells in another order give the same sums but for rounding: flash attention adds V up in f16.
double rounding(const Case &the_case) { return the_case.options & flash ? 5e-3 : 1e-4; }

std::string apart_text(double apart) {
    char text[32];
    std::snprintf(text, sizeof text, "logits %.1e apart", apart);
    return text;
}

// kvstate numbers its ON_DEVICE states in the bits of the header's seq_id that no sequence needs.
Bytes of_sequence(Bytes state) {
    if (state.size() >= 8) {
        std::fill(state.begin() + 5, state.begin() + 8, 0);
    }
    return state;
}

void exact(Report &report, const std::string &what, const Logits &is, const Logits &should) {
    const double apart = difference(is, should);
    report.holds(what + ", bit for bit", apart == 0, apart_text(apart), "0");
}

void close(const Case &the_case, Report &report, const std::string &what, const Logits &is,
           const Logits &should) {
    const double apart = difference(is, should);
    report.holds(what + ", but for rounding (" + apart_text(apart) + ")", apart <= rounding(the_case),
                 apart_text(apart), "at most " + apart_text(rounding(the_case)));
}

void same(const Case &the_case, bool same_cells, Report &report, const std::string &what, const Logits &is,
          const Logits &should) {
    if (same_cells) return exact(report, what, is, should);
    close(the_case, report, what, is, should);
}

// More than rounding explains, but a difference of numbers: a leg that has nothing to show is not wrong in this way.
void wrong(const Case &the_case, Report &report, const std::string &what, const Logits &is,
           const Logits &should) {
    const double apart = difference(is, should);
    report.holds(what + " (" + apart_text(apart) + ")", std::isfinite(apart) && apart > rounding(the_case),
                 apart_text(apart), "more than " + apart_text(rounding(the_case)));
}

// Whether a save of the saved sequence has cells that its window masks.
bool has_masked(const Case &the_case) {
    const Model &model = *find_model(the_case.model);
    const std::string layout = the_case.layout;
    if (model.swa_type == KVS_SWA_TYPE_CHUNKED) return layout == "late";
    return has_window(model.memory) && layout != "short" && layout != "emptied";
}

bool is_masked(const Model &model, int32_t pos, int32_t last) {
    const auto n_swa = static_cast<int32_t>(model.n_swa);
    return model.swa_type == KVS_SWA_TYPE_CHUNKED ? pos < last / n_swa * n_swa : last - pos >= n_swa;
}

bool is_quantized(const Case &the_case) { return std::string(the_case.types) != "f16/f16"; }

// Whether restored cells, and those that follow, lie where they would without the save. The next token goes behind
// the last cell that was restored; without the save it would go elsewhere after seq_add, which has it search from
// cell 0, and where an SWA cache has wrapped.
bool same_cells_in_place(const Case &the_case) {
    const std::string layout = the_case.layout;
    if (layout == "holes" || layout == "shared") return false;
    return !has_masked(the_case) ||
           !(layout == "shifted" || (layout == "long" && !(the_case.options & swa_full)));
}
bool same_cells_fresh(const Case &the_case) {
    return same_cells_in_place(the_case) &&
           (std::string(the_case.layout) != "interleaved" || the_case.options & streams);
}

// What holds of any leg by itself, stock or adapter.
void round_trip_of(const std::string &leg, const Results &r, Report &report) {
    const long long size = static_cast<long long>(r.bytes("none").size());
    report.equal(leg + ": get_data into a buffer that is too small", r.number("get_short"), 0);
    report.equal(leg + ": get_data into a larger buffer", r.number("get_long"), size);
    report.equal(leg + ": nothing is written behind the state", r.number("long_untouched"), 1);
    report.equal(leg + ": save_file into a folder that is not there", r.number("save_nowhere"), 0);
    report.equal(leg + ": load_file without room for tokens counts them", r.number("counted_tokens"), 1);
    report.equal(leg + ": load_file without room for tokens returns their offset", r.number("count_tokens"),
                 12);
    for (const char *set :
         {"set_in_place", "set_fresh", "set_over", "set_with_bytes_behind", "set_there", "set_back"}) {
        report.equal(leg + ": " + set + " consumes the state", r.number(set), size);
    }
    report.equal(leg + ": save_file returns the size of the file", r.number("save_file"),
                 r.bytes("slot").size());
    report.equal(leg + ": load_file returns the end of the state", r.number("load_file"),
                 r.number("save_file"));
    report.equal(leg + ": load_file gives the tokens", r.number("load_file_tokens"), 1);
    for (const char *again : {"in_place", "fresh", "load_file", "back"}) {
        report.equal(leg + ": written again, " + again, r.bytes(again), r.bytes("none"));
    }
    report.equal(leg + ": set_whole consumes the state", r.number("set_whole"), r.bytes("whole").size());
    report.equal(leg + ": the whole context written again", r.bytes("again_whole"), r.bytes("whole"));
    report.equal(leg + ": a checkpoint is consumed", r.number("set_checkpoint"), r.bytes("partial").size());
    report.equal(leg + ": seq_rm after a checkpoint", r.number("cut_checkpoint"), 1);
}

// llama.cpp reads what kvstate wrote of a range, in memory and as a file, and writes it again.
void pieces_of_leg(const Case &the_case, const std::string &leg, const Results &r, Report &report) {
    for (const Piece &piece : pieces_of(find_model(the_case.model)->memory)) {
        const std::string name = piece.name, what = leg + ": the " + name + " that kvstate wrote";
        const Bytes range = r.bytes(name);
        report.equal(what + " is consumed", r.number("set_" + name), range.size());
        report.equal(what + ", pos_min", r.number("pos_min_" + name), r.number("alone_pos_min_" + name));
        report.equal(what + ", pos_max", r.number("pos_max_" + name), r.number("p1_" + name) - 1);
        report.equal(what + ", written again", r.bytes("again_" + name), range);
        report.equal(what + ", the file is loaded to its end", r.number("load_file_" + name),
                     r.number("save_file_" + name));
        report.equal(what + ", tokens of the file", r.number("tokens_" + name), 1);
        report.equal(what + ", the file's state written again", r.bytes("again_file_" + name), range);
        if (piece.from == 0) {
            same(the_case, same_cells_fresh(the_case), report, what + ", gone on", r.logits(name),
                 r.logits("never"));
        }
    }
}

// NONE of the adapter holds what stock's holds, the same bytes, and the cells that the window masks.
void superset(const Case &the_case, const Legs &legs, Report &report) {
    const Model &model = *find_model(the_case.model);
    const Bytes mine_bytes = legs.adapter.bytes("none"), stock_bytes = legs.stock.bytes("none");
    Cursor mine_in(mine_bytes, 8), stock_in(stock_bytes, 8);
    const size_t n_section = attention_sections(model.memory);
    for (size_t i = 0; i < n_section; ++i) {
        const std::string where = " (section " + std::to_string(i) + ")";
        const Section mine = read_section(mine_in, model.cell_ext, model.has_v);
        const Section stock = read_section(stock_in, model.cell_ext, model.has_v);
        if (i + 1 < n_section) {
            report.holds("the section without a window is equal" + where, mine.cells == stock.cells,
                         std::to_string(mine.cells.size()) + " cells",
                         std::to_string(stock.cells.size()) + " cells");
            continue;
        }
        size_t equal = 0;
        for (const auto &[pos, cell] : stock.cells) {
            const auto it = mine.cells.find(pos);
            equal += it != mine.cells.end() && it->second == cell;
        }
        report.equal("cells that stock wrote are in the adapter's state, byte for byte" + where, equal,
                     stock.cells.size());
        const int32_t last = mine.cells.rbegin()->first;
        size_t masked = 0;
        for (const auto &[pos, cell] : mine.cells) masked += is_masked(model, pos, last);
        report.equal("the others are masked" + where, mine.cells.size() - masked, stock.cells.size());
        report.holds("there are masked ones" + where, masked > 0, std::to_string(masked), "more than 0");
        const bool gap_free = mine.cells.rbegin()->first - mine.cells.begin()->first + 1 ==
                              static_cast<int32_t>(mine.cells.size());
        report.holds("its positions have no gap" + where, gap_free,
                     std::to_string(mine.cells.begin()->first) + " to " + std::to_string(last),
                     std::to_string(mine.cells.size()) + " of them");
    }
}

void round_trip_stock(const Case &the_case, const Results &stock, Report &report) {
    round_trip_of("stock", stock, report);
    // A layout in which nothing moves and nothing is masked is the same to the last bit.
    if (!has_masked(the_case) && same_cells_fresh(the_case)) {
        exact(report, "stock: restored and gone on", stock.logits("fresh"), stock.logits("never"));
    }
    alone_takes(the_case, "stock", stock, report);
}

void round_trip_legs(const Case &the_case, const Legs &legs, Report &report) {
    const Model &model = *find_model(the_case.model);
    const Results &stock = legs.stock, &mine = legs.adapter;
    round_trip_of("adapter", mine, report);
    alone_takes(the_case, "adapter", mine, report);
    report.equal("adapter: a buffer that is too small is left alone", mine.number("short_untouched"), 1);

    // Logits.
    const Logits never = mine.logits("never");
    exact(report, "a context that never saved answers as stock", never, stock.logits("never"));
    const bool in_place = same_cells_in_place(the_case), fresh = same_cells_fresh(the_case);
    same(the_case, in_place, report, "adapter: restored in place and gone on", mine.logits("in_place"), never);
    same(the_case, fresh, report, "adapter: restored into an empty cache and gone on", mine.logits("fresh"),
         never);
    // After a whole context the next token searches from cell 0 as well.
    same(the_case, fresh && !has_masked(the_case), report, "adapter: the whole context restored and gone on",
         mine.logits("whole"), never);
    same(the_case, in_place, report, "adapter: back at a checkpoint and gone on", mine.logits("checkpoint"),
         never);

    report.equal("adapter: restored in place, the other sequences are as they were",
                 mine.number("others_unchanged"), 1);

    // Positions.
    report.equal("adapter: pos_min after the restore", mine.number("in_place_pos_min"), mine.number("pos_min"));
    report.equal("adapter: restored over another sequence, pos_max", mine.number("over_pos_max"),
                 mine.number("n_tokens") - 1);
    report.equal("adapter: restored as another sequence, pos_max", mine.number("there_pos_max"),
                 mine.number("n_tokens") - 1);
    report.equal("adapter: restored as another sequence, the first is empty",
                 mine.number("there_leaves_pos_max"), -1);
    report.equal("adapter: written again after a restore over another sequence", mine.bytes("over"),
                 mine.bytes("none"));

    // Bytes.
    report.equal("whole context equal to stock's", mine.bytes("whole"), stock.bytes("whole"));
    if (has_masked(the_case)) {
        if (attention_sections(model.memory) > 0) superset(the_case, legs, report);
        report.holds("NONE holds more than stock's", mine.bytes("none").size() > stock.bytes("none").size(),
                     std::to_string(mine.bytes("none").size()),
                     "more than " + std::to_string(stock.bytes("none").size()));
    } else {
        report.equal("NONE equal to stock's", mine.bytes("none"), stock.bytes("none"));
        report.equal("slot file equal to stock's, and checksums behind it", without_checksums(mine.bytes("slot")),
                     stock.bytes("slot"));
    }
    if (all_full_attention(model.memory)) {
        report.equal("PARTIAL of full attention is 8 bytes", mine.bytes("partial").size(), 8);
        report.equal("stock's PARTIAL of full attention holds all of it", stock.bytes("partial"),
                     stock.bytes("none"));
    } else {
        report.equal("PARTIAL equal to stock's", mine.bytes("partial"), stock.bytes("partial"));
    }

    // The adapter takes what stock wrote.
    const Results &took = legs.adapter_took_stock;
    report.equal("adapter consumes stock's NONE", took.number("set_none"), stock.bytes("none").size());
    report.equal("adapter writes stock's NONE again", took.bytes("none"), stock.bytes("none"));
    report.equal("adapter consumes stock's whole context", took.number("set_whole"),
                 stock.bytes("whole").size());
    report.equal("adapter writes stock's whole context again", took.bytes("whole"), stock.bytes("whole"));
    report.equal("adapter loads stock's slot file", took.number("load_file"), stock.bytes("slot").size());
    report.equal("adapter writes stock's slot file again", without_checksums(took.bytes("slot")),
                 stock.bytes("slot"));
    report.equal("adapter consumes stock's PARTIAL", took.number("set_checkpoint"),
                 stock.bytes("partial").size());
    same(the_case, fresh && !has_masked(the_case), report, "adapter: gone on from stock's NONE",
         took.logits("go_on"), never);
    same(the_case, in_place, report, "adapter: gone on from stock's PARTIAL", took.logits("checkpoint"), never);

    if (model.memory == Memory::iswa) {
        report.equal("adapter consumes stock's NONE with swa_full the other way", took.number("set_other_swa"),
                     stock.bytes("none").size());
        close(the_case, report, "adapter: gone on from it", took.logits("other_swa"), never);
    }
    if (model.memory == Memory::iswa || model.memory == Memory::attention) {
        report.equal("adapter consumes stock's NONE with streams the other way",
                     took.number("set_other_streams"), stock.bytes("none").size());
        close(the_case, report, "adapter: gone on from it", took.logits("other_streams"), never);
    }

    // Stock takes what the adapter wrote.
    const Results &gave = legs.stock_took_adapter;
    report.equal("stock consumes the adapter's NONE", gave.number("set_none"), mine.bytes("none").size());
    report.equal("stock writes it again as its own NONE", gave.bytes("none"), stock.bytes("none"));
    report.equal("stock consumes the adapter's whole context", gave.number("set_whole"),
                 mine.bytes("whole").size());
    report.equal("stock writes the adapter's whole context again", gave.bytes("whole"), mine.bytes("whole"));
    report.equal("stock loads the adapter's slot file but for the checksums", gave.number("load_file"),
                 without_checksums(mine.bytes("slot")).size());
    report.equal("stock writes it again as its own slot file", gave.bytes("slot"), stock.bytes("slot"));
    same(the_case, fresh, report, "stock: gone on from the adapter's NONE", gave.logits("go_on"), never);
    if (model.memory == Memory::iswa) {
        // A cache of full size has more masked cells than another one has room for.
        const bool fits = !(the_case.options & swa_full) || std::string(the_case.layout) != "long";
        report.equal(std::string("stock ") + (fits ? "consumes" : "refuses, for its SWA cache is too small,") +
                         " the adapter's NONE with swa_full the other way",
                     gave.number("set_other_swa"), fits ? mine.bytes("none").size() : 0);
    }
    if (!all_full_attention(model.memory)) {
        report.equal("stock consumes the adapter's PARTIAL", gave.number("set_checkpoint"),
                     mine.bytes("partial").size());
    }
}

void refused(const std::string &leg, const Results &r, Report &report) {
    for (const auto &[name, tries] : r.numbers()) {
        if (name.rfind("tries_", 0) != 0) continue;
        const std::string what = name.substr(6);
        report.equal(leg + ": refused of " + std::to_string(tries) + " " + what, r.number("refused_" + what),
                     tries);
        report.equal(leg + ": nothing changed in " + std::to_string(tries) + " " + what,
                     r.number("unchanged_" + what), tries);
    }
    report.equal(leg + ": the true state is still taken", r.number("set"), r.number("size"));
    if (r.numbers().count("set_other_v")) {
        report.equal(leg + ": a state with V the other way round is taken", r.number("set_other_v"),
                     r.bytes("other_v").size());
        report.equal(leg + ": and given back", r.number("set_other_v_back"), r.number("set_other_v"));
        report.equal(leg + ": written again where it came from", r.bytes("other_v_back"), r.bytes("other_v"));
    }
}

}  // namespace

void compare_stock(const Case &the_case, const Results &stock, Report &report) {
    const std::string steps = the_case.steps;
    if (steps == "round_trip") round_trip_stock(the_case, stock, report);
    if (steps == "cut") {
        report.equal("stock: set_data consumes the state", stock.number("set"), stock.number("size"));
        if (has_masked(the_case)) {
            wrong(the_case, report, "stock: the fault, a prefix of a restored sequence lacks cells",
                  stock.logits("restored"), stock.logits("never"));
        } else {
            exact(report, "stock: cut and gone on", stock.logits("restored"), stock.logits("never"));
        }
    }
    if (steps == "pending_shift") {
        report.equal("stock: can_shift", stock.number("can_shift"), 1);
        wrong(the_case, report, "stock: the fault, a pending shift is lost", stock.logits("restored"),
              stock.logits("never"));
    }
    if (steps == "k_shift") alone_shifts(the_case, stock, report);
    if (steps == "removals") alone_removes(the_case, "stock", stock, report);
    if (steps == "pieces") pieces_of_leg(the_case, "stock", stock, report);
    if (steps == "pending_copy") {
        wrong(the_case, report, "stock: the fault, a pending copy is lost", stock.logits("restored"),
              stock.logits("never"));
    }
    if (steps == "on_device") {
        report.equal("stock: set_data consumes the state", stock.number("set"), stock.number("size"));
        if (is_quantized(the_case)) {
            wrong(the_case, report, "stock: the fault, quantised tensors are not kept",
                  stock.logits("restored"), stock.logits("never"));
        } else {
            exact(report, "stock: restored and gone on", stock.logits("restored"), stock.logits("never"));
        }
    }
    if (steps == "exceptions") {
        report.equal("stock: of exceptions in state_write arrive", stock.number("write_arrived"),
                     stock.number("write_thrown"));
    }
}

void compare_legs(const Case &the_case, const Legs &legs, Report &report) {
    const Results &stock = legs.stock, &mine = legs.adapter;
    const std::string steps = the_case.steps;
    if (steps == "round_trip") round_trip_legs(the_case, legs, report);
    if (steps == "cut") {
        report.equal("adapter: set_data consumes the state", mine.number("set"), mine.number("size"));
        report.equal("adapter: seq_rm answers as in a context that never saved", mine.number("cut"),
                     mine.number("cut_never"));
        exact(report, "adapter: cut to a prefix and gone on", mine.logits("restored"), mine.logits("never"));
        exact(report, "a context that never saved answers as stock", mine.logits("never"),
              stock.logits("never"));
    }
    if (steps == "pending_shift" || steps == "pending_copy") {
        const bool searched_from_0 = steps == "pending_shift" && has_masked(the_case);
        report.equal("adapter: set_data consumes the state", mine.number("set"), mine.number("size"));
        for (const std::string what : {"restored", "restored_file", "restored_whole"}) {
            same(the_case, !searched_from_0, report, "adapter: saved before the decode, gone on, " + what,
                 mine.logits(what), mine.logits("never"));
        }
        if (steps == "pending_shift") {
            exact(report, "adapter: saved and gone on", mine.logits("saved"), mine.logits("never"));
        }
    }
    if (steps == "removals") {
        alone_removes(the_case, "adapter", mine, report);
        for (const Range &range : ranges) {
            const std::string name = std::string("removed_") + range.name;
            report.equal("adapter: the answer to " + name, mine.number(name), stock.number(name));
        }
    }
    if (steps == "pieces") pieces_of_leg(the_case, "adapter", mine, report);
    // Stock leaves masked cells out of the state.
    if (steps == "k_shift" && !has_masked(the_case)) {
        report.equal("adapter: before the shift as stock", mine.bytes("before"), stock.bytes("before"));
        report.equal("adapter: after the shift as stock", mine.bytes("after"), stock.bytes("after"));
    }
    if (steps == "crowded") {
        report.equal("adapter: set_data into a crowded cache consumes the state", mine.number("set"),
                     mine.number("size"));
        report.equal("adapter: pos_max in a crowded cache", mine.number("pos_max"),
                     mine.number("n_tokens") - 1);
        close(the_case, report, "adapter: restored into a crowded cache and gone on", mine.logits("restored"),
              mine.logits("never"));
        for (const std::string seq : {"0", "other"}) {
            close(the_case, report, "adapter: gone on with sequence " + seq + " around it",
                  mine.logits("restored_" + seq), mine.logits("never_" + seq));
        }
    }
    if (steps == "refusals" || steps == "on_device_refusals") refused("adapter", mine, report);
    if (steps == "on_device") {
        for (const char *set : {"set", "set_there"})
            report.equal(std::string("adapter: ") + set + " consumes the state", mine.number(set),
                         mine.number("size"));
        report.equal("adapter: a checkpoint is consumed", mine.number("set_checkpoint"),
                     mine.number("size_checkpoint"));
        report.equal("adapter: restored as another sequence, pos_max", mine.number("there_pos_max"),
                     stock.number("there_pos_max"));
        same(the_case, same_cells_fresh(the_case), report, "adapter: restored and gone on",
             mine.logits("restored"), mine.logits("never"));
        same(the_case, same_cells_in_place(the_case), report, "adapter: back at a checkpoint and gone on",
             mine.logits("checkpoint"), mine.logits("never"));
        if (!has_masked(the_case))
            report.equal("NONE | ON_DEVICE equal to stock's", of_sequence(mine.bytes("none")),
                         of_sequence(stock.bytes("none")));
        if (all_full_attention(find_model(the_case.model)->memory)) {
            report.equal("PARTIAL | ON_DEVICE of full attention is 8 bytes", mine.bytes("partial").size(), 8);
        } else {
            report.equal("PARTIAL | ON_DEVICE equal to stock's", of_sequence(mine.bytes("partial")),
                         of_sequence(stock.bytes("partial")));
        }
    }
    if (steps == "exceptions") {
        // The metadata of many cells is one write.
        report.equal("a foreign io is given no more writes than by stock",
                     mine.number("write_calls") > 0 && mine.number("write_calls") <= stock.number("write_calls"),
                     true);
        report.equal("a foreign io gets the bytes of get_data", mine.number("write_equal"), 1);
        report.equal("a foreign io is read to its end", mine.number("read_all"), 1);
        report.equal("exceptions that arrive out of state_write as they were thrown",
                     mine.number("write_arrived"), mine.number("write_thrown"));
        if (attention_sections(find_model(the_case.model)->memory) > 0) {
            report.equal("exceptions that arrive out of state_read as they were thrown",
                         mine.number("read_arrived"), mine.number("read_thrown"));
        } else {
            // Other sections are read by llama.cpp, which turns some exceptions into one of its own.
            report.equal("exceptions that arrive out of state_read, or as llama.cpp's own",
                         mine.number("read_arrived") + mine.number("read_failed"), mine.number("read_thrown"));
        }
        report.equal("an exception in state_write changes nothing", mine.number("write_unchanged"), 1);
        report.equal("an exception in state_read leaves the other sequence", mine.number("other_unchanged"), 1);
        report.equal("a restore after an exception", mine.number("set"), mine.number("size"));
        report.equal("written again after an exception", mine.number("restored_equal"), 1);
    }
}
