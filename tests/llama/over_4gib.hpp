// A cache with more than 4 GiB of transposed V in one layer, and a state above 4 GiB, in sparse memory.

#pragma once

#include "compare.hpp"

void over_4gib(Report &report);
