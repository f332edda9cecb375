// A program on a machine whose CUDA cannot be used: no_driver DEVICE STATUS TEXT. A context on the device fails with this status
// and a reason that has this text; a context in host memory works before and after.

#include "check.h"

static void host_context_works(void) {
    kvs_context *ctx = new_context(default_setup(16, 2));
    decode(ctx, 0, 0, 5, NULL);
    state before = save(ctx, 0);
    CHECK(kvs_state_seq_set_data(ctx, before.data, before.size, 1) == before.size);
    CHECK(kvs_memory_seq_pos_max(kvs_get_memory(ctx), 1) == 4);
    free(before.data);
    kvs_context_free(ctx);
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    host_context_works();
    // Twice: what was found the first time stays.
    for (int i = 0; i < 2; i++) {
        setup s = default_setup(8, 1);
        s.layer.device = atoi(argv[1]);
        kvs_context *ctx = NULL;
        FAILS(try_new_context(&s, &ctx), atoi(argv[2]), atoi(argv[2]), argv[3]);
        CHECK(ctx == NULL);
    }
    host_context_works();
    puts(kvs_last_error());
    return 0;
}
