// CUDA devices: numbers, streams, pinned memory, staging, failures of the driver. The emulated driver has two.

#include "check.h"

#include <dlfcn.h>

static kvs_context *ctx;

// Calls of the driver that an engine makes, and of the emulated one for tests.
static void *driver(const char *name) {
    static void *library;
    if (library == NULL) library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library != NULL);
    void *symbol = dlsym(library, name);
    CHECK(symbol != NULL);
    return symbol;
}

// A call of the driver that has to succeed; its parameters are those of cuda.h.
#define CU(name, types, ...)                                \
    do {                                                    \
        int(*call) types;                                   \
        *(void **)&call = driver(#name);                    \
        CHECK(call(__VA_ARGS__) == 0);                      \
    } while (0)

static void *new_stream(void) {
    int device = -1;
    void *context = NULL, *stream = NULL;
    CU(cuDeviceGet, (int *, int), &device, 0);
    CU(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
    CU(cuCtxSetCurrent, (void *), context);
    CU(cuStreamCreate, (void **, unsigned), &stream, 1);
    return stream;
}

static void free_stream(void *stream) {
    CU(cuStreamDestroy_v2, (void *), stream);
    CU(cuDevicePrimaryCtxRelease_v2, (int), 0);
}

// Queues work on a stream: size bytes at ptr become value.
static void queue_fill(void *ptr, uint8_t value, size_t size, void *stream) {
    CU(cuMemsetD8Async, (uintptr_t, unsigned char, size_t, void *), (uintptr_t)ptr, value, size, stream);
}

static kvs_context *new_on(int32_t device) {
    setup s = default_setup(8, 2);
    s.layer.device = device;
    return new_context(s);
}

// Three tokens of sequence 0, in rows of 8 bytes.
static void open_context(void) {
    ctx = new_on(0);
    decode(ctx, 0, 0, 3, NULL);
    uint8_t rows[24];
    for (int i = 0; i < 24; i++) rows[i] = (uint8_t)(i + 1);
    CHECK(kvs_kv_set(ctx, 0, 0, 0, KVS_KV_K, 0, rows, 24) == KVS_STATUS_OK);
}

static void devices_are_checked_by_number(void) {
    CHECK(kvs_device_check(0) == KVS_STATUS_OK && kvs_device_check(1) == KVS_STATUS_OK);
    FAILS(kvs_device_check(2), KVS_STATUS_NO_DEVICE, KVS_STATUS_NO_DEVICE, "no CUDA device 2: 2 can be used");
    FAILS(kvs_device_check(-1), KVS_STATUS_NO_DEVICE, KVS_STATUS_NO_DEVICE, "no CUDA device -1: 2 can be used");
    setup s = default_setup(8, 1);
    s.layer.device = 2;
    FAILS(try_new_context(&s, &ctx), KVS_STATUS_NO_DEVICE, KVS_STATUS_NO_DEVICE, "no CUDA device 2: 2 can be used");
    CHECK(ctx == NULL);
}

static void layers_on_two_devices_and_the_host_have_the_state_of_the_host(void) {
    state states[2];
    for (int i = 0; i < 2; i++) {
        setup s = default_setup(8, 2);
        kvs_kv_layer_params layers[3] = {s.layer, s.layer, s.layer};
        if (i == 1) {
            layers[0].device = 1;
            layers[2].device = 0;
        }
        s.kv.layers = layers;
        s.kv.n_layer = 3;
        s.section.kv = &s.kv;
        s.context.sections = &s.section;
        CHECK(kvs_context_new(&s.context, &ctx) == KVS_STATUS_OK);
        decode(ctx, 0, 0, 5, NULL);
        uint8_t rows[40];
        for (uint32_t layer = 0; layer < 3; layer++) {
            memset(rows, (int)layer + 1, sizeof rows);
            CHECK(kvs_kv_set(ctx, 0, 0, layer, KVS_KV_K, 0, rows, sizeof rows) == KVS_STATUS_OK);
            kvs_plane k, v;
            CHECK(kvs_kv_plane(ctx, 0, 0, layer, &k, &v) == KVS_STATUS_OK);
            CHECK(k.device == layers[layer].device && v.device == k.device && k.data != NULL);
        }
        states[i] = save(ctx, 0);
        kvs_context_free(ctx);
    }
    CHECK(states[0].size == states[1].size && memcmp(states[0].data, states[1].data, states[0].size) == 0);
    free(states[0].data);
    free(states[1].data);
}

static kvs_status adopt(void *k, void *v, int32_t device, kvs_context **out) {
    setup s = default_setup(8, 2);
    s.layer.k = k;
    s.layer.v = v;
    s.layer.device = device;
    return try_new_context(&s, out);
}

static void addresses_of_a_device_are_adopted_whatever_number_is_named(void) {
    open_context();
    state before = save(ctx, 0);
    kvs_plane k, v;
    CHECK(kvs_kv_plane(ctx, 0, 0, 0, &k, &v) == KVS_STATUS_OK);
    kvs_context *adopting = NULL;
    CHECK(adopt(k.data, v.data, 1, &adopting) == KVS_STATUS_OK);
    kvs_plane found;
    CHECK(kvs_kv_plane(adopting, 0, 0, 0, &found, NULL) == KVS_STATUS_OK);
    CHECK(found.data == k.data && found.device == 0);
    decode(adopting, 0, 0, 3, NULL);
    check_unchanged(ctx, save(adopting, -1));
    kvs_memory_usage usage = kvs_memory_usage_default();
    CHECK(kvs_memory_usage_get(adopting, &usage) == KVS_STATUS_OK && usage.kv_device == 0 && usage.kv_host == 0);
    kvs_context_free(adopting);

    // Memory of the host is not a device's because somebody says so.
    static uint8_t host[64];
    adopting = NULL;
    BAD_STATUS(adopt(host, host, 0, &adopting), "is no memory of a device");
    // Nor the other way round, and none is read behind its end.
    BAD_STATUS(adopt(k.data, v.data, KVS_DEVICE_HOST, &adopting), "is memory of device 0, and adopted as memory of the host");
    BAD_STATUS(adopt(k.data, (uint8_t *)v.data + 224, 0, &adopting), "sections[0].layers[0].v: the 64 bytes from");
    CHECK(adopting == NULL);
    free(before.data);
    kvs_context_free(ctx);
}

static void the_driver_says_whose_memory_an_address_is(void) {
    open_context();
    kvs_context *other = new_on(1);
    kvs_plane k, v, of_other;
    void *pinned = NULL;
    CHECK(kvs_kv_plane(ctx, 0, 0, 0, &k, &v) == 0 && kvs_kv_plane(other, 0, 0, 0, &of_other, NULL) == 0);
    CHECK(kvs_pinned_alloc(0, 64, &pinned) == KVS_STATUS_OK);
    CHECK(kvs_device_of(k.data) == 0 && kvs_device_of((uint8_t *)v.data + 63) == 0);
    CHECK(kvs_device_of(of_other.data) == 1);
    CHECK(kvs_device_of(pinned) == KVS_DEVICE_HOST && kvs_device_of(&k) == KVS_DEVICE_HOST);
    CHECK(kvs_device_of(NULL) == KVS_DEVICE_HOST);
    CHECK(kvs_pinned_free(pinned) == KVS_STATUS_OK);
    kvs_context_free(other);
    kvs_context_free(ctx);
    CHECK(kvs_device_of(k.data) == KVS_DEVICE_HOST);
}

static void a_save_runs_behind_what_is_queued_on_the_stream(void) {
    open_context();
    void *stream = new_stream();
    kvs_plane k;
    CHECK(kvs_kv_plane(ctx, 0, 0, 0, &k, NULL) == KVS_STATUS_OK);
    CHECK(kvs_stream_set(ctx, 0, stream) == KVS_STATUS_OK);
    queue_fill(k.data, 0x11, 64, stream);
    kvs_snapshot *snapshot = NULL;
    CHECK(kvs_snapshot_take(ctx, 0, 0, &snapshot) == KVS_STATUS_OK);
    state saved = save(ctx, 0);
    // This runs behind the copy of the snapshot.
    queue_fill(k.data, 0x22, 64, stream);
    state later = save(ctx, 0), kept = {malloc(saved.size), saved.size};
    CHECK(kvs_snapshot_get_data(snapshot, kept.data, kept.size) == saved.size);
    CHECK(memcmp(kept.data, saved.data, saved.size) == 0);
    const size_t v_section = 12 + 3 * 8;
    for (size_t i = 1; i <= 24; i++) {
        CHECK(saved.data[saved.size - v_section - i] == 0x11 && later.data[saved.size - v_section - i] == 0x22);
    }
    // A restore runs behind the stream, and the stream behind the restore.
    queue_fill(k.data, 0x33, 64, stream);
    CHECK(kvs_state_seq_set_data(ctx, saved.data, saved.size, 0) == saved.size);
    uint8_t row[8];
    CHECK(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_K, 0, row, 8) == KVS_STATUS_OK && row[0] == 0x11 && row[7] == 0x11);
    CHECK(kvs_stream_clear(ctx, 0) == KVS_STATUS_OK);
    CU(cuStreamSynchronize, (void *), stream);
    free_stream(stream);
    kvs_snapshot_free(snapshot);
    free(saved.data);
    free(later.data);
    free(kept.data);
    kvs_context_free(ctx);
}

static void streams_that_make_no_sense_are_refused(void) {
    open_context();
    NO_HANDLE_STATUS(kvs_stream_set(NULL, 0, NULL));
    NO_HANDLE_STATUS(kvs_stream_clear(NULL, 0));
    BAD_STATUS(kvs_stream_set(ctx, -1, NULL), "device: -1, devices are counted from 0");
    BAD_STATUS(kvs_stream_clear(ctx, -1), "device: -1, devices are counted from 0");
    kvs_state_writer *writer = NULL;
    kvs_state_reader *reader = NULL;
    state s = save(ctx, 0);
    CHECK(kvs_state_writer_new(0, NULL, &writer) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_new(0, s.data, s.size, NULL, &reader) == KVS_STATUS_OK);
    NO_HANDLE_STATUS(kvs_state_writer_set_stream(NULL, 0, NULL));
    NO_HANDLE_STATUS(kvs_state_reader_set_stream(NULL, 0, NULL));
    BAD_STATUS(kvs_state_writer_set_stream(writer, -1, NULL), "device: -1, devices are counted from 0");
    BAD_STATUS(kvs_state_reader_set_stream(reader, -2, NULL), "device: -2, devices are counted from 0");
    kvs_state_writer_free(writer);
    kvs_state_reader_free(reader);
    void *stream = new_stream();
    BAD_STATUS(kvs_stream_set(ctx, 1, stream), "is no stream of the primary context of device 1");
    FAILS(kvs_stream_set(ctx, 2, NULL), KVS_STATUS_NO_DEVICE, KVS_STATUS_NO_DEVICE, "no CUDA device 2: 2 can be used");
    free_stream(stream);
    // The default stream is one.
    CHECK(kvs_stream_set(ctx, 0, NULL) == KVS_STATUS_OK && kvs_stream_set(ctx, 1, NULL) == KVS_STATUS_OK);
    check_unchanged(ctx, save(ctx, -1));
    CHECK(kvs_stream_clear(ctx, 0) == KVS_STATUS_OK && kvs_stream_clear(ctx, 0) == KVS_STATUS_OK);
    free(s.data);
    kvs_context_free(ctx);
}

static void a_stream_that_is_being_captured_fails_the_calls(void) {
    open_context();
    state before = save(ctx, 0);
    void *stream = new_stream(), *graph = NULL;
    CHECK(kvs_stream_set(ctx, 0, stream) == KVS_STATUS_OK);
    CU(cuStreamBeginCapture_v2, (void *, int), stream, 2);
    kvs_snapshot *snapshot = NULL;
    BAD_STATUS(kvs_snapshot_take(ctx, 0, 0, &snapshot), "the one of device 0 is being captured into a graph");
    uint8_t bytes[256];
    BAD(kvs_state_seq_get_data(ctx, bytes, sizeof bytes, 0), 0, "is being captured into a graph");
    BAD(kvs_state_seq_set_data(ctx, before.data, before.size, 0), 0, "is being captured into a graph");
    BAD_STATUS(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_K, 0, bytes, 8), "is being captured into a graph");
    kvs_memory_clear(kvs_get_memory(ctx), true);
    CHECK(strstr(kvs_last_error(), "is being captured into a graph") != NULL);
    CHECK(snapshot == NULL);
    CU(cuStreamEndCapture, (void *, void **), stream, &graph);
    CHECK(kvs_stream_clear(ctx, 0) == KVS_STATUS_OK);
    state after = save(ctx, 0);
    CHECK(after.size == before.size && memcmp(after.data, before.data, after.size) == 0);
    free_stream(stream);
    free(before.data);
    free(after.data);
    kvs_context_free(ctx);
}

