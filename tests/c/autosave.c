// Auto-save: a folder that keeps the slots of a server.

#include "check.h"

enum { N_TOKENS = 12 };

static const kvs_token tokens[4] = {-1, 1, 7, 8};

// A target with N_TOKENS tokens in sequence 0, and a draft model with as many in its sequence 1.
static kvs_context *target, *draft;
static kvs_slot_save_params save_params;
static kvs_slot_load_params load_params;
static kvs_autosave *autosave;

static void open_folder(void) {
    kvs_autosave_params params = kvs_autosave_default_params();
    params.directory = "slots";
    params.every_n_tokens = 10;
    CHECK(kvs_autosave_open(&params, &autosave) == KVS_STATUS_OK);
    CHECK(kvs_autosave_note(autosave, 0) == NULL);
}

static void open_all(void) {
    target = new_context(default_setup(32, 2));
    draft = new_context(default_setup(32, 2));
    decode(target, 0, 0, N_TOKENS, NULL);
    decode(draft, 1, 0, N_TOKENS, NULL);
    save_params = kvs_slot_save_default_params();
    save_params.tokens = tokens;
    save_params.n_tokens = 4;
    save_params.draft = draft;
    save_params.draft_seq_id = 1;
    load_params = kvs_slot_load_default_params();
    load_params.draft = draft;
    load_params.verify = KVS_VERIFY_FULL;
    open_folder();
}

static void close_all(void) {
    kvs_autosave_free(autosave);
    kvs_context_free(target);
    kvs_context_free(draft);
}

static kvs_pos pos_max(kvs_context *ctx, kvs_seq_id seq_id) {
    return kvs_memory_seq_pos_max(kvs_get_memory(ctx), seq_id);
}

static size_t file_size(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return 0;
    CHECK(fseek(file, 0, SEEK_END) == 0);
    const long size = ftell(file);
    fclose(file);
    return (size_t)size;
}

static void a_slot_is_restored_by_the_next_run(void) {
    open_all();
    size_t size = 0;
    CHECK(kvs_autosave_save(autosave, target, 2, 0, &save_params, &size) == KVS_STATUS_OK);
    CHECK(size > 0 && size == file_size("slots/auto-slot2.bin"));
    kvs_autosave_free(autosave);

    open_folder();
    CHECK(kvs_autosave_count(autosave) == 1);
    kvs_autosaved_slot slot = kvs_autosaved_slot_default();
    CHECK(kvs_autosave_get(autosave, 0, &slot) == KVS_STATUS_OK);
    CHECK(slot.slot_id == 2 && slot.n_tokens == 4 && slot.size == size && slot.last_use_ms > 0);
    CHECK(slot.struct_size == sizeof slot);

    kvs_slot_result result = kvs_slot_result_default();
    int32_t restored = -1;
    CHECK(kvs_autosave_restore(autosave, target, 2, 1, &load_params, &result, &restored) == KVS_STATUS_OK);
    CHECK(restored == 1 && pos_max(target, 1) == N_TOKENS - 1 && pos_max(draft, 0) == N_TOKENS - 1);
    CHECK(result.n_tokens == 4 && memcmp(result.tokens, tokens, sizeof tokens) == 0);
    CHECK(result.draft == KVS_SLOT_DRAFT_RESTORED && result.n_note == 0 && result.target_size > 0);
    kvs_slot_result_free(&result);
    // The file is one as any other.
    CHECK(kvs_slot_load(target, "slots/auto-slot2.bin", 1, &load_params, &result) == KVS_STATUS_OK);
    kvs_slot_result_free(&result);
    kvs_token read[4];
    size_t n_read = 0;
    CHECK(kvs_state_seq_load_file(target, "slots/auto-slot2.bin", 1, read, 4, &n_read) > 0 && n_read == 4);
    close_all();
}

