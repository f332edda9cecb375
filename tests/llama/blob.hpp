// Reads the sections of a state: their geometry, the cells of attention, and the bytes of each cell.

#pragma once

#include "results.hpp"

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

class Cursor {
public:
    Cursor(const Bytes &bytes, size_t at) : bytes_(bytes), at_(at) {}

    template <typename T>
    T take() {
        T value;
        std::memcpy(&value, skip(sizeof(T)), sizeof(T));
        return value;
    }
    const uint8_t *skip(uint64_t n) {
        if (n > bytes_.size() - at_) {
            throw std::runtime_error("the state ends at " + std::to_string(bytes_.size()) + ", " +
                                     std::to_string(n) + " bytes are wanted from " + std::to_string(at_));
        }
        at_ += n;
        return bytes_.data() + at_ - n;
    }
    size_t at() const { return at_; }

private:
    const Bytes &bytes_;
    size_t at_;
};

struct TensorType {
    int32_t type;
    uint64_t row_size;
    uint32_t n_embd;  // of transposed V, otherwise 0
};

struct Section {
    uint32_t v_trans = 0, n_rot_k = 0, n_rot_v = 0;
    std::vector<TensorType> k, v;  // v is empty where the layers have none
    // By position (positions are unique in text): ext, K and V of the cell, one after the other.
    std::map<int32_t, Bytes> cells;
};

// A state in memory has 8 bytes before its sections.
inline Section read_section(Cursor &in, bool cell_ext, bool has_v) {
    Section section;
    const auto n_stream = in.take<uint32_t>();
    for (uint32_t s = 0; s < n_stream; ++s) {
        const auto n_cell = in.take<uint32_t>();
        if (n_cell == 0) continue;
        std::vector<Bytes *> cells;
        for (uint32_t i = 0; i < n_cell; ++i) {
            const auto pos = in.take<int32_t>();
            const auto n_seq_id = in.take<uint32_t>();
            Bytes &cell = section.cells[pos];
            if (cell_ext) {
                const uint8_t *ext = in.skip(12);
                cell.assign(ext, ext + 12);
            }
            in.skip(4 * uint64_t{n_seq_id});
            cells.push_back(&cell);
        }
        section.v_trans = in.take<uint32_t>();
        const auto n_layer = in.take<uint32_t>();
        section.n_rot_k = in.take<uint32_t>();
        section.n_rot_v = in.take<uint32_t>();
        const auto rows = [&](std::vector<TensorType> &types) {
            const auto type = in.take<int32_t>();
            const auto row_size = in.take<uint64_t>();
            types.push_back({type, row_size, 0});
            for (Bytes *cell : cells) {
                const uint8_t *row = in.skip(row_size);
                cell->insert(cell->end(), row, row + row_size);
            }
        };
        for (uint32_t il = 0; il < n_layer; ++il) rows(section.k);
        for (uint32_t il = 0; has_v && il < n_layer; ++il) {
            if (!section.v_trans) {
                rows(section.v);
                continue;
            }
            const auto type = in.take<int32_t>();
            const auto element_size = in.take<uint32_t>();
            const auto n_embd = in.take<uint32_t>();
            section.v.push_back({type, uint64_t{element_size} * n_embd, n_embd});
            for (uint32_t j = 0; j < n_embd; ++j) {
                for (Bytes *cell : cells) {
                    const uint8_t *element = in.skip(element_size);
                    cell->insert(cell->end(), element, element + element_size);
                }
            }
        }
    }
    return section;
}

// A layer of a recurrent section. Elements; -1: it has no such tensor. All are f32.
struct RecurrentLayer {
    int64_t r = -1, s = -1, p = -1;
};

// `layers` has a letter for each, as in Model.
inline std::vector<RecurrentLayer> read_recurrent(Cursor &in, const std::string &layers) {
    const auto n_cell = in.take<uint32_t>();
    for (uint32_t i = 0; i < n_cell; ++i) {
        in.take<int32_t>();
        in.skip(4 * uint64_t{in.take<uint32_t>()});
    }
    in.take<uint32_t>();
    const auto n_layer = in.take<uint32_t>();
    if (n_layer != layers.size()) throw std::runtime_error("a recurrent section of " + std::to_string(n_layer) + " layers");
    const auto rows = [&](bool has_type) {
        if (has_type) in.take<int32_t>();
        const auto row_size = in.take<uint64_t>();
        in.skip(row_size * n_cell);
        return static_cast<int64_t>(row_size / sizeof(float));
    };
    std::vector<RecurrentLayer> found(n_layer);
    for (uint32_t il = 0; il < n_layer; ++il) {
        if (layers[il] != '-') found[il].r = rows(true);
        if (layers[il] == 'p') found[il].p = rows(false);
    }
    for (uint32_t il = 0; il < n_layer; ++il) {
        if (layers[il] != '-') found[il].s = rows(true);
    }
    return found;
}

// A compressor of DSV4.
struct Compressor {
    std::vector<uint32_t> layers;
    int32_t type_k = 0;
    uint32_t n_embd_k = 0, ratio = 0, state_size = 0, n_embd_state = 0;
};

// The compressed half of a whole DSV4 state, of one stream.
inline std::vector<Compressor> read_compressors(Cursor &in) {
    std::vector<Compressor> found(3);
    const auto tensor = [&](Compressor &of, bool is_k) {
        const auto type = in.take<int32_t>();
        const auto n_embd = in.take<uint64_t>(), n_row = in.take<uint64_t>(), row_size = in.take<uint64_t>();
        in.skip(n_row * row_size);
        if (is_k) of.type_k = type, of.n_embd_k = static_cast<uint32_t>(n_embd);
    };
    for (Compressor &of : found) {
        in.skip(3 * sizeof(uint32_t));  // version, rows, streams
        of.layers.resize(in.take<uint32_t>());
        for (uint32_t &il : of.layers) {
            il = in.take<uint32_t>();
            tensor(of, true);
        }
    }
    for (Compressor &of : found) {
        in.take<uint32_t>();
        of.ratio = in.take<uint32_t>();
        of.state_size = in.take<uint32_t>();
        of.n_embd_state = in.take<uint32_t>();
        in.take<uint32_t>();
        const auto n_layer = in.take<uint32_t>();
        for (uint32_t i = 0; i < n_layer; ++i) {
            in.take<uint32_t>();
            tensor(of, false);
            tensor(of, false);
        }
    }
    return found;
}
