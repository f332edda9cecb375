// kvstate: save, restore, checkpoint and file the KV cache of one sequence, with llama.cpp's exact bytes and
// calls. https://github.com/kvstate/kvstate, MIT
//
// The contract of all calls
//
// Threads. A context may move between threads. One call at a time may use it; calls marked Const change nothing
// and may run side by side with each other. kvs_last_error is per thread.
//
// Failure. Calls with llama.cpp's names (kvs_ for llama_) return what llama.cpp's return: 0 or false is
// failure. Other calls return a kvs_status. kvs_last_error() gives the reason in words, naming the field and
// both values; one line with it goes to the log callback. Out-parameters are written only on success, and a
// failed call changes nothing unless it says so. No call throws, unwinds or aborts on bad input.
//
// Pointers. Every pointer is valid for what the call reads or writes through it, and used by nobody else
// meanwhile; NULL is an error where nothing else is said, or fine for an array of no elements. What a struct
// points to is copied during the call, except adopted K and V, which must outlive the context and must not be
// written by others while a call that reads or writes K or V runs. A handle is freed once, by its free call.
//
// Structs. One that starts with struct_size can grow: fill it with its init call (or the inline
// kvs_X_default_params()) before you set fields, and a program keeps working with a newer library.
//
// Bytes. State sizes and contents are llama.cpp's, little-endian. get_data writes exactly get_size bytes;
// set_data returns the bytes it consumed. A state is untrusted input: whatever is wrong with it, the call
// fails with a reason and the context keeps what it held, byte for byte.

#ifndef KVSTATE_H
#define KVSTATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Type numbers of ggml that K and V may have; any other number of ggml's is accepted for its size.
#define KVS_TYPE_F32 0

// 16-bit floats.
#define KVS_TYPE_F16 1

// 4 bits, blocks of 32 with a scale.
#define KVS_TYPE_Q4_0 2

// 4 bits, blocks of 32 with a scale and a minimum.
#define KVS_TYPE_Q4_1 3

// 5 bits, blocks of 32 with a scale.
#define KVS_TYPE_Q5_0 6

// 5 bits, blocks of 32 with a scale and a minimum.
#define KVS_TYPE_Q5_1 7

// 8 bits, blocks of 32 with a scale.
#define KVS_TYPE_Q8_0 8

// 4 bits, non-linear, blocks of 32.
#define KVS_TYPE_IQ4_NL 20

// bfloat16.
#define KVS_TYPE_BF16 30

// Full attention.
#define KVS_SWA_TYPE_NONE 0

// A position sees the n_swa latest ones, itself included.
#define KVS_SWA_TYPE_STANDARD 1

// A position sees its own chunk of n_swa positions.
#define KVS_SWA_TYPE_CHUNKED 2

// A position sees n_swa / 2 positions to either side.
#define KVS_SWA_TYPE_SYMMETRIC 3

// RoPE turns neighbouring elements of a head: 2 * i and 2 * i + 1. The number is llama.h's.
#define KVS_ROPE_TYPE_NORM 0

// RoPE turns elements of two halves of a head: i and i + n_rope_dims / 2.
#define KVS_ROPE_TYPE_NEOX 2

// R of a layer.
#define KVS_RECURRENT_R 0

// P of a layer.
#define KVS_RECURRENT_P 1

// S of a layer.
#define KVS_RECURRENT_S 2

// Compressed sparse attention.
#define KVS_DSV4_CSA 0

// Heavily compressed attention.
#define KVS_DSV4_HCA 1

// The lightning indexer.
#define KVS_DSV4_LID 2

// Compressed K.
#define KVS_DSV4_K 0

// A state's sums of values.
#define KVS_DSV4_STATE_KV 1

// A state's sums of scores.
#define KVS_DSV4_STATE_SCORE 2

// An attention cache, described by kv.
#define KVS_SECTION_KV 1

// States of recurrent or linear-attention layers, described by recurrent.
#define KVS_SECTION_RECURRENT 2

// Layers of a draft that read the cells of the target's cache: the draft's states have nothing of them.
#define KVS_SECTION_SHARED 3

// The compressed half of a DSV4 memory, behind its raw pair of attention caches, described by dsv4.
#define KVS_SECTION_DSV4 4

// Nothing is said: files older than version 4 that may be rotated are refused.
#define KVS_LEGACY_ROTATION_UNSTATED 0

// Files older than version 4 were made with the rotation that llama.cpp applies to quantised caches.
#define KVS_LEGACY_ROTATION_ROTATED 1

// Files older than version 4 were made without rotation.
#define KVS_LEGACY_ROTATION_PLAIN 2

// Bytes of the text of a reason, its NUL included.
#define KVS_REASON_SIZE 160

// Nothing is in the way.
#define KVS_REWIND_POSSIBLE 0

// The sequence does not reach that far.
#define KVS_REWIND_PAST_END 1

// A section no longer has what a token at that position sees.
#define KVS_REWIND_CELLS_GONE 2

// A section keeps states of a few positions only (recurrent layers), and none to go on from there.
#define KVS_REWIND_NO_STATE 3

// The plane is in host memory.
#define KVS_DEVICE_HOST (-1)

// K of a layer, for kvs_kv_get and kvs_kv_set.
#define KVS_KV_K 0

// V of a layer.
#define KVS_KV_V 1

// Restored and cut, the sequence can go on.
#define KVS_CHECKPOINT_SERVES 0

// It was taken behind the divergence, and does not hold what a token there sees.
#define KVS_CHECKPOINT_PAST_DIVERGENCE 1

// After a restore something would be missing that a token sees.
#define KVS_CHECKPOINT_MASKED 2

// It cannot be restored into this context: it is of other sections, or cells are missing.
#define KVS_CHECKPOINT_UNFIT 3

// Bytes of a fingerprint.
#define KVS_FINGERPRINT_SIZE 32

// A call failed, or something was damaged.
#define KVS_LOG_ERROR 1

// Something was odd, and was dealt with.
#define KVS_LOG_WARN 2

// Worth knowing.
#define KVS_LOG_INFO 3

// A folder that keeps slots from one run of a server to the next: slot N in auto-slotN.bin, a slot file as any other, and on
// request its draft in auto-slotN.drft. All calls but kvs_autosave_free are Const: they may be made from any thread, side by
// side, also while one waits.
//
// Whatever is wrong with a file costs a cold start and nothing else.
typedef struct kvs_autosave kvs_autosave;

// The checkpoints of one sequence, by position. They belong to the history that the sequence has, and outlive the context. One
// call at a time may use them; calls marked Const may run side by side.
typedef struct kvs_checkpoints kvs_checkpoints;

// A context: the KV cache of a model's sequences.
typedef struct kvs_context kvs_context;

// The tensors of a sequence's ON_DEVICE state.
typedef struct kvs_device_state kvs_device_state;

// A save in the background. Calls marked Const may be made from any thread, side by side.
typedef struct kvs_job kvs_job;

// The memory behind a kvs_slot_result.
typedef struct kvs_loaded_slot kvs_loaded_slot;

// The memory of a context.
typedef struct kvs_memory kvs_memory;

// Cells for the tokens of a ubatch, as kvs_slot_prepare found them.
typedef struct kvs_slot kvs_slot;

// The state of a sequence, or of a whole context, as it was when it was taken: its tensors are copied where the cache is, in
// the memory of a device or of the host. There may be as many as memory has room for. A snapshot outlives its context.
typedef struct kvs_snapshot kvs_snapshot;

// A state on its way in. First every section is planned, in write order: read, checked, placed, and nothing
// changes. Then, from kvs_state_reader_rewind on, the same sections are read in the same order: cells are set,
// and tensors wait for kvs_state_reader_finish, which copies all of them in one batch. The state has been restored
// when that has returned KVS_STATUS_OK, and not before.
//
// The whole of it: plan every section; compare kvs_state_reader_left with 0, since what a state has beyond the
// cache (a section, V of the last layer) is told by nothing else; rewind; read every section; finish. The README has it as
// code. Sections of the caller's own are read or skipped while planning, and read in between afterwards.
//
// Until it is freed, the bytes of the state stay as they are, and the cache is changed through it alone.
typedef struct kvs_state_reader kvs_state_reader;

// A state on its way out. Sections are named one after another, in write order; nothing of a tensor is copied
// before kvs_state_writer_get_data or kvs_state_writer_save_file, which copy all of them in one batch.
//
// Until it is freed, nobody writes the tensors that were named and what a view points to stays where it is.
typedef struct kvs_state_writer kvs_state_writer;

// What a call returns that is not one of llama.cpp's: KVS_STATUS_OK or a reason. kvs_last_error() says more.
typedef int32_t kvs_status;

// RoPE of a layer, as the model applies it to K. Fill with kvs_rope_params_init first.
//
// There is no attn_factor: K was scaled when it was computed, and a shift only turns it.
typedef struct kvs_rope_params {
    // sizeof(kvs_rope_params), set by the init call.
    size_t struct_size;
    // KVS_ROPE_TYPE_*, by default NORM. Models whose positions have several parts (M-RoPE) cannot be shifted.
    uint32_t rope_type;
    // Elements of a head of K.
    uint32_t n_embd_head;
    // Elements of a head that are turned; 0: all behind n_embd_nope.
    uint32_t n_rope_dims;
    // Elements of a head before those that are turned (MLA caches that begin with the latent part).
    uint32_t n_embd_nope;
    // Base of the frequencies, of this layer (local layers can have one of their own); by default 10000.
    float freq_base;
    // What positions are multiplied with, of this layer; by default 1.
    float freq_scale;
    // By what each pair's frequency is divided, n_rope_dims / 2 factors; NULL: none.
    const float *freq_factors;
    // Share of YaRN's extrapolation; by default 0, and the fields below are not looked at.
    float ext_factor;
    // YaRN: pairs that turn more often than this in the original context are extrapolated; by default 32.
    float beta_fast;
    // YaRN: pairs that turn less often than this in the original context are scaled; by default 1.
    float beta_slow;
    // YaRN: the context of the training.
    uint32_t n_ctx_orig;
} kvs_rope_params;

// One layer of an attention cache. Fill with kvs_kv_layer_params_init first.
typedef struct kvs_kv_layer_params {
    // sizeof(kvs_kv_layer_params), set by the init call.
    size_t struct_size;
    // ggml type of K; by default f16.
    int32_t type_k;
    // ggml type of V; by default f16.
    int32_t type_v;
    // Elements of one cell of K, all heads together.
    uint32_t n_embd_k_gqa;
    // Elements of one cell of V; 0: the layer has no V (MLA).
    uint32_t n_embd_v_gqa;
    // Memory of the caller for K (adopted), first cell of stream 0; NULL: kvstate allocates (managed). Either
    // all layers of a context's section are adopted or none. It must outlive the context. Elements of two tensors must not
    // overlap, which nobody checks.
    void *k;
    // Memory of the caller for V.
    void *v;
    // Bytes from one cell of K to the next; 0: the size of a row. Strides are for adopted memory only.
    uint64_t k_cell_stride;
    // Bytes from one stream of K to the next; 0: kv_size cells. Streams may not interleave.
    uint64_t k_stream_stride;
    // Bytes from one cell of V to the next; 0: the size of a row, or of an element if V is transposed.
    uint64_t v_cell_stride;
    // Bytes from one channel of transposed V to the next; 0: kv_size elements.
    uint64_t v_channel_stride;
    // Bytes from one stream of V to the next; 0: all of one stream's V.
    uint64_t v_stream_stride;
    // KVS_DEVICE_HOST (by default), or the number of a CUDA device, whose memory kvstate allocates. Adopted memory: any number
    // of a device says that k and v are addresses of devices; the driver says of which, and they may be of two.
    int32_t device;
    // 0.
    uint32_t reserved;
    // How kvstate rotates K after kvs_memory_seq_add and seq_div. NULL in all layers of a context: it does not;
    // NULL in some: K of these does not depend on the position.
    const struct kvs_rope_params *rope;
} kvs_kv_layer_params;

// An attention cache. Fill with kvs_kv_params_init first.
typedef struct kvs_kv_params {
    // sizeof(kvs_kv_params), set by the init call.
    size_t struct_size;
    // Cells of each stream.
    uint32_t kv_size;
    // Number of layers.
    uint32_t n_layer;
    // The layers, in the order of the model.
    const struct kvs_kv_layer_params *layers;
    // KVS_SWA_TYPE_*, by default none. The rule of a partial state looks at this, never at the model.
    uint32_t swa_type;
    // Size of the window in positions.
    uint32_t n_swa;
    // 1: V is transposed, channel by channel (flash attention off).
    uint32_t v_trans;
    // 1: cells carry an ext, x, y and token (n_pos_per_embd > 1, or n-gram embeddings).
    uint32_t cell_ext;
    // Size of the Hadamard rotation applied to K, as llama.cpp does for quantised caches; 0: none.
    uint32_t n_rot_k;
    // Size of the Hadamard rotation applied to V; 0: none.
    uint32_t n_rot_v;
    // Elements of one head of K, 0: unknown. Only files older than version 4 need it.
    uint32_t n_embd_head_k;
    // Elements of one head of V, 0: unknown.
    uint32_t n_embd_head_v;
    // The index of the section whose cells this one takes: an indexer has those of its attention cache, which comes before it
    // and has the same kv_size, window and ext. -1 (by default): it has cells of its own.
    int32_t mirrors;
    // 0.
    uint32_t reserved;
} kvs_kv_params;

// One layer of a recurrent section; one without a state is listed, too. Fill with kvs_recurrent_layer_params_init first.
typedef struct kvs_recurrent_layer_params {
    // sizeof(kvs_recurrent_layer_params), set by the init call.
    size_t struct_size;
    // 1: the layer has R, the state of the convolution. By default 0.
    uint32_t has_r;
    // 1: the layer has S, the state of the recurrence. By default 0; an S of 0 elements is not the same as none.
    uint32_t has_s;
    // ggml type of R and P; by default f32.
    int32_t type_r;
    // ggml type of S; by default f32.
    int32_t type_s;
    // Elements of a row of R.
    uint32_t n_embd_r;
    // Elements of a row of S.
    uint32_t n_embd_s;
    // Elements of a row of P, a second row beside R in models with n-gram embeddings; 0: the layer has no P.
    uint32_t n_embd_p;
    // KVS_DEVICE_HOST (by default), or the number of a CUDA device, as in kvs_kv_layer_params.
    int32_t device;
    // Memory of the caller for R (adopted): n_seq_max * (1 + n_rs_seq) rows, one behind the other; NULL: kvstate allocates
    // (managed), or R has no elements. Either all tensors of a section are adopted or none. It must outlive the context.
    void *r;
    // Memory of the caller for S.
    void *s;
    // Memory of the caller for P.
    void *p;
} kvs_recurrent_layer_params;

