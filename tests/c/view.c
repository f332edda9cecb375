// Views, writers and readers: states of a cache whose cells and tensors are the caller's.

#include "check.h"

// The cache: one stream of cells in arrays, one layer of f16 K and V.

enum { N_CELL = 16, N_SEQ = 3, N_EMBD = 4, ROW = 8, PLANE = N_CELL * ROW, STATE = 4096 };

typedef struct {
    uint8_t data[PLANE];
} tensor;

typedef struct {
    kvs_pos pos[N_CELL]; // -1: empty
    uint64_t seqs[N_CELL];
    uint32_t head;
    tensor k, v;
    kvs_plane k_plane, v_plane;
    kvs_tensor_access access;
    const char *failing; // the call of this name returns 7
    int n_visit, n_apply, n_clear, n_get, n_set;
} cache;

static int fails(const char *failing, const char *name) {
    return failing != NULL && strcmp(failing, name) == 0 ? 7 : 0;
}

static int visit(void *user, uint32_t stream, kvs_seq_id seq, kvs_visit_each each, void *arg) {
    cache *c = user;
    CHECK(stream == 0 && seq >= -1 && seq < N_SEQ);
    c->n_visit++;
    for (uint32_t i = 0; i < N_CELL; i++) {
        if (c->pos[i] < 0 || (seq >= 0 && !(c->seqs[i] >> seq & 1))) continue;
        const kvs_cell cell = {.idx = i, .pos = c->pos[i], .tok = -1, .seqs = {c->seqs[i]}};
        int stop = each(arg, &cell);
        if (stop != 0) return stop;
    }
    return fails(c->failing, "visit");
}

static void rm(cache *c, kvs_seq_id seq) {
    for (uint32_t i = 0; i < N_CELL; i++) {
        if (c->pos[i] < 0) continue;
        c->seqs[i] &= seq < 0 ? 0 : ~((uint64_t)1 << seq);
        if (c->seqs[i] != 0) continue;
        c->pos[i] = -1;
        if (i < c->head) c->head = i;
    }
}

static int apply(void *user, uint32_t stream, kvs_seq_id seq, uint32_t n, const kvs_cell *cells) {
    cache *c = user;
    CHECK(stream == 0);
    c->n_apply++;
    if (fails(c->failing, "apply")) return 7;
    rm(c, seq);
    for (uint32_t i = 0; i < n; i++) {
        CHECK(cells[i].idx < N_CELL && c->pos[cells[i].idx] < 0 && cells[i].shift == 0);
        c->pos[cells[i].idx] = cells[i].pos;
        c->seqs[cells[i].idx] = cells[i].seqs[0];
        c->head = cells[i].idx + 1;
    }
    return 0;
}

static int clear(void *user, kvs_seq_id seq) {
    cache *c = user;
    c->n_clear++;
    for (uint32_t i = 0; i < N_CELL; i++) {
        if (seq >= 0 && c->seqs[i] != (uint64_t)1 << seq) continue;
        memset(c->k.data + i * ROW, 0, ROW);
        memset(c->v.data + i * ROW, 0, ROW);
    }
    rm(c, seq);
    return fails(c->failing, "clear");
}

static int get(void *user, void *t, uint64_t offset, uint64_t n, void *dst) {
    cache *c = user;
    c->n_get++;
    CHECK(offset + n <= PLANE);
    memcpy(dst, ((tensor *)t)->data + offset, n);
    return fails(c->failing, "get");
}

static int set(void *user, void *t, uint64_t offset, uint64_t n, const void *src) {
    cache *c = user;
    c->n_set++;
    CHECK(offset + n <= PLANE);
    memcpy(((tensor *)t)->data + offset, src, n);
    return fails(c->failing, "set");
}

// The same cells and bytes as sequences of ctx; their data becomes noise first.
static void mirror(cache *c, kvs_context *ctx) {
    memset(c, 0, sizeof *c);
    kvs_plane k, v;
    CHECK(kvs_kv_plane(ctx, 0, 0, 0, &k, &v) == KVS_STATUS_OK);
    for (int i = 0; i < PLANE; i++) {
        ((uint8_t *)k.data)[i] = (uint8_t)(7 * i + 1);
        ((uint8_t *)v.data)[i] = (uint8_t)(11 * i + 2);
    }
    memcpy(c->k.data, k.data, PLANE);
    memcpy(c->v.data, v.data, PLANE);
    for (uint32_t i = 0; i < N_CELL; i++) {
        kvs_cell cell;
        CHECK(kvs_cell_get(ctx, 0, 0, i, &cell) == KVS_STATUS_OK);
        c->pos[i] = cell.pos;
        c->seqs[i] = cell.seqs[0];
    }
    k.tensor = &c->k;
    k.data = c->k.data;
    v.tensor = &c->v;
    v.data = c->v.data;
    c->k_plane = k;
    c->v_plane = v;
    c->access = (kvs_tensor_access){c, get, set};
}

static kvs_kv_view view_of(cache *c) {
    kvs_kv_view view = kvs_kv_view_default();
    view.user = c;
    view.kv_size = N_CELL;
    view.n_seq_max = N_SEQ;
    view.n_layer = 1;
    view.k = &c->k_plane;
    view.v = &c->v_plane;
    view.head = &c->head;
    view.visit = visit;
    view.apply = apply;
    view.clear = clear;
    return view;
}

// The tensors are reached through get and set alone.
static kvs_kv_view remote_view_of(cache *c) {
    c->k_plane.data = c->v_plane.data = NULL;
    kvs_kv_view view = view_of(c);
    view.access = &c->access;
    return view;
}

static kvs_context *ctx;
static cache c;

// Sequence 0 is at cells 0 to 2, 5 and 6, sequence 1 at 3 and 4.
static void open_cache(void) {
    ctx = new_context(default_setup(N_CELL, N_SEQ));
    decode(ctx, 0, 0, 3, NULL);
    decode(ctx, 1, 0, 2, NULL);
    decode(ctx, 0, 3, 2, NULL);
    mirror(&c, ctx);
}

static bool holds(kvs_seq_id seq, const char *cells) {
    for (uint32_t i = 0; i < N_CELL; i++) {
        if ((cells[i] == 'x') != (c.pos[i] >= 0 && (c.seqs[i] >> seq & 1) != 0)) return false;
    }
    return true;
}

static bool same_row(uint32_t a, uint32_t b) {
    return memcmp(c.k.data + a * ROW, c.k.data + b * ROW, ROW) == 0 &&
           memcmp(c.v.data + a * ROW, c.v.data + b * ROW, ROW) == 0;
}

static bool is_zero(uint32_t cell) {
    for (uint32_t i = cell * ROW; i < (cell + 1) * ROW; i++) {
        if (c.k.data[i] != 0 || c.v.data[i] != 0) return false;
    }
    return true;
}

// Nothing was called that changes the cache since `before` was copied.
static void check_same(const cache *before) {
    CHECK(memcmp(c.pos, before->pos, sizeof c.pos) == 0 && memcmp(c.seqs, before->seqs, sizeof c.seqs) == 0);
    CHECK(memcmp(&c.k, &before->k, sizeof c.k) == 0 && memcmp(&c.v, &before->v, sizeof c.v) == 0);
    CHECK(c.head == before->head && c.n_apply == before->n_apply && c.n_clear == before->n_clear);
}

static state save_view(kvs_kv_view view, kvs_seq_id seq) {
    kvs_state_writer *writer = NULL;
    CHECK(kvs_state_writer_new(seq, NULL, &writer) == KVS_STATUS_OK);
    CHECK(kvs_state_writer_write_kv_cache(writer, &view, KVS_STATE_SEQ_FLAGS_NONE) == KVS_STATUS_OK);
    state s = {NULL, kvs_state_writer_size(writer)};
    s.data = malloc(s.size);
    CHECK(s.data != NULL && kvs_state_writer_get_data(writer, s.data, s.size) == s.size);
    kvs_state_writer_free(writer);
    return s;
}

static bool equal(state a, state b) {
    bool same = a.size == b.size && memcmp(a.data, b.data, a.size) == 0;
    free(a.data);
    free(b.data);
    return same;
}

static kvs_state_reader *reader_of(state s, kvs_seq_id seq) {
    kvs_state_reader *reader = NULL;
    CHECK(kvs_state_reader_new(seq, s.data, s.size, NULL, &reader) == KVS_STATUS_OK);
    return reader;
}

static kvs_status plan(kvs_state_reader *reader, kvs_kv_view view) {
    return kvs_state_reader_plan_kv_cache(reader, &view, KVS_STATE_SEQ_FLAGS_NONE, NULL, NULL);
}

#define OK(call) CHECK((call) == KVS_STATUS_OK)
#define CALLBACK(call, name) FAILS(call, KVS_STATUS_CALLBACK, KVS_STATUS_CALLBACK, name " of the caller failed: 7")

// Input and output in turns

typedef struct {
    uint8_t bytes[STATE];
    size_t size, offset;
    const char *failing;
} tape;

static int tape_write(void *user, const void *src, size_t size) {
    tape *t = user;
    CHECK(t->size + size <= STATE);
    memcpy(t->bytes + t->size, src, size);
    t->size += size;
    return fails(t->failing, "write");
}

