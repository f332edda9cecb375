// Slot files: a target, a draft model, checkpoints and a driver, saved and loaded.

#include "check.h"

enum { N_TOKENS = 12 };

static const kvs_token tokens[4] = {-1, 1, 7, 8};
static const uint8_t driver[] = "driver";

// A target with N_TOKENS tokens in sequence 0, and a draft model with as many in its sequence 1.
static kvs_context *target, *draft;
static uint8_t partial[64];
static kvs_slot_checkpoint checkpoints[2];
static kvs_slot_save_params params;

static void open_both(void) {
    target = new_context(default_setup(32, 2));
    draft = new_context(default_setup(32, 2));
    decode(target, 0, 0, N_TOKENS, NULL);
    decode(draft, 1, 0, N_TOKENS, NULL);
    const size_t size = kvs_state_seq_get_data_ext(target, partial, sizeof partial, 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    CHECK(size == 8);
    for (int i = 0; i < 2; i++) {
        checkpoints[i] = kvs_slot_checkpoint_default();
        checkpoints[i].n_tokens = 4 * (i + 1);
        checkpoints[i].pos_max = 4 * (i + 1) - 1;
        checkpoints[i].target = partial;
        checkpoints[i].target_size = size;
    }
    params = kvs_slot_save_default_params();
    params.tokens = tokens;
    params.n_tokens = 4;
    params.checkpoints = checkpoints;
    params.n_checkpoint = 2;
    params.draft = draft;
    params.draft_seq_id = 1;
    params.driver = driver;
    params.driver_size = sizeof driver;
    params.identity.model = (const uint8_t *)"model";
    params.identity.model_size = 5;
}

static void close_both(void) {
    kvs_context_free(target);
    kvs_context_free(draft);
}

static size_t save_all(const char *filename) {
    size_t size = 0;
    CHECK(kvs_slot_save(target, filename, 0, &params, &size) == KVS_STATUS_OK);
    CHECK(size > 0);
    return size;
}

static kvs_pos pos_max(kvs_context *ctx, kvs_seq_id seq_id) {
    return kvs_memory_seq_pos_max(kvs_get_memory(ctx), seq_id);
}

// Parameters that name the draft and the model.
static kvs_slot_load_params load_params(void) {
    kvs_slot_load_params load = kvs_slot_load_default_params();
    load.draft = draft;
    load.verify = KVS_VERIFY_FULL;
    load.identity = params.identity;
    return load;
}

// Changes the byte at an offset; from the end if that is negative.
static void flip(const char *filename, long at) {
    FILE *file = fopen(filename, "r+b");
    CHECK(file != NULL && fseek(file, at, at < 0 ? SEEK_END : SEEK_SET) == 0);
    const int byte = fgetc(file);
    CHECK(byte != EOF && fseek(file, -1, SEEK_CUR) == 0 && fputc(byte ^ 1, file) != EOF && fclose(file) == 0);
}

static void everything_is_saved_and_comes_back(void) {
    open_both();
    const size_t size = save_all("slot.bin");
    kvs_slot_load_params load = load_params();
    kvs_slot_result result = kvs_slot_result_default();
    CHECK(kvs_slot_load(target, "slot.bin", 1, &load, &result) == KVS_STATUS_OK);
    CHECK(pos_max(target, 1) == N_TOKENS - 1 && pos_max(draft, 0) == N_TOKENS - 1);
    CHECK(result.n_tokens == 4 && memcmp(result.tokens, tokens, sizeof tokens) == 0);
    CHECK(result.target_size > 0 && result.target_size < size);
    CHECK(result.n_checkpoint == 2 && result.n_checkpoint_in_file == 2);
    CHECK(result.checkpoints[1].n_tokens == 8 && result.checkpoints[1].pos_max == 7);
    CHECK(result.checkpoints[1].target_size == 8 && memcmp(result.checkpoints[1].target, partial, 8) == 0);
    CHECK(result.draft == KVS_SLOT_DRAFT_RESTORED && result.draft_reason[0] == '\0');
    CHECK(result.draft_size == kvs_state_seq_get_size(draft, 0));
    CHECK(result.driver_size == sizeof driver && memcmp(result.driver, driver, sizeof driver) == 0);
    CHECK(result.verified == KVS_VERIFY_FULL && result.n_note == 0);
    CHECK(result.identity.model_size == 5 && memcmp(result.identity.model, "model", 5) == 0);
    kvs_slot_result_free(&result);
    CHECK(result.memory == NULL && result.tokens == NULL && result.struct_size == sizeof result);
    kvs_slot_result_free(&result);
    close_both();
}

static void expect_equal_files(const char *a, const char *b) {
    FILE *files[2] = {fopen(a, "rb"), fopen(b, "rb")};
    CHECK(files[0] != NULL && files[1] != NULL);
    int byte = 0;
    while (byte != EOF) {
        byte = fgetc(files[0]);
        CHECK(byte == fgetc(files[1]));
    }
    CHECK(fclose(files[0]) == 0 && fclose(files[1]) == 0);
}

static void a_save_in_the_background_is_that_of_the_slot_when_it_began(void) {
    open_both();
    const size_t expected = save_all("slot.bin");
    // Nothing that the caller has is looked at any more once the call returns.
    uint8_t state[sizeof partial];
    memcpy(state, partial, sizeof partial);
    kvs_slot_checkpoint own[2] = {checkpoints[0], checkpoints[1]};
    kvs_token tokens_of_caller[4];
    memcpy(tokens_of_caller, tokens, sizeof tokens);
    own[0].target = own[1].target = state;
    params.checkpoints = own;
    params.tokens = tokens_of_caller;
    kvs_job *job = NULL;
    CHECK(kvs_slot_save_start(target, "background.bin", 0, &params, NULL, &job) == KVS_STATUS_OK);
    memset(own, 0, sizeof own);
    memset(state, 0xff, sizeof state);
    memset(tokens_of_caller, 0xff, sizeof tokens_of_caller);
    decode(target, 0, N_TOKENS, 4, NULL);
    CHECK(kvs_memory_seq_rm(kvs_get_memory(draft), 1, -1, -1));
    close_both();
    size_t size = 0;
    CHECK(kvs_job_wait(job, &size) == KVS_STATUS_OK && size == expected);
    kvs_job_free(job);
    expect_equal_files("slot.bin", "background.bin");
}

static int stop(void *user_data, uint64_t done, uint64_t total) {
    CHECK(done <= total && total > 0);
    ++*(int *)user_data;
    return 1;
}

static void a_save_in_the_background_that_is_cancelled_leaves_the_old_file(void) {
    open_both();
    save_all("slot.bin");
    save_all("old.bin");
    decode(target, 0, N_TOKENS, 4, NULL);
    int n_calls = 0;
    kvs_transfer_params transfer = kvs_transfer_default_params();
    transfer.progress = stop;
    transfer.progress_user_data = &n_calls;
    kvs_job *job = NULL;
    CHECK(kvs_slot_save_start(target, "slot.bin", 0, &params, &transfer, &job) == KVS_STATUS_OK);
    size_t size = 7;
    FAILS(kvs_job_wait(job, &size), KVS_STATUS_CANCELLED, KVS_STATUS_CANCELLED, "cancelled after");
    CHECK(size == 7 && n_calls == 1);
    kvs_job_free(job);
    expect_equal_files("slot.bin", "old.bin");
    close_both();
}

static void what_makes_no_sense_begins_no_save(void) {
    open_both();
    kvs_job *job = NULL;
    NO_HANDLE_STATUS(kvs_slot_save_start(NULL, "slot.bin", 0, &params, NULL, &job));
    BAD_STATUS(kvs_slot_save_start(target, NULL, 0, &params, NULL, &job), "filename: NULL");
    BAD_STATUS(kvs_slot_save_start(target, "", 0, &params, NULL, &job), "filename: names no file");
    BAD_STATUS(kvs_slot_save_start(target, "slot.bin", 0, &params, NULL, NULL), "job_out: NULL");
    kvs_transfer_params transfer = kvs_transfer_default_params();
    transfer.reserved = 1;
    BAD_STATUS(kvs_slot_save_start(target, "slot.bin", 0, &params, &transfer, &job), "reserved: 1");
    checkpoints[0].target_size = 0;
    BAD_STATUS(kvs_slot_save_start(target, "slot.bin", 0, &params, NULL, &job), "checkpoints[0].target: 0 bytes");
    params.n_checkpoint = 0;
    params.draft = target;
    BAD_STATUS(kvs_slot_save_start(target, "slot.bin", 0, &params, NULL, &job), "draft: is the target's context");
    params.draft = NULL;
    params.directory = ".";
    BAD_STATUS(kvs_slot_save_start(target, "a/b", 0, &params, NULL, &job), "a name has no separator");
    CHECK(job == NULL);
    close_both();
}

static void without_parameters_it_is_a_sequence_file(void) {
    open_both();
    size_t size = 0;
    CHECK(kvs_slot_save(target, "slot.bin", 0, NULL, &size) == KVS_STATUS_OK);
    CHECK(kvs_slot_save(target, "slot.bin", 0, NULL, NULL) == KVS_STATUS_OK);
    kvs_slot_result result = kvs_slot_result_default();
    CHECK(kvs_slot_load(target, "slot.bin", 1, NULL, &result) == KVS_STATUS_OK);
    CHECK(result.draft == KVS_SLOT_DRAFT_ABSENT && result.n_tokens == 0 && result.verified == KVS_VERIFY_NONE);
    kvs_slot_result_free(&result);
    kvs_token none[1];
    const size_t end = kvs_state_seq_load_file(target, "slot.bin", 1, none, 1, NULL);
    CHECK(end > 12 && end < size);
    close_both();
}

static void a_file_of_a_plain_save_loads_with_a_note(void) {
    open_both();
    CHECK(kvs_state_seq_save_file(target, "plain.bin", 0, tokens, 4) > 0);
    kvs_slot_load_params load = load_params();
    kvs_slot_result result = kvs_slot_result_default();
    CHECK(kvs_slot_load(target, "plain.bin", 1, &load, &result) == KVS_STATUS_OK);
    CHECK(result.n_note == 1 && strstr(result.notes[0], "no identity and no checksums") != NULL);
    CHECK(result.verified == KVS_VERIFY_NONE && result.draft == KVS_SLOT_DRAFT_ABSENT);
    kvs_slot_result_free(&result);
    close_both();
}

static void a_draft_state_that_does_not_fit_is_dropped_and_says_why(void) {
    open_both();
    save_all("slot.bin");
    setup s = default_setup(16, 1);
    s.layer.n_embd_k_gqa = 8;
    kvs_context *other = new_context(s);
    decode(other, 0, 0, 3, NULL);
    kvs_slot_load_params load = load_params();
    load.draft = other;
    kvs_slot_result result = kvs_slot_result_default();
    CHECK(kvs_slot_load(target, "slot.bin", 1, &load, &result) == KVS_STATUS_OK);
    CHECK(result.draft == KVS_SLOT_DRAFT_DROPPED && strstr(result.draft_reason, "mismatched key row size") != NULL);
    CHECK(result.driver_size == 0 && pos_max(target, 1) == N_TOKENS - 1 && pos_max(other, 0) == -1);
    kvs_slot_result_free(&result);
    kvs_context_free(other);
    close_both();
}

static void a_damaged_appendix_is_left_out_and_a_damaged_state_refused(void) {
    open_both();
    const size_t size = save_all("slot.bin");
    kvs_slot_load_params load = load_params();
    kvs_slot_result result = kvs_slot_result_default();
    flip("slot.bin", -1);
    CHECK(kvs_slot_load(target, "slot.bin", 1, &load, &result) == KVS_STATUS_OK);
    CHECK(result.verified == KVS_VERIFY_NONE && result.n_note == 2 && result.n_checkpoint == 2);
    kvs_slot_result_free(&result);
    flip("slot.bin", -1);
    // In the middle of the cells.
    flip("slot.bin", 12 + 16 + 40);
    state before = save(target, -1);
    FAILS(kvs_slot_load(target, "slot.bin", 1, &load, &result), KVS_STATUS_CORRUPT, KVS_STATUS_CORRUPT,
          "crc32c of the memory state");
    check_unchanged(target, before);
    CHECK(result.memory == NULL && size > 0);
    close_both();
}

static void a_file_of_another_model_is_refused(void) {
    open_both();
    save_all("slot.bin");
    kvs_slot_load_params load = load_params();
    load.identity.model = (const uint8_t *)"MODEL";
    kvs_slot_result result = kvs_slot_result_default();
    FAILS(kvs_slot_load(target, "slot.bin", 1, &load, &result), KVS_STATUS_MISMATCH, KVS_STATUS_MISMATCH,
          "model: the state has 'model', the cache 'MODEL'");
    close_both();
}

static void a_file_that_lacks_what_is_required_is_refused(void) {
    open_both();
    CHECK(kvs_state_seq_save_file(target, "plain.bin", 0, tokens, 4) > 0);
    kvs_slot_load_params load = load_params();
    kvs_slot_result result = kvs_slot_result_default();
    state before = save(target, -1);
    load.require = KVS_REQUIRE_CHECKSUMS;
    FAILS(kvs_slot_load(target, "plain.bin", 1, &load, &result), KVS_STATUS_CORRUPT, KVS_STATUS_CORRUPT,
          "checksums: none (expected those of a slot file, which are required)");
    load.require = KVS_REQUIRE_IDENTITY;
    FAILS(kvs_slot_load(target, "plain.bin", 1, &load, &result), KVS_STATUS_MISMATCH, KVS_STATUS_MISMATCH,
          "model: the state has none, and it is required, the cache 'model'");
    load.identity.model_size = 0;
    BAD_STATUS(kvs_slot_load(target, "plain.bin", 1, &load, &result), "require: an identity is required");
    load.require = 4;
    BAD_STATUS(kvs_slot_load(target, "plain.bin", 1, &load, &result), "require: 0x4 (known: 0x3)");
    check_unchanged(target, before);
    save_all("slot.bin");
    load = load_params();
    load.require = KVS_REQUIRE_IDENTITY | KVS_REQUIRE_CHECKSUMS;
    CHECK(kvs_slot_load(target, "slot.bin", 1, &load, &result) == KVS_STATUS_OK);
    kvs_slot_result_free(&result);
    close_both();
}

// Fingerprints

static void a_fingerprint_is_of_files_and_settings(void) {
    // A GGUF of version 3 without values and tensors.
    static const uint8_t gguf[24] = {'G', 'G', 'U', 'F', 3};
    FILE *file = fopen("model.gguf", "wb");
    CHECK(file != NULL && fwrite(gguf, 1, sizeof gguf, file) == sizeof gguf && fclose(file) == 0);
    const char *const ggufs[] = {"model.gguf"};
    const kvs_setting settings[] = {{"type_k", "f16"}, {"rope_freq_scale", "0.5"}};
    const kvs_setting turned[] = {settings[1], settings[0]}, twice[] = {settings[0], settings[0]};
    uint8_t all[KVS_FINGERPRINT_SIZE], again[KVS_FINGERPRINT_SIZE];
    CHECK(kvs_fingerprint(ggufs, 1, settings, 2, all) == KVS_STATUS_OK);
    CHECK(kvs_fingerprint(ggufs, 1, turned, 2, again) == KVS_STATUS_OK && memcmp(all, again, sizeof all) == 0);
    CHECK(kvs_fingerprint(NULL, 0, settings, 2, again) == KVS_STATUS_OK && memcmp(all, again, sizeof all) != 0);
    CHECK(kvs_fingerprint(ggufs, 1, NULL, 0, again) == KVS_STATUS_OK && memcmp(all, again, sizeof all) != 0);

    memset(again, 7, sizeof again);
    BAD_STATUS(kvs_fingerprint(ggufs, 1, twice, 2, again), "settings: 'type_k' comes twice, as 'f16' and 'f16'");
    BAD_STATUS(kvs_fingerprint(NULL, 0, NULL, 0, again), "no GGUF and no setting is named");
    BAD_STATUS(kvs_fingerprint(NULL, 1, NULL, 0, again), "ggufs: NULL, with a count of 1");
    BAD_STATUS(kvs_fingerprint(NULL, 0, &(kvs_setting){"type_k", NULL}, 1, again), "value: NULL");
    BAD_STATUS(kvs_fingerprint(ggufs, 1, NULL, 0, NULL), "fingerprint_out: NULL");
    const char *const missing[] = {"missing.gguf"};
    FAILS(kvs_fingerprint(missing, 1, NULL, 0, again), KVS_STATUS_IO, KVS_STATUS_IO, "missing.gguf");
    for (size_t i = 0; i < sizeof again; i++) CHECK(again[i] == 7);
}

// Writers and readers

// A state that is a section of the caller's.
static const char section[] = "a section of the caller's";

static kvs_state_writer *new_writer(kvs_seq_id seq_id) {
    kvs_state_writer *writer = NULL;
    CHECK(kvs_state_writer_new(seq_id, NULL, &writer) == KVS_STATUS_OK);
    CHECK(kvs_state_writer_write(writer, section, sizeof section) == KVS_STATUS_OK);
    return writer;
}

static kvs_slot_save_params without_draft(void) {
    kvs_slot_save_params save_params = params;
    save_params.draft = NULL;
    return save_params;
}

static kvs_slot_load_params load_without_draft(void) {
    kvs_slot_load_params load = load_params();
    load.draft = NULL;
    return load;
}

static void a_writer_saves_a_slot_and_a_reader_reads_it(void) {
    open_both();
    kvs_state_writer *writer = new_writer(0);
    kvs_slot_save_params save_params = without_draft();
    size_t size = 0;
    CHECK(kvs_state_writer_save_slot(writer, "slot.bin", &save_params, false, &size) == KVS_STATUS_OK);
    const size_t state_end = kvs_state_writer_save_file(writer, "plain.bin", tokens, 4, false);
    CHECK(state_end > 0 && state_end < size);
    kvs_state_writer_free(writer);

    const kvs_slot_load_params load = load_without_draft();
    kvs_state_reader *reader = NULL;
    kvs_slot_result result = kvs_slot_result_default();
    char read[sizeof section];
    CHECK(kvs_state_reader_open_slot(1, "slot.bin", &load, NULL, &reader) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_read(reader, read, sizeof read) == KVS_STATUS_OK && memcmp(read, section, sizeof read) == 0);
    CHECK(kvs_state_reader_slot(reader, &result) == KVS_STATUS_OK);
    CHECK(result.n_tokens == 4 && result.n_checkpoint == 2 && result.driver_size == sizeof driver);
    CHECK(result.verified == KVS_VERIFY_FULL && result.draft == KVS_SLOT_DRAFT_ABSENT && result.n_note == 0);
    CHECK(result.append_start == state_end && result.target_size == state_end - 12 - sizeof tokens);
    CHECK(result.pos_min == -1 && result.pos_max == -1); // there was no view
    BAD_STATUS(kvs_state_reader_slot(reader, &result), "holds what an earlier load gave");
    kvs_slot_result_free(&result);
    BAD_STATUS(kvs_state_reader_slot(reader, &result), "the slot has been given already");
    kvs_state_reader_free(reader);
    close_both();
}

static void a_server_appends_behind_the_checksums_of_a_writer(void) {
    open_both();
    kvs_state_writer *writer = new_writer(0);
    size_t size = 0;
    CHECK(kvs_state_writer_save_slot(writer, "slot.bin", NULL, false, &size) == KVS_STATUS_OK);
    kvs_state_writer_free(writer);
    FILE *file = fopen("slot.bin", "ab");
    CHECK(file != NULL && fputs("SCKP", file) >= 0 && fclose(file) == 0);
    kvs_state_reader *reader = NULL;
    kvs_slot_result result = kvs_slot_result_default();
    char read[sizeof section];
    CHECK(kvs_state_reader_open_slot(1, "slot.bin", NULL, NULL, &reader) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_read(reader, read, sizeof read) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_slot(reader, &result) == KVS_STATUS_OK && result.append_start == size && result.n_note == 1);
    kvs_slot_result_free(&result);
    kvs_state_reader_free(reader);
    close_both();
}

static void what_a_reader_compares_is_refused_before_it_reads(void) {
    open_both();
    kvs_state_writer *writer = new_writer(0);
    kvs_slot_save_params save_params = without_draft();
    CHECK(kvs_state_writer_save_slot(writer, "slot.bin", &save_params, true, NULL) == KVS_STATUS_OK);
    kvs_state_reader *reader = NULL;
    kvs_slot_load_params load = load_without_draft();
    load.identity.model = (const uint8_t *)"MODEL";
    FAILS(kvs_state_reader_open_slot(1, "slot.bin", &load, NULL, &reader), KVS_STATUS_MISMATCH, KVS_STATUS_MISMATCH,
          "model: the state has 'model', the cache 'MODEL'");
    load = load_without_draft();
    flip("slot.bin", 12 + 16 + 3);
    FAILS(kvs_state_reader_open_slot(1, "slot.bin", &load, NULL, &reader), KVS_STATUS_CORRUPT, KVS_STATUS_CORRUPT,
          "crc32c of the memory state");
    CHECK(kvs_state_writer_save_file(writer, "plain.bin", tokens, 4, false) > 0);
    load.require = KVS_REQUIRE_CHECKSUMS;
    char read[sizeof section];
    kvs_slot_result result = kvs_slot_result_default();
    CHECK(kvs_state_reader_open_slot(1, "plain.bin", &load, NULL, &reader) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_read(reader, read, sizeof read) == KVS_STATUS_OK);
    FAILS(kvs_state_reader_slot(reader, &result), KVS_STATUS_CORRUPT, KVS_STATUS_CORRUPT, "checksums: none");
    kvs_state_reader_free(reader);
    kvs_state_writer_free(writer);
    close_both();
}

static void what_makes_no_sense_for_writers_and_readers_is_refused(void) {
    open_both();
    kvs_state_writer *writer = new_writer(0), *whole = new_writer(-1);
    kvs_state_reader *reader = NULL;
    kvs_slot_save_params save_params = without_draft();
    CHECK(kvs_state_writer_save_slot(writer, "slot.bin", &save_params, false, NULL) == KVS_STATUS_OK);
    BAD_STATUS(kvs_state_writer_save_slot(writer, "slot.bin", &params, false, NULL), "draft: ");
    BAD_STATUS(kvs_state_writer_save_slot(whole, "slot.bin", &save_params, false, NULL), "seq_id: -1");
    BAD_STATUS(kvs_state_writer_save_slot(writer, NULL, &save_params, false, NULL), "filename: NULL");
    NO_HANDLE_STATUS(kvs_state_writer_save_slot(NULL, "slot.bin", &save_params, false, NULL));
    kvs_slot_load_params load = load_params();
    BAD_STATUS(kvs_state_reader_open_slot(1, "slot.bin", &load, NULL, &reader), "draft: ");
    load = load_without_draft();
    BAD_STATUS(kvs_state_reader_open_slot(-1, "slot.bin", &load, NULL, &reader), "seq_id: -1");
    BAD_STATUS(kvs_state_reader_open_slot(1, "slot.bin", &load, NULL, NULL), "reader_out: NULL");
    load.p1 = 4;
    BAD_STATUS(kvs_state_reader_open_slot(1, "slot.bin", &load, NULL, &reader), "p1: 4, a reader restores all positions");
    kvs_slot_result result = kvs_slot_result_default();
    NO_HANDLE_STATUS(kvs_state_reader_slot(NULL, &result));
    CHECK(kvs_state_reader_open_file(1, "slot.bin", 4, NULL, &reader) == KVS_STATUS_OK);
    BAD_STATUS(kvs_state_reader_slot(reader, &result), "it was not opened as a slot");
    BAD_STATUS(kvs_state_reader_slot(reader, NULL), "kvs_slot_result: NULL");
    kvs_state_reader_free(reader);
    kvs_state_writer_free(whole);
    kvs_state_writer_free(writer);
    close_both();
}

static void a_name_in_a_directory_has_no_separator(void) {
    open_both();
    params.directory = ".";
    save_all("slot.bin");
    kvs_slot_load_params load = load_params();
    load.directory = ".";
    kvs_slot_result result = kvs_slot_result_default();
    CHECK(kvs_slot_load(target, "slot.bin", 1, &load, &result) == KVS_STATUS_OK);
    kvs_slot_result_free(&result);
    BAD_STATUS(kvs_slot_save(target, "../slot.bin", 0, &params, NULL), "a name has no separator");
    BAD_STATUS(kvs_slot_load(target, "./slot.bin", 1, &load, &result), "a name has no separator");
    BAD_STATUS(kvs_slot_save(target, "\xff", 0, &params, NULL), "not UTF-8");
    close_both();
}

static void what_makes_no_sense_is_refused(void) {
    open_both();
    save_all("slot.bin");
    kvs_slot_load_params load = load_params();
    kvs_slot_result result = kvs_slot_result_default();
    load.draft = target;
    BAD_STATUS(kvs_slot_load(target, "slot.bin", 1, &load, &result), "draft: is the target's context");
    load = load_params();
    load.verify = 3;
    BAD_STATUS(kvs_slot_load(target, "slot.bin", 1, &load, &result), "verify: 3 is out of range [0, 2]");
    load = load_params();
    load.n_token_capacity = 3;
    FAILS(kvs_slot_load(target, "slot.bin", 1, &load, &result), KVS_STATUS_BUFFER_TOO_SMALL,
          KVS_STATUS_BUFFER_TOO_SMALL, "4 > 3");
    load = load_params();
    CHECK(kvs_slot_load(target, "slot.bin", 1, &load, &result) == KVS_STATUS_OK);
    BAD_STATUS(kvs_slot_load(target, "slot.bin", 1, &load, &result), "holds what an earlier load gave");
    kvs_slot_result_free(&result);
    params.sidecar = 2;
    BAD_STATUS(kvs_slot_save(target, "slot.bin", 0, &params, NULL), "sidecar: 2, it is 0 or 1");
    params.sidecar = 0;
    checkpoints[1].pos_min = 8;
    BAD_STATUS(kvs_slot_save(target, "slot.bin", 0, &params, NULL), "pos_min: 8, above pos_max 7");
    checkpoints[1].pos_min = 0;
    checkpoints[1].target_size = 0;
    BAD_STATUS(kvs_slot_save(target, "slot.bin", 0, &params, NULL), "checkpoints[1].target: 0 bytes");
    close_both();
}

static void structs_of_another_size_are_refused(void) {
    BAD_STATUS(kvs_slot_checkpoint_init(&checkpoints[0], sizeof checkpoints[0] - 1), "kvs_slot_checkpoint.struct_size");
    BAD_STATUS(kvs_slot_save_params_init(&params, sizeof params - 1), "kvs_slot_save_params.struct_size");
    kvs_slot_load_params load;
    BAD_STATUS(kvs_slot_load_params_init(&load, sizeof load - 1), "kvs_slot_load_params.struct_size");
    kvs_slot_result result;
    BAD_STATUS(kvs_slot_result_init(&result, sizeof result - 1), "kvs_slot_result.struct_size");
}

static void a_null_argument_fails_every_call(void) {
    open_both();
    save_all("slot.bin");
    kvs_slot_result result = kvs_slot_result_default();
    NO_HANDLE_STATUS(kvs_slot_save(NULL, "slot.bin", 0, NULL, NULL));
    NO_HANDLE_STATUS(kvs_slot_load(NULL, "slot.bin", 0, NULL, &result));
    BAD_STATUS(kvs_slot_save(target, NULL, 0, NULL, NULL), "filename: NULL");
    BAD_STATUS(kvs_slot_load(target, NULL, 0, NULL, &result), "filename: NULL");
    BAD_STATUS(kvs_slot_load(target, "slot.bin", 0, NULL, NULL), "kvs_slot_result: NULL");
    BAD_STATUS(kvs_slot_checkpoint_init(NULL, sizeof checkpoints[0]), "kvs_slot_checkpoint: NULL");
    BAD_STATUS(kvs_slot_save_params_init(NULL, sizeof params), "kvs_slot_save_params: NULL");
    BAD_STATUS(kvs_slot_load_params_init(NULL, sizeof(kvs_slot_load_params)), "kvs_slot_load_params: NULL");
    BAD_STATUS(kvs_slot_result_init(NULL, sizeof result), "kvs_slot_result: NULL");
    FAILS_VOID(kvs_slot_result_free(NULL), KVS_STATUS_INVALID_ARGUMENT, "kvs_slot_result: NULL");
    params.tokens = NULL;
    BAD_STATUS(kvs_slot_save(target, "slot.bin", 0, &params, NULL), "tokens: NULL, with a count of 4");
    close_both();
}

MAIN(CASE(everything_is_saved_and_comes_back), CASE(a_save_in_the_background_is_that_of_the_slot_when_it_began),
     CASE(a_save_in_the_background_that_is_cancelled_leaves_the_old_file), CASE(what_makes_no_sense_begins_no_save),
     CASE(without_parameters_it_is_a_sequence_file),
     CASE(a_file_of_a_plain_save_loads_with_a_note), CASE(a_draft_state_that_does_not_fit_is_dropped_and_says_why),
     CASE(a_damaged_appendix_is_left_out_and_a_damaged_state_refused), CASE(a_file_of_another_model_is_refused),
     CASE(a_file_that_lacks_what_is_required_is_refused), CASE(a_fingerprint_is_of_files_and_settings),
     CASE(a_writer_saves_a_slot_and_a_reader_reads_it), CASE(a_server_appends_behind_the_checksums_of_a_writer),
     CASE(what_a_reader_compares_is_refused_before_it_reads),
     CASE(what_makes_no_sense_for_writers_and_readers_is_refused),
     CASE(a_name_in_a_directory_has_no_separator), CASE(what_makes_no_sense_is_refused),
     CASE(structs_of_another_size_are_refused), CASE(a_null_argument_fails_every_call))