// Recurrent states: one for each sequence, whatever its length. Fill with kvs_recurrent_params_init first.
typedef struct kvs_recurrent_params {
    // sizeof(kvs_recurrent_params), set by the init call.
    size_t struct_size;
    // Number of layers of the model.
    uint32_t n_layer;
    // Rollback planes: positions by which the end of a sequence can be cut off after a ubatch. By default 0.
    uint32_t n_rs_seq;
    // The layers, in the order of the model.
    const struct kvs_recurrent_layer_params *layers;
} kvs_recurrent_params;

// Where a ubatch reads and writes states in a recurrent section. A row counts through all planes of a tensor: row
// k * n_seq_max + c is the state of cell c, k tokens before its newest one.
//
// Every row that is read (kvs_slot_sources, kvs_slot_moves) is read before any is written.
typedef struct kvs_recurrent_slot {
    // The cell of the first sequence set of the ubatch, those of the others follow it. The ubatch writes the newest state of
    // each into its cell, and those of the tokens before it k * n_seq_max rows behind that, as far as there are planes and tokens: only these count
    // for kvs_memory_max_cut.
    uint32_t head;
    // Sequence sets: tokens whose sequences are the same, in the order in which the ubatch names them first.
    uint32_t n_set;
    // Rows that have to move.
    uint32_t n_move;
} kvs_recurrent_slot;

// A row that has to move, in every tensor: its cell is taken by the ubatch.
typedef struct kvs_row_move {
    // Where it goes.
    uint32_t to;
    // Where it is.
    uint32_t from;
} kvs_row_move;

// Sequence id, below n_seq_max.
typedef int32_t kvs_seq_id;

// Position of a token in its sequence.
typedef int32_t kvs_pos;

// The state of a sequence in a recurrent section.
typedef struct kvs_recurrent_state {
    // The last position that it has seen; -1: there is none, and the fields below are 0.
    kvs_pos pos;
    // Its row in every tensor.
    uint32_t row;
    // By how many tokens the sequence was cut back since its last ubatch; the next one ends it.
    uint32_t rollback;
    // How many rollback planes behind it hold states of the tokens before. -1: the row does not hold the state of pos, for
    // kvs_memory_seq_rm, which answers as llama.cpp's, has gone further back than states were kept (kvs_memory_max_cut).
    int32_t n_older;
} kvs_recurrent_state;

// K or V of one layer in one stream. Rows: cell c is the row at data + c * cell_stride. Transposed V: channel
// j of cell c is at data + j * channel_stride + c * cell_stride.
typedef struct kvs_plane {
    // In a view: the caller's handle of the tensor (ggml_tensor *), which its callbacks get back. NULL in a plane
    // that kvstate gives out.
    void *tensor;
    // Address of cell 0; NULL if the layer has no V. In a view also if the bytes are reached through the callbacks
    // of kvs_tensor_access alone, whose offsets count from cell 0.
    void *data;
    // KVS_DEVICE_HOST, or the number of a CUDA device, whose memory data is in. In a view any number of a device says
    // that, and the driver says which it is.
    int32_t device;
    // ggml type.
    int32_t ggml_type;
    // Elements of one cell, as in a state: a tensor padded beyond them has larger strides. 0: the layer has no
    // such tensor.
    uint32_t n_embd;
    // 0.
    uint32_t reserved;
    // Bytes from one cell to the next.
    uint64_t cell_stride;
    // Bytes from one channel to the next; 0 for rows.
    uint64_t channel_stride;
} kvs_plane;

// A compressor of DSV4 attention: K with a row for every ratio positions, and the state in which the next row grows. Fill with
// kvs_dsv4_compressor_params_init first.
typedef struct kvs_dsv4_compressor_params {
    // sizeof(kvs_dsv4_compressor_params), set by the init call.
    size_t struct_size;
    // Positions of a row.
    uint32_t ratio;
    // Rows of K in each stream.
    uint32_t kv_size;
    // Numbers of the model's layers that have it, ascending.
    const uint32_t *layers;
    // How many they are.
    uint32_t n_layer;
    // ggml type of K; by default f16.
    int32_t type_k;
    // Elements of a row of K.
    uint32_t n_embd_k;
    // Rows of a state.
    uint32_t state_size;
    // Elements of a row of a state, which is f32.
    uint32_t n_embd_state;
    // 0.
    uint32_t reserved;
    // Memory of the caller for K (adopted), zeroed: an address for each layer in layers, of kv_size rows for each stream, one
    // behind the other. NULL: kvstate allocates (managed). Either all tensors of a section are adopted or none. They must
    // outlive the context.
    void *const *k;
    // The same for a state's sums of values: state_size rows for each stream, and as many again for each rollback plane.
    void *const *kv;
    // The same for a state's sums of scores.
    void *const *score;
} kvs_dsv4_compressor_params;

// The compressed half of a DSV4 memory. Everything is one stream per sequence (unified 0). Fill with
// kvs_dsv4_params_init first.
typedef struct kvs_dsv4_params {
    // sizeof(kvs_dsv4_params), set by the init call.
    size_t struct_size;
    // Compressed sparse attention.
    const struct kvs_dsv4_compressor_params *csa;
    // Heavily compressed attention.
    const struct kvs_dsv4_compressor_params *hca;
    // The lightning indexer.
    const struct kvs_dsv4_compressor_params *lid;
    // The device of each layer of the model, KVS_DEVICE_HOST or the number of a CUDA device; NULL (by default): host memory.
    // Adopted memory: any number of a device says that the layer's addresses are of a device, and the driver says of which.
    const int32_t *devices;
    // How many they are.
    uint32_t n_device;
    // Rollback planes: positions by which the end of a sequence can be cut off after a ubatch. By default 0.
    uint32_t n_rs_seq;
} kvs_dsv4_params;

// A section of the memory. Fill with kvs_section_params_init first, or use the inline kvs_kv_section and its like.
typedef struct kvs_section_params {
    // sizeof(kvs_section_params), set by the init call.
    size_t struct_size;
    // KVS_SECTION_*, by default KVS_SECTION_KV.
    uint32_t kind;
    // 0.
    uint32_t reserved;
    // The attention cache; NULL in sections of another kind, as are the descriptions below.
    const struct kvs_kv_params *kv;
    // The recurrent states.
    const struct kvs_recurrent_params *recurrent;
    // The compressed half of a DSV4 memory.
    const struct kvs_dsv4_params *dsv4;
} kvs_section_params;

// Rotates the K rows of n cells of a stream of a section, in every layer: each cell of the array cells by the
// number of positions at the same index of shifts, forward (negative: back; never 0). Returns 0 if it did.
// Called from calls that write a state, before K is read; it must not call the library with the same context.
typedef int32_t (*kvs_shift_callback)(void *user_data,
                                      uint32_t section,
                                      uint32_t stream,
                                      const uint32_t *cells,
                                      const kvs_pos *shifts,
                                      size_t n);

// A context. Fill with kvs_context_params_init first.
typedef struct kvs_context_params {
    // sizeof(kvs_context_params), set by the init call.
    size_t struct_size;
    // Sequences, 1 to 256; by default 1.
    uint32_t n_seq_max;
    // 1 (by default): all sequences share one stream of kv_size cells; 0: each has a stream of kv_size cells.
    uint32_t unified;
    // The sections in write order, which is that of the states that are to be read: full attention before SWA (iSWA), an
    // indexer behind its attention cache, recurrent states behind attention (in hybrids with an indexer before that), and the
    // compressed half of DSV4 last. Only indexers and DSV4 are held to it: it is the engine's order that counts.
    const struct kvs_section_params *sections;
    // Number of sections.
    uint32_t n_section;
    // KVS_LEGACY_ROTATION_*.
    uint32_t legacy_rotation;
    // Architecture name, in whole-context states; NULL: empty.
    const char *arch;
    // Rotates K after kvs_memory_seq_add and seq_div, where no layer has rope; NULL: nobody does.
    kvs_shift_callback shift;
    // For shift.
    void *shift_user_data;
    // 1, with shift NULL and no rope: the engine promises to rotate what kvs_shift_get lists and to call kvs_shift_done
    // before the next decode or save. A save with shifts pending fails; a decode is not checked.
    uint32_t shift_by_engine;
    // Most masked cells beyond the window that a state with KVS_STATE_SEQ_FLAGS_NONE keeps of an SWA section.
    // UINT32_MAX (by default): all, so that the restored sequence can be cut to any prefix.
    uint32_t max_masked_cells;
    // 1: a saved file is renamed into place without waiting for the disk, as llama.cpp writes its own. It survives a
    // crash of the process all the same; after one of the machine it may be damaged. By default 0.
    uint32_t unsynced_files;
    // 1: states of other types, or of another rotation (n_rot_k, n_rot_v), are converted to those of the cache, which rounds:
    // docs/semantics.md. 0 (by default): they are refused. V is turned from rows to channels (v_trans) and back in any case.
    uint32_t convert_types;
    // Pinned staging buffers between host and CUDA devices, 2 to 64; 0 (by default): 4.
    uint32_t n_staging;
    // Bytes of one staging buffer; 0 (by default): 32 MiB. A buffer is no larger than the cache is on devices, and no smaller
    // than a transposed channel or a row. There are 2 more of them on each device.
    //
    // They are allocated when the first state is moved, smaller if memory is short. Jobs that run side by side have a
    // set each. Two sets for each device are kept for what comes next, until the context and its last snapshot and job are
    // freed.
    uint64_t staging_size;
} kvs_context_params;

// The memory of a context; lives as long as the context does.
typedef struct kvs_memory *kvs_memory_t;

// Why a sequence cannot be rewound to a position.
typedef struct kvs_rewind_obstacle {
    // KVS_REWIND_POSSIBLE, or why not. The fields below are set where it says so, and -1 otherwise.
    uint32_t kind;
    // First position that a token at the wanted one needs (CELLS_GONE).
    kvs_pos need_min;
    // The last one (CELLS_GONE).
    kvs_pos need_max;
    // First position that the section has (CELLS_GONE), or can go on at (NO_STATE); -1: none.
    kvs_pos has_min;
    // Last position that the section has (CELLS_GONE) or can go on at (NO_STATE), or the sequence has (PAST_END); -1: none.
    kvs_pos has_max;
    // The same in words, with the section, cut to the size; empty for KVS_REWIND_POSSIBLE.
    char text[KVS_REASON_SIZE];
} kvs_rewind_obstacle;

// Token id.
typedef int32_t kvs_token;

// What a sequence state holds and where: KVS_STATE_SEQ_FLAGS_*, combined.
typedef uint32_t kvs_state_seq_flags;

// A ubatch, with the arrays of llama_batch. Fill with kvs_ubatch_init first.
typedef struct kvs_ubatch {
    // sizeof(kvs_ubatch), set by the init call.
    size_t struct_size;
    // Number of tokens.
    uint32_t n_tokens;
    // 0.
    uint32_t reserved;
    // Position of each token.
    const kvs_pos *pos;
    // Number of sequences of each token, at least 1; NULL: 1 each.
    const int32_t *n_seq_id;
    // Sequences of each token; NULL: sequence 0. Those of one token are in one stream; tokens of one ubatch may
    // be in different streams, and the cells of each are counted within its own.
    const kvs_seq_id *const *seq_id;
    // Token ids, kept by sections with cell_ext; NULL: embeddings.
    const kvs_token *token;
    // M-RoPE columns, kept by sections with cell_ext; NULL: 0.
    const kvs_pos *x;
    // M-RoPE rows, kept by sections with cell_ext; NULL: 0.
    const kvs_pos *y;
} kvs_ubatch;

// What is known of a cell.
typedef struct kvs_cell {
    // Index in its stream.
    uint32_t idx;
    // Position; -1 if the cell is empty.
    kvs_pos pos;
    // Positions by which K still has to be rotated forward.
    kvs_pos shift;
    // M-RoPE column.
    kvs_pos x;
    // M-RoPE row.
    kvs_pos y;
    // Token; -1 if unknown, or if the cell came from an embedding.
    kvs_token tok;
    // Its sequences: bit s % 64 of seqs[s / 64] for sequence s.
    uint64_t seqs[4];
} kvs_cell;

// Told how far the saving or loading of a file is, or a job, on the thread of the call (a job's: its own): done of total
// bytes, the file's in a save to one, the state's in a save to memory, the state's or its tensors' in a load; total is never
// 0. done never decreases, and is total once, at the end; how often
// it is told differs. Returns 0 to go on; anything else cancels, at the end too, and the call fails with
// KVS_STATUS_CANCELLED. It must not call the library with the same handle, and must not throw or unwind.
typedef int32_t (*kvs_progress_callback)(void *user_data, uint64_t done, uint64_t total);

// How bytes are moved. Fill with kvs_transfer_params_init first.
typedef struct kvs_transfer_params {
    // sizeof(kvs_transfer_params), set by the init call.
    size_t struct_size;
    // Threads that copy, the caller's included; 0 (by default): the cores, at most 4. A small state takes fewer;
    // tensors that are reached through callbacks, and a file that is saved, take one.
    uint32_t n_threads;
    // 0.
    uint32_t reserved;
    // Called while a file is saved or loaded, or a job runs; NULL: nobody is.
    kvs_progress_callback progress;
    // For progress.
    void *progress_user_data;
} kvs_transfer_params;