static void what_does_not_fit_is_a_cold_start_that_says_why(void) {
    open_all();
    kvs_slot_result result = kvs_slot_result_default();
    int32_t restored = -1;
    CHECK(kvs_autosave_restore(autosave, target, 0, 1, NULL, &result, &restored) == KVS_STATUS_OK);
    CHECK(restored == 0 && result.n_note == 0 && result.n_tokens == 0 && result.target_size == 0);
    kvs_slot_result_free(&result);

    CHECK(kvs_autosave_save(autosave, target, 0, 0, &save_params, NULL) == KVS_STATUS_OK);
    kvs_context *small = new_context(default_setup(8, 2));
    CHECK(kvs_autosave_restore(autosave, small, 0, 1, NULL, &result, &restored) == KVS_STATUS_OK);
    CHECK(restored == 0 && result.n_note == 1 && strstr(result.notes[0], "failed to find 12 available cells") != NULL);
    CHECK(pos_max(small, 1) == -1);
    // A result is used once.
    BAD_STATUS(kvs_autosave_restore(autosave, target, 0, 1, NULL, &result, &restored), "result: holds what an earlier load");
    kvs_slot_result_free(&result);
    kvs_context_free(small);
    close_all();
}

static void a_save_is_due_after_so_many_tokens_and_runs_in_the_background(void) {
    open_all();
    CHECK(!kvs_autosave_is_dirty(autosave, 0) && !kvs_autosave_mark(autosave, 0, 9));
    CHECK(kvs_autosave_mark(autosave, 0, 1) && kvs_autosave_is_dirty(autosave, 0));
    CHECK(kvs_autosave_save_start(autosave, target, 0, 0, &save_params) == KVS_STATUS_OK);
    // The server goes on.
    kvs_memory_clear(kvs_get_memory(target), true);
    const int32_t ended = kvs_autosave_poll(autosave, 0);
    CHECK(ended == 0 || ended == 1);
    uint64_t done = 1, total = 0;
    CHECK(kvs_autosave_progress(autosave, 0, &done, &total) == KVS_STATUS_OK);
    CHECK(done <= total && total > 0);
    size_t size = 0;
    CHECK(kvs_autosave_wait(autosave, 0, &size) == KVS_STATUS_OK);
    CHECK(size == total && size == file_size("slots/auto-slot0.bin"));
    CHECK(kvs_autosave_poll(autosave, 0) == 1 && !kvs_autosave_is_dirty(autosave, 0));
    CHECK(kvs_autosave_progress(autosave, 0, &done, &total) == KVS_STATUS_OK && done == 0 && total == 0);
    CHECK(kvs_autosave_wait(autosave, 0, &size) == KVS_STATUS_OK && size == 0);
    CHECK(kvs_autosave_flush(autosave) == KVS_STATUS_OK);

    kvs_slot_result result = kvs_slot_result_default();
    int32_t restored = 0;
    CHECK(kvs_autosave_restore(autosave, target, 0, 0, &load_params, &result, &restored) == KVS_STATUS_OK);
    CHECK(restored == 1 && pos_max(target, 0) == N_TOKENS - 1);
    kvs_slot_result_free(&result);
    close_all();
}

static void a_save_can_be_cancelled(void) {
    open_all();
    CHECK(kvs_autosave_cancel(autosave, 0) == KVS_STATUS_OK);
    CHECK(kvs_autosave_save(autosave, target, 0, 0, &save_params, NULL) == KVS_STATUS_OK);
    const size_t before = file_size("slots/auto-slot0.bin");
    // It may have been done before.
    CHECK(kvs_autosave_save_start(autosave, target, 0, 0, NULL) == KVS_STATUS_OK);
    CHECK(kvs_autosave_cancel(autosave, 0) == KVS_STATUS_OK);
    size_t size = 0;
    const kvs_status status = kvs_autosave_wait(autosave, 0, &size);
    CHECK(status == KVS_STATUS_OK || status == KVS_STATUS_CANCELLED);
    CHECK(file_size("slots/auto-slot0.bin") == (status == KVS_STATUS_OK ? size : before));
    close_all();
}

static void a_sidecar_has_the_draft(void) {
    open_all();
    save_params.sidecar = 1;
    size_t size = 0;
    CHECK(kvs_autosave_save(autosave, target, 0, 0, &save_params, &size) == KVS_STATUS_OK);
    CHECK(file_size("slots/auto-slot0.drft") > 0);
    CHECK(size == file_size("slots/auto-slot0.bin") + file_size("slots/auto-slot0.drft"));
    kvs_slot_result result = kvs_slot_result_default();
    CHECK(kvs_slot_load(target, "slots/auto-slot0.bin", 1, &load_params, &result) == KVS_STATUS_OK);
    CHECK(result.draft == KVS_SLOT_DRAFT_RESTORED && pos_max(draft, 0) == N_TOKENS - 1);
    kvs_slot_result_free(&result);
    CHECK(kvs_autosave_remove(autosave, 0) == KVS_STATUS_OK);
    CHECK(file_size("slots/auto-slot0.bin") == 0 && file_size("slots/auto-slot0.drft") == 0);
    close_all();
}

