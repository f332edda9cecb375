// A server's slots, written against llama.h: nothing in this file knows of kvstate.

#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
typedef llama_context context; // a C++ server leaves out the struct
#else
typedef struct llama_context context;
#endif

// Stands in for llama_decode: the tokens of a sequence from position p0.
bool engine_decode(context *ctx, llama_seq_id seq_id, llama_pos p0, int n_tokens);

struct server_slot {
    llama_seq_id id;
    llama_token prompt[64];
    size_t n_prompt;
    uint8_t *checkpoint;
    size_t checkpoint_size;
    llama_pos checkpoint_pos;
};

static int fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    return 1;
}

static bool slot_prompt(struct llama_context *ctx, struct server_slot *slot, int n) {
    if (!engine_decode(ctx, slot->id, (llama_pos)slot->n_prompt, n)) return false;
    for (int i = 0; i < n; i++) slot->prompt[slot->n_prompt++] = 100 + i;
    return true;
}

static bool slot_save_checkpoint(struct llama_context *ctx, struct server_slot *slot) {
    const llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    slot->checkpoint_size = llama_state_seq_get_size_ext(ctx, slot->id, flags);
    slot->checkpoint = (uint8_t *)malloc(slot->checkpoint_size);
    slot->checkpoint_pos = llama_memory_seq_pos_max(llama_get_memory(ctx), slot->id);
    return llama_state_seq_get_data_ext(ctx, slot->checkpoint, slot->checkpoint_size, slot->id, flags) ==
           slot->checkpoint_size;
}

static bool slot_back_to_checkpoint(struct llama_context *ctx, struct server_slot *slot) {
    llama_memory_t mem = llama_get_memory(ctx);
    const size_t n = llama_state_seq_set_data_ext(ctx, slot->checkpoint, slot->checkpoint_size, slot->id,
                                                  LLAMA_STATE_SEQ_FLAGS_SWA_ONLY);
    if (n != slot->checkpoint_size) return false;
    if (!llama_memory_seq_rm(mem, slot->id, slot->checkpoint_pos + 1, -1)) return false;
    slot->n_prompt = (size_t)slot->checkpoint_pos + 1;
    return llama_memory_seq_pos_max(mem, slot->id) == slot->checkpoint_pos;
}

int server_main(context *ctx, const char *slot_path, const char *session_path) {
    llama_memory_t mem = llama_get_memory(ctx);
    struct server_slot slot = {0, {LLAMA_TOKEN_NULL}, 0, NULL, 0, -1};
    if (!slot_prompt(ctx, &slot, 12)) return fail("decode");

    // Save, erase and restore a slot.
    const size_t n_saved = llama_state_seq_save_file(ctx, slot_path, slot.id, slot.prompt, slot.n_prompt);
    if (n_saved == 0) return fail("save slot");
    llama_memory_seq_rm(mem, slot.id, -1, -1);
    if (llama_memory_seq_pos_max(mem, slot.id) != -1) return fail("erase slot");
    size_t n_tokens = 0;
    llama_token tokens[64];
    if (llama_state_seq_load_file(ctx, slot_path, slot.id, tokens, 64, &n_tokens) != n_saved) return fail("load slot");
    if (n_tokens != slot.n_prompt || memcmp(tokens, slot.prompt, n_tokens * sizeof tokens[0]) != 0) {
        return fail("tokens of the slot");
    }
    uint32_t head[2];
    FILE *file = fopen(slot_path, "rb");
    if (!file || fread(head, sizeof head, 1, file) != 1) return fail("slot file");
    fclose(file);
    if (head[0] != LLAMA_STATE_SEQ_MAGIC || head[1] != LLAMA_STATE_SEQ_VERSION) return fail("head of the slot file");

    // A checkpoint, a draft that is thrown away, and back.
    if (!slot_save_checkpoint(ctx, &slot)) return fail("save checkpoint");
    if (!slot_prompt(ctx, &slot, 3)) return fail("draft");
    if (!slot_back_to_checkpoint(ctx, &slot)) return fail("back to the checkpoint");

    // A second slot that shares the prompt, and its own end.
    llama_memory_seq_cp(mem, 0, 1, -1, -1);
    if (llama_memory_seq_pos_max(mem, 1) != 11 || llama_memory_seq_pos_min(mem, 1) != 0) return fail("copy");
    if (llama_state_seq_get_size(ctx, 1) != llama_state_seq_get_size(ctx, 0)) return fail("size of the copy");

    // Context shift: drop half of what is behind the first tokens, move the rest.
    if (!llama_memory_can_shift(mem)) return fail("can_shift");
    if (!llama_memory_seq_rm(mem, 1, 2, 7)) return fail("discard");
    llama_memory_seq_rm(mem, 0, -1, -1);
    llama_memory_seq_add(mem, 1, 7, -1, -5);
    if (llama_memory_seq_pos_max(mem, 1) != 6) return fail("shift");
    llama_memory_seq_div(mem, 1, 4, -1, 1);
    llama_memory_seq_keep(mem, 1);

    // One sequence in memory, and the whole context in memory and in a session file.
    const size_t size = llama_state_seq_get_size(ctx, 1);
    uint8_t *state = (uint8_t *)malloc(size);
    if (llama_state_seq_get_data(ctx, state, size, 1) != size) return fail("get_data");
    if (llama_state_seq_set_data(ctx, state, size, 0) != size) return fail("set_data");
    free(state);
    const size_t whole_size = llama_state_get_size(ctx);
    uint8_t *whole = (uint8_t *)malloc(whole_size);
    if (llama_state_get_data(ctx, whole, whole_size) != whole_size) return fail("state_get_data");
    if (!llama_state_save_file(ctx, session_path, slot.prompt, slot.n_prompt)) return fail("save session");
    llama_memory_clear(mem, true);
    if (llama_state_set_data(ctx, whole, whole_size) != whole_size) return fail("state_set_data");
    free(whole);
    if (!llama_state_load_file(ctx, session_path, tokens, 64, &n_tokens)) return fail("load session");
    if (n_tokens != slot.n_prompt || llama_memory_seq_pos_max(mem, 0) != 6) return fail("session");
    file = fopen(session_path, "rb");
    if (!file || fread(head, sizeof head, 1, file) != 1) return fail("session file");
    fclose(file);
    if (head[0] != LLAMA_SESSION_MAGIC || head[1] != LLAMA_SESSION_VERSION) return fail("head of the session file");

    // What is refused.
    if (llama_state_seq_get_size_ext(ctx, 2, LLAMA_STATE_SEQ_FLAGS_NONE) != 0) return fail("seq_id out of range");
    if (llama_state_seq_load_file(ctx, session_path, 0, tokens, 64, &n_tokens) != 0) return fail("session as slot");
    free(slot.checkpoint);
    return 0;
}
