// A kvstate context of the geometry that a state shows.

#pragma once

#include "blob.hpp"
#include "cases.hpp"

#include <kvstate.h>

#include <memory>

using Context = std::unique_ptr<kvs_context, decltype(&kvs_context_free)>;

// What a state of a sequence in memory shows of the sections that it is of.
struct Geometry {
    std::vector<Section> attention;  // in write order
    std::vector<RecurrentLayer> recurrent;
    std::vector<Compressor> compressors;
    size_t end = 0;  // where the last section ends
};

Geometry read_geometry(const Model &model, const Bytes &state);

// Elements of a row.
uint32_t elements(const TensorType &tensor);

// A context like the one that wrote the state: 4 sequences, caches of 512 cells.
Context context_for(const Case &the_case, const Geometry &geometry, const kvs_rope_params *rope = nullptr);