static int tape_write_tensor(void *user, void *from, uint64_t offset, uint64_t n) {
    CHECK(offset + n <= PLANE);
    return tape_write(user, ((tensor *)from)->data + offset, n) || fails(((tape *)user)->failing, "write_tensor") ? 7 : 0;
}

static int tape_read(void *user, void *dst, size_t size) {
    tape *t = user;
    if (t->offset + size > t->size) return 7;
    memcpy(dst, t->bytes + t->offset, size);
    t->offset += size;
    return fails(t->failing, "read");
}

static int tape_read_tensor(void *user, void *to, uint64_t offset, uint64_t n) {
    CHECK(offset + n <= PLANE);
    return tape_read(user, ((tensor *)to)->data + offset, n) || fails(((tape *)user)->failing, "read_tensor") ? 7 : 0;
}

static kvs_io io_of(tape *t) {
    kvs_io io = kvs_io_default();
    io.user = t;
    io.write = tape_write;
    io.write_tensor = tape_write_tensor;
    io.read = tape_read;
    io.read_tensor = tape_read_tensor;
    return io;
}

static tape written(kvs_seq_id seq) {
    tape t = {.size = 0};
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    OK(kvs_kv_cache_state_write(&view, &io, seq, KVS_STATE_SEQ_FLAGS_NONE));
    return t;
}

static void init_writes_defaults_and_checks_the_size(void) {
    kvs_kv_view view;
    memset(&view, 0xa5, sizeof view);
    OK(kvs_kv_view_init(&view, sizeof view));
    CHECK(view.struct_size == sizeof view && view.n_stream == 1 && view.n_seq_max == 1 && view.n_layer == 0);
    CHECK(view.user == NULL && view.visit == NULL && view.access == NULL && view.swa_type == KVS_SWA_TYPE_NONE);
    kvs_io io;
    memset(&io, 0xa5, sizeof io);
    OK(kvs_io_init(&io, sizeof io));
    CHECK(io.struct_size == sizeof io && io.user == NULL && io.write == NULL && io.read_tensor == NULL);

    BAD_STATUS(kvs_kv_view_init(NULL, sizeof view), "kvs_kv_view: NULL");
    BAD_STATUS(kvs_io_init(NULL, sizeof io), "kvs_io: NULL");
    BAD_STATUS(kvs_kv_view_init(&view, offsetof(kvs_kv_view, legacy_rotation) - 1), "kvs_kv_view.struct_size: ");
    BAD_STATUS(kvs_io_init(&io, 8), "kvs_io.struct_size: 8, ");
}

static void structs_of_another_size_are_refused(void) {
    open_cache();
    tape t = {.size = 0};
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    view.struct_size = 0;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "kvs_kv_view.struct_size: 0, ");
    view.struct_size = sizeof view;
    io.struct_size -= 8;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "kvs_io.struct_size: ");
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, &io, 0, 0, NULL, NULL), "kvs_io.struct_size: ");

    // A newer caller's fields have to be zero.
    struct {
        kvs_kv_view view;
        uint64_t newer;
    } larger = {view_of(&c), 0};
    larger.view.struct_size = sizeof larger;
    io = io_of(&t);
    OK(kvs_kv_cache_state_write(&larger.view, &io, 0, 0));
    larger.newer = 1;
    BAD_STATUS(kvs_kv_cache_state_write(&larger.view, &io, 0, 0), "with fields set that this library");
    CHECK(c.n_apply == 0 && c.n_clear == 0);
    kvs_context_free(ctx);
}

// In turns

static void a_state_written_in_turns_is_that_of_a_context(void) {
    open_cache();
    for (kvs_seq_id seq = 0; seq < N_SEQ; seq++) {
        tape t = written(seq);
        state s = save(ctx, seq);
        CHECK(t.size == s.size - 8 && memcmp(t.bytes, s.data + 8, t.size) == 0);
        free(s.data);
    }
    // The whole context has an empty architecture before its sections.
    tape t = written(-1);
    state s = save(ctx, -1);
    CHECK(t.size == s.size - 4 && memcmp(t.bytes, s.data + 4, t.size) == 0);
    free(s.data);

    // Full attention has nothing in a partial state.
    tape none = {.size = 0};
    kvs_io io = io_of(&none);
    kvs_kv_view view = view_of(&c);
    OK(kvs_kv_cache_state_write(&view, &io, 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY));
    CHECK(none.size == 0);
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 4), "unknown state flags");
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, N_SEQ, 0), "seq_id 3 is out of range [0, 3)");
    kvs_context_free(ctx);
}

static void a_state_read_in_turns_takes_the_cells_that_it_reports(void) {
    open_cache();
    tape t = written(0);
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    uint32_t cells[N_CELL + 1];
    memset(cells, 0xa5, sizeof cells);
    kvs_slot_info sinfo = {7, N_CELL, cells};
    OK(kvs_kv_cache_state_read_sinfo(&view, &io, 1, KVS_STATE_SEQ_FLAGS_NONE, &sinfo, NULL));
    CHECK(t.offset == t.size && c.n_apply == 1 && c.n_clear == 0);
    CHECK(sinfo.n == 5 && sinfo.capacity == N_CELL && cells[5] == 0xa5a5a5a5);
    CHECK(cells[0] == 3 && cells[1] == 4 && cells[2] == 7 && cells[3] == 8 && cells[4] == 9);
    CHECK(holds(0, "xxx..xx.........") && holds(1, "...xx..xxx......") && c.head == 10);
    const uint32_t from[5] = {0, 1, 2, 5, 6};
    for (int i = 0; i < 5; i++) CHECK(c.pos[cells[i]] == c.pos[from[i]] && same_row(cells[i], from[i]));

    // The context does the same with its own.
    state s = save(ctx, 0);
    CHECK(kvs_state_seq_set_data(ctx, s.data, s.size, 1) == s.size);
    free(s.data);
    CHECK(equal(save(ctx, 1), save_view(view, 1)));
    kvs_context_free(ctx);
}

static void a_whole_context_is_read_in_turns(void) {
    open_cache();
    tape t = written(-1);
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    decode(ctx, 2, 0, 4, NULL);
    OK(kvs_kv_cache_state_read_sinfo(&view, &io, -1, 0, NULL, NULL));
    CHECK(t.offset == t.size && holds(0, "xxx..xx.........") && holds(1, "...xx...........") && c.n_clear == 1);
    tape again = written(-1);
    CHECK(again.size == t.size && memcmp(again.bytes, t.bytes, t.size) == 0);
    kvs_context_free(ctx);
}

static void a_mirrored_cache_takes_the_cells_that_are_given(void) {
    open_cache();
    tape t = written(0);
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    uint32_t given[5] = {15, 13, 11, 9, 7}, cells[N_CELL];
    const kvs_slot_info in = {5, 0, given};
    kvs_slot_info out = {0, N_CELL, cells};
    OK(kvs_kv_cache_state_read_sinfo(&view, &io, 2, 0, &out, &in));
    CHECK(out.n == 5 && memcmp(cells, given, sizeof given) == 0);
    CHECK(holds(2, ".......x.x.x.x.x") && same_row(15, 0) && same_row(7, 6) && c.pos[15] == 0 && c.pos[7] == 4);
    kvs_context_free(ctx);
}

static void given_cells_that_do_not_fit_empty_the_destination(void) {
    open_cache();
    tape t = written(0);
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    uint32_t given[5] = {15, 13, 11, 9, 0};
    const kvs_slot_info in = {5, 0, given}, fewer = {4, 0, given};
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, &in), "cell 0 of the mirrored slot layout is not free");
    CHECK(holds(1, "................") && is_zero(3) && is_zero(4) && holds(0, "xxx..xx.........") && !is_zero(0));
    t.offset = 0;
    FAILS(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, &fewer), KVS_STATUS_MISMATCH, KVS_STATUS_MISMATCH,
          "mirrored slot layout: the state has 5, the cache 4");
    kvs_context_free(ctx);
}

static void layouts_without_room_are_refused_before_anything_changes(void) {
    open_cache();
    const cache before = c;
    tape t = written(0);
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    uint32_t cells[N_CELL];
    kvs_slot_info out = {7, N_CELL - 1, cells}, null = {7, N_CELL, NULL};
    const kvs_slot_info in = {2, 0, NULL}, longer = {UINT32_MAX, 0, cells};
    const char *text = "sinfos_out[0].capacity: 15, each stream has room for kv_size 16";
    state s = save(ctx, 0);
    kvs_state_reader *reader = reader_of(s, 1);
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, &out, NULL), text);
    BAD_STATUS(kvs_state_reader_plan_kv_cache(reader, &view, 0, &out, NULL), text);
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, &view, &out), text);
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, &null, NULL), "sinfos_out[0].idxs: NULL");
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, &in), "sinfos_in.idxs: NULL, with a count of 2");
    text = "sinfos_in[0].n: 4294967295, a stream has kv_size 16 cells";
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, &longer), text);
    BAD_STATUS(kvs_state_reader_plan_kv_cache(reader, &view, 0, NULL, &longer), text);
    CHECK(out.n == 7 && t.offset == 0);
    check_same(&before);
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static void input_that_ends_leaves_an_empty_destination(void) {
    open_cache();
    tape t = written(0);
    kvs_kv_view view = view_of(&c);
    const size_t whole = t.size;
    for (t.size = 0; t.size < whole; t.size++) {
        t.offset = 0;
        kvs_io io = io_of(&t);
        uint32_t cells[N_CELL];
        kvs_slot_info out = {7, N_CELL, cells};
        kvs_clear_last_error();
        CHECK(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, &out, NULL) == KVS_STATUS_CALLBACK);
        CHECK(strstr(kvs_last_error(), "of the caller failed: 7") != NULL && out.n == 7);
        CHECK(holds(1, "................") && is_zero(3) && is_zero(4));
        CHECK(holds(0, "xxx..xx.........") && !is_zero(0) && !is_zero(6));
    }
    kvs_context_free(ctx);
}