static void pinned_memory_takes_and_gives_states(void) {
    open_context();
    state before = save(ctx, 0);
    void *pinned = NULL;
    CHECK(kvs_pinned_alloc(0, before.size, &pinned) == KVS_STATUS_OK);
    for (size_t i = 0; i < before.size; i++) CHECK(((uint8_t *)pinned)[i] == 0);
    CHECK(kvs_state_seq_get_data(ctx, pinned, before.size, 0) == before.size);
    CHECK(memcmp(pinned, before.data, before.size) == 0);
    kvs_memory_clear(kvs_get_memory(ctx), true);
    CHECK(kvs_state_seq_set_data(ctx, pinned, before.size, 0) == before.size);
    state after = save(ctx, 0);
    CHECK(memcmp(after.data, before.data, before.size) == 0);
    CHECK(kvs_pinned_free(pinned) == KVS_STATUS_OK);

    uint8_t *own = aligned_alloc(4096, 4096);
    CHECK(own != NULL && kvs_host_register(0, own, 4096) == KVS_STATUS_OK);
    CHECK(kvs_state_seq_get_data(ctx, own, 4096, 0) == before.size && memcmp(own, before.data, before.size) == 0);
    CHECK(kvs_host_unregister(own) == KVS_STATUS_OK);
    CHECK(kvs_state_seq_get_data(ctx, own, 4096, 0) == before.size);
    free(own);
    free(before.data);
    free(after.data);
    kvs_context_free(ctx);
}