// Bytes of memory that a context has taken. Adopted memory is not counted, and neither are snapshots, which belong to nobody:
// kvs_snapshot_size and kvs_snapshot_device_size tell of them.
typedef struct kvs_memory_usage {
    // sizeof(kvs_memory_usage), set by the init call.
    size_t struct_size;
    // K and V in host memory. Pages that were never written are no memory yet.
    uint64_t kv_host;
    // K and V in the memory of devices.
    uint64_t kv_device;
    // Tensors of the ON_DEVICE states of all sequences, in host memory.
    uint64_t on_device_states_host;
    // Tensors of the ON_DEVICE states of all sequences, in the memory of devices.
    uint64_t on_device_states_device;
    // Staging buffers, pinned host memory.
    uint64_t staging_pinned;
    // Staging buffers in the memory of devices.
    uint64_t staging_device;
} kvs_memory_usage;

// Where checkpoints are: KVS_CHECKPOINT_MEMORY_CACHE or _HOST.
typedef uint32_t kvs_checkpoint_memory;

// How many checkpoints of a sequence there may be. Fill with kvs_checkpoints_params_init first.
typedef struct kvs_checkpoints_params {
    // sizeof(kvs_checkpoints_params), set by the init call.
    size_t struct_size;
    // Most checkpoints, at least 1; by default 32.
    uint32_t n_max;
    // So many positions more to compute make no difference; when room is needed, checkpoints that are closer go first. By
    // default 256.
    uint32_t min_step;
    // Most bytes of all of them; 0 (by default): no bound.
    uint64_t max_bytes;
    // Where they are; by default KVS_CHECKPOINT_MEMORY_CACHE.
    kvs_checkpoint_memory memory;
    // 0.
    uint32_t reserved;
} kvs_checkpoints_params;

// A context checkpoint: where in the sequence it was taken, and its states. Fill with kvs_slot_checkpoint_init first.
typedef struct kvs_slot_checkpoint {
    // sizeof(kvs_slot_checkpoint), set by the init call.
    size_t struct_size;
    // Tokens before it, at least 0.
    int64_t n_tokens;
    // Positions of the sequence then.
    kvs_pos pos_min;
    // At least pos_min.
    kvs_pos pos_max;
    // State of the target, taken with KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY; never empty.
    const uint8_t *target;
    // Bytes of target.
    size_t target_size;
    // State of the draft model; may be empty.
    const uint8_t *draft;
    // Bytes of draft.
    size_t draft_size;
    // State of the speculative driver; may be empty.
    const uint8_t *driver;
    // Bytes of driver.
    size_t driver_size;
} kvs_slot_checkpoint;

// A partial state to go back to.
typedef struct kvs_checkpoint {
    // Tokens of the history then, as the caller counts them.
    int64_t n_tokens;
    // Bytes of its state.
    uint64_t size;
    // From this position on every section has the sequence after a restore: cells that a window masked do not count.
    kvs_pos pos_min;
    // The largest position of the sequence then.
    kvs_pos pos_max;
} kvs_checkpoint;

// What a checkpoint is worth for a history that diverges.
typedef struct kvs_checkpoint_verdict {
    // KVS_CHECKPOINT_SERVES, or why not.
    uint32_t kind;
    // Where the sequence could go on; 0 if the checkpoint does not serve.
    kvs_pos pos;
    // The same in words, cut to the size.
    char text[KVS_REASON_SIZE];
} kvs_checkpoint_verdict;

// A setting that states depend on.
typedef struct kvs_setting {
    // Its name, not empty.
    const char *key;
    // Its value.
    const char *value;
} kvs_setting;

// Whose state a slot file holds, any bytes. What is empty is not said.
typedef struct kvs_slot_identity {
    // Fingerprint of the model and its settings: compared where the file and its reader both have one.
    const uint8_t *model;
    // Bytes of model.
    size_t model_size;
    // Whoever reads the file has to name the same salt; an empty one too.
    const uint8_t *salt;
    // Bytes of salt.
    size_t salt_size;
    // The caller's own: compared with nothing, given back.
    const uint8_t *metadata;
    // Bytes of metadata.
    size_t metadata_size;
} kvs_slot_identity;

// What a slot file is to hold beside the state of the target. Fill with kvs_slot_save_params_init first.
typedef struct kvs_slot_save_params {
    // sizeof(kvs_slot_save_params), set by the init call.
    size_t struct_size;
    // The folder of the file. With it, filename is the name of a file and nothing more: one with a separator is refused.
    // NULL (by default): filename is a path.
    const char *directory;
    // The token field, as it stands: a server's own payload, if it packs one.
    const kvs_token *tokens;
    // Number of tokens.
    size_t n_tokens;
    // Context checkpoints, oldest first.
    const struct kvs_slot_checkpoint *checkpoints;
    // Number of checkpoints.
    size_t n_checkpoint;
    // The draft model's context; NULL (by default): none. Not the target's.
    struct kvs_context *draft;
    // Its sequence.
    kvs_seq_id draft_seq_id;
    // 1: the draft's state and driver go into a file of their own, which stands beside the slot file and ends in .drft instead;
    // 0 by default. A load finds it.
    uint32_t sidecar;
    // State of the speculative driver; may be empty.
    const uint8_t *driver;
    // Bytes of driver.
    size_t driver_size;
    // Whose state it is.
    struct kvs_slot_identity identity;
} kvs_slot_save_params;

// How much of a slot file is compared with its checksums before anything changes: KVS_VERIFY_*.
typedef int32_t kvs_verify;

// What a slot file has to have to be loaded: bits KVS_REQUIRE_*.
typedef uint32_t kvs_require;

// How a slot file is to be loaded. Fill with kvs_slot_load_params_init first.
typedef struct kvs_slot_load_params {
    // sizeof(kvs_slot_load_params), set by the init call.
    size_t struct_size;
    // As in kvs_slot_save_params.
    const char *directory;
    // Most tokens that are taken; by default any number.
    size_t n_token_capacity;
    // Checkpoints to keep, the last ones; 32 by default.
    size_t n_ctx_checkpoints;
    // The draft model's context; NULL (by default): none. Not the target's.
    struct kvs_context *draft;
    // Its sequence. It is replaced, or empty after the call if there is nothing to restore.
    kvs_seq_id draft_seq_id;
    // KVS_VERIFY_NONE by default. KVS_VERIFY_FULL reads all of the file, whatever is wanted of it.
    kvs_verify verify;
    // Only positions below this one are restored, of the target and of the draft, and nothing else of their tensors is read: a
    // prompt without its reply. Below 0 (by default): all. Checkpoints that have seen others are left out, and so is the
    // driver's state, if anything is. Refused as in kvs_state_seq_load_file_range.
    kvs_pos p1;
    // What the file has to have: bits KVS_REQUIRE_*, none by default.
    kvs_require require;
    // Whose state it has to be. A file that says nothing of it is loaded, and noted, unless it is required to.
    struct kvs_slot_identity identity;
} kvs_slot_load_params;

// What became of the draft state of a slot file: KVS_SLOT_DRAFT_*.
typedef int32_t kvs_slot_draft;

// What a slot file gave. Fill with kvs_slot_result_init before the load; everything that it points to is freed by
// kvs_slot_result_free.
typedef struct kvs_slot_result {
    // sizeof(kvs_slot_result), set by the init call.
    size_t struct_size;
    // The token field.
    const kvs_token *tokens;
    // Number of tokens.
    size_t n_tokens;
    // So many of them, from the first on, belong to what was restored, if the list has one for each cell; all of them if nothing
    // was cut, and 0 if nothing was restored.
    size_t n_token_kept;
    // Positions that were restored of the target; -1: none.
    kvs_pos pos_min;
    // The largest.
    kvs_pos pos_max;
    // Bytes of the target's memory state in the file.
    uint64_t target_size;
    // Where a server that appends to the file once it is saved has begun to: behind the memory state, or behind the checksums if
    // they come next.
    uint64_t append_start;
    // The checkpoints that were kept, oldest first.
    const struct kvs_slot_checkpoint *checkpoints;
    // Their number.
    size_t n_checkpoint;
    // Number of checkpoints in the file, of those that can be read: 0 if their part is damaged.
    size_t n_checkpoint_in_file;
    // KVS_SLOT_DRAFT_*.
    kvs_slot_draft draft;
    // What was verified: KVS_VERIFY_NONE if the file has no checksums. A damaged part behind the memory state is left out, and
    // noted.
    kvs_verify verified;
    // Why the draft state was dropped; otherwise empty.
    const char *draft_reason;
    // Bytes of the draft state, if it is restored.
    uint64_t draft_size;
    // State of the speculative driver; empty if the file has none, or a draft state that was dropped.
    const uint8_t *driver;
    // Bytes of driver.
    size_t driver_size;
    // Whose state the file says that it is.
    struct kvs_slot_identity identity;
    // What is missing, damaged or unknown, in words.
    const char *const *notes;
    // Number of notes.
    size_t n_note;
    // What kvs_slot_result_free frees; NULL if nothing was loaded.
    struct kvs_loaded_slot *memory;
} kvs_slot_result;

// Which folder keeps the slots, and how much of them. Fill with kvs_autosave_params_init first.
typedef struct kvs_autosave_params {
    // sizeof(kvs_autosave_params), set by the init call.
    size_t struct_size;
    // The folder, which is created if it is not there.
    const char *directory;
    // Most bytes of all slot files, without the temporary one of a save that runs; 0 (by default): no bound.
    uint64_t max_bytes;
    // kvs_autosave_mark says that a save is due after so many tokens; 0 (by default): never.
    uint64_t every_n_tokens;
    // 1: saves do not wait for the disk, whatever unsynced_files of the context is; 0 by default.
    uint32_t unsynced_files;
    // 0.
    uint32_t reserved;
} kvs_autosave_params;

// A slot that the folder has. Fill with kvs_autosaved_slot_init first.
typedef struct kvs_autosaved_slot {
    // sizeof(kvs_autosaved_slot), set by the init call.
    size_t struct_size;
    // The slot.
    uint32_t slot_id;
    // Words of its token field.
    uint32_t n_tokens;
    // Bytes of its files.
    uint64_t size;
    // When it was used last, in milliseconds since 1970.
    uint64_t last_use_ms;
} kvs_autosaved_slot;

// Calls that reach tensors which are in no host memory. They return 0, or anything else to fail; neither throws.
typedef struct kvs_tensor_access {
    // Passed back.
    void *user;
    // Copies n bytes of the tensor from offset on to dst.
    int (*get)(void *user, void *tensor, uint64_t offset, uint64_t n, void *dst);
    // Copies n bytes from src to the tensor from offset on.
    int (*set)(void *user, void *tensor, uint64_t offset, uint64_t n, const void *src);
} kvs_tensor_access;

// Takes one cell; 0: go on. Anything else: stop, and return it.
typedef int (*kvs_visit_each)(void *arg, const struct kvs_cell *cell);

// An attention cache whose cells and tensors are the caller's (llama_kv_cache). Fill with kvs_kv_view_init first.
//
// Its callbacks return 0, or anything else to fail, which ends the call with KVS_STATUS_CALLBACK. They must not
// throw or unwind: catch, keep the exception, and throw it again after the call has returned. They run on the
// thread of the call, during the call; get of the access also during kvs_state_writer_get_data, _save_file and
// _get_on_device, set during kvs_state_reader_finish. Calls with the writer or the reader of the call that
// they run in are refused.
typedef struct kvs_kv_view {
    // sizeof(kvs_kv_view), set by the init call.
    size_t struct_size;
    // Passed to visit, apply and clear.
    void *user;
    // What the section is called in messages; by default "kv".
    const char *name;
    // 1 (unified), or one stream per sequence.
    uint32_t n_stream;
    // Cells of each stream.
    uint32_t kv_size;
    // Sequences. With several streams, sequence s lives in stream s.
    uint32_t n_seq_max;
    // Number of layers.
    uint32_t n_layer;
    // Size of the window in positions.
    uint32_t n_swa;
    // KVS_SWA_TYPE_* of this cache, never the model's.
    uint32_t swa_type;
    // 1: V is transposed.
    uint32_t v_trans;
    // Size of the Hadamard rotation applied to K; 0: none.
    uint32_t n_rot_k;
    // Size of the Hadamard rotation applied to V; 0: none.
    uint32_t n_rot_v;
    // 1: states carry x, y and token of each cell.
    uint32_t cell_ext;
    // 1: the cells are another cache's, which saves them. Nothing is written or read: planes and callbacks may be
    // NULL.
    uint32_t shared;
    // K, stream-major: [n_stream * n_layer].
    const struct kvs_plane *k;
    // V, likewise; NULL: no layer has V.
    const struct kvs_plane *v;
    // Where the search for free cells starts in each stream, n_stream of them, at most kv_size (which is cell 0
    // again); NULL: at cell 0.
    const uint32_t *head;
    // For planes whose data is NULL; all planes have data if this is NULL.
    const struct kvs_tensor_access *access;
    // Calls each(arg, cell) once for every cell of seq in stream, or with seq -1 for every used cell, in any
    // order (ascending is fastest), and returns at once what it returns if that is not 0. The cell's seqs are all of
    // its sequences, whichever is visited. A pending shift is not applied: see kvs_kv_cache_state_write.
    int (*visit)(void *user, uint32_t stream, kvs_seq_id seq, kvs_visit_each each, void *arg);
    // Replaces seq by n cells, whose idx says where and whose seqs is seq alone. They are empty, or the
    // sequence's own, or hold one other sequence whose window has passed them: that one loses them and all its
    // older positions (the purge rule of llama_kv_cache::apply_ubatch). x, y and tok are set as given, shift is 0, the
    // next search starts after the last cell. n is 0 for an empty sequence.
    //
    // seq -1: everything is replaced. clear has been called with -1; then each stream that is to hold cells gets
    // one call, whose seqs name the sequences of each cell.
    int (*apply)(void *user, uint32_t stream, kvs_seq_id seq, uint32_t n, const struct kvs_cell *cells);
    // Removes seq (-1: everything) and zeroes the data of the cells that only it used.
    int (*clear)(void *user, kvs_seq_id seq);
    // KVS_LEGACY_ROTATION_*, for a reader of files older than version 4.
    uint32_t legacy_rotation;
    // 1: a reader converts K and V of other types or of another rotation, which rounds; 0: it refuses them.
    uint32_t convert_types;
} kvs_kv_view;

