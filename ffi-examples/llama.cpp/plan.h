// Planning a restore: every section of a memory is read and checked before the first change.
#pragma once

#include "io.h"

// Plans the restore of a sequence, or of the whole context with seq_id -1. False if the memory is of a kind that is not known here: then nothing was planned.
// Throws what is wrong with the state.
bool plan_restore(llama_memory_i & memory, reader_io & io, llama_seq_id seq_id, llama_state_seq_flags flags);