static void pinned_memory_that_makes_no_sense_is_refused(void) {
    void *ptr = NULL, *other = NULL;
    BAD_STATUS(kvs_pinned_alloc(0, 0, &ptr), "size: 0 bytes");
    BAD_STATUS(kvs_pinned_alloc(0, 64, NULL), "ptr_out: NULL");
    BAD_STATUS(kvs_pinned_alloc(-1, 64, &ptr), "device: -1, devices are counted from 0");
    FAILS(kvs_pinned_alloc(5, 64, &ptr), KVS_STATUS_NO_DEVICE, KVS_STATUS_NO_DEVICE, "no CUDA device 5: 2 can be used");
    FAILS(kvs_pinned_alloc(0, SIZE_MAX / 4, &ptr), KVS_STATUS_OUT_OF_MEMORY, KVS_STATUS_OUT_OF_MEMORY,
          "out of memory: pinned memory needs");
    CHECK(ptr == NULL && kvs_pinned_free(NULL) == KVS_STATUS_OK);

    uint8_t *own = aligned_alloc(4096, 4096);
    BAD_STATUS(kvs_host_register(-1, own, 4096), "device: -1, devices are counted from 0");
    BAD_STATUS(kvs_host_register(0, NULL, 4096), "nothing to pin");
    BAD_STATUS(kvs_host_register(0, own, 0), "nothing to pin");
    FAILS(kvs_host_register(5, own, 4096), KVS_STATUS_NO_DEVICE, KVS_STATUS_NO_DEVICE, "no CUDA device 5");
    CHECK(kvs_host_register(0, own, 4096) == KVS_STATUS_OK);
    BAD_STATUS(kvs_host_register(0, own + 64, 64), "some of the 64 bytes");
    BAD_STATUS(kvs_host_register(0, own, 4096), "are pinned already");
    CHECK(kvs_pinned_alloc(0, 64, &other) == KVS_STATUS_OK);
    // Each ends with the call that belongs to it, and once.
    BAD_STATUS(kvs_pinned_free(own), "no pinned memory was allocated there");
    BAD_STATUS(kvs_host_unregister(other), "no pinned memory was registered there");
    BAD_STATUS(kvs_pinned_free((uint8_t *)other + 8), "no pinned memory was allocated there");
    BAD_STATUS(kvs_host_unregister(NULL), "no pinned memory was registered there");
    CHECK(kvs_pinned_free(other) == KVS_STATUS_OK && kvs_host_unregister(own) == KVS_STATUS_OK);
    BAD_STATUS(kvs_pinned_free(other), "no pinned memory was allocated there");
    BAD_STATUS(kvs_host_unregister(own), "no pinned memory was registered there");
    free(own);
}