// Where a state's bytes go to or come from in turns (llama_io_write_i, llama_io_read_i). Fill with kvs_io_init
// first. The calls return 0, or anything else to fail, which ends the call with KVS_STATUS_CALLBACK; they must
// not throw or unwind.
typedef struct kvs_io {
    // sizeof(kvs_io), set by the init call.
    size_t struct_size;
    // Passed back.
    void *user;
    // Takes metadata.
    int (*write)(void *user, const void *src, size_t size);
    // Takes n bytes of the caller's tensor from offset on.
    int (*write_tensor)(void *user, void *tensor, uint64_t offset, uint64_t n);
    // Gives metadata.
    int (*read)(void *user, void *dst, size_t size);
    // Moves the next n bytes to the caller's tensor, from offset on.
    int (*read_tensor)(void *user, void *tensor, uint64_t offset, uint64_t n);
} kvs_io;

// The cells of one stream of a state, in the order of the state.
typedef struct kvs_slot_info {
    // Number of cells, 0 for a stream without.
    uint32_t n;
    // As sinfos_out: what idxs has room for, at least kv_size. As sinfos_in: ignored.
    uint32_t capacity;
    // The cells; NULL only as sinfos_in with n 0.
    uint32_t *idxs;
} kvs_slot_info;

// Takes one line without a line end. level: KVS_LOG_*. May be called from any thread that calls the library;
// must not call the library.
typedef void (*kvs_log_callback)(int32_t level, const char *text, void *user_data);

// Done.
#define KVS_STATUS_OK 0

// An argument or a parameter makes no sense; the message names it.
#define KVS_STATUS_INVALID_ARGUMENT 1

// A handle is NULL, or of another kind; a freed one is noticed where its memory still shows it.
#define KVS_STATUS_INVALID_HANDLE 2

// An internal error in an earlier call left the context unusable; kvs_context_free still works.
#define KVS_STATUS_POISONED 3

// A buffer of the caller is too small; it is untouched.
#define KVS_STATUS_BUFFER_TOO_SMALL 4

// The bytes end before the state does.
#define KVS_STATUS_TRUNCATED 5

// The bytes are no state, or hold a value that no state can hold.
#define KVS_STATUS_CORRUPT 6

// A file of a version that is not read.
#define KVS_STATUS_UNSUPPORTED_VERSION 7

// The state was made with another geometry than the cache has.
#define KVS_STATUS_MISMATCH 8

// A file older than version 4 does not say whether K and V are rotated: see legacy_rotation.
#define KVS_STATUS_ROTATION_UNSTATED 9

// Too few cells that can be used.
#define KVS_STATUS_NO_SPACE 10

// The ON_DEVICE state behind a blob is gone or was replaced by a later one.
#define KVS_STATUS_NO_DEVICE_STATE 11

// Positions cannot be shifted in this context.
#define KVS_STATUS_CANNOT_SHIFT 12

// Shifts are pending and could not be applied.
#define KVS_STATUS_SHIFT_FAILED 13

// The cache changed between prepare and commit, or between plan and read.
#define KVS_STATUS_STALE 14

// An operating-system call on a file failed.
#define KVS_STATUS_IO 15

// Memory for the cache or a state could not be had. (Small allocations are not checked: where not even those
// can be had, the process ends, as Rust programs do.)
#define KVS_STATUS_OUT_OF_MEMORY 16

// A bug in kvstate was caught at the boundary.
#define KVS_STATUS_INTERNAL 17

// A callback of the caller returned something other than 0.
#define KVS_STATUS_CALLBACK 18

// The progress callback, or kvs_job_cancel, asked for an end.
#define KVS_STATUS_CANCELLED 19

// There is no CUDA driver that can be used, or this build has no CUDA. Contexts in host memory work.
#define KVS_STATUS_NO_CUDA 20

// There is no device of that number.
#define KVS_STATUS_NO_DEVICE 21

// The CUDA driver is older than the kernels need, which is CUDA 12.0 (r525).
#define KVS_STATUS_DRIVER_TOO_OLD 22

// A call of the device's driver failed; the message has the driver's name for it.
#define KVS_STATUS_DEVICE 23

// The caller's stream is being captured into a graph: nothing can be ordered behind it, and nothing was changed.
#define KVS_STATUS_STREAM_CAPTURING 24

// Another process, or another handle of this one, keeps the folder.
#define KVS_STATUS_LOCKED 25

// The files of a slot would take more bytes than those of the folder may.
#define KVS_STATUS_OVER_BUDGET 26

// A state that is to be added to a sequence does not begin behind its end.
#define KVS_STATUS_POSITIONS_MEET 27

// A section cannot go on at the end of the range, or prefix, that is wanted.
#define KVS_STATUS_CANNOT_CUT 28

// The whole state of the sequence.
#define KVS_STATE_SEQ_FLAGS_NONE 0

// The older name of KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY.
#define KVS_STATE_SEQ_FLAGS_SWA_ONLY 1

// Only what kvs_memory_seq_rm cannot roll back: the cells of SWA sections that the window still shows. Of a
// full-attention cache that is nothing: 8 bytes.
#define KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY 1

// The tensors stay in memory of the context, the blob holds metadata only. A sequence has one such state: a
// new one replaces it. The state survives kvs_memory_clear.
#define KVS_STATE_SEQ_FLAGS_ON_DEVICE 2

// In restores of a sequence: the state's positions, which have to be behind those of the sequence, are added to it instead of
// replacing it. Not with KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY.
#define KVS_STATE_SEQ_FLAGS_APPEND (1 << 16)

// In the memory that the cache is in, a device's or the host's.
#define KVS_CHECKPOINT_MEMORY_CACHE 0

// In host memory.
#define KVS_CHECKPOINT_MEMORY_HOST 1

// Nothing, but for the appendix that holds the checksums.
#define KVS_VERIFY_NONE 0

// Header and tokens.
#define KVS_VERIFY_HEADERS 1

// Everything: the file is read once for that, and again for what is restored. Whoever changes a slot file replaces it, as a save
// does: bytes that are overwritten in between are not noticed.
#define KVS_VERIFY_FULL 2

// The fingerprint of a model; identity.model names one too then.
#define KVS_REQUIRE_IDENTITY 1

// Checksums that are whole.
#define KVS_REQUIRE_CHECKSUMS 2

// The file has none.
#define KVS_SLOT_DRAFT_ABSENT 0

// It is restored.
#define KVS_SLOT_DRAFT_RESTORED 1

// It could not be used: see draft_reason.
#define KVS_SLOT_DRAFT_DROPPED 2

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The reason of the calling thread's last failure: names the field and both values. Empty if none failed.
// Valid until the thread's next failing call or kvs_clear_last_error.
const char *kvs_last_error(void);

// The status of the calling thread's last failure, for calls that return 0 or false: KVS_STATUS_OK if none
// failed.
kvs_status kvs_last_status(void);

// Forgets the calling thread's last failure: for calls that return nothing, so that kvs_last_status() tells
// afterwards whether they failed.
void kvs_clear_last_error(void);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_rope_params_init(struct kvs_rope_params *params, size_t struct_size);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_kv_layer_params_init(struct kvs_kv_layer_params *params, size_t struct_size);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_kv_params_init(struct kvs_kv_params *params, size_t struct_size);

// Cells of an SWA section as llama.cpp sizes it: the windows of the sequences of one stream and a ubatch, at
// most kv_size, padded to 256.
uint32_t kvs_swa_kv_size(uint32_t kv_size,
                         uint32_t n_swa,
                         uint32_t n_seq_max,
                         uint32_t n_ubatch,
                         bool unified);

// Bytes of n elements of a ggml type; 0: no such type, or no whole number of its blocks.
uint64_t kvs_row_size(int32_t ggml_type, uint32_t n);

// Name of a ggml type, as ggml has it ("f16", "q8_0"); NULL: no such type.
const char *kvs_type_name(int32_t ggml_type);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_recurrent_layer_params_init(struct kvs_recurrent_layer_params *params, size_t struct_size);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_recurrent_params_init(struct kvs_recurrent_params *params, size_t struct_size);

// The recurrent part of a slot. Const.
kvs_status kvs_slot_recurrent(const struct kvs_slot *slot,
                              uint32_t section,
                              struct kvs_recurrent_slot *recurrent_out);

// The row that the state of each sequence set is in before the ubatch; -1: it begins with zeros. n is n_set. Const.
kvs_status kvs_slot_sources(const struct kvs_slot *slot,
                            uint32_t section,
                            int64_t *rows,
                            size_t n);

// The rows that have to move before the ubatch writes. n is n_move. Const.
kvs_status kvs_slot_moves(const struct kvs_slot *slot,
                          uint32_t section,
                          struct kvs_row_move *moves,
                          size_t n);

// Where the state of a sequence is in a recurrent section. Const.
kvs_status kvs_recurrent_state_get(const struct kvs_context *ctx,
                                   uint32_t section,
                                   kvs_seq_id seq_id,
                                   struct kvs_recurrent_state *state_out);

// Where R, P or S (which: KVS_RECURRENT_*) of a layer of a recurrent section lies: row r is cell r of the plane. data is NULL
// and n_embd 0 if the layer has no such tensor, or one without elements. The addresses stay as long as the context does. Const.
kvs_status kvs_recurrent_plane(const struct kvs_context *ctx,
                               uint32_t section,
                               uint32_t layer,
                               uint32_t which,
                               struct kvs_plane *plane_out);

// Copies size bytes of R, P or S (which: KVS_RECURRENT_*) of a layer of a recurrent section to dst, from offset on: bytes from
// row 0, laid out as kvs_recurrent_plane tells. For programs without CUDA code, and for looking: it waits for each copy. Const.
kvs_status kvs_recurrent_get(const struct kvs_context *ctx,
                             uint32_t section,
                             uint32_t layer,
                             uint32_t which,
                             uint64_t offset,
                             void *dst,
                             size_t size);

// Copies size bytes from src into R, P or S, as kvs_recurrent_get the other way.
kvs_status kvs_recurrent_set(struct kvs_context *ctx,
                             uint32_t section,
                             uint32_t layer,
                             uint32_t which,
                             uint64_t offset,
                             const void *src,
                             size_t size);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_dsv4_compressor_params_init(struct kvs_dsv4_compressor_params *params, size_t struct_size);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_dsv4_params_init(struct kvs_dsv4_params *params, size_t struct_size);

// Where a tensor (which: KVS_DSV4_K or _STATE_*) of a compressor (KVS_DSV4_CSA, _HCA, _LID) lies in a layer, by its number in
// the model: its plane of a stream, and of states of a rollback plane. Row r is cell r. The addresses stay as
// long as the context does. Const.
//
// A ubatch reads and writes the streams of its sequences, which have their numbers. It goes on from the states in the plane of
// kvs_dsv4_rollback, leaves the newest ones in plane 0 and those k tokens before in plane k, as far as there are planes and
// tokens, and writes row pos / ratio of K for each block of ratio positions that ends in it.
kvs_status kvs_dsv4_plane(const struct kvs_context *ctx,
                          uint32_t compressor,
                          uint32_t which,
                          uint32_t layer,
                          uint32_t stream,
                          uint32_t rollback,
                          struct kvs_plane *plane_out);

// Copies size bytes of a plane, named as in kvs_dsv4_plane, to dst, from offset on: bytes from row 0. For programs without CUDA
// code, and for looking: it waits for each copy. Const.
kvs_status kvs_dsv4_get(const struct kvs_context *ctx,
                        uint32_t compressor,
                        uint32_t which,
                        uint32_t layer,
                        uint32_t stream,
                        uint32_t rollback,
                        uint64_t offset,
                        void *dst,
                        size_t size);

// Copies size bytes from src into a plane, as kvs_dsv4_get the other way.
kvs_status kvs_dsv4_set(struct kvs_context *ctx,
                        uint32_t compressor,
                        uint32_t which,
                        uint32_t layer,
                        uint32_t stream,
                        uint32_t rollback,
                        uint64_t offset,
                        const void *src,
                        size_t size);

// The rollback plane that the states of a sequence are in until its next ubatch: ask before the slot is committed. Const.
kvs_status kvs_dsv4_rollback(const struct kvs_context *ctx,
                             kvs_seq_id seq_id,
                             uint32_t *rollback_out);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_section_params_init(struct kvs_section_params *params, size_t struct_size);

// The kind of a section, KVS_SECTION_*; 0: failed. Const.
uint32_t kvs_section_kind(const struct kvs_context *ctx, uint32_t section);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_context_params_init(struct kvs_context_params *params, size_t struct_size);

// Creates a context; params and everything it points to (but not adopted memory) may go afterwards. *ctx_out
// is written only on success. Free it with kvs_context_free.
kvs_status kvs_context_new(const struct kvs_context_params *params, struct kvs_context **ctx_out);

// Frees a context and what it owns; adopted memory is the caller's. NULL is fine.
void kvs_context_free(struct kvs_context *ctx);

// Number of streams: 1, or one per sequence. Sequence s is in stream 0, or in stream s. 0: failed. Const.
uint32_t kvs_n_stream(const struct kvs_context *ctx);

// States what files older than version 4 leave open: KVS_LEGACY_ROTATION_*.
kvs_status kvs_set_legacy_rotation(struct kvs_context *ctx, uint32_t rotation);

// Version of the library: major * 10000 + minor * 100 + patch.
uint32_t kvs_version(void);

// The memory of ctx, for the kvs_memory_* calls; lives as long as ctx does. NULL: failed. Const.
kvs_memory_t kvs_get_memory(const struct kvs_context *ctx);

// Empties every section; with data the tensors are zeroed as well. ON_DEVICE states survive. If it fails (kvs_last_status) with
// KVS_STATUS_STREAM_CAPTURING, nothing has changed; otherwise no cell is used any more, and not all tensors are zeroed.
void kvs_memory_clear(kvs_memory_t mem,
                      bool data);

