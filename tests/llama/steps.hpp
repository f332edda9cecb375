// What one leg does for a case. The same calls, whether stock llama.cpp answers them or the adapter in front of it.

#pragma once

#include "cases.hpp"
#include "results.hpp"

#include <llama.h>

void run_steps(llama_model *model, const Case &the_case, Results &out);

// Takes the states that another leg made of a round_trip case, and writes them again.
void take_steps(llama_model *model, const Case &the_case, const Results &from, Results &out);

// In foreign_io.cpp, which needs llama.cpp's private headers.
void exceptions(llama_model *model, const Case &the_case, Results &out);

// In pieces.cpp, which needs kvstate.
void pieces(llama_model *model, const Case &the_case, Results &out);

// By what the model in a file divides the frequencies of RoPE; empty: nothing. llama.h has no call for it.
Logits rope_freqs(const std::string &path);