// A cache whose cells are the test's own: two of sequence 0.
static int visit(void *user, uint32_t stream, kvs_seq_id seq, kvs_visit_each each, void *arg) {
    (void)user, (void)stream, (void)seq;
    for (uint32_t i = 0; i < 2; i++) {
        const kvs_cell cell = {.idx = i, .pos = (kvs_pos)i, .tok = -1, .seqs = {1}};
        const int stop = each(arg, &cell);
        if (stop != 0) return stop;
    }
    return 0;
}

static int apply(void *user, uint32_t stream, kvs_seq_id seq, uint32_t n, const kvs_cell *cells) {
    (void)user, (void)stream, (void)seq, (void)n, (void)cells;
    return 0;
}

static int clear(void *user, kvs_seq_id seq) {
    (void)user, (void)seq;
    return 0;
}

// What the process holds, as the emulated driver counts: see FakeLive.
static uint64_t pinned_bytes(void) {
    uint64_t live[8];
    void (*call)(uint64_t *);
    *(void **)&call = driver("fakecuda_live");
    call(live);
    return live[3];
}

static void views_share_staging_that_can_be_freed(void) {
    open_context();
    kvs_plane planes[2];
    CHECK(kvs_kv_plane(ctx, 0, 0, 0, &planes[0], &planes[1]) == KVS_STATUS_OK);
    kvs_kv_view view = kvs_kv_view_default();
    view.kv_size = 8;
    view.n_seq_max = 2;
    view.n_layer = 1;
    view.k = &planes[0];
    view.v = &planes[1];
    view.visit = visit;
    view.apply = apply;
    view.clear = clear;
    kvs_state_writer *writer = NULL;
    CHECK(kvs_state_writer_new(0, NULL, &writer) == KVS_STATUS_OK);
    CHECK(kvs_state_writer_write_kv_cache(writer, &view, 0) == KVS_STATUS_OK);
    uint8_t bytes[256];
    const uint64_t before = pinned_bytes();
    const size_t n = kvs_state_writer_get_data(writer, bytes, sizeof bytes);
    CHECK(n > 0 && pinned_bytes() > before);
    kvs_state_writer_free(writer);
    kvs_shared_staging_free();
    CHECK(pinned_bytes() == before);
    // It comes again when it is needed.
    CHECK(kvs_memory_seq_rm(kvs_get_memory(ctx), 0, 2, -1));
    state expected = save(ctx, 0);
    CHECK(n == expected.size && memcmp(bytes, expected.data, n) == 0);
    free(expected.data);

    planes[0].device = -2;
    CHECK(kvs_state_writer_new(0, NULL, &writer) == KVS_STATUS_OK);
    BAD_STATUS(kvs_state_writer_write_kv_cache(writer, &view, 0), "view.k[0].device: -2");
    static uint8_t host[64];
    planes[0].device = 0;
    planes[0].data = host;
    BAD_STATUS(kvs_state_writer_write_kv_cache(writer, &view, 0), "is no memory of a device");
    CHECK(strstr(kvs_last_error(), "view.k[0].ptr") != NULL);
    kvs_state_writer_free(writer);
    kvs_context_free(ctx);
}