static void a_shared_view_writes_and_reads_nothing(void) {
    open_cache();
    const cache before = c;
    tape t = {.size = 0, .failing = "read"};
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    view.shared = 1;
    OK(kvs_kv_cache_state_write(&view, &io, 0, 0));
    CHECK(t.size == 0);
    uint32_t cells[N_CELL];
    kvs_slot_info out = {7, N_CELL, cells};
    OK(kvs_kv_cache_state_read_sinfo(&view, &io, 0, 0, &out, NULL));
    CHECK(out.n == 0);
    check_same(&before);
    // It needs neither calls nor tensors.
    kvs_kv_view bare = kvs_kv_view_default();
    bare.kv_size = N_CELL;
    bare.n_layer = 1;
    bare.shared = 1;
    CHECK(equal(save_view(bare, 0), save_view(view, 0)));
    bare.shared = 0;
    BAD_STATUS(kvs_kv_cache_state_write(&bare, &io, 0, 0), "view.k: NULL, with a count of 1");
    kvs_context_free(ctx);
}

// Callbacks

static void a_callback_that_is_missing_is_refused(void) {
    open_cache();
    tape t = written(0);
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    view.visit = NULL;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "view.visit: NULL");
    view = view_of(&c);
    view.apply = NULL;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "view.apply: NULL");
    view = view_of(&c);
    view.clear = NULL;
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, NULL), "view.clear: NULL");

    view = remote_view_of(&c);
    kvs_state_writer *writer = NULL;
    c.access.get = NULL;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "access.get: NULL");
    BAD_STATUS(kvs_state_writer_new(0, &c.access, &writer), "access.get: NULL");
    c.access = (kvs_tensor_access){&c, get, NULL};
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "access.set: NULL");
    CHECK(writer == NULL && c.n_apply == 0 && c.n_clear == 0);
    c.access.set = set;

    io.write = NULL;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "io.write: NULL");
    io = io_of(&t);
    io.write_tensor = NULL;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "io.write_tensor: NULL");
    const cache before = c;
    io = io_of(&t);
    io.read = NULL;
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, NULL), "io.read: NULL");
    io = io_of(&t);
    io.read_tensor = NULL;
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, NULL), "io.read_tensor: NULL");
    check_same(&before);
    kvs_context_free(ctx);
}

static void a_callback_that_fails_ends_the_call(void) {
    open_cache();
    tape t = written(0);
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    state s = save(ctx, 0);
    kvs_state_reader *reader = reader_of(s, 1);

    c.failing = "visit";
    CALLBACK(kvs_kv_cache_state_write(&view, &io, 0, 0), "visit");
    CALLBACK(plan(reader, view), "visit");
    CHECK(kvs_state_reader_offset(reader) == 8);
    c.failing = NULL;
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    c.failing = "apply";
    CALLBACK(kvs_state_reader_read_kv_cache(reader, &view, NULL), "apply");
    CALLBACK(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, NULL), "apply");
    // The first failure is the reason.
    c.failing = "clear";
    t.failing = "read";
    t.offset = 0;
    CALLBACK(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, NULL), "read");
    // Before all is replaced, all is cleared.
    CALLBACK(kvs_kv_cache_state_read_sinfo(&view, &io, -1, 0, NULL, NULL), "clear");
    kvs_context_free(ctx);

    open_cache();
    t = written(0);
    t.failing = "read_tensor";
    CALLBACK(kvs_kv_cache_state_read_sinfo(&view, &io, 1, 0, NULL, NULL), "read_tensor");
    CHECK(holds(1, "................"));
    t.failing = "write";
    CALLBACK(kvs_kv_cache_state_write(&view, &io, 0, 0), "write");
    t.failing = "write_tensor";
    t.size = 0;
    CALLBACK(kvs_kv_cache_state_write(&view, &io, 0, 0), "write_tensor");
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static void what_a_visit_tells_is_checked(void) {
    open_cache();
    tape t = {.size = 0};
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    view.kv_size = 6;
    // Sequence 0 has cell 6; the visit returns what each returned, and that is not the reason.
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "kv.visit: cell 6 is out of range [0, 6)");
    view.kv_size = N_CELL;
    c.seqs[1] |= (uint64_t)1 << N_SEQ;
    view.name = "swa";
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "swa.visit: cell 1 has none, or not only, of the 3 sequences");
    kvs_context_free(ctx);
}

static int visit_without_a_cell(void *user, uint32_t stream, kvs_seq_id seq, kvs_visit_each each, void *arg) {
    (void)user, (void)stream, (void)seq;
    CHECK(each(arg, NULL) != 0);
    return 0; // as if nothing had happened
}

static void a_visit_that_passes_over_a_refusal_is_refused(void) {
    open_cache();
    tape t = {.size = 0};
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    view.visit = visit_without_a_cell;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "visit: each was called without a cell");
    kvs_context_free(ctx);
}

// Planes

static void a_view_that_makes_no_sense_is_refused_by_field(void) {
    open_cache();
    const cache before = c;
    tape t = {.size = 0};
    kvs_io io = io_of(&t);
    kvs_kv_view view;
#define REFUSED(change, text)                                      \
    do {                                                           \
        c = before;                                                \
        view = view_of(&c);                                        \
        change;                                                    \
        BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), text); \
        CHECK(t.size == 0);                                        \
    } while (0)
    REFUSED(c.k_plane.device = -2, "view.k[0].device: -2, it is -1 or the number of a device");
    REFUSED(c.v_plane.device = -9, "view.v[0].device: -9, ");
    REFUSED(c.k_plane.data = NULL, "view.k[0].data: NULL, and the view has no access");
    REFUSED(c.v_plane.data = NULL, "view.v[0].data: NULL, and the view has no access");
    REFUSED(c.k_plane.ggml_type = 999, "view.k[0].ggml_type: 999 is no type of ggml");
    REFUSED(c.k_plane.ggml_type = KVS_TYPE_Q8_0, "view.k[0].n_embd: 4, cells hold blocks of 32 elements of ");
    REFUSED(c.k_plane.n_embd = 0, "view.k[0].n_embd: 0, cells hold blocks of 1 elements of ");
    REFUSED(c.k_plane.cell_stride = ROW - 1, "view.k[0].shape: rows of 8 bytes 7 apart: 16 cells overlap");
    REFUSED((c.v_plane.cell_stride = 1, c.v_plane.channel_stride = 32, view.v_trans = 1),
            "view.v[0].shape: 4 channels of 2-byte elements, cells 1 and channels 32 apart: 16 cells overlap");
    REFUSED(c.v_plane.reserved = 1, "view.v[0].reserved: 1, it is 0");
    REFUSED(c.head = N_CELL + 1, "view.head[0]: 17, at most kv_size 16");
    REFUSED(view.k = NULL, "view.k: NULL, with a count of 1");
    REFUSED(view.n_layer = UINT32_MAX, "view.n_layer: 4294967295, at most 65536");
    REFUSED(view.kv_size = 0, "view.kv_size: 0, a stream has cells");
    REFUSED(view.n_stream = 2, "view.n_stream: 2 with n_seq_max 3, it is 1 or as many");
    REFUSED(view.n_stream = 0, "view.n_stream: 0 with n_seq_max 3, it is 1 or as many");
    REFUSED(view.n_seq_max = 257, "n_seq_max: 257 is out of range [1, 256]");
    REFUSED(view.n_stream = view.n_seq_max = UINT32_MAX, "n_seq_max: 4294967295 is out of range [1, 256]");
    REFUSED(view.convert_types = 2, "view.convert_types: 2");
    REFUSED(view.legacy_rotation = 3, "legacy_rotation: 3 is no KVS_LEGACY_ROTATION_*");
    REFUSED(view.swa_type = 4, "view.swa_type: 4, it is 0 to 3");
    REFUSED(view.swa_type = KVS_SWA_TYPE_STANDARD, "view.n_swa: 0, a sliding window has a size");
    REFUSED(view.v_trans = 2, "view.v_trans: 2, it is 0 or 1");
    REFUSED(view.cell_ext = 2, "view.cell_ext: 2, it is 0 or 1");
    REFUSED(view.shared = 2, "view.shared: 2, it is 0 or 1");
    REFUSED(view.n_rot_k = 3, "n_rot_k: 3, ");