// Removes the positions [p0, p1) of a sequence. seq_id < 0: of every sequence; p0 < 0: from 0; p1 < 0: to the
// end. False, and nothing removed, if a section cannot remove just that range: attention always can; a recurrent or compressed
// state goes back by up to n_rs_seq positions, once after a ubatch. That is llama.cpp's answer, which does not ask whether
// there is a state of that position: kvs_memory_max_cut and kvs_memory_can_rewind do. Such an answer is no failure and leaves
// kvs_last_error alone; a seq_id out of range is one.
bool kvs_memory_seq_rm(kvs_memory_t mem,
                       kvs_seq_id seq_id,
                       kvs_pos p0,
                       kvs_pos p1);

// Whether kvs_memory_seq_rm would remove just that range. False on failure, too. Const.
bool kvs_memory_can_seq_rm(kvs_memory_t mem, kvs_seq_id seq_id, kvs_pos p0, kvs_pos p1);

// How many positions can be cut off the end of a sequence so that what is left has its recurrent and compressed states;
// INT32_MAX: any number. kvs_memory_seq_rm answers as llama.cpp does, which is true for up to n_rs_seq positions, though fewer
// may have been in the last ubatch, and none since a restore; a sequence that was cut further back cannot go on
// (kvs_memory_can_rewind) until it is restored or emptied. -1: failed. Const.
int32_t kvs_memory_max_cut(kvs_memory_t mem,
                           kvs_seq_id seq_id);

// Gives the cells of seq_id_src in [p0, p1) to seq_id_dst as well; a recurrent state, which is of all its positions, whatever
// the range is. Between streams the sequence is copied at
// once, cells and data, and replaces seq_id_dst; the range must hold all of it. On failure nothing changes
// and kvs_last_error says why.
void kvs_memory_seq_cp(kvs_memory_t mem,
                       kvs_seq_id seq_id_src,
                       kvs_seq_id seq_id_dst,
                       kvs_pos p0,
                       kvs_pos p1);

// Removes all other sequences (llama.cpp leaves those whose attention cells are in another stream).
void kvs_memory_seq_keep(kvs_memory_t mem, kvs_seq_id seq_id);

// Adds delta to the positions [p0, p1) of a sequence; K is rotated later, see shift in kvs_context_params.
// Cells whose position falls below 0 are freed, a position above INT32_MAX is refused, and cells that are
// shared with other sequences move in all of them.
// Refused (nothing changes, kvs_last_error says why) where kvs_memory_can_shift is false.
void kvs_memory_seq_add(kvs_memory_t mem, kvs_seq_id seq_id, kvs_pos p0, kvs_pos p1, kvs_pos delta);

// Divides the positions [p0, p1) of a sequence by d >= 1; as kvs_memory_seq_add otherwise.
void kvs_memory_seq_div(kvs_memory_t mem, kvs_seq_id seq_id, kvs_pos p0, kvs_pos p1, int32_t d);

// Smallest position of a sequence; -1 if it is empty. Of attention caches that of the SWA section where there is one: after a
// partial state was restored into an empty sequence it says nothing about full attention. Beside recurrent states the larger
// one of both, and of DSV4 the largest position. Const.
kvs_pos kvs_memory_seq_pos_min(kvs_memory_t mem,
                               kvs_seq_id seq_id);

// Largest position of a sequence; -1 if it is empty. Of the SWA section where there is one; beside recurrent states the smaller
// one of both. Below the smallest where they have no position in common. Const.
kvs_pos kvs_memory_seq_pos_max(kvs_memory_t mem,
                               kvs_seq_id seq_id);

// Whether positions can be shifted: somebody rotates K, and all sections have the same size. Const.
bool kvs_memory_can_shift(kvs_memory_t mem);

// Whether kvs_memory_seq_rm(mem, seq_id, pos, -1) would leave a sequence that can go on at pos: every token from there on sees
// what it would have seen in a fresh run. False on failure, too. Const.
bool kvs_memory_can_rewind(kvs_memory_t mem,
                           kvs_seq_id seq_id,
                           kvs_pos pos);

// The largest position, at most pos, to which the sequence can be rewound; 0: all has to be computed anew. -1: failed. Const.
kvs_pos kvs_memory_rewind_pos(kvs_memory_t mem,
                              kvs_seq_id seq_id,
                              kvs_pos pos);

// Why a sequence cannot be rewound to pos. Const.
kvs_status kvs_memory_rewind_obstacle(kvs_memory_t mem,
                                      kvs_seq_id seq_id,
                                      kvs_pos pos,
                                      struct kvs_rewind_obstacle *obstacle_out);

// Bytes of the state of the whole context. Const.
size_t kvs_state_get_size(struct kvs_context *ctx);

// Writes the state of the whole context to dst, which has size bytes; returns the bytes written. 0: failed,
// dst is untouched.
size_t kvs_state_get_data(struct kvs_context *ctx, uint8_t *dst, size_t size);

// Replaces all sequences by the state in src; returns the bytes consumed. 0: failed, nothing has changed, with the exception
// of kvs_state_seq_set_data_ext.
size_t kvs_state_set_data(struct kvs_context *ctx,
                          const uint8_t *src,
                          size_t size);

// Replaces all sequences by those in a whole-context file (versions 9 to 11) and gives its tokens, at most
// n_token_capacity of them; n_token_count_out may be NULL. False: failed, nothing has changed and nothing was
// written. A file that is truncated meanwhile: as for kvs_state_seq_load_file. A device that fails: as for
// kvs_state_seq_set_data_ext.
bool kvs_state_load_file(struct kvs_context *ctx,
                         const char *path_session,
                         kvs_token *tokens_out,
                         size_t n_token_capacity,
                         size_t *n_token_count_out);

// Writes the whole context and a token list to a file (version 11): beside it, synced, then renamed over it.
// False: failed, a file that was there is untouched.
bool kvs_state_save_file(struct kvs_context *ctx,
                         const char *path_session,
                         const kvs_token *tokens,
                         size_t n_token_count);

// kvs_state_seq_get_size_ext with KVS_STATE_SEQ_FLAGS_NONE. Const.
size_t kvs_state_seq_get_size(struct kvs_context *ctx, kvs_seq_id seq_id);

// Frees the tensors of the sequence's live state that was taken with KVS_STATE_SEQ_FLAGS_ON_DEVICE, if there is one: its blob
// can no longer be restored.
kvs_status kvs_state_seq_drop_on_device(struct kvs_context *ctx,
                                        kvs_seq_id seq_id);

// kvs_state_seq_get_data_ext with KVS_STATE_SEQ_FLAGS_NONE.
size_t kvs_state_seq_get_data(struct kvs_context *ctx, uint8_t *dst, size_t size, kvs_seq_id seq_id);

// kvs_state_seq_set_data_ext with KVS_STATE_SEQ_FLAGS_NONE.
size_t kvs_state_seq_set_data(struct kvs_context *ctx,
                              const uint8_t *src,
                              size_t size,
                              kvs_seq_id dest_seq_id);

// Writes a sequence and a token list to a file (version 4): beside it, synced, then renamed over it. Returns
// the size of the file. 0: failed, a file that was there is untouched.
//
// filepath is a regular file or nothing yet; symbolic links are followed. A new file has mode 0600, an old one
// keeps its mode. A process that is killed meanwhile may leave a file .kvstate-*.tmp beside it.
size_t kvs_state_seq_save_file(struct kvs_context *ctx,
                               const char *filepath,
                               kvs_seq_id seq_id,
                               const kvs_token *tokens,
                               size_t n_token_count);

// Replaces sequence dest_seq_id by the one in a sequence file (versions 2 to 4) and gives its tokens;
// n_token_count_out may be NULL. Returns the offset behind the state, where appendices begin. 0: failed,
// nothing has changed and nothing was written. With tokens_out NULL only the token count is reported, checked
// against the size of the file, and no state is loaded; 12 is returned, the size of the header before the
// tokens.
//
// A file that is truncated while it is loaded is an error (a save of kvstate never truncates one). A state
// takes the cells that are free without dest_seq_id. Where those hold something, mostly dest_seq_id itself, the file is
// read into memory first: only if it cannot be read again then, dest_seq_id is empty after the failure. A device that fails: as
// for kvs_state_seq_set_data_ext.
size_t kvs_state_seq_load_file(struct kvs_context *ctx,
                               const char *filepath,
                               kvs_seq_id dest_seq_id,
                               kvs_token *tokens_out,
                               size_t n_token_capacity,
                               size_t *n_token_count_out);

// Bytes of a sequence's state with these flags: exactly what kvs_state_seq_get_data_ext writes. Const.
size_t kvs_state_seq_get_size_ext(struct kvs_context *ctx, kvs_seq_id seq_id, kvs_state_seq_flags flags);

// Writes a sequence's state to dst, which has size bytes; returns the bytes written. 0: failed; dst is
// untouched if it is too small. Pending shifts are applied first.
size_t kvs_state_seq_get_data_ext(struct kvs_context *ctx,
                                  uint8_t *dst,
                                  size_t size,
                                  kvs_seq_id seq_id,
                                  kvs_state_seq_flags flags);

// Replaces sequence dest_seq_id by the state in src, in every section that the state holds; returns the bytes
// consumed (bytes behind the state are ignored). 0: failed, nothing has changed. flags as they were for
// kvs_state_seq_get_data_ext, and KVS_STATE_SEQ_FLAGS_APPEND to add the state to the sequence: refused with
// KVS_STATUS_POSITIONS_MEET unless all of its positions are behind those of the sequence.
//
// One exception, for every call that restores: if the driver of a device fails while cells that are in use are written over,
// dest_seq_id (or, of a whole context, every sequence) is empty afterwards. All that can be known before is refused before.
//
// To go back to a checkpoint that was taken with KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY after n positions: restore it,
// then kvs_memory_seq_rm(mem, seq_id, n, -1), since full attention still holds what came later (or the other way
// round). No checkpoint is
// needed while kvs_memory_seq_pos_min shows that the window before n is still there.
//
// The tensors of a state carry no checksum: bytes that were damaged there are restored as they are.
size_t kvs_state_seq_set_data_ext(struct kvs_context *ctx,
                                  const uint8_t *src,
                                  size_t size,
                                  kvs_seq_id dest_seq_id,
                                  kvs_state_seq_flags flags);

// Bytes of the state of the positions p0 <= pos < p1 of a sequence: exactly what kvs_state_seq_get_data_range writes. p0 < 0:
// from 0; p1 < 0: to the end. 0: failed. Const.
size_t kvs_state_seq_get_size_range(struct kvs_context *ctx,
                                    kvs_seq_id seq_id,
                                    kvs_pos p0,
                                    kvs_pos p1,
                                    kvs_state_seq_flags flags);

// Writes the state of the positions p0 <= pos < p1 of a sequence, in every section, to dst, which has size bytes; returns the
// bytes written. 0: failed; dst is untouched if it is too small.
//
// It is a state like any other, of a sequence that has these positions and no others: every reader of states reads it, and
// KVS_STATE_SEQ_FLAGS_APPEND adds it to the pieces before. A recurrent section, or the compressed half of a DSV4 memory, has one
// state: that of the end of the range, which has to be there, as for kvs_memory_can_rewind; KVS_STATUS_CANNOT_CUT otherwise. So
// the pieces of a hybrid are saved while each of them is the end. A section with a window has what the window has not lost.
size_t kvs_state_seq_get_data_range(struct kvs_context *ctx,
                                    uint8_t *dst,
                                    size_t size,
                                    kvs_seq_id seq_id,
                                    kvs_pos p0,
                                    kvs_pos p1,
                                    kvs_state_seq_flags flags);

// kvs_state_seq_save_file, of the positions p0 <= pos < p1: see kvs_state_seq_get_data_range. The tokens are stored as they are.
size_t kvs_state_seq_save_file_range(struct kvs_context *ctx,
                                     const char *filepath,
                                     kvs_seq_id seq_id,
                                     kvs_pos p0,
                                     kvs_pos p1,
                                     const kvs_token *tokens,
                                     size_t n_token_count);

// kvs_state_seq_load_file, of the positions p0 <= pos < p1 of the file alone: p1 is where a prompt ends and its reply begins. flags
// are KVS_STATE_SEQ_FLAGS_NONE, which replaces dest_seq_id, or KVS_STATE_SEQ_FLAGS_APPEND, which adds to it. Of the tensors nothing
// else is read. 0: failed, nothing has changed and nothing was written.
//
// All tokens of the file are given, at most n_token_capacity; *n_token_kept_out of them, from the first on, belong to positions
// before p1, if the list has one for each cell (0 if nothing was restored). Both counts may be NULL; tokens_out may not.
//
// If p1 cuts the state, the sequence can go on at p1, as kvs_memory_can_rewind says it; otherwise the call is refused with
// KVS_STATUS_CANNOT_CUT: a recurrent state knows its end alone, and a window may have lost what a token at p1 sees. A
// checkpoint is the way back there. Only the end is looked at: with p0 > 0 and flags NONE the sequence is a piece
// without its beginning, and its next tokens attend to that piece alone.
size_t kvs_state_seq_load_file_range(struct kvs_context *ctx,
                                     const char *filepath,
                                     kvs_seq_id dest_seq_id,
                                     kvs_pos p0,
                                     kvs_pos p1,
                                     kvs_state_seq_flags flags,
                                     kvs_token *tokens_out,
                                     size_t n_token_capacity,
                                     size_t *n_token_count_out,
                                     size_t *n_token_kept_out);

// Fills the struct of struct_size bytes at ubatch with defaults.
kvs_status kvs_ubatch_init(struct kvs_ubatch *ubatch, size_t struct_size);

// Finds a cell for each token of a ubatch in every section, as llama.cpp would. The cache does not change:
// commit the slot or leave it, then free it with kvs_slot_free. *slot_out is written only on success;
// KVS_STATUS_NO_SPACE if there are too few cells. Const.
kvs_status kvs_slot_prepare(const struct kvs_context *ctx,
                            const struct kvs_ubatch *ubatch,
                            struct kvs_slot **slot_out);

// The cell of each token in a section, in the order of the ubatch; n is the number of tokens. Const.
kvs_status kvs_slot_cells(const struct kvs_slot *slot, uint32_t section, uint32_t *cells, size_t n);

// Gives the cells of slot to its tokens: call it before K and V of the ubatch are written into the cells.
// KVS_STATUS_STALE if the cache has changed since kvs_slot_prepare; nothing changes then.
kvs_status kvs_slot_commit(struct kvs_context *ctx, const struct kvs_slot *slot);