static void tensors_of_a_device_are_written_and_read_like_any_other(void) {
    open_context();
    kvs_plane k;
    CHECK(kvs_kv_plane(ctx, 0, 0, 0, &k, NULL) == KVS_STATUS_OK);
    uint8_t blob[8 + 4 + 8], row[8];
    kvs_state_writer *writer = NULL;
    const uint32_t n = 1;
    CHECK(kvs_state_writer_new(0, NULL, &writer) == KVS_STATUS_OK);
    CHECK(kvs_state_writer_write(writer, &n, sizeof n) == KVS_STATUS_OK);
    CHECK(kvs_state_writer_write_tensor(writer, NULL, k.data, 8, 8) == KVS_STATUS_OK);
    CHECK(kvs_state_writer_get_data(writer, blob, sizeof blob) == sizeof blob);
    kvs_state_writer_free(writer);
    for (int i = 0; i < 8; i++) CHECK(blob[12 + i] == 9 + i);

    kvs_state_reader *reader = NULL;
    uint32_t found = 0;
    CHECK(kvs_state_reader_new(0, blob, sizeof blob, NULL, &reader) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_read(reader, &found, sizeof found) == KVS_STATUS_OK && found == 1);
    CHECK(kvs_state_reader_skip_tensor(reader, 8) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_rewind(reader) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_read(reader, &found, sizeof found) == KVS_STATUS_OK);
    BAD_STATUS(kvs_state_reader_read_tensor(reader, NULL, k.data, 508, 8), "the 8 bytes from");
    CHECK(kvs_state_reader_read_tensor(reader, NULL, k.data, 16, 8) == KVS_STATUS_OK);
    CHECK(kvs_state_reader_finish(reader) == KVS_STATUS_OK);
    kvs_state_reader_free(reader);
    CHECK(kvs_kv_get(ctx, 0, 0, 0, KVS_KV_K, 16, row, 8) == KVS_STATUS_OK && memcmp(row, blob + 12, 8) == 0);
    kvs_context_free(ctx);
}