#undef REFUSED
    kvs_context_free(ctx);
}

static void a_plane_that_differs_between_streams_is_refused(void) {
    open_cache();
    tape t = {.size = 0};
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    kvs_plane k[N_SEQ] = {c.k_plane, c.k_plane, c.k_plane}, v[N_SEQ] = {c.v_plane, c.v_plane, c.v_plane};
    view.n_stream = N_SEQ;
    view.k = k;
    view.v = v;
    view.head = NULL;
    k[2].n_embd = 2;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "view.k[2].n_embd: 2, in stream 0 it is 4");
    k[2].n_embd = N_EMBD;
    v[1].ggml_type = KVS_TYPE_F32;
    BAD_STATUS(kvs_kv_cache_state_write(&view, &io, 0, 0), "view.v[1].ggml_type: 0, in stream 0 it is 1");
    CHECK(c.n_visit == 0);
    kvs_context_free(ctx);
}

static void a_cache_without_v_has_none_in_its_state(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    state with_v = save_view(view, 0);
    view.v = NULL;
    state without = save_view(view, 0);
    c.v_plane.n_embd = 0;
    state zero_wide = save_view(view_of(&c), 0);
    CHECK(with_v.size - without.size == 12 + 5 * ROW);
    free(with_v.data);
    CHECK(equal(without, zero_wide));
    kvs_context_free(ctx);
}

static void tensors_are_reached_through_access_where_data_is_null(void) {
    open_cache();
    state want = save(ctx, 0);
    kvs_kv_view view = remote_view_of(&c);
    CHECK(equal(save_view(view, 0), save(ctx, 0)));
    CHECK(c.n_get == 4 && c.n_set == 0); // cells 0 to 2 and 5 to 6 of K and V

    kvs_state_reader *reader = reader_of(want, 2);
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    CHECK(c.n_set == 0);
    OK(kvs_state_reader_finish(reader));
    CHECK(c.n_set == 2 && same_row(7, 0) && same_row(11, 6)); // cells 7 to 11 of K and V
    kvs_state_reader_free(reader);

    c.failing = "get";
    kvs_state_writer *writer = NULL;
    OK(kvs_state_writer_new(0, NULL, &writer));
    OK(kvs_state_writer_write_kv_cache(writer, &view, 0));
    FAILS(kvs_state_writer_get_data(writer, want.data, want.size), 0, KVS_STATUS_CALLBACK, "get of the caller failed: 7");
    FAILS(kvs_state_writer_save_file(writer, "file", NULL, 0, true), 0, KVS_STATUS_CALLBACK, "get of the caller failed: 7");
    CHECK(fopen("file", "rb") == NULL);
    kvs_state_writer_free(writer);
    free(want.data);
    kvs_context_free(ctx);
}

static void a_tensor_that_cannot_be_written_fails_finish(void) {
    open_cache();
    state s = save(ctx, 0);
    kvs_kv_view view = remote_view_of(&c);
    kvs_state_reader *reader = reader_of(s, 2);
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    c.failing = "set";
    CALLBACK(kvs_state_reader_finish(reader), "set");
    c.failing = NULL;
    BAD_STATUS(kvs_state_reader_finish(reader), "reader: its tensors could not all be copied: restart it to begin again");
    CHECK(c.n_set == 1);
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

// Writers and readers

static void a_context_reads_what_a_writer_wrote(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    state s = save_view(view, 0);
    CHECK(kvs_state_seq_set_data(ctx, s.data, s.size, 2) == s.size);
    CHECK(kvs_memory_seq_pos_max(kvs_get_memory(ctx), 2) == 4);
    CHECK(equal(s, save(ctx, 0)));

    // A whole context begins with its architecture, which is the caller's to write.
    const uint32_t arch_len = 0;
    kvs_state_writer *writer = NULL;
    OK(kvs_state_writer_new(-1, NULL, &writer));
    OK(kvs_state_writer_write(writer, &arch_len, sizeof arch_len));
    OK(kvs_state_writer_write_kv_cache(writer, &view, 0));
    uint8_t whole[STATE];
    size_t size = kvs_state_writer_get_data(writer, whole, sizeof whole);
    CHECK(size == kvs_state_writer_size(writer));
    kvs_state_writer_free(writer);
    CHECK(kvs_state_set_data(ctx, whole, size) == size);
    CHECK(kvs_memory_seq_pos_max(kvs_get_memory(ctx), 2) == -1 && kvs_memory_seq_pos_max(kvs_get_memory(ctx), 0) == 4);
    kvs_context_free(ctx);
}

static void a_view_reads_what_a_context_wrote(void) {
    open_cache();
    state s = save(ctx, 0);
    kvs_kv_view view = view_of(&c);
    const cache before = c;
    kvs_state_reader *reader = reader_of(s, 1);
    uint32_t planned[N_CELL], cells[N_CELL];
    kvs_slot_info out = {0, N_CELL, planned}, again = {0, N_CELL, cells};
    OK(kvs_state_reader_plan_kv_cache(reader, &view, 0, &out, NULL));
    CHECK(out.n == 5 && planned[0] == 3 && planned[4] == 9);
    CHECK(kvs_state_reader_offset(reader) == s.size && kvs_state_reader_left(reader) == 0);
    CHECK(kvs_state_reader_tensor_bytes(reader) == 0);
    check_same(&before);
    OK(kvs_state_reader_rewind(reader));
    CHECK(kvs_state_reader_offset(reader) == 8);
    OK(kvs_state_reader_read_kv_cache(reader, &view, &again));
    CHECK(again.n == 5 && memcmp(cells, planned, 5 * sizeof cells[0]) == 0);
    CHECK(holds(1, "...xx..xxx......") && c.n_apply == 1 && memcmp(&c.k, &before.k, sizeof c.k) == 0);
    OK(kvs_state_reader_finish(reader));
    CHECK(same_row(3, 0) && same_row(9, 6) && c.n_clear == 0);
    kvs_state_reader_free(reader);

    CHECK(kvs_state_seq_set_data(ctx, s.data, s.size, 1) == s.size);
    CHECK(equal(save_view(view, 1), save(ctx, 1)));
    free(s.data);
    kvs_context_free(ctx);
}

static void damaged_bytes_are_refused_by_the_plan_and_change_nothing(void) {
    open_cache();
    state s = save(ctx, 0);
    kvs_kv_view view = view_of(&c);
    const cache before = c;
    for (size_t size = 0; size < s.size; size++) {
        kvs_state_reader *reader = NULL;
        kvs_clear_last_error();
        kvs_status opened = kvs_state_reader_new(1, s.data, size, NULL, &reader);
        CHECK(opened == (size < 8 ? KVS_STATUS_TRUNCATED : KVS_STATUS_OK) && (reader == NULL) == (size < 8));
        if (reader != NULL) CHECK(plan(reader, view) == KVS_STATUS_TRUNCATED);
        CHECK_REASON(KVS_STATUS_TRUNCATED, "truncated state: ");
        kvs_state_reader_free(reader);
    }
    c.k_plane.ggml_type = KVS_TYPE_BF16;
    kvs_state_reader *reader = reader_of(s, 1);
    FAILS(plan(reader, view), KVS_STATUS_MISMATCH, KVS_STATUS_MISMATCH, "mismatched key type: the state has 1 (f16), the cache 30 (bf16)");
    view.convert_types = 1;
    CHECK(plan(reader, view) == KVS_STATUS_OK);
    kvs_state_reader_free(reader);
    check_same(&before);
    free(s.data);
    kvs_context_free(ctx);
}

static void sections_of_the_caller_stand_beside_a_view(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    tensor own = {"0123456789abcdef"}, hidden = {"ABCDEFGHIJKLMNOP"};
    kvs_state_writer *writer = NULL;
    OK(kvs_state_writer_new(0, &c.access, &writer));
    OK(kvs_state_writer_write(writer, "meta", 4));
    OK(kvs_state_writer_write_kv_cache(writer, &view, 0));
    OK(kvs_state_writer_write_tensor(writer, &own, own.data, 10, 6));
    OK(kvs_state_writer_write_tensor(writer, &hidden, NULL, 2, 3)); // through get
    OK(kvs_state_writer_write_tensor(writer, NULL, NULL, 0, 0));
    OK(kvs_state_writer_write(writer, NULL, 0));
    uint8_t bytes[STATE];
    const size_t size = kvs_state_writer_get_data(writer, bytes, sizeof bytes);
    CHECK(size > 0 && kvs_state_writer_size(writer) == size && c.n_get == 1);
    CHECK(memcmp(bytes + 8, "meta", 4) == 0 && memcmp(bytes + size - 9, "abcdefCDE", 9) == 0);
    BAD_STATUS(kvs_state_writer_write(writer, NULL, 1), "src: NULL, with a count of 1");
    BAD(kvs_state_writer_get_data(writer, NULL, 1), 0, "dst: NULL, with a count of 1");
    bytes[0] = 0xa5;
    FAILS(kvs_state_writer_get_data(writer, bytes, size - 1), 0, KVS_STATUS_BUFFER_TOO_SMALL, "buffer too small");
    CHECK(bytes[0] == 0xa5 && kvs_state_writer_get_data(writer, bytes, size) == size);
    kvs_state_writer_free(writer);
    OK(kvs_state_writer_new(0, NULL, &writer));
    BAD_STATUS(kvs_state_writer_write_tensor(writer, &own, NULL, 0, 1), "data: NULL, and there is no access");
    kvs_state_writer_free(writer);

    kvs_state_reader *reader = NULL;
    OK(kvs_state_reader_new(1, bytes, size, &c.access, &reader));
    char meta[5] = "";
    OK(kvs_state_reader_read(reader, meta, 4));
    CHECK(strcmp(meta, "meta") == 0);
    OK(plan(reader, view));
    OK(kvs_state_reader_skip_tensor(reader, 9));
    CHECK(kvs_state_reader_left(reader) == 0 && kvs_state_reader_offset(reader) == size);
    FAILS(kvs_state_reader_skip_tensor(reader, 1), KVS_STATUS_TRUNCATED, KVS_STATUS_TRUNCATED, "truncated state: tensor");
    FAILS(kvs_state_reader_read(reader, meta, 1), KVS_STATUS_TRUNCATED, KVS_STATUS_TRUNCATED, "truncated state: metadata");
    BAD_STATUS(kvs_state_reader_read(reader, NULL, 1), "dst: NULL, with a count of 1");
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read(reader, meta, 4));
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    OK(kvs_state_reader_read_tensor(reader, &own, own.data, 0, 6));
    OK(kvs_state_reader_read_tensor(reader, &hidden, NULL, 13, 3)); // through set
    OK(kvs_state_reader_read_tensor(reader, NULL, NULL, 0, 0));
    CHECK(c.n_set == 0 && own.data[0] == '0');
    OK(kvs_state_reader_finish(reader));
    CHECK(memcmp(own.data, "abcdef6789abcdef", 16) == 0 && memcmp(hidden.data, "ABCDEFGHIJKLMCDE", 16) == 0);
    const kvs_token *tokens = NULL;
    size_t n_token = 7;
    OK(kvs_state_reader_tokens(reader, &tokens, &n_token));
    CHECK(n_token == 0);
    kvs_state_reader_free(reader);
    kvs_context_free(ctx);
}