// Frees a slot, committed or not. NULL is fine.
void kvs_slot_free(struct kvs_slot *slot);

// Cells that attention has to look at in a stream of a section: up to the last used one, padded to a multiple
// of n_pad (llama.cpp: 256), at most kv_size; of an empty stream n_pad. Const.
kvs_status kvs_n_kv(const struct kvs_context *ctx,
                    uint32_t section,
                    uint32_t stream,
                    uint32_t n_pad,
                    uint32_t *n_kv_out);

// The mask row of token i of a ubatch against the first n_kv cells of its stream in a section: 0 where the
// token attends, -INFINITY where it does not. Causal, symmetric windows too. Call it after kvs_slot_commit:
// the token attends to itself and to those before it in the ubatch. n_kv is what kvs_n_kv gives, or any number
// up to kv_size that leaves out no cell that the token attends to. Const.
kvs_status kvs_mask_row(const struct kvs_context *ctx,
                        uint32_t section,
                        const struct kvs_ubatch *ubatch,
                        uint32_t i,
                        float *row,
                        size_t n_kv);

// Where K and V of a layer lie in a stream of a section; layers are counted within the section. v_out may be
// NULL. The addresses stay as long as the context does: no call moves a plane. Const.
kvs_status kvs_kv_plane(const struct kvs_context *ctx,
                        uint32_t section,
                        uint32_t stream,
                        uint32_t layer,
                        struct kvs_plane *k_out,
                        struct kvs_plane *v_out);

// What is known of a cell. Const.
kvs_status kvs_cell_get(const struct kvs_context *ctx,
                        uint32_t section,
                        uint32_t stream,
                        uint32_t cell,
                        struct kvs_cell *cell_out);

// The cells of a stream of a section whose K has to be rotated, and by how many positions each. *n_out is
// their number; with too small a capacity nothing else is written (KVS_STATUS_BUFFER_TOO_SMALL), so ask with
// capacity 0 first. Const.
kvs_status kvs_shift_get(const struct kvs_context *ctx,
                         uint32_t section,
                         uint32_t stream,
                         uint32_t *cells,
                         kvs_pos *shifts,
                         size_t capacity,
                         size_t *n_out);

// The engine has rotated K of everything that kvs_shift_get lists, in all streams and sections.
kvs_status kvs_shift_done(struct kvs_context *ctx);

// Rotates K of everything that kvs_shift_get lists, in all streams and sections, by rope of the layers or by the
// shift callback. An engine calls it before it decodes; a save does it for what it writes.
//
// Where it fails, the shifts that were not applied stay pending. If the owner of a tensor fails where K may be rotated
// in part, the sequences that had it are emptied, as kvs_last_error says.
kvs_status kvs_shift_apply(struct kvs_context *ctx);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_transfer_params_init(struct kvs_transfer_params *params, size_t struct_size);

// Says how the context moves bytes from now on.
//
// A save that is cancelled leaves the file that was there. A load that is cancelled leaves the context as it was:
// where it has to overwrite cells that are in use, progress is called while the file is brought into memory, before the
// first change, and no more after that. Of kvs_slot_load with KVS_VERIFY_FULL it hears how much of the file is verified, and
// nothing of the restore after it.
kvs_status kvs_set_transfer(struct kvs_context *ctx,
                            const struct kvs_transfer_params *params);

// Fills the struct of struct_size bytes at usage with zeroes.
kvs_status kvs_memory_usage_init(struct kvs_memory_usage *usage, size_t struct_size);

// Tells what memory the context has taken. Const.
kvs_status kvs_memory_usage_get(const struct kvs_context *ctx, struct kvs_memory_usage *usage);

// Whether a CUDA device can be used: opens it, waits for nothing of the caller's, and gives it back. KVS_STATUS_NO_CUDA,
// KVS_STATUS_NO_DEVICE (that number is none, or its compute capability is below 6.0), KVS_STATUS_DRIVER_TOO_OLD and
// KVS_STATUS_DEVICE (a kernel of this process has left it unusable) say why not; contexts in host memory work all the same.
kvs_status kvs_device_check(int32_t device);

// The CUDA device whose memory ptr is in, as its driver says; KVS_DEVICE_HOST: no device's, or there is no driver, or it fails
// (kvs_last_status). Pinned memory is the host's.
int32_t kvs_device_of(const void *ptr);

// Names the stream (a CUstream or cudaStream_t of the device's primary context; NULL is the default stream) on which the
// caller's work on a device runs. From now on calls that read or write K or V there run behind what is queued on
// it, and what is queued on it later runs behind them; calls that give bytes to the host, or take them from there, wait for
// the device too. It stays alive until another one is named, kvs_stream_clear is called, or the context is freed. A stream
// that is being captured into a graph makes those calls fail with KVS_STATUS_STREAM_CAPTURING, with nothing changed. KVS_STATUS_INVALID_ARGUMENT for a stream
// of another device or context.
//
// Without one, the caller's work on the device has to be done before a call, and every call waits for its own.
kvs_status kvs_stream_set(struct kvs_context *ctx,
                          int32_t device,
                          void *stream);

// From now on no stream is named on the device.
kvs_status kvs_stream_clear(struct kvs_context *ctx, int32_t device);

// Frees the staging buffers of the context that are not in use, on devices and pinned; they come again when they are needed. A
// snapshot that finds no memory on its device does so by itself.
kvs_status kvs_staging_free(struct kvs_context *ctx);

// Allocates size bytes of pinned host memory, zeroed. States of devices, whichever, go into it and come from it without
// another copy on the host, several times as fast. device: the one in whose context it is allocated; every device reaches
// it. Free it with kvs_pinned_free.
kvs_status kvs_pinned_alloc(int32_t device,
                            size_t size,
                            void **ptr_out);

// Frees what kvs_pinned_alloc gave, which no job may still write to; NULL is fine.
kvs_status kvs_pinned_free(void *ptr);

// Pins size bytes of the caller's own memory at ptr, as kvs_pinned_alloc allocates them, until kvs_host_unregister.
// KVS_STATUS_INVALID_ARGUMENT if some of them are pinned already.
kvs_status kvs_host_register(int32_t device,
                             void *ptr,
                             size_t size);

// Ends what kvs_host_register began at ptr.
kvs_status kvs_host_unregister(void *ptr);

// Copies size bytes of K or V (KVS_KV_*) of a layer in a stream of a section to dst, from offset on: bytes from cell 0, laid
// out as kvs_kv_plane tells. For programs without CUDA code, and for looking: it waits for each copy. Const.
kvs_status kvs_kv_get(const struct kvs_context *ctx,
                      uint32_t section,
                      uint32_t stream,
                      uint32_t layer,
                      int which,
                      uint64_t offset,
                      void *dst,
                      size_t size);

// Copies size bytes from src into K or V, as kvs_kv_get the other way.
kvs_status kvs_kv_set(struct kvs_context *ctx,
                      uint32_t section,
                      uint32_t stream,
                      uint32_t layer,
                      int which,
                      uint64_t offset,
                      const void *src,
                      size_t size);

// Takes a snapshot of a sequence, with flags KVS_STATE_SEQ_FLAGS_NONE or _PARTIAL_ONLY, or with seq_id -1 and
// KVS_STATE_SEQ_FLAGS_NONE of the whole context (KVS_STATE_SEQ_FLAGS_ON_DEVICE makes no difference for a sequence). Pending
// shifts are applied first. Nothing leaves a device, and with a stream named by kvs_stream_set nothing is waited for: what is
// queued on it afterwards runs behind the copy. Free it with kvs_snapshot_free.
kvs_status kvs_snapshot_take(struct kvs_context *ctx,
                             kvs_seq_id seq_id,
                             kvs_state_seq_flags flags,
                             struct kvs_snapshot **snapshot_out);

// Frees a snapshot and its memory; NULL is fine. Jobs that it was given to go on.
void kvs_snapshot_free(struct kvs_snapshot *snapshot);

// Bytes that kvs_snapshot_get_data writes. 0: failed. Const.
size_t kvs_snapshot_size(const struct kvs_snapshot *snapshot);

// Bytes of it in the memory of devices. Const.
size_t kvs_snapshot_device_size(const struct kvs_snapshot *snapshot);

// Replaces sequence dest_seq_id by the state in a snapshot of a sequence, of this context or of another one of the same model;
// or, with -1, all sequences by those in a snapshot of a whole context. A state like any other: it takes cells that are free or
// the destination's. If it fails nothing has changed, but for a device that fails in the middle, as kvs_state_seq_set_data_ext
// says.
kvs_status kvs_snapshot_restore(struct kvs_context *ctx,
                                const struct kvs_snapshot *snapshot,
                                kvs_seq_id dest_seq_id);

// Writes the state to dst, which has size bytes: those that kvs_state_seq_get_data_ext (or kvs_state_get_data) would have
// written when it was taken; returns their number. 0: failed. Const.
size_t kvs_snapshot_get_data(const struct kvs_snapshot *snapshot,
                             uint8_t *dst,
                             size_t size);

// Writes the state and a token list to a file, as kvs_state_seq_save_file (or kvs_state_save_file) would have when it was
// taken; returns the size of the file. 0: failed, a file that was there is untouched. A partial state has no file. Const.
size_t kvs_snapshot_save_file(const struct kvs_snapshot *snapshot,
                              const char *filepath,
                              const kvs_token *tokens,
                              size_t n_token_count);

// Begins kvs_snapshot_get_data on a thread of its own. dst is the job's until it has ended: kvs_job_poll says 1, or
// kvs_job_wait or kvs_job_free has returned. params: NULL, or threads and a progress callback, which is called on the job's
// thread. Free the job with kvs_job_free.
kvs_status kvs_snapshot_get_data_start(const struct kvs_snapshot *snapshot,
                                       uint8_t *dst,
                                       size_t size,
                                       const struct kvs_transfer_params *params,
                                       struct kvs_job **job_out);

// Begins kvs_snapshot_save_file on a thread of its own; the path and the tokens are copied. params and the job: as for
// kvs_snapshot_get_data_start.
kvs_status kvs_snapshot_save_file_start(const struct kvs_snapshot *snapshot,
                                        const char *filepath,
                                        const kvs_token *tokens,
                                        size_t n_token_count,
                                        const struct kvs_transfer_params *params,
                                        struct kvs_job **job_out);

// Whether the job has ended, well or not: 1 or 0; -1: no live handle. Const.
int32_t kvs_job_poll(const struct kvs_job *job);

// Bytes done of total. Const.
kvs_status kvs_job_progress(const struct kvs_job *job, uint64_t *done_out, uint64_t *total_out);

// Asks the job to end: kvs_job_wait fails with KVS_STATUS_CANCELLED then, unless it was done before. What a cancelled
// job has written to dst is no state; a file that was there is untouched. Const.
kvs_status kvs_job_cancel(const struct kvs_job *job);

// Waits for the job's end; *size_out (NULL: not wanted) is then what the blocking call would have returned. Fails with the
// reason of the save. A job is waited for once, by one thread: a second wait is KVS_STATUS_INVALID_ARGUMENT. Others may poll and
// cancel it meanwhile. Const.
kvs_status kvs_job_wait(const struct kvs_job *job,
                        size_t *size_out);

// Frees a job; one that has not ended is cancelled and waited for. NULL is fine.
void kvs_job_free(struct kvs_job *job);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_checkpoints_params_init(struct kvs_checkpoints_params *params, size_t struct_size);

// Makes room for the checkpoints of a sequence; params NULL: the defaults. Free it with kvs_checkpoints_free.
kvs_status kvs_checkpoints_new(kvs_seq_id seq_id,
                               const struct kvs_checkpoints_params *params,
                               struct kvs_checkpoints **checkpoints_out);

// Frees them all; NULL is fine.
void kvs_checkpoints_free(struct kvs_checkpoints *checkpoints);

// Takes a checkpoint of the sequence as it is, with n_tokens tokens in its history. Those that are not behind it are replaced:
// the history was rewound meanwhile. Others make room before memory is taken, as n_max and max_bytes demand: those whose loss
// leaves the smallest gap, measured against its distance from the end. Fails for a sequence that is empty or cannot go on at
// its end, and with KVS_STATUS_OUT_OF_MEMORY for a checkpoint that alone exceeds max_bytes; no checkpoint is lost then. If
// memory or a device fails, those that made room are gone.
kvs_status kvs_checkpoints_take(struct kvs_checkpoints *checkpoints,
                                struct kvs_context *ctx,
                                int64_t n_tokens);

// Adds a checkpoint that was taken before, such as one that kvs_slot_load gave back, for the sequence that was restored with it: its
// target is copied to host memory and stays there; its draft and driver are the caller's. pos_min is taken from the state, where that
// has positions. One with the same pos_max is replaced; then others make room as in kvs_checkpoints_take, or this one itself. Fails
// for a pos_max behind the end of the sequence or other than the state's, and as kvs_state_seq_set_data for a state that cannot be
// restored into ctx; ctx does not change, and no checkpoint is lost then.
kvs_status kvs_checkpoints_put(struct kvs_checkpoints *checkpoints,
                               const struct kvs_context *ctx,
                               const struct kvs_slot_checkpoint *checkpoint);

// Brings the sequence back to the largest position, at most pos, from which it can go on as in a fresh run: it is cut as it is,
// or the best checkpoint is restored and cut. pos is the first position whose token is another one, or is to be computed again
// for its logits. The sequence then holds exactly the positions below *pos_out; 0: nothing served, it is empty. *n_tokens_out
// (NULL: not wanted) is n_tokens of the checkpoint that was restored, -1 without one. Checkpoints behind that position are
// dropped. On failure the checkpoints are as before, and the sequence as after a kvs_snapshot_restore that fails.
kvs_status kvs_checkpoints_resume(struct kvs_checkpoints *checkpoints,
                                  struct kvs_context *ctx,
                                  kvs_pos pos,
                                  kvs_pos *pos_out,
                                  int64_t *n_tokens_out);