static void a_state_that_stays_on_the_device_can_be_dropped(void) {
    open_context();
    uint8_t blob[256];
    const size_t n = kvs_state_seq_get_data_ext(ctx, blob, sizeof blob, 0, KVS_STATE_SEQ_FLAGS_ON_DEVICE);
    kvs_memory_usage usage = kvs_memory_usage_default();
    CHECK(n > 0 && kvs_memory_usage_get(ctx, &usage) == KVS_STATUS_OK && usage.on_device_states_device > 0);
    CHECK(kvs_state_seq_set_data_ext(ctx, blob, n, 1, KVS_STATE_SEQ_FLAGS_ON_DEVICE) == n);
    CHECK(kvs_state_seq_drop_on_device(ctx, 0) == KVS_STATUS_OK && kvs_state_seq_drop_on_device(ctx, 0) == KVS_STATUS_OK);
    CHECK(kvs_memory_usage_get(ctx, &usage) == KVS_STATUS_OK && usage.on_device_states_device == 0);
    FAILS(kvs_state_seq_set_data_ext(ctx, blob, n, 1, KVS_STATE_SEQ_FLAGS_ON_DEVICE), 0, KVS_STATUS_NO_DEVICE_STATE, "");
    NO_HANDLE_STATUS(kvs_state_seq_drop_on_device(NULL, 0));
    FAILS(kvs_state_seq_drop_on_device(ctx, 2), KVS_STATUS_INVALID_ARGUMENT, KVS_STATUS_INVALID_ARGUMENT, "seq_id 2");
    kvs_context_free(ctx);
}

static void a_call_of_the_driver_that_fails_is_named(void) {
    open_context();
    state before = save(ctx, 0);
    uint8_t bytes[256];
    void (*fail)(const char *, unsigned, int);
    *(void **)&fail = driver("fakecuda_fail");
    fail("cuMemcpyDtoHAsync_v2", 1, 719);
    FAILS(kvs_state_seq_get_data(ctx, bytes, sizeof bytes, 0), 0, KVS_STATUS_DEVICE,
          "cuMemcpyDtoHAsync_v2 on device 0: CUDA_ERROR_LAUNCH_FAILED (719)");
    CHECK(kvs_state_seq_get_data(ctx, bytes, sizeof bytes, 0) == before.size);
    CHECK(memcmp(bytes, before.data, before.size) == 0);
    free(before.data);
    kvs_context_free(ctx);
}

MAIN(CASE(devices_are_checked_by_number), CASE(layers_on_two_devices_and_the_host_have_the_state_of_the_host),
     CASE(addresses_of_a_device_are_adopted_whatever_number_is_named),
     CASE(the_driver_says_whose_memory_an_address_is), CASE(a_save_runs_behind_what_is_queued_on_the_stream), CASE(streams_that_make_no_sense_are_refused),
     CASE(a_stream_that_is_being_captured_fails_the_calls), CASE(pinned_memory_takes_and_gives_states),
     CASE(pinned_memory_that_makes_no_sense_is_refused), CASE(views_share_staging_that_can_be_freed),
     CASE(tensors_of_a_device_are_written_and_read_like_any_other), CASE(a_state_that_stays_on_the_device_can_be_dropped),
     CASE(a_call_of_the_driver_that_fails_is_named))