static size_t file_bytes(const char *path, uint8_t *bytes) {
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    size_t n = fread(bytes, 1, STATE, file);
    fclose(file);
    return n;
}

static void a_file_is_that_of_a_context_and_comes_back(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    const kvs_token tokens[3] = {5, 6, 7};
    kvs_state_writer *writer = NULL;
    OK(kvs_state_writer_new(0, NULL, &writer));
    OK(kvs_state_writer_write_kv_cache(writer, &view, 0));
    const size_t size = kvs_state_writer_save_file(writer, "viewed", tokens, 3, true);
    CHECK(size == kvs_state_seq_save_file(ctx, "managed", 0, tokens, 3) && size > 0);
    CHECK(kvs_state_writer_save_file(writer, "viewed", tokens, 3, true) == size); // once more
    uint8_t a[STATE], b[STATE];
    CHECK(file_bytes("viewed", a) == size && file_bytes("managed", b) == size && memcmp(a, b, size) == 0);
    BAD(kvs_state_writer_save_file(writer, NULL, tokens, 3, true), 0, "filepath: NULL");
    BAD(kvs_state_writer_save_file(writer, "viewed", NULL, 3, true), 0, "tokens: NULL, with a count of 3");
    FAILS(kvs_state_writer_save_file(writer, "no/such/folder", tokens, 3, true), 0, KVS_STATUS_IO, "no/such/folder");
    kvs_state_writer_free(writer);

    kvs_state_reader *reader = NULL;
    FAILS(kvs_state_reader_open_file(1, "viewed", 2, NULL, &reader), KVS_STATUS_BUFFER_TOO_SMALL,
          KVS_STATUS_BUFFER_TOO_SMALL, "exceeded capacity! 3 > 2");
    FAILS(kvs_state_reader_open_file(-1, "viewed", 3, NULL, &reader), KVS_STATUS_UNSUPPORTED_VERSION,
          KVS_STATUS_UNSUPPORTED_VERSION, "session file");
    FAILS(kvs_state_reader_open_file(1, "absent", 3, NULL, &reader), KVS_STATUS_IO, KVS_STATUS_IO, "absent");
    BAD_STATUS(kvs_state_reader_open_file(1, NULL, 3, NULL, &reader), "filepath: NULL");
    BAD_STATUS(kvs_state_reader_open_file(256, "viewed", 3, NULL, &reader), "seq_id 256 is out of range");
    CHECK(reader == NULL);
    OK(kvs_state_reader_open_file(1, "viewed", 3, NULL, &reader));
    const kvs_token *read = NULL;
    size_t n_token = 0;
    OK(kvs_state_reader_tokens(reader, &read, &n_token));
    CHECK(n_token == 3 && memcmp(read, tokens, sizeof tokens) == 0);
    BAD_STATUS(kvs_state_reader_tokens(reader, NULL, &n_token), "tokens_out: NULL");
    BAD_STATUS(kvs_state_reader_tokens(reader, &read, NULL), "n_token_count_out: NULL");
    CHECK(kvs_state_reader_offset(reader) == 12 + sizeof tokens);
    OK(plan(reader, view));
    CHECK(kvs_state_reader_offset(reader) == size && kvs_state_reader_left(reader) == 0);
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    OK(kvs_state_reader_finish(reader));
    kvs_state_reader_free(reader);
    CHECK(holds(1, "...xx..xxx......") && same_row(3, 0) && same_row(9, 6));
    kvs_context_free(ctx);
}

static void a_file_of_a_whole_context_is_that_of_a_context(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    const uint32_t arch_len = 0;
    kvs_state_writer *writer = NULL;
    OK(kvs_state_writer_new(-1, NULL, &writer));
    OK(kvs_state_writer_write(writer, &arch_len, sizeof arch_len));
    OK(kvs_state_writer_write_kv_cache(writer, &view, 0));
    const size_t size = kvs_state_writer_save_file(writer, "viewed", NULL, 0, true);
    kvs_state_writer_free(writer);
    CHECK(kvs_state_save_file(ctx, "managed", NULL, 0));
    uint8_t a[STATE], b[STATE];
    CHECK(file_bytes("viewed", a) == size && file_bytes("managed", b) == size && memcmp(a, b, size) == 0);

    kvs_state_reader *reader = NULL;
    uint32_t arch;
    OK(kvs_state_reader_open_file(-1, "managed", 0, NULL, &reader));
    OK(kvs_state_reader_read(reader, &arch, sizeof arch));
    OK(plan(reader, view));
    CHECK(kvs_state_reader_left(reader) == 0 && arch == 0);
    kvs_state_reader_free(reader);
    CHECK(c.n_apply == 0 && c.n_clear == 0);
    kvs_context_free(ctx);
}

static void a_legacy_partial_state_is_dropped_after_a_restart(void) {
    open_cache();
    state s = save(ctx, 0);
    kvs_kv_view view = view_of(&c);
    const cache before = c;
    kvs_state_reader *reader = reader_of(s, 1);
    OK(kvs_state_reader_plan_kv_cache(reader, &view, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY, NULL, NULL));
    CHECK(kvs_state_reader_left(reader) == s.size - 8);
    OK(kvs_state_reader_restart(reader, true));
    OK(kvs_state_reader_plan_kv_cache(reader, &view, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY, NULL, NULL));
    CHECK(kvs_state_reader_left(reader) == 0);
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    OK(kvs_state_reader_finish(reader));
    CHECK(kvs_state_reader_left(reader) == 0);
    check_same(&before);
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static void an_on_device_state_without_its_tensors_is_planned_and_not_read(void) {
    open_cache();
    uint8_t bytes[STATE];
    const size_t size = kvs_state_seq_get_data_ext(ctx, bytes, sizeof bytes, 0, KVS_STATE_SEQ_FLAGS_ON_DEVICE);
    kvs_kv_view view = view_of(&c);
    kvs_state_reader *reader = NULL;
    BAD_STATUS(kvs_state_reader_new_on_device(-1, bytes, size, 0, NULL, NULL, &reader), "seq_id -1 is out of range [0, 256)");
    BAD_STATUS(kvs_state_reader_new_on_device(1, NULL, size, 0, NULL, NULL, &reader), "src: NULL");
    FAILS(kvs_state_reader_new_on_device(1, bytes, 7, 0, NULL, NULL, &reader), KVS_STATUS_TRUNCATED, KVS_STATUS_TRUNCATED, "truncated");
    CHECK(reader == NULL);
    OK(kvs_state_reader_new_on_device(1, bytes, size, 0, NULL, NULL, &reader));
    OK(plan(reader, view));
    CHECK(kvs_state_reader_left(reader) == 0 && kvs_state_reader_tensor_bytes(reader) == 2 * 5 * ROW);
    OK(kvs_state_reader_rewind(reader));
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, &view, NULL), "reader: the tensors of this state are not here");
    BAD_STATUS(kvs_state_reader_read_tensor(reader, &c.k, c.k.data, 0, 1), "reader: the tensors of this state are not here");
    CHECK(c.n_apply == 0);
    kvs_state_reader_free(reader);
    kvs_context_free(ctx);
}