static void a_folder_has_one_keeper_and_a_budget(void) {
    open_all();
    kvs_autosave_params params = kvs_autosave_default_params();
    params.directory = "slots";
    params.max_bytes = 100;
    kvs_autosave *second = NULL;
    FAILS(kvs_autosave_open(&params, &second), KVS_STATUS_LOCKED, KVS_STATUS_LOCKED, "auto-slots.lock is locked");
    CHECK(second == NULL);
    kvs_autosave_free(autosave);
    CHECK(kvs_autosave_open(&params, &autosave) == KVS_STATUS_OK);
    FAILS(kvs_autosave_save(autosave, target, 0, 0, &save_params, NULL), KVS_STATUS_OVER_BUDGET, KVS_STATUS_OVER_BUDGET,
          "bytes do not fit max_bytes: 100");
    FAILS(kvs_autosave_save_start(autosave, target, 0, 0, &save_params), KVS_STATUS_OVER_BUDGET, KVS_STATUS_OVER_BUDGET,
          "bytes do not fit max_bytes: 100");
    CHECK(kvs_autosave_count(autosave) == 0);
    close_all();
}

static void what_was_odd_is_said(void) {
    open_all();
    CHECK(kvs_autosave_save(autosave, target, 0, 0, &save_params, NULL) == KVS_STATUS_OK);
    kvs_autosave_free(autosave);
    FILE *file = fopen("slots/auto-slots.json", "wb");
    CHECK(file != NULL && fputs("{", file) >= 0 && fclose(file) == 0);
    kvs_autosave_params params = kvs_autosave_default_params();
    params.directory = "slots";
    CHECK(kvs_autosave_open(&params, &autosave) == KVS_STATUS_OK);
    CHECK(strstr(kvs_autosave_note(autosave, 0), "auto-slots.json is not used: ") != NULL);
    CHECK(kvs_autosave_note(autosave, 1) == NULL && kvs_autosave_count(autosave) == 1);
    close_all();
}

static void what_makes_no_sense_is_refused(void) {
    open_all();
    kvs_slot_result result = kvs_slot_result_default();
    int32_t restored = -1;
    save_params.directory = load_params.directory = ".";
    BAD_STATUS(kvs_autosave_save(autosave, target, 0, 0, &save_params, NULL), "directory: given");
    BAD_STATUS(kvs_autosave_save_start(autosave, target, 0, 0, &save_params), "directory: given");
    BAD_STATUS(kvs_autosave_restore(autosave, target, 0, 1, &load_params, &result, &restored), "directory: given");
    BAD_STATUS(kvs_autosave_save(autosave, target, 0, 2, NULL, NULL), "seq_id 2 is out of range [0, 2)");
    BAD_STATUS(kvs_autosave_restore(autosave, target, 0, 2, NULL, &result, &restored), "seq_id 2 is out of range [0, 2)");
    kvs_autosaved_slot slot = kvs_autosaved_slot_default();
    BAD_STATUS(kvs_autosave_get(autosave, 0, &slot), "i: 0 is out of range [0, 0)");
    kvs_autosave_params params = kvs_autosave_default_params();
    kvs_autosave *other = NULL;
    BAD_STATUS(kvs_autosave_open(&params, &other), "directory: NULL");
    params.directory = "other";
    params.unsynced_files = 2;
    BAD_STATUS(kvs_autosave_open(&params, &other), "unsynced_files: 2");
    params.unsynced_files = 1;
    params.reserved = 1;
    BAD_STATUS(kvs_autosave_open(&params, &other), "reserved: 1");
    CHECK(other == NULL && restored == -1 && result.memory == NULL);
    close_all();
}

