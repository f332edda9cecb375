// kvstate under llama.h's names: a program written against llama.h's state and memory calls compiles unchanged.
// With -I include/compat its #include "llama.h" finds this file.
//
// It stands in for llama.h and cannot stand beside it: both define the same names, one means llama.cpp's context
// and the other kvstate's. Included after llama.h this file says so; llama.h included after this file does not
// compile, because llama_memory_t is then declared twice with different types.
//
// Only what kvstate has is here. A context comes from kvs_context_new and goes by kvs_context_free.

#ifdef LLAMA_H
#error "kvstate_llama.h takes the place of llama.h, and llama.h is already included"
#endif

#ifndef KVSTATE_LLAMA_H
#define KVSTATE_LLAMA_H

#include "kvstate.h"

#ifndef LLAMA_API
#define LLAMA_API
#endif

// A macro, so that both `llama_context *` and `struct llama_context *` are contexts of kvstate.
#define llama_context kvs_context

// A typedef and not a macro: this is the declaration that llama.h collides with.
typedef kvs_memory_t llama_memory_t;

typedef kvs_pos llama_pos;
typedef kvs_seq_id llama_seq_id;
typedef kvs_token llama_token;
typedef kvs_state_seq_flags llama_state_seq_flags;

#define LLAMA_TOKEN_NULL -1

#define LLAMA_FILE_MAGIC_GGLA 0x67676c61u
#define LLAMA_FILE_MAGIC_GGSN 0x6767736eu
#define LLAMA_FILE_MAGIC_GGSQ 0x67677371u

#define LLAMA_SESSION_MAGIC   LLAMA_FILE_MAGIC_GGSN
#define LLAMA_SESSION_VERSION 11

#define LLAMA_STATE_SEQ_MAGIC   LLAMA_FILE_MAGIC_GGSQ
#define LLAMA_STATE_SEQ_VERSION 4

#define LLAMA_STATE_SEQ_FLAGS_NONE         KVS_STATE_SEQ_FLAGS_NONE
#define LLAMA_STATE_SEQ_FLAGS_SWA_ONLY     KVS_STATE_SEQ_FLAGS_SWA_ONLY
#define LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY KVS_STATE_SEQ_FLAGS_PARTIAL_ONLY
#define LLAMA_STATE_SEQ_FLAGS_ON_DEVICE    KVS_STATE_SEQ_FLAGS_ON_DEVICE

#define llama_get_memory         kvs_get_memory
#define llama_memory_clear       kvs_memory_clear
#define llama_memory_seq_rm      kvs_memory_seq_rm
#define llama_memory_seq_cp      kvs_memory_seq_cp
#define llama_memory_seq_keep    kvs_memory_seq_keep
#define llama_memory_seq_add     kvs_memory_seq_add
#define llama_memory_seq_div     kvs_memory_seq_div
#define llama_memory_seq_pos_min kvs_memory_seq_pos_min
#define llama_memory_seq_pos_max kvs_memory_seq_pos_max
#define llama_memory_can_shift   kvs_memory_can_shift

#define llama_state_get_size  kvs_state_get_size
#define llama_state_get_data  kvs_state_get_data
#define llama_state_set_data  kvs_state_set_data
#define llama_state_load_file kvs_state_load_file
#define llama_state_save_file kvs_state_save_file

#define llama_state_seq_get_size     kvs_state_seq_get_size
#define llama_state_seq_get_data     kvs_state_seq_get_data
#define llama_state_seq_set_data     kvs_state_seq_set_data
#define llama_state_seq_get_size_ext kvs_state_seq_get_size_ext
#define llama_state_seq_get_data_ext kvs_state_seq_get_data_ext
#define llama_state_seq_set_data_ext kvs_state_seq_set_data_ext
#define llama_state_seq_load_file    kvs_state_seq_load_file
#define llama_state_seq_save_file    kvs_state_seq_save_file

#endif // KVSTATE_LLAMA_H