static void an_on_device_state_of_a_writer_comes_back(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    kvs_state_writer *writer = NULL;
    OK(kvs_state_writer_new(0, NULL, &writer));
    OK(kvs_state_writer_write_kv_cache(writer, &view, 0));
    uint8_t blob[STATE], later[STATE];
    kvs_device_state *state_of_blob = NULL, *state_of_later = NULL;
    const size_t size = kvs_state_writer_metadata_size(writer);
    CHECK(size == kvs_state_writer_size(writer) - 2 * 5 * ROW);
    blob[0] = 0xa5;
    FAILS(kvs_state_writer_get_on_device(writer, blob, size - 1, 0, &state_of_blob), 0, KVS_STATUS_BUFFER_TOO_SMALL,
          "buffer too small");
    BAD(kvs_state_writer_get_on_device(writer, NULL, size, 0, &state_of_blob), 0, "dst: NULL");
    BAD(kvs_state_writer_get_on_device(writer, blob, size, 4, &state_of_blob), 0, "unknown state flags");
    BAD(kvs_state_writer_get_on_device(writer, blob, size, 0, NULL), 0, "state_out: NULL");
    CHECK(blob[0] == 0xa5 && state_of_blob == NULL);
    CHECK(kvs_state_writer_get_on_device(writer, blob, size, 0, &state_of_blob) == size);
    CHECK(kvs_state_writer_get_on_device(writer, later, STATE, KVS_STATE_SEQ_FLAGS_ON_DEVICE, &state_of_later) == size);
    kvs_state_writer_free(writer);

    // The cells' bytes go; the state has its own.
    cache before = c;
    memset(c.k.data, 0, 5 * ROW);
    kvs_state_reader *reader = NULL;
    FAILS(kvs_state_reader_new_on_device(1, blob, size, 0, state_of_later, NULL, &reader), KVS_STATUS_NO_DEVICE_STATE,
          KVS_STATUS_NO_DEVICE_STATE, "a later one has replaced it, or it is of another context");
    FAILS(kvs_state_reader_new_on_device(1, blob, size, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY, state_of_blob, NULL, &reader),
          KVS_STATUS_NO_DEVICE_STATE, KVS_STATUS_NO_DEVICE_STATE, "other flags");
    BAD_STATUS(kvs_state_reader_new_on_device(-1, blob, size, 0, state_of_blob, NULL, &reader), "seq_id -1 is out of");
    NO_HANDLE_STATUS(kvs_state_reader_new_on_device(1, blob, size, 0, (kvs_device_state *)ctx, NULL, &reader));
    CHECK(reader == NULL);
    OK(kvs_state_reader_new_on_device(1, blob, size, 0, state_of_blob, NULL, &reader));
    OK(plan(reader, view));
    CHECK(kvs_state_reader_left(reader) == 0 && kvs_state_reader_tensor_bytes(reader) == 0);
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    OK(kvs_state_reader_finish(reader));
    kvs_state_reader_free(reader);
    CHECK(holds(1, "...xx..xxx......") && memcmp(c.k.data + 3 * ROW, before.k.data, 2 * ROW) == 0);
    kvs_device_state_free(state_of_blob);
    kvs_device_state_free(state_of_later);
    kvs_device_state_free(NULL);
    FAILS_VOID(kvs_device_state_free((kvs_device_state *)ctx), KVS_STATUS_INVALID_HANDLE, "state is not a live handle");

    OK(kvs_state_writer_new(-1, NULL, &writer));
    BAD(kvs_state_writer_get_on_device(writer, blob, size, 0, &state_of_blob), 0, "a whole context has no ON_DEVICE state");
    kvs_state_writer_free(writer);
    kvs_context_free(ctx);
}

static void a_section_is_read_only_as_it_was_planned(void) {
    open_cache();
    state s = save(ctx, 0);
    kvs_kv_view view = view_of(&c), other = view;
    other.name = "other";
    const cache before = c;
    kvs_state_reader *reader = reader_of(s, 1);
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, &view, NULL), "view: section kv is not the next that was planned");
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, &other, NULL), "view: section other is not the next that was planned");
    check_same(&before);
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    OK(kvs_state_reader_finish(reader));
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, &view, NULL), "view: section kv is not the next that was planned");
    CHECK(c.n_apply == 1);
    kvs_state_reader_free(reader);

    BAD_STATUS(plan(reader = reader_of(s, N_SEQ), view), "seq_id 3 is out of range [0, 3)");
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

// A state of two sections, "a" and "b", both of view; the caller frees it.
static state two_sections(kvs_kv_view view) {
    kvs_state_writer *writer = NULL;
    OK(kvs_state_writer_new(0, NULL, &writer));
    OK(kvs_state_writer_write_kv_cache(writer, &view, 0));
    OK(kvs_state_writer_write_kv_cache(writer, &view, 0));
    state s = {NULL, kvs_state_writer_size(writer)};
    s.data = malloc(s.size);
    CHECK(s.data != NULL && kvs_state_writer_get_data(writer, s.data, s.size) == s.size);
    kvs_state_writer_free(writer);
    return s;
}

static void finish_fails_unless_all_that_was_planned_has_been_read(void) {
    open_cache();
    kvs_kv_view a = view_of(&c);
    cache other = c;
    other.k_plane.data = other.k.data;
    other.v_plane.data = other.v.data;
    kvs_kv_view b = view_of(&other);
    a.name = "a";
    b.name = "b";
    state s = two_sections(a);

    kvs_state_reader *reader = reader_of(s, 1);
    char text[80];
    snprintf(text, sizeof text, "reader: nothing was planned, and the state has %zu bytes", s.size - 8);
    BAD_STATUS(kvs_state_reader_finish(reader), text);
    OK(plan(reader, a));
    OK(plan(reader, b));
    BAD_STATUS(kvs_state_reader_finish(reader), "reader: section 1 of 2 was planned and not read (a)");
    OK(kvs_state_reader_rewind(reader));
    BAD_STATUS(kvs_state_reader_finish(reader), "reader: section 1 of 2 was planned and not read (a)");
    OK(kvs_state_reader_read_kv_cache(reader, &a, NULL));
    BAD_STATUS(kvs_state_reader_finish(reader), "reader: section 2 of 2 was planned and not read (b)");
    OK(kvs_state_reader_read_kv_cache(reader, &b, NULL));
    OK(kvs_state_reader_finish(reader));
    CHECK(same_row(3, 0) && memcmp(other.k.data, c.k.data, PLANE) == 0);
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static void finish_fails_after_a_plan_or_a_read_that_failed(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    state s = save(ctx, 0);
    kvs_state_reader *reader = reader_of(s, 1);
    c.failing = "visit";
    CALLBACK(plan(reader, view), "visit");
    BAD_STATUS(kvs_state_reader_finish(reader), "reader: section kv could not be planned: restart it");
    c.failing = NULL;
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    c.failing = "apply";
    CALLBACK(kvs_state_reader_read_kv_cache(reader, &view, NULL), "apply");
    c.failing = NULL;
    const char *text = "reader: the cells of section kv could not be set: restart it to begin again";
    BAD_STATUS(kvs_state_reader_finish(reader), text);
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, &view, NULL), text);
    OK(kvs_state_reader_restart(reader, false));
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    OK(kvs_state_reader_finish(reader));
    CHECK(holds(1, "...xx..xxx......") && same_row(3, 0));
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static void a_state_without_attention_sections_is_finished_without_a_plan(void) {
    open_cache();
    uint8_t bytes[STATE];
    const size_t empty = kvs_state_seq_get_data_ext(ctx, bytes, sizeof bytes, 0, KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    kvs_state_reader *reader = reader_of((state){bytes, empty}, 1);
    CHECK(empty == 8);
    OK(kvs_state_reader_finish(reader));
    kvs_state_reader_free(reader);

    tensor own = {"0123456789abcdef"};
    kvs_state_writer *writer = NULL;
    OK(kvs_state_writer_new(0, NULL, &writer));
    OK(kvs_state_writer_write(writer, "meta", 4));
    OK(kvs_state_writer_write_tensor(writer, NULL, own.data, 10, 6));
    const size_t size = kvs_state_writer_get_data(writer, bytes, sizeof bytes);
    kvs_state_writer_free(writer);
    reader = reader_of((state){bytes, size}, 1);
    char meta[5] = "";
    OK(kvs_state_reader_read(reader, meta, 4));
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read(reader, meta, 4));
    OK(kvs_state_reader_read_tensor(reader, NULL, own.data, 0, 6));
    OK(kvs_state_reader_finish(reader));
    CHECK(strcmp(meta, "meta") == 0 && memcmp(own.data, "abcdef6789abcdef", 16) == 0);
    kvs_state_reader_free(reader);
    kvs_context_free(ctx);
}