static void structs_of_another_size_are_refused(void) {
    kvs_autosave_params params;
    kvs_autosaved_slot slot;
    BAD_STATUS(kvs_autosave_params_init(&params, sizeof params - 1), "kvs_autosave_params.struct_size");
    BAD_STATUS(kvs_autosaved_slot_init(&slot, sizeof slot - 1), "kvs_autosaved_slot.struct_size");
    params = kvs_autosave_default_params();
    CHECK(params.struct_size == sizeof params && params.directory == NULL && params.max_bytes == 0);
    CHECK(params.every_n_tokens == 0 && params.unsynced_files == 0 && params.reserved == 0);
    CHECK(kvs_slot_save_default_params().sidecar == 0);
}

static void a_null_argument_fails_every_call(void) {
    open_all();
    kvs_autosave_params params = kvs_autosave_default_params();
    kvs_autosaved_slot slot = kvs_autosaved_slot_default();
    kvs_slot_result result = kvs_slot_result_default();
    int32_t restored = 0;
    uint64_t n = 0;
    BAD_STATUS(kvs_autosave_params_init(NULL, sizeof params), "kvs_autosave_params: NULL");
    BAD_STATUS(kvs_autosaved_slot_init(NULL, sizeof slot), "kvs_autosaved_slot: NULL");
    BAD_STATUS(kvs_autosave_open(NULL, &autosave), "kvs_autosave_params: NULL");
    BAD_STATUS(kvs_autosave_open(&params, NULL), "autosave_out: NULL");
    BAD_STATUS(kvs_autosave_get(autosave, 0, NULL), "kvs_autosaved_slot: NULL");
    BAD_STATUS(kvs_autosave_progress(autosave, 0, NULL, &n), "done_out: NULL");
    BAD_STATUS(kvs_autosave_progress(autosave, 0, &n, NULL), "total_out: NULL");
    BAD_STATUS(kvs_autosave_restore(autosave, target, 0, 1, NULL, NULL, &restored), "kvs_slot_result: NULL");
    BAD_STATUS(kvs_autosave_restore(autosave, target, 0, 1, NULL, &result, NULL), "restored_out: NULL");
    NO_HANDLE_STATUS(kvs_autosave_save(NULL, target, 0, 0, NULL, NULL));
    NO_HANDLE_STATUS(kvs_autosave_save(autosave, NULL, 0, 0, NULL, NULL));
    NO_HANDLE_STATUS(kvs_autosave_save_start(NULL, target, 0, 0, NULL));
    NO_HANDLE_STATUS(kvs_autosave_save_start(autosave, NULL, 0, 0, NULL));
    NO_HANDLE_STATUS(kvs_autosave_restore(NULL, target, 0, 1, NULL, &result, &restored));
    NO_HANDLE_STATUS(kvs_autosave_restore(autosave, NULL, 0, 1, NULL, &result, &restored));
    NO_HANDLE_STATUS(kvs_autosave_get(NULL, 0, &slot));
    NO_HANDLE_STATUS(kvs_autosave_progress(NULL, 0, &n, &n));
    NO_HANDLE_STATUS(kvs_autosave_cancel(NULL, 0));
    NO_HANDLE_STATUS(kvs_autosave_wait(NULL, 0, NULL));
    NO_HANDLE_STATUS(kvs_autosave_flush(NULL));
    NO_HANDLE_STATUS(kvs_autosave_remove(NULL, 0));
    NO_HANDLE(kvs_autosave_note(NULL, 0), NULL);
    NO_HANDLE(kvs_autosave_count(NULL), 0);
    NO_HANDLE(kvs_autosave_mark(NULL, 0, 1), false);
    NO_HANDLE(kvs_autosave_is_dirty(NULL, 0), false);
    NO_HANDLE(kvs_autosave_poll(NULL, 0), -1);
    kvs_autosave_free(NULL);
    close_all();
}

MAIN(CASE(a_slot_is_restored_by_the_next_run), CASE(what_does_not_fit_is_a_cold_start_that_says_why),
     CASE(a_save_is_due_after_so_many_tokens_and_runs_in_the_background), CASE(a_save_can_be_cancelled),
     CASE(a_sidecar_has_the_draft), CASE(a_folder_has_one_keeper_and_a_budget), CASE(what_was_odd_is_said),
     CASE(what_makes_no_sense_is_refused), CASE(structs_of_another_size_are_refused), CASE(a_null_argument_fails_every_call))