// Tells that the history goes on at pos: checkpoints that hold that position or a later one are dropped. Whoever cuts the
// sequence himself says so; kvs_checkpoints_resume does it alone.
kvs_status kvs_checkpoints_truncate(struct kvs_checkpoints *checkpoints,
                                    kvs_pos pos);

// How many there are. 0 on failure. Const.
size_t kvs_checkpoints_count(const struct kvs_checkpoints *checkpoints);

// Bytes of all their states. 0 on failure. Const.
size_t kvs_checkpoints_size(const struct kvs_checkpoints *checkpoints);

// Tells of the checkpoint at an index, in the order of positions. Const.
kvs_status kvs_checkpoints_get(const struct kvs_checkpoints *checkpoints,
                               size_t index,
                               struct kvs_checkpoint *checkpoint_out);

// Writes the state of the checkpoint at an index, kvs_checkpoint.size bytes, as kvs_state_seq_get_data with
// KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY wrote it then: the target of a kvs_slot_checkpoint. Returns its size. 0: failed. Const.
size_t kvs_checkpoints_get_data(const struct kvs_checkpoints *checkpoints,
                                size_t index,
                                uint8_t *dst,
                                size_t size);

// What the checkpoint at an index is worth if the history diverges at pos. Changes nothing. Const.
kvs_status kvs_checkpoints_verdict(const struct kvs_checkpoints *checkpoints,
                                   const struct kvs_context *ctx,
                                   size_t index,
                                   kvs_pos pos,
                                   struct kvs_checkpoint_verdict *verdict_out);

// The fingerprint of a model and its settings, for model in kvs_slot_identity: KVS_FINGERPRINT_SIZE bytes.
//
// ggufs: the paths of the model's files, each file of one that is split, and of what else goes into its states, such as
// adapters; their order counts. Of each the head is read, metadata and the names, types and shapes of tensors, not their data:
// models that differ in nothing else need a setting that tells them apart. settings: in any order; a key that comes twice is
// refused. Either may be empty. docs/format.md says how the fingerprint is computed.
kvs_status kvs_fingerprint(const char *const *ggufs,
                           size_t n_gguf,
                           const struct kvs_setting *settings,
                           size_t n_setting,
                           uint8_t *fingerprint_out);

// Fills the struct of struct_size bytes at checkpoint with zeroes.
kvs_status kvs_slot_checkpoint_init(struct kvs_slot_checkpoint *checkpoint, size_t struct_size);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_slot_save_params_init(struct kvs_slot_save_params *params, size_t struct_size);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_slot_load_params_init(struct kvs_slot_load_params *params, size_t struct_size);

// Fills the struct of struct_size bytes at result with zeroes.
kvs_status kvs_slot_result_init(struct kvs_slot_result *result, size_t struct_size);

// Writes a slot file: sequence seq_id and what params say (NULL: no more than that). In front it is what
// kvs_state_seq_save_file writes, and llama.cpp reads it. *size_out (NULL: not wanted) is the size of the file.
//
// The file is written beside filename, synced, then renamed over it, as by kvs_state_seq_save_file. Files that a process
// which was killed has left in that folder (.kvstate-*.tmp) are removed; those of a living one are not.
kvs_status kvs_slot_save(struct kvs_context *ctx,
                         const char *filename,
                         kvs_seq_id seq_id,
                         const struct kvs_slot_save_params *params,
                         size_t *size_out);

// Begins kvs_slot_save on a thread of its own, of the slot as it is now: its states are copied where the caches are, all that
// params point to in host memory, and both contexts may go on, or be freed. transfer: NULL, or threads and a progress callback,
// which is called on the job's thread. *size_out of kvs_job_wait is the size of the file. Free the job with kvs_job_free.
kvs_status kvs_slot_save_start(struct kvs_context *ctx,
                               const char *filename,
                               kvs_seq_id seq_id,
                               const struct kvs_slot_save_params *params,
                               const struct kvs_transfer_params *transfer,
                               struct kvs_job **job_out);

// Replaces sequence dest_seq_id by the one in a slot file, or in any sequence file (versions 2 to 4), and fills result with
// what else the file holds. params may be NULL.
//
// Refused, and nothing has changed in either context: a file of another model, salt or geometry, one that has not what require
// asks for, a state that does not fit, and what KVS_VERIFY_* finds damaged in header, tokens or memory state. What is damaged or
// unknown behind the memory state is left out and said in notes. A draft state that does not fit is dropped: the draft's sequence
// is empty then, and the target stands.
kvs_status kvs_slot_load(struct kvs_context *ctx,
                         const char *filename,
                         kvs_seq_id dest_seq_id,
                         const struct kvs_slot_load_params *params,
                         struct kvs_slot_result *result);

// Frees what a result points to, and fills it with zeroes. A result of no load is fine.
void kvs_slot_result_free(struct kvs_slot_result *result);

// Fills the struct of struct_size bytes at params with defaults.
kvs_status kvs_autosave_params_init(struct kvs_autosave_params *params, size_t struct_size);

// Fills the struct of struct_size bytes at slot with zeroes.
kvs_status kvs_autosaved_slot_init(struct kvs_autosaved_slot *slot, size_t struct_size);

// Takes a folder, and finds out what it holds: by its manifest, and by the files themselves where that is missing, damaged, or
// of a later version. What killed processes have left behind, and slots that are too many for max_bytes, are removed.
// KVS_STATUS_LOCKED if another process, or another handle, has taken it: the end of a process, however it comes, gives it back.
// A folder that cannot be written can be opened: restores work, saves fail and say why. Free it with kvs_autosave_free.
kvs_status kvs_autosave_open(const struct kvs_autosave_params *params,
                             struct kvs_autosave **autosave_out);

// Waits for the saves that run (kvs_autosave_cancel ends one sooner), and gives the folder back. NULL is fine.
void kvs_autosave_free(struct kvs_autosave *autosave);

// What was odd when the folder was opened, in words; NULL behind the last note. Valid until the handle is freed. Const.
const char *kvs_autosave_note(const struct kvs_autosave *autosave,
                              size_t i);

// Number of slots that the folder has. 0: none, or failed. Const.
size_t kvs_autosave_count(const struct kvs_autosave *autosave);

// Slot i of those that the folder has, by number. Const.
kvs_status kvs_autosave_get(const struct kvs_autosave *autosave, size_t i, struct kvs_autosaved_slot *slot);

// Slot slot_id has been used and is another than its file: n_tokens tokens were computed since the last call. Returns whether a
// save is due: every_n_tokens have come together since the last that was begun, and none runs. Const.
bool kvs_autosave_mark(const struct kvs_autosave *autosave,
                       uint32_t slot_id,
                       uint64_t n_tokens);

// Whether the slot was marked since the state that its file has: at the end of a run these are the slots to save. Const.
bool kvs_autosave_is_dirty(const struct kvs_autosave *autosave,
                           uint32_t slot_id);

// Saves a slot: sequence seq_id and what params say (NULL: no more than that; directory must be NULL). *size_out (NULL: not
// wanted) is the size of its files.
//
// The slots that were used longest ago make room for it, once it is there. KVS_STATUS_OVER_BUDGET: it does not fit beside slots
// that were used later. If it fails its old file stands, and every other. A save of the slot in the background is waited for
// first. Const.
kvs_status kvs_autosave_save(const struct kvs_autosave *autosave,
                             struct kvs_context *ctx,
                             uint32_t slot_id,
                             kvs_seq_id seq_id,
                             const struct kvs_slot_save_params *params,
                             size_t *size_out);

// Takes a snapshot of a slot and begins kvs_autosave_save of it on a thread of its own: the contexts may go on, and everything
// that params point to is copied. A save of the slot that still runs is waited for first. Its failure is said by
// kvs_autosave_wait, and logged. Const.
kvs_status kvs_autosave_save_start(const struct kvs_autosave *autosave,
                                   struct kvs_context *ctx,
                                   uint32_t slot_id,
                                   kvs_seq_id seq_id,
                                   const struct kvs_slot_save_params *params);

// Whether no save of the slot runs in the background: 1 or 0; -1: no live handle. Const.
int32_t kvs_autosave_poll(const struct kvs_autosave *autosave, uint32_t slot_id);

// Bytes done of total of the save in the background, until it has been waited for; 0 of 0 if there is none. Const.
kvs_status kvs_autosave_progress(const struct kvs_autosave *autosave,
                                 uint32_t slot_id,
                                 uint64_t *done_out,
                                 uint64_t *total_out);

// Asks the save in the background to end: kvs_autosave_wait fails with KVS_STATUS_CANCELLED then, and the old file stands,
// unless it was done before. Const.
kvs_status kvs_autosave_cancel(const struct kvs_autosave *autosave,
                               uint32_t slot_id);

// Waits for the save of the slot in the background, and fails for its reason; *size_out (NULL: not wanted) is then what
// kvs_autosave_save would have given, or 0 if there was none that nobody has waited for. Const.
kvs_status kvs_autosave_wait(const struct kvs_autosave *autosave,
                             uint32_t slot_id,
                             size_t *size_out);

// Waits for all saves in the background, and brings the manifest up to date with what was used. Fails for the reason of the last
// save that failed, after all of them. Const.
kvs_status kvs_autosave_flush(const struct kvs_autosave *autosave);

// Replaces sequence dest_seq_id by that of a slot, as kvs_slot_load from its file (params: as there, and directory must be
// NULL), and fills result. The slot is not dirty then. *restored_out is 1, or 0 for a cold start: nothing has changed then, and
// the notes of the result say why; there are none if the folder has no such slot. Either way the result is to be freed.
//
// Fails only for what is the caller's: arguments, and a progress callback that cancels. Const.
kvs_status kvs_autosave_restore(const struct kvs_autosave *autosave,
                                struct kvs_context *ctx,
                                uint32_t slot_id,
                                kvs_seq_id dest_seq_id,
                                const struct kvs_slot_load_params *params,
                                struct kvs_slot_result *result,
                                int32_t *restored_out);

// Removes a slot from the folder; one that it does not have is fine. A save of it in the background is cancelled. Const.
kvs_status kvs_autosave_remove(const struct kvs_autosave *autosave,
                               uint32_t slot_id);

// Fills a view with defaults: one stream, full attention, no layers.
kvs_status kvs_kv_view_init(struct kvs_kv_view *view, size_t struct_size);

// Fills an io with NULLs.
kvs_status kvs_io_init(struct kvs_io *io, size_t struct_size);

// llama_kv_cache::state_write: writes the section of one sequence, or of all with seq_id -1, through io, which
// needs write and write_tensor. What is selected is up to the flags and the view's own window: docs/semantics.md.
//
// A pending shift (kvs_cell.shift) is not applied: positions are the new ones and K is written as it is, with a
// warning in the log, since nothing here tells a save from a question for its size. Apply shifts before a save.
kvs_status kvs_kv_cache_state_write(const struct kvs_kv_view *view,
                                    const struct kvs_io *io,
                                    kvs_seq_id seq_id,
                                    kvs_state_seq_flags flags);

// llama_kv_cache::state_read_sinfo: reads the section through io, which needs read and read_tensor, and replaces
// sequence seq_id, or everything with -1. Cells are searched as docs/semantics.md says, or are those of sinfos_in.
//
// sinfos_out and sinfos_in are NULL or have n_stream entries, by stream of the state. sinfos_in: a mirrored cache
// takes the cells of its source; the state must have as many streams then. sinfos_out: gets the cells used; each
// entry has room for kv_size.
//
// Metadata and tensors come in turns, so this call cannot refuse a bad state before anything changes, as
// kvs_state_reader_plan_kv_cache does: once something has been read, a failure leaves the destination empty and its
// data zero. If clear fails as well, that is in the log: kvs_last_error has what failed first.
kvs_status kvs_kv_cache_state_read_sinfo(const struct kvs_kv_view *view,
                                         const struct kvs_io *io,
                                         kvs_seq_id seq_id,
                                         kvs_state_seq_flags flags,
                                         struct kvs_slot_info *sinfos_out,
                                         const struct kvs_slot_info *sinfos_in);

// Begins the state of a sequence, or with seq_id -1 of a whole context. access: for tensors of
// kvs_state_writer_write_tensor that kvstate does not reach by itself, NULL if there are none.
//
// A whole context begins with the name of its architecture, which is the caller's to write: its length in bytes as
// a little-endian uint32_t, then the bytes, without a NUL (kvs_context_params.arch, if that is who reads it).
kvs_status kvs_state_writer_new(kvs_seq_id seq_id,
                                const struct kvs_tensor_access *access,
                                struct kvs_state_writer **writer_out);

// Frees a writer; NULL is fine.
void kvs_state_writer_free(struct kvs_state_writer *writer);

// Says how the writer moves bytes: n_threads in kvs_state_writer_get_data and _get_on_device too, progress in
// kvs_state_writer_save_file alone, where a save that is cancelled leaves the file that was there.
kvs_status kvs_state_writer_set_transfer(struct kvs_state_writer *writer,
                                         const struct kvs_transfer_params *params);

// Names the stream of a device that the writer's copies run behind: kvs_stream_set for a writer.
kvs_status kvs_state_writer_set_stream(struct kvs_state_writer *writer, int32_t device, void *stream);

// Metadata of a section of the caller's.
kvs_status kvs_state_writer_write(struct kvs_state_writer *writer, const void *src, size_t size);

// n bytes of a tensor of the caller's from offset on: data is the tensor's address in host memory or, as its driver then
// says, in the memory of a CUDA device (kvs_device_of); or NULL, then they are reached through the access, which gets tensor back.
kvs_status kvs_state_writer_write_tensor(struct kvs_state_writer *writer,
                                         void *tensor,
                                         void *data,
                                         uint64_t offset,
                                         uint64_t n);

// An attention section: what kvs_kv_cache_state_write would write. KVS_STATE_SEQ_FLAGS_ON_DEVICE makes no
// difference here: kvs_state_writer_get_on_device does.
kvs_status kvs_state_writer_write_kv_cache(struct kvs_state_writer *writer,
                                           const struct kvs_kv_view *view,
                                           kvs_state_seq_flags flags);

// Bytes that kvs_state_writer_get_data writes: those of all sections, and for a sequence the 8 of the header.
// 0: failed.
size_t kvs_state_writer_size(struct kvs_state_writer *writer);

