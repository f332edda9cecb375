// kvstate without llama.cpp, on the bytes that a leg wrote.

#pragma once

#include "compare.hpp"

// Loads NONE, PARTIAL, the whole context and the slot file of a leg into a kvstate context of the same geometry,
// and holds what it writes against them.
void alone_takes(const Case &the_case, const std::string &leg, const Results &results, Report &report);

// Moves the sequence of a k_shift as the leg did, and holds K of every cell against what llama.cpp made of it.
void alone_shifts(const Case &the_case, const Results &results, Report &report);

// Restores the state of removals, removes each of the ranges, and holds the answers and positions against the leg's.
void alone_removes(const Case &the_case, const std::string &leg, const Results &results, Report &report);