static void planning_ends_and_tensors_are_read_with_the_rewind(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    state s = save(ctx, 0);
    kvs_state_reader *reader = reader_of(s, 1);
    BAD_STATUS(kvs_state_reader_read_tensor(reader, NULL, c.k.data, 0, 4), "reader: tensors are read after the rewind");
    CHECK(kvs_state_reader_offset(reader) == 8);
    OK(kvs_state_reader_rewind(reader));
    BAD_STATUS(plan(reader, view), "reader: it was rewound to be read: restart it to plan again");
    OK(kvs_state_reader_restart(reader, false));
    OK(plan(reader, view));
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static void bytes_of_a_tensor_that_wrap_around_are_refused(void) {
    open_cache();
    state s = save(ctx, 0);
    const uint64_t wraps = UINT64_MAX - 5, beyond = UINT64_MAX - (uintptr_t)c.k.data;
    kvs_state_writer *writer = NULL;
    kvs_state_reader *reader = NULL;
    OK(kvs_state_writer_new(0, &c.access, &writer));
    OK(kvs_state_reader_new(1, s.data, s.size, &c.access, &reader));
    OK(kvs_state_reader_rewind(reader));
    const char *text = "offset: 18446744073709551610, with n 8 the end overflows";
    BAD_STATUS(kvs_state_writer_write_tensor(writer, &c.k, c.k.data, wraps, 8), text);
    BAD_STATUS(kvs_state_writer_write_tensor(writer, &c.k, NULL, wraps, 8), text);
    BAD_STATUS(kvs_state_reader_read_tensor(reader, &c.k, c.k.data, wraps, 8), text);
    BAD_STATUS(kvs_state_reader_read_tensor(reader, &c.k, NULL, wraps, 8), text);
    BAD_STATUS(kvs_state_writer_write_tensor(writer, &c.k, c.k.data, beyond, 1), "with n 1 the end of the tensor at ");
    BAD_STATUS(kvs_state_reader_read_tensor(reader, &c.k, c.k.data, beyond, 1), "with n 1 the end of the tensor at ");
    CHECK(kvs_state_writer_size(writer) == 8 && kvs_state_reader_offset(reader) == 8);

    // Nor is there a state of more bytes than memory or a file can have.
    const uint64_t quarter = (uint64_t)1 << 62;
    OK(kvs_state_writer_write_tensor(writer, &c.k, NULL, 0, quarter));
    FAILS(kvs_state_writer_write_tensor(writer, &c.k, NULL, 0, quarter), KVS_STATUS_OUT_OF_MEMORY, KVS_STATUS_OUT_OF_MEMORY,
          "a state needs 9223372036854775808 bytes");
    FAILS(kvs_state_writer_write(writer, c.k.data, SIZE_MAX / 2), KVS_STATUS_OUT_OF_MEMORY, KVS_STATUS_OUT_OF_MEMORY,
          "the metadata of a state needs 9223372036854775807 bytes");
    CHECK(kvs_state_writer_size(writer) == quarter + 8);
    kvs_state_writer_free(writer);
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static kvs_state_reader *used_by_apply;

static int apply_that_uses_the_reader(void *user, uint32_t stream, kvs_seq_id seq, uint32_t n, const kvs_cell *cells) {
    const char *text = "reader: in use by the call whose callback made this one";
    BAD_STATUS(kvs_state_reader_finish(used_by_apply), text);
    BAD_STATUS(kvs_state_reader_rewind(used_by_apply), text);
    FAILS_VOID(kvs_state_reader_free(used_by_apply), KVS_STATUS_INVALID_ARGUMENT, text);
    return apply(user, stream, seq, n, cells);
}

static void a_callback_that_uses_its_reader_is_refused(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    view.apply = apply_that_uses_the_reader;
    state s = save(ctx, 0);
    kvs_state_reader *reader = used_by_apply = reader_of(s, 1);
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    OK(kvs_state_reader_finish(reader));
    CHECK(holds(1, "...xx..xxx......") && same_row(3, 0));
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static void a_plan_is_stale_once_its_cells_are_taken(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    state s = save(ctx, 0);
    // Cell 7 is planned for sequence 1, then sequence 2 takes it.
    kvs_state_reader *reader = reader_of(s, 1), *second = reader_of(s, 2);
    OK(plan(reader, view));
    OK(plan(second, view));
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_rewind(second));
    c.pos[7] = 0;
    c.seqs[7] = 4;
    const cache before = c;
    FAILS(kvs_state_reader_read_kv_cache(reader, &view, NULL), KVS_STATUS_STALE, KVS_STATUS_STALE,
          "cell 7 is held by another sequence since the state was planned: plan again (section kv, stream 0)");
    check_same(&before);
    BAD_STATUS(kvs_state_reader_finish(reader), "section 1 of 1 was planned and not read");
    // Its own cells are replaced, so that is no obstacle.
    OK(kvs_state_reader_read_kv_cache(second, &view, NULL));
    OK(kvs_state_reader_finish(second));
    CHECK(holds(2, ".......xxxxx....") && same_row(7, 0));
    kvs_state_reader_free(reader);
    kvs_state_reader_free(second);
    free(s.data);
    kvs_context_free(ctx);
}

static void a_section_is_read_into_the_cache_that_it_was_planned_for(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    cache twin = c;
    twin.k_plane.tensor = &twin.k;
    twin.k_plane.data = twin.k.data;
    twin.v_plane.data = twin.v.data;
    kvs_kv_view other = view_of(&twin);
    const cache before = c;
    state s = save(ctx, 0);
    kvs_state_reader *reader = reader_of(s, 1);
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, &other, NULL), "view: section kv was planned for another cache: a tensor ");
    check_same(&before);
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    OK(kvs_state_reader_finish(reader));
    kvs_state_reader_free(reader);

    // So far as they lie behind calls, by their handles.
    view = remote_view_of(&c);
    twin.v_plane.tensor = &twin.v;
    other = remote_view_of(&twin);
    reader = reader_of(s, 1);
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, &other, NULL), "view: section kv was planned for another cache: a tensor ");
    CHECK(twin.n_apply == 0);
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static void a_view_that_was_planned_and_is_then_shared_is_refused(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    view.n_layer = 0;
    state s = save_view(view, 0);
    kvs_state_reader *reader = reader_of(s, 1);
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    view.shared = 1;
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, &view, NULL), "view.shared: 1, section kv was planned with 0");
    CHECK(c.n_apply == 0);
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

static void a_file_that_does_not_record_rotation_needs_to_be_told(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    view.n_rot_k = 64;
    kvs_state_writer *writer = NULL;
    OK(kvs_state_writer_new(0, NULL, &writer));
    OK(kvs_state_writer_write_kv_cache(writer, &view, 0));
    const size_t size = kvs_state_writer_save_file(writer, "rotated", NULL, 0, false);
    kvs_state_writer_free(writer);
    // Version 3 has no n_rot_k and n_rot_v, which stand behind the 5 cells, v_trans and n_layer.
    uint8_t bytes[STATE];
    CHECK(file_bytes("rotated", bytes) == size && bytes[4] == 4 && bytes[12 + 8 + 5 * 12 + 8] == 64);
    bytes[4] = 3;
    uint8_t *rot = bytes + 12 + 8 + 5 * 12 + 8;
    memmove(rot, rot + 8, size - 8 - (size_t)(rot - bytes));
    FILE *file = fopen("rotated", "wb");
    CHECK(file != NULL && fwrite(bytes, 1, size - 8, file) == size - 8 && fclose(file) == 0);

    kvs_state_reader *reader = NULL;
    OK(kvs_state_reader_open_file(1, "rotated", 0, NULL, &reader));
    FAILS(plan(reader, view), KVS_STATUS_ROTATION_UNSTATED, KVS_STATUS_ROTATION_UNSTATED, "set legacy_rotation");
    view.legacy_rotation = KVS_LEGACY_ROTATION_PLAIN;
    FAILS(plan(reader, view), KVS_STATUS_MISMATCH, KVS_STATUS_MISMATCH, "incompatible key rotation");
    view.legacy_rotation = KVS_LEGACY_ROTATION_ROTATED;
    OK(plan(reader, view));
    CHECK(kvs_state_reader_left(reader) == 0);
    // A caller from before the field says nothing.
    OK(kvs_state_reader_restart(reader, false));
    view.struct_size = offsetof(kvs_kv_view, legacy_rotation);
    FAILS(plan(reader, view), KVS_STATUS_ROTATION_UNSTATED, KVS_STATUS_ROTATION_UNSTATED, "set legacy_rotation");
    kvs_state_reader_free(reader);
    kvs_context_free(ctx);
}

static void a_reader_that_is_freed_before_finish_leaves_the_tensors_alone(void) {
    open_cache();
    state s = save(ctx, 0);
    kvs_kv_view view = view_of(&c);
    const cache before = c;
    kvs_state_reader *reader = reader_of(s, 1);
    OK(plan(reader, view));
    OK(kvs_state_reader_rewind(reader));
    OK(kvs_state_reader_read_kv_cache(reader, &view, NULL));
    kvs_state_reader_free(reader);
    CHECK(memcmp(&c.k, &before.k, sizeof c.k) == 0 && memcmp(&c.v, &before.v, sizeof c.v) == 0);
    free(s.data);
    kvs_context_free(ctx);
}