// Writes the state to dst, a sequence's with its header; returns the bytes written. 0: failed; dst is untouched if
// it is too small.
size_t kvs_state_writer_get_data(struct kvs_state_writer *writer,
                                 uint8_t *dst,
                                 size_t size);

// Bytes that kvs_state_writer_get_on_device writes. 0: failed.
size_t kvs_state_writer_metadata_size(struct kvs_state_writer *writer);

// Writes a sequence's metadata to dst, as a state with KVS_STATE_SEQ_FLAGS_ON_DEVICE; returns the bytes written. The
// tensors are in *state_out, which the caller frees. The seq_id field of the header holds more than the sequence:
// it tells states apart. flags: those that the sections were written with. 0: failed, nothing is written.
size_t kvs_state_writer_get_on_device(struct kvs_state_writer *writer,
                                      uint8_t *dst,
                                      size_t size,
                                      kvs_state_seq_flags flags,
                                      struct kvs_device_state **state_out);

// Frees what kvs_state_writer_get_on_device gave; NULL is fine.
void kvs_device_state_free(struct kvs_device_state *state);

// Writes the state and a token list to a file, as kvs_state_seq_save_file does, or kvs_state_save_file for a whole
// context; returns the size of the file. sync: wait for the disk before the file is renamed into place. 0: failed, a
// file that was there is untouched.
size_t kvs_state_writer_save_file(struct kvs_state_writer *writer,
                                  const char *filepath,
                                  const kvs_token *tokens,
                                  size_t n_token_count,
                                  bool sync);

// Begins to read the state of a sequence, which will replace seq_id, or with -1 that of a whole context, which
// begins with the name of its architecture, to be read and compared by the caller. access: as for
// kvs_state_writer_new.
kvs_status kvs_state_reader_new(kvs_seq_id seq_id,
                                const uint8_t *src,
                                size_t size,
                                const struct kvs_tensor_access *access,
                                struct kvs_state_reader **reader_out);

// Begins to read the state in a file of at most n_token_capacity tokens (sequence files 2 to 4, with seq_id -1
// whole-context files 9 to 11). Its tensors are read in kvs_state_reader_finish: a file that is truncated before is an
// error there (a save of kvstate never truncates).
kvs_status kvs_state_reader_open_file(kvs_seq_id seq_id,
                                      const char *filepath,
                                      size_t n_token_capacity,
                                      const struct kvs_tensor_access *access,
                                      struct kvs_state_reader **reader_out);

// Begins to read a sequence's ON_DEVICE state, whose metadata is src. flags as they were, with
// KVS_STATE_SEQ_FLAGS_ON_DEVICE or without. state: what kvs_state_writer_get_on_device gave for it, which must
// outlive the reader; refused if it is another blob's.
//
// state NULL: the caller keeps the tensors itself. The state can be planned then, which drops no cell, and
// kvs_state_reader_tensor_bytes says how many bytes its tensors have; it cannot be read.
kvs_status kvs_state_reader_new_on_device(kvs_seq_id seq_id,
                                          const uint8_t *src,
                                          size_t size,
                                          kvs_state_seq_flags flags,
                                          struct kvs_device_state *state,
                                          const struct kvs_tensor_access *access,
                                          struct kvs_state_reader **reader_out);

// Says how the reader moves bytes: n_threads in kvs_state_reader_finish. progress is not called: by then the cells are
// the state's, and their data has to follow.
kvs_status kvs_state_reader_set_transfer(struct kvs_state_reader *reader,
                                         const struct kvs_transfer_params *params);

// Bytes of the tensors planned so far, of a reader of kvs_state_reader_new_on_device; otherwise 0.
uint64_t kvs_state_reader_tensor_bytes(struct kvs_state_reader *reader);

// Frees a reader; what was read and not finished is dropped. NULL is fine.
void kvs_state_reader_free(struct kvs_state_reader *reader);

// The tokens of the file, none for a state in memory: valid until the reader is freed.
kvs_status kvs_state_reader_tokens(struct kvs_state_reader *reader,
                                   const kvs_token **tokens_out,
                                   size_t *n_token_count_out);

// Bytes consumed, from the start of the state in memory or of the file.
size_t kvs_state_reader_offset(struct kvs_state_reader *reader);

// Bytes that are left.
size_t kvs_state_reader_left(struct kvs_state_reader *reader);

// Goes back to the first section, to read what was planned. Nothing can be planned after it.
kvs_status kvs_state_reader_rewind(struct kvs_state_reader *reader);

// Forgets what was planned, read or failed and goes back to the first section. legacy_partial: full-attention
// sections are expected in a partial state, to be checked and dropped. Plan a partial state again like this if bytes are left
// after it was planned: older llama.cpp wrote them.
kvs_status kvs_state_reader_restart(struct kvs_state_reader *reader,
                                    bool legacy_partial);

// Names the stream of a device that the reader's copies run behind: kvs_stream_set for a reader.
kvs_status kvs_state_reader_set_stream(struct kvs_state_reader *reader, int32_t device, void *stream);

// Frees the staging buffers on devices and of pinned memory that writers and readers share and that are not in use. They are
// allocated when one of those first moves bytes of a device, and stay for the next. What contexts have is not touched.
void kvs_shared_staging_free(void);

// Metadata of a section of the caller's.
kvs_status kvs_state_reader_read(struct kvs_state_reader *reader, void *dst, size_t size);

// Passes over n bytes of a tensor of the caller's, while the state is planned.
kvs_status kvs_state_reader_skip_tensor(struct kvs_state_reader *reader, uint64_t n);

// The next n bytes go to a tensor of the caller's from offset on, with the batch of kvs_state_reader_finish. data:
// as for kvs_state_writer_write_tensor. Refused before kvs_state_reader_rewind.
kvs_status kvs_state_reader_read_tensor(struct kvs_state_reader *reader,
                                        void *tensor,
                                        void *data,
                                        uint64_t offset,
                                        uint64_t n);

// Reads, checks and places the next attention section; nothing changes, and if it fails, nothing is consumed.
// flags: those that the state was written with, which it does not tell: with others it passes over a section, or
// looks for one that is not there. sinfos_out, sinfos_in: as for kvs_kv_cache_state_read_sinfo.
kvs_status kvs_state_reader_plan_kv_cache(struct kvs_state_reader *reader,
                                          const struct kvs_kv_view *view,
                                          kvs_state_seq_flags flags,
                                          struct kvs_slot_info *sinfos_out,
                                          const struct kvs_slot_info *sinfos_in);

// Does what was planned for the next attention section: its cells are set through apply, its tensors wait for
// kvs_state_reader_finish. view: of the cache that it was planned for, with the same planes; user may be another.
// sinfos_out: gets the cells that the plan found.
//
// Refused, with nothing changed: another view (KVS_STATUS_INVALID_ARGUMENT), cells that another sequence holds since
// the plan (KVS_STATUS_STALE). If clear or apply fails, the cells are what they have left, the data is as it was, and
// the reader serves no further than kvs_state_reader_restart: clear the destination in every section.
kvs_status kvs_state_reader_read_kv_cache(struct kvs_state_reader *reader,
                                          const struct kvs_kv_view *view,
                                          struct kvs_slot_info *sinfos_out);

// Copies the tensors of everything that was read, in one batch. Fails if a section that was planned has not been
// read, if one has failed, or if nothing of the state was looked at. If it fails, cells may be set whose data is not
// there: clear the destination in every section.
kvs_status kvs_state_reader_finish(struct kvs_state_reader *reader);

// Writes the state of a sequence, and what params say (NULL: no more than that), to a slot file: kvs_slot_save for a writer. In
// front it is what kvs_state_writer_save_file writes. sync: wait for the disk before the file is renamed into place. *size_out
// (NULL: not wanted) is the size of the file.
//
// draft is NULL in params: a writer's slot file has the target alone, and no sidecar.
kvs_status kvs_state_writer_save_slot(struct kvs_state_writer *writer,
                                      const char *filename,
                                      const struct kvs_slot_save_params *params,
                                      bool sync,
                                      size_t *size_out);

// Begins to read the state in a slot file, or in any sequence file, which will replace seq_id: kvs_state_reader_open_file with
// what kvs_slot_load compares. params may be NULL; draft is NULL in it, and p1 below 0: all positions are restored.
//
// Refused: a file of another model or salt, and what verify finds damaged in header, tokens or memory state. The geometry is not
// compared: only the caller knows its own sections, and the state says most of it.
kvs_status kvs_state_reader_open_slot(kvs_seq_id seq_id,
                                      const char *filename,
                                      const struct kvs_slot_load_params *params,
                                      const struct kvs_tensor_access *access,
                                      struct kvs_state_reader **reader_out);

// Fills result with what else a slot file holds, as kvs_slot_load does: to be called once, when every section is planned and
// before kvs_state_reader_rewind. Identity and checksums that something stands behind are compared now, and the file is refused as
// by kvs_state_reader_open_slot: nothing has changed then. pos_min and pos_max are those of the views that were planned. A draft
// state is told as dropped.
kvs_status kvs_state_reader_slot(struct kvs_state_reader *reader,
                                 struct kvs_slot_result *result);

// Sends the library's log lines to callback; NULL: nowhere, as at the start. One per process. When it returns,
// no thread is inside the earlier callback.
kvs_status kvs_log_set(kvs_log_callback callback,
                       void *user_data);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#ifdef __cplusplus
extern "C" {
#endif

// Defaults as a value, for initialisers.
static inline kvs_rope_params kvs_rope_default_params(void) {
    kvs_rope_params params;
    kvs_rope_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_kv_layer_params kvs_kv_layer_default_params(void) {
    kvs_kv_layer_params params;
    kvs_kv_layer_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_kv_params kvs_kv_default_params(void) {
    kvs_kv_params params;
    kvs_kv_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_recurrent_layer_params kvs_recurrent_layer_default_params(void) {
    kvs_recurrent_layer_params params;
    kvs_recurrent_layer_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_recurrent_params kvs_recurrent_default_params(void) {
    kvs_recurrent_params params;
    kvs_recurrent_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_dsv4_compressor_params kvs_dsv4_compressor_default_params(void) {
    kvs_dsv4_compressor_params params;
    kvs_dsv4_compressor_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_dsv4_params kvs_dsv4_default_params(void) {
    kvs_dsv4_params params;
    kvs_dsv4_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_section_params kvs_section_default_params(void) {
    kvs_section_params params;
    kvs_section_params_init(&params, sizeof params);
    return params;
}

// A section of each kind, for the array of a context: a hybrid is {kvs_kv_section(&kv), kvs_recurrent_section(&recurrent)}.
static inline kvs_section_params kvs_kv_section(const kvs_kv_params *kv) {
    kvs_section_params params = kvs_section_default_params();
    params.kv = kv;
    return params;
}

static inline kvs_section_params kvs_recurrent_section(const kvs_recurrent_params *recurrent) {
    kvs_section_params params = kvs_section_default_params();
    params.kind = KVS_SECTION_RECURRENT;
    params.recurrent = recurrent;
    return params;
}

static inline kvs_section_params kvs_shared_section(void) {
    kvs_section_params params = kvs_section_default_params();
    params.kind = KVS_SECTION_SHARED;
    return params;
}

static inline kvs_section_params kvs_dsv4_section(const kvs_dsv4_params *dsv4) {
    kvs_section_params params = kvs_section_default_params();
    params.kind = KVS_SECTION_DSV4;
    params.dsv4 = dsv4;
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_context_params kvs_context_default_params(void) {
    kvs_context_params params;
    kvs_context_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_transfer_params kvs_transfer_default_params(void) {
    kvs_transfer_params params;
    kvs_transfer_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_checkpoints_params kvs_checkpoints_default_params(void) {
    kvs_checkpoints_params params;
    kvs_checkpoints_params_init(&params, sizeof params);
    return params;
}

// Zeroes as a value, for kvs_memory_usage_get.
static inline kvs_memory_usage kvs_memory_usage_default(void) {
    kvs_memory_usage usage;
    kvs_memory_usage_init(&usage, sizeof usage);
    return usage;
}

// Zeroes as a value, for initialisers.
static inline kvs_slot_checkpoint kvs_slot_checkpoint_default(void) {
    kvs_slot_checkpoint checkpoint;
    kvs_slot_checkpoint_init(&checkpoint, sizeof checkpoint);
    return checkpoint;
}

// Defaults as a value, for initialisers.
static inline kvs_slot_save_params kvs_slot_save_default_params(void) {
    kvs_slot_save_params params;
    kvs_slot_save_params_init(&params, sizeof params);
    return params;
}

// Defaults as a value, for initialisers.
static inline kvs_slot_load_params kvs_slot_load_default_params(void) {
    kvs_slot_load_params params;
    kvs_slot_load_params_init(&params, sizeof params);
    return params;
}

// Zeroes as a value, for kvs_slot_load.
static inline kvs_slot_result kvs_slot_result_default(void) {
    kvs_slot_result result;
    kvs_slot_result_init(&result, sizeof result);
    return result;
}

// Defaults as a value, for initialisers.
static inline kvs_autosave_params kvs_autosave_default_params(void) {
    kvs_autosave_params params;
    kvs_autosave_params_init(&params, sizeof params);
    return params;
}

// Zeroes as a value, for kvs_autosave_get.
static inline kvs_autosaved_slot kvs_autosaved_slot_default(void) {
    kvs_autosaved_slot slot;
    kvs_autosaved_slot_init(&slot, sizeof slot);
    return slot;
}

// Defaults as a value, for initialisers.
static inline kvs_ubatch kvs_ubatch_default(void) {
    kvs_ubatch ubatch;
    kvs_ubatch_init(&ubatch, sizeof ubatch);
    return ubatch;
}

// Defaults as a value, for initialisers.
static inline kvs_kv_view kvs_kv_view_default(void) {
    kvs_kv_view view;
    kvs_kv_view_init(&view, sizeof view);
    return view;
}

// NULLs as a value, for initialisers.
static inline kvs_io kvs_io_default(void) {
    kvs_io io;
    kvs_io_init(&io, sizeof io);
    return io;
}

#ifdef __cplusplus
}
#endif

#endif // KVSTATE_H
