"""tests/c/no_driver.c through the wrapper: no_driver.py DEVICE STATUS TEXT. Run by tests/no_driver.rs."""

import sys

import kvstate


def host_context_works():
    with kvstate.Context([kvstate.Kv(16, [kvstate.Layer(4, 4)])], n_seq_max=2) as ctx:
        ctx.decode(range(5))
        state = ctx.state_seq_get_data(0)
        assert ctx.state_seq_set_data(state, 1) == len(state) and ctx.seq_pos_max(1) == 4


device, status, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
host_context_works()
for _ in range(2):
    try:
        kvstate.Context([kvstate.Kv(8, [kvstate.Layer(4, 4, device=device)])])
    except kvstate.KvsError as error:
        assert (error.status, text in str(error)) == (status, True), (error.status, str(error))
    else:
        raise AssertionError(f"a context on device {device}")
host_context_works()