static void a_null_handle_or_one_of_another_kind_fails_every_call(void) {
    open_cache();
    kvs_kv_view view = view_of(&c);
    state s = save(ctx, 0);
    kvs_state_writer *writer = NULL;
    kvs_state_reader *reader = reader_of(s, 1);
    OK(kvs_state_writer_new(0, NULL, &writer));
    kvs_state_writer *const no_writer[] = {NULL, (kvs_state_writer *)reader, (kvs_state_writer *)ctx};
    kvs_state_reader *const no_reader[] = {NULL, (kvs_state_reader *)writer, (kvs_state_reader *)ctx};
    uint8_t bytes[8] = {0};
    const kvs_token *tokens = NULL;
    size_t n = 7;
    for (int i = 0; i < 3; i++) {
        kvs_state_writer *w = no_writer[i];
        NO_HANDLE_STATUS(kvs_state_writer_write(w, bytes, 1));
        NO_HANDLE_STATUS(kvs_state_writer_write_tensor(w, &c.k, c.k.data, 0, 1));
        NO_HANDLE_STATUS(kvs_state_writer_write_kv_cache(w, &view, 0));
        NO_HANDLE(kvs_state_writer_size(w), 0);
        NO_HANDLE(kvs_state_writer_metadata_size(w), 0);
        kvs_device_state *kept = NULL;
        NO_HANDLE(kvs_state_writer_get_on_device(w, bytes, sizeof bytes, 0, &kept), 0);
        NO_HANDLE(kvs_state_writer_get_data(w, bytes, sizeof bytes), 0);
        NO_HANDLE(kvs_state_writer_save_file(w, "x", NULL, 0, true), 0);
        kvs_state_reader *r = no_reader[i];
        NO_HANDLE(kvs_state_reader_tensor_bytes(r), 0);
        NO_HANDLE_STATUS(kvs_state_reader_tokens(r, &tokens, &n));
        NO_HANDLE(kvs_state_reader_offset(r), 0);
        NO_HANDLE(kvs_state_reader_left(r), 0);
        NO_HANDLE_STATUS(kvs_state_reader_rewind(r));
        NO_HANDLE_STATUS(kvs_state_reader_restart(r, true));
        NO_HANDLE_STATUS(kvs_state_reader_read(r, bytes, 1));
        NO_HANDLE_STATUS(kvs_state_reader_skip_tensor(r, 1));
        NO_HANDLE_STATUS(kvs_state_reader_read_tensor(r, &c.k, c.k.data, 0, 1));
        NO_HANDLE_STATUS(plan(r, view));
        NO_HANDLE_STATUS(kvs_state_reader_read_kv_cache(r, &view, NULL));
        NO_HANDLE_STATUS(kvs_state_reader_finish(r));
        if (i == 0) continue;
        FAILS_VOID(kvs_state_writer_free(w), KVS_STATUS_INVALID_HANDLE, "writer is not a live handle");
        FAILS_VOID(kvs_state_reader_free(r), KVS_STATUS_INVALID_HANDLE, "reader is not a live handle");
    }
    CHECK(tokens == NULL && n == 7 && fopen("x", "rb") == NULL);
    kvs_clear_last_error();
    kvs_state_writer_free(NULL);
    kvs_state_reader_free(NULL);
    kvs_state_writer_free(writer);
    kvs_state_reader_free(reader);
    CHECK(kvs_last_status() == KVS_STATUS_OK);
    free(s.data);
    kvs_context_free(ctx);
}

static void a_null_argument_fails_every_call(void) {
    open_cache();
    state s = save(ctx, 0);
    tape t = {.size = 0};
    kvs_io io = io_of(&t);
    kvs_kv_view view = view_of(&c);
    kvs_state_writer *writer = NULL;
    kvs_state_reader *reader = NULL;
    BAD_STATUS(kvs_kv_cache_state_write(NULL, &io, 0, 0), "kvs_kv_view: NULL");
    BAD_STATUS(kvs_kv_cache_state_write(&view, NULL, 0, 0), "kvs_io: NULL");
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(NULL, &io, 0, 0, NULL, NULL), "kvs_kv_view: NULL");
    BAD_STATUS(kvs_kv_cache_state_read_sinfo(&view, NULL, 0, 0, NULL, NULL), "kvs_io: NULL");
    BAD_STATUS(kvs_state_writer_new(0, NULL, NULL), "writer_out: NULL");
    BAD_STATUS(kvs_state_reader_new(0, s.data, s.size, NULL, NULL), "reader_out: NULL");
    BAD_STATUS(kvs_state_reader_open_file(0, "x", 0, NULL, NULL), "reader_out: NULL");
    BAD_STATUS(kvs_state_reader_new_on_device(0, s.data, s.size, 0, NULL, NULL, NULL), "reader_out: NULL");
    BAD_STATUS(kvs_state_reader_new(0, NULL, 8, NULL, &reader), "src: NULL, with a count of 8");
    const kvs_seq_id bad[] = {-2, 256, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        BAD_STATUS(kvs_state_writer_new(bad[i], NULL, &writer), "is out of range [0, 256)");
        BAD_STATUS(kvs_state_reader_new(bad[i], s.data, s.size, NULL, &reader), "is out of range [0, 256)");
    }
    CHECK(writer == NULL && reader == NULL);
    OK(kvs_state_writer_new(0, NULL, &writer));
    OK(kvs_state_reader_new(0, s.data, s.size, NULL, &reader));
    BAD_STATUS(kvs_state_writer_write_kv_cache(writer, NULL, 0), "kvs_kv_view: NULL");
    BAD_STATUS(kvs_state_writer_write_kv_cache(writer, &view, 4), "unknown state flags");
    BAD_STATUS(kvs_state_reader_plan_kv_cache(reader, NULL, 0, NULL, NULL), "kvs_kv_view: NULL");
    BAD_STATUS(kvs_state_reader_plan_kv_cache(reader, &view, 4, NULL, NULL), "unknown state flags");
    BAD_STATUS(kvs_state_reader_read_kv_cache(reader, NULL, NULL), "kvs_kv_view: NULL");
    CHECK(kvs_state_writer_size(writer) == 8 && kvs_state_reader_offset(reader) == 8);
    kvs_state_writer_free(writer);
    kvs_state_reader_free(reader);
    free(s.data);
    kvs_context_free(ctx);
}

MAIN(CASE(init_writes_defaults_and_checks_the_size), CASE(structs_of_another_size_are_refused),
     CASE(a_state_written_in_turns_is_that_of_a_context), CASE(a_state_read_in_turns_takes_the_cells_that_it_reports),
     CASE(a_whole_context_is_read_in_turns), CASE(a_mirrored_cache_takes_the_cells_that_are_given),
     CASE(given_cells_that_do_not_fit_empty_the_destination),
     CASE(layouts_without_room_are_refused_before_anything_changes), CASE(input_that_ends_leaves_an_empty_destination),
     CASE(a_shared_view_writes_and_reads_nothing), CASE(a_callback_that_is_missing_is_refused),
     CASE(a_callback_that_fails_ends_the_call), CASE(what_a_visit_tells_is_checked),
     CASE(a_visit_that_passes_over_a_refusal_is_refused), CASE(a_view_that_makes_no_sense_is_refused_by_field),
     CASE(a_plane_that_differs_between_streams_is_refused), CASE(a_cache_without_v_has_none_in_its_state),
     CASE(tensors_are_reached_through_access_where_data_is_null), CASE(a_tensor_that_cannot_be_written_fails_finish),
     CASE(a_context_reads_what_a_writer_wrote), CASE(a_view_reads_what_a_context_wrote),
     CASE(damaged_bytes_are_refused_by_the_plan_and_change_nothing), CASE(sections_of_the_caller_stand_beside_a_view),
     CASE(a_file_is_that_of_a_context_and_comes_back), CASE(a_file_of_a_whole_context_is_that_of_a_context),
     CASE(a_legacy_partial_state_is_dropped_after_a_restart), CASE(an_on_device_state_without_its_tensors_is_planned_and_not_read),
     CASE(an_on_device_state_of_a_writer_comes_back),
     CASE(a_section_is_read_only_as_it_was_planned),
     CASE(finish_fails_unless_all_that_was_planned_has_been_read),
     CASE(finish_fails_after_a_plan_or_a_read_that_failed),
     CASE(a_state_without_attention_sections_is_finished_without_a_plan),
     CASE(planning_ends_and_tensors_are_read_with_the_rewind),
     CASE(bytes_of_a_tensor_that_wrap_around_are_refused),
     CASE(a_callback_that_uses_its_reader_is_refused),
     CASE(a_plan_is_stale_once_its_cells_are_taken),
     CASE(a_section_is_read_into_the_cache_that_it_was_planned_for),
     CASE(a_view_that_was_planned_and_is_then_shared_is_refused),
     CASE(a_file_that_does_not_record_rotation_needs_to_be_told),
     CASE(a_reader_that_is_freed_before_finish_leaves_the_tensors_alone),
     CASE(a_null_handle_or_one_of_another_kind_fails_every_call), CASE(a_null_argument_fails_every_call))
