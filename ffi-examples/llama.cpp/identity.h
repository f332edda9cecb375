// Whose state a slot file holds.
#pragma once

#include "kvstate.h"

#include <array>

struct llama_context;

// A fingerprint of the model, by its metadata and the types and shapes of its tensors, and of how the context rotates positions. The
// model's file is not read: nobody knows its name any more. Adapters are not part of it, since a server sets them for each request.
std::array<uint8_t, KVS_FINGERPRINT_SIZE> fingerprint_of(const llama_context & ctx);
