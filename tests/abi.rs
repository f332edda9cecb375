//! The C ABI as its callers meet it: headers, symbols, C and C++ programs, Python.
#![allow(missing_docs, reason = "a test")]

mod cc;
mod fakecuda;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use cc::{Link, build, compiles, link, repo, run, temp_dir};
use fakecuda::FakeCuda;
use kvstate::Status;
use kvstate::capi;

// Headers

#[test]
fn each_header_compiles_alone_and_twice_as_c11_and_as_cpp17() {
    let dir = temp_dir();
    for header in ["kvstate.h", "kvstate_llama.h"] {
        let include = format!("#include <{header}>\n");
        for (name, text) in [("once", include.clone()), ("twice", include.repeat(2))] {
            // An empty translation unit is not ISO C.
            let text = text + "int used;\n";
            for (extension, compiler) in [("c", cc::c()), ("cpp", cc::cpp())] {
                let output = compiles(compiler, dir.path(), &format!("{name}.{extension}"), &text);
                assert!(
                    output.status.success(),
                    "{header} {name} as {extension}:\n{}",
                    String::from_utf8_lossy(&output.stderr)
                );
            }
        }
    }
}

#[test]
fn the_header_declares_each_call_once() {
    let header = fs::read_to_string(repo("include/kvstate.h")).expect("kvstate.h");
    let mut seen = BTreeMap::<String, usize>::new();
    for name in declared_calls(&header) {
        *seen.entry(name).or_default() += 1;
    }
    let twice: Vec<_> = seen.iter().filter(|&(_, &n)| n > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
}

/// Names of the functions that a header declares and does not define.
fn declared_calls(header: &str) -> Vec<String> {
    let lines = header.lines().filter(|line| !line.starts_with('#'));
    let code: String = lines.map(|line| line.split("//").next().unwrap_or("").to_owned() + "\n").collect();
    let code = code.split("static inline").next().unwrap_or("");
    code.split(';')
        .filter_map(|statement| {
            let (before, _) = statement.split_once('(')?;
            let name = before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next()?;
            (name.starts_with("kvs_") && !statement.contains("typedef")).then(|| name.to_owned())
        })
        .collect()
}

// kvstate_llama.h and llama.h. This one has the real one's guard, and its typedefs.

const LLAMA_H: &str = "
#ifndef LLAMA_H
#define LLAMA_H
#include <stdint.h>
struct llama_context;
typedef struct llama_memory_i * llama_memory_t;
typedef int32_t llama_pos;
typedef int32_t llama_token;
typedef int32_t llama_seq_id;
#endif
";

#[test]
fn kvstate_llama_h_refuses_to_come_after_llama_h() {
    beside_llama_h(
        "#include <llama.h>\n#include <kvstate_llama.h>\n",
        "kvstate_llama.h takes the place of llama.h",
    );
    // Also where its own guard would hide it.
    beside_llama_h(
        "#include <kvstate_llama.h>\n#define LLAMA_H\n#include <kvstate_llama.h>\n",
        "kvstate_llama.h takes the place of llama.h",
    );
}

#[test]
fn llama_h_does_not_compile_after_kvstate_llama_h() {
    beside_llama_h("#include <kvstate_llama.h>\n#include <llama.h>\n", "llama_memory_t");
}

fn beside_llama_h(text: &str, message: &str) {
    let dir = temp_dir();
    fs::write(dir.path().join("llama.h"), LLAMA_H).expect("llama.h");
    for (extension, mut compiler) in [("c", cc::c()), ("cpp", cc::cpp())] {
        compiler.arg("-I").arg(dir.path());
        let output = compiles(compiler, dir.path(), &format!("both.{extension}"), text);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{extension} compiled:\n{text}");
        assert!(errors.contains(message), "{extension}: {errors}");
    }
}

#[test]
fn a_server_written_against_llama_h_compiles_and_runs_unchanged_as_c() {
    server_slots(cc::c());
}

#[test]
fn a_server_written_against_llama_h_compiles_and_runs_unchanged_as_cpp() {
    let mut compiler = cc::cpp();
    compiler.args(["-x", "c++"]);
    server_slots(compiler);
}

fn server_slots(mut compiler: Command) {
    let dir = temp_dir();
    compiler
        .arg("-I")
        .arg(repo("include/compat"))
        .arg(repo("tests/c/llama_server_slots.c"))
        .arg(repo("tests/c/llama_server_engine.c"))
        .args(["-x", "none"]);
    link(&mut compiler, Link::Dynamic);
    let exe = build(compiler, dir.path(), "server");
    run(Command::new(exe).arg(dir.path().join("slot.bin")).arg(dir.path().join("session.bin")));
}

// Symbols and numbers

#[test]
fn the_exported_symbols_are_those_in_symbols_txt() {
    let nm = run(Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(cc::dylib()));
    let exported: BTreeSet<&str> = nm.lines().filter_map(|line| line.split(' ').next()).collect();
    let text = fs::read_to_string(repo("include/symbols.txt")).expect("include/symbols.txt");
    let listed: Vec<&str> = text.lines().collect();
    assert!(listed.is_sorted(), "include/symbols.txt is not sorted");
    let exported: Vec<&str> = exported.into_iter().collect();
    assert_eq!(exported, listed, "exported (left) and include/symbols.txt (right) differ");
}

#[test]
fn the_header_declares_what_is_exported() {
    let header = fs::read_to_string(repo("include/kvstate.h")).expect("kvstate.h");
    let declared: BTreeSet<String> = declared_calls(&header).into_iter().collect();
    let text = fs::read_to_string(repo("include/symbols.txt")).expect("include/symbols.txt");
    let listed: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    assert_eq!(declared, listed, "declared (left) and exported (right) differ");
}

#[test]
fn the_static_library_needs_the_native_libraries_that_are_documented() {
    let dir = temp_dir();
    let source = dir.path().join("all.rs");
    fs::write(&source, "extern crate kvstate;").expect("the source");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .args(["--crate-type", "staticlib", "--edition", "2024", "--print", "native-static-libs"])
        .arg("--extern")
        .arg(format!("kvstate={}", cc::lib_dir().join("libkvstate.rlib").display()))
        .arg("-L")
        .arg(format!("dependency={}", cc::lib_dir().display()))
        .arg("--out-dir")
        .arg(dir.path())
        .arg(source)
        .output()
        .expect("rustc");
    let notes = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{notes}");
    let line = notes.lines().find_map(|line| line.split_once("native-static-libs: "));
    let needed: BTreeSet<&str> = line.expect("the note").1.split_whitespace().collect();
    assert_eq!(needed, BTreeSet::from(cc::NATIVE_LIBS));
}

/// Every status once; a new one does not compile until it is listed here.
fn number_in_c(status: Status) -> (&'static str, i32) {
    macro_rules! numbers {
        ($($variant:ident = $constant:ident),* $(,)?) => {
            match status { $(Status::$variant => (stringify!($constant), capi::$constant)),* }
        };
    }
    numbers!(
        Ok = KVS_STATUS_OK,
        InvalidArgument = KVS_STATUS_INVALID_ARGUMENT,
        InvalidHandle = KVS_STATUS_INVALID_HANDLE,
        Poisoned = KVS_STATUS_POISONED,
        BufferTooSmall = KVS_STATUS_BUFFER_TOO_SMALL,
        Truncated = KVS_STATUS_TRUNCATED,
        Corrupt = KVS_STATUS_CORRUPT,
        UnsupportedVersion = KVS_STATUS_UNSUPPORTED_VERSION,
        Mismatch = KVS_STATUS_MISMATCH,
        RotationUnstated = KVS_STATUS_ROTATION_UNSTATED,
        NoSpace = KVS_STATUS_NO_SPACE,
        NoDeviceState = KVS_STATUS_NO_DEVICE_STATE,
        CannotShift = KVS_STATUS_CANNOT_SHIFT,
        ShiftFailed = KVS_STATUS_SHIFT_FAILED,
        Stale = KVS_STATUS_STALE,
        Io = KVS_STATUS_IO,
        OutOfMemory = KVS_STATUS_OUT_OF_MEMORY,
        Internal = KVS_STATUS_INTERNAL,
        Callback = KVS_STATUS_CALLBACK,
        Cancelled = KVS_STATUS_CANCELLED,
        NoCuda = KVS_STATUS_NO_CUDA,
        NoDevice = KVS_STATUS_NO_DEVICE,
        DriverTooOld = KVS_STATUS_DRIVER_TOO_OLD,
        Device = KVS_STATUS_DEVICE,
        StreamCapturing = KVS_STATUS_STREAM_CAPTURING,
        Locked = KVS_STATUS_LOCKED,
        OverBudget = KVS_STATUS_OVER_BUDGET,
        PositionsMeet = KVS_STATUS_POSITIONS_MEET,
        CannotCut = KVS_STATUS_CANNOT_CUT,
    )
}

#[test]
fn every_status_constant_of_the_header_is_the_number_of_a_status() {
    use Status as S;
    let all = [
        S::Ok,
        S::InvalidArgument,
        S::InvalidHandle,
        S::Poisoned,
        S::BufferTooSmall,
        S::Truncated,
        S::Corrupt,
        S::UnsupportedVersion,
        S::Mismatch,
        S::RotationUnstated,
        S::NoSpace,
        S::NoDeviceState,
        S::CannotShift,
        S::ShiftFailed,
        S::Stale,
        S::Io,
        S::OutOfMemory,
        S::Internal,
        S::Callback,
        S::Cancelled,
        S::NoCuda,
        S::NoDevice,
        S::DriverTooOld,
        S::Device,
        S::StreamCapturing,
        S::Locked,
        S::OverBudget,
        S::PositionsMeet,
        S::CannotCut,
    ];
    let header = fs::read_to_string(repo("include/kvstate.h")).expect("kvstate.h");
    let in_header: BTreeMap<&str, i32> = header
        .lines()
        .filter_map(|line| line.strip_prefix("#define ")?.split_once(' '))
        .filter(|(name, _)| name.starts_with("KVS_STATUS_"))
        .map(|(name, number)| (name, number.parse().expect("a number")))
        .collect();
    assert_eq!(in_header.len(), all.len());
    for status in all {
        let (name, number) = number_in_c(status);
        assert_eq!(number, status as i32, "{name}");
        assert_eq!(in_header.get(name), Some(&number), "{name}");
    }
}

// The C tests: a file of cases each, and a Rust test for each case.

fn on_the_host(exe: &Path, case: &str) {
    let dir = temp_dir();
    run(Command::new(exe).arg(case).current_dir(dir.path()));
}

/// Runs a case on the emulated devices: work that is queued happens late, then early and in another order.
fn on_devices(exe: &Path, case: &str) {
    for mode in ["lazy", "eager"] {
        let dir = temp_dir();
        run(with_devices(Command::new(exe).arg(case).current_dir(dir.path())).env("FAKECUDA_MODE", mode));
    }
}

fn on_the_host_and_on_devices(exe: &Path, case: &str) {
    on_the_host(exe, case);
    on_devices(exe, case);
}

/// Has a program find the emulated driver, and its tests use device 0.
fn with_devices(command: &mut Command) -> &mut Command {
    let cuda = FakeCuda::load();
    command
        .env("LD_LIBRARY_PATH", &cuda.folder)
        .env("FAKECUDA_KERNELS", &cuda.kernels)
        .env("TEST_DEVICE", "0")
}

macro_rules! c_tests {
    ($module:ident $on:ident: $($case:ident),+ $(,)?) => {
        mod $module {
            use super::*;

            fn exe() -> &'static Path {
                static EXE: OnceLock<PathBuf> = OnceLock::new();
                EXE.get_or_init(|| {
                    let mut compiler = cc::c();
                    compiler.arg(repo(concat!("tests/c/", stringify!($module), ".c")));
                    compiler.arg(format!("-DFIXTURES=\"{}\"", repo("tests/fixtures").display()));
                    link(&mut compiler, Link::Dynamic);
                    build(compiler, Path::new(env!("CARGO_TARGET_TMPDIR")), stringify!($module))
                })
            }

            $(#[test]
            fn $case() {
                $on(exe(), stringify!($case));
            })+

            #[test]
            fn every_case_is_run() {
                let listed = run(&mut Command::new(exe()));
                assert_eq!(listed.lines().collect::<Vec<_>>(), [$(stringify!($case)),+]);
            }
        }
    };
}

c_tests! { structs on_the_host:
    a_size_below_the_first_version_is_refused,
    a_struct_that_was_not_filled_is_refused,
    a_larger_struct_is_accepted_if_what_is_unknown_is_zero,
    a_larger_struct_is_refused_if_something_unknown_is_set,
    init_writes_as_many_bytes_as_it_is_told,
    the_inline_defaults_are_those_of_the_init_calls,
    memory_usage_is_filled_as_far_as_it_is_known,
    the_elements_of_an_array_have_one_size,
    reserved_fields_are_zero,
    layouts_without_effect_are_refused,
    structs_may_go_once_the_context_is_there,
}

c_tests! { failures on_the_host:
    a_null_handle_fails_every_call,
    a_null_argument_fails_every_call,
    free_calls_take_null,
    arrays_of_no_elements_may_be_null,
    unknown_flag_bits_are_refused,
    sequence_ids_out_of_range_are_refused,
    indices_out_of_range_are_refused,
    a_buffer_that_is_too_small_is_untouched,
    out_parameters_are_untouched_on_failure,
    a_context_works_on_after_failed_calls,
    each_failure_is_one_log_line,
    a_success_leaves_the_last_reason,
}

c_tests! { threads on_the_host:
    the_last_error_is_per_thread,
    const_calls_run_side_by_side,
    two_contexts_are_independent,
    a_context_moves_between_threads,
}

c_tests! { engine on_the_host:
    a_slot_is_stale_once_the_cache_has_changed,
    a_slot_of_another_context_is_refused,
    a_full_cache_has_no_slot,
    the_number_of_cells_asked_for_is_that_of_the_tokens,
    a_layer_without_v_has_a_null_plane,
    a_cell_tells_what_it_holds,
    adopted_rows_round_trip_and_gaps_are_untouched,
    adopted_transposed_v_round_trips_and_gaps_are_untouched,
    strides_that_make_cells_overlap_are_refused,
    the_shift_callback_gets_the_shifted_cells_before_a_save,
    a_partial_state_of_full_attention_rotates_nothing,
    a_save_fails_if_the_shift_callback_does,
    nobody_who_rotates_means_no_shifts,
    k_is_rotated_by_the_rope_of_its_layer,
    rope_that_does_not_fit_is_refused,
    shifts_are_not_applied_by_the_library_where_the_engine_does_it,
    an_engine_that_rotates_asks_and_says_when_it_has,
    a_callback_and_a_promise_of_the_engine_exclude_each_other,
}

c_tests! { transfer on_the_host:
    a_save_and_a_load_report_until_their_end,
    a_cancelled_save_leaves_the_old_file,
    a_cancelled_load_leaves_the_context,
    a_writer_reports_and_can_be_cancelled,
    a_reader_takes_threads_and_reports_nothing,
    what_is_reserved_is_zero,
}

c_tests! { view on_the_host:
    init_writes_defaults_and_checks_the_size,
    structs_of_another_size_are_refused,
    a_state_written_in_turns_is_that_of_a_context,
    a_state_read_in_turns_takes_the_cells_that_it_reports,
    a_whole_context_is_read_in_turns,
    a_mirrored_cache_takes_the_cells_that_are_given,
    given_cells_that_do_not_fit_empty_the_destination,
    layouts_without_room_are_refused_before_anything_changes,
    input_that_ends_leaves_an_empty_destination,
    a_shared_view_writes_and_reads_nothing,
    a_callback_that_is_missing_is_refused,
    a_callback_that_fails_ends_the_call,
    what_a_visit_tells_is_checked,
    a_visit_that_passes_over_a_refusal_is_refused,
    a_view_that_makes_no_sense_is_refused_by_field,
    a_plane_that_differs_between_streams_is_refused,
    a_cache_without_v_has_none_in_its_state,
    tensors_are_reached_through_access_where_data_is_null,
    a_tensor_that_cannot_be_written_fails_finish,
    a_context_reads_what_a_writer_wrote,
    a_view_reads_what_a_context_wrote,
    damaged_bytes_are_refused_by_the_plan_and_change_nothing,
    sections_of_the_caller_stand_beside_a_view,
    a_file_is_that_of_a_context_and_comes_back,
    a_file_of_a_whole_context_is_that_of_a_context,
    a_legacy_partial_state_is_dropped_after_a_restart,
    an_on_device_state_without_its_tensors_is_planned_and_not_read,
    an_on_device_state_of_a_writer_comes_back,
    a_section_is_read_only_as_it_was_planned,
    finish_fails_unless_all_that_was_planned_has_been_read,
    finish_fails_after_a_plan_or_a_read_that_failed,
    a_state_without_attention_sections_is_finished_without_a_plan,
    planning_ends_and_tensors_are_read_with_the_rewind,
    bytes_of_a_tensor_that_wrap_around_are_refused,
    a_callback_that_uses_its_reader_is_refused,
    a_plan_is_stale_once_its_cells_are_taken,
    a_section_is_read_into_the_cache_that_it_was_planned_for,
    a_view_that_was_planned_and_is_then_shared_is_refused,
    a_file_that_does_not_record_rotation_needs_to_be_told,
    a_reader_that_is_freed_before_finish_leaves_the_tensors_alone,
    a_null_handle_or_one_of_another_kind_fails_every_call,
    a_null_argument_fails_every_call,
}

c_tests! { kv_bytes on_the_host_and_on_devices:
    what_is_set_is_got_and_saved,
    bytes_outside_a_plane_are_refused,
    planes_that_are_not_there_are_refused,
    the_memory_that_is_taken_is_told,
}

c_tests! { snapshot on_the_host_and_on_devices:
    a_snapshot_is_what_a_save_was_when_it_was_taken,
    a_snapshot_is_restored_into_another_sequence_and_another_context,
    a_snapshot_of_the_whole_context_replaces_all_sequences,
    a_snapshot_outlives_its_context,
    a_file_of_a_snapshot_is_that_of_a_save_when_it_was_taken,
    what_a_snapshot_takes_is_where_its_cache_is,
    a_job_without_tensors_is_done_at_its_end,
    a_save_in_the_background_has_the_bytes_of_a_blocking_one,
    a_job_goes_on_without_its_snapshot_and_its_context,
    progress_cancels_a_job,
    a_job_is_polled_and_cancelled_while_another_thread_waits,
    a_job_that_is_freed_is_cancelled,
    a_save_that_fails_in_the_background_fails_the_wait,
    a_snapshot_that_does_not_fit_changes_nothing,
    what_makes_no_snapshot_is_refused,
    a_buffer_that_is_too_small_is_untouched,
    a_partial_snapshot_has_no_file,
    a_handle_that_is_none_fails_every_call,
    a_null_argument_fails_every_call,
}

c_tests! { checkpoint on_the_host_and_on_devices:
    a_sequence_says_where_it_can_be_rewound,
    a_sequence_says_why_it_cannot_be_rewound,
    checkpoints_tell_what_they_cover,
    a_history_that_diverges_resumes_at_the_best_checkpoint,
    a_checkpoint_says_why_it_does_not_serve,
    checkpoints_keep_to_their_number_and_bytes,
    checkpoints_outlive_their_context,
    checkpoints_go_through_a_slot_file_to_another_context,
    a_checkpoint_that_does_not_belong_to_the_sequence_is_refused,
    parameters_that_make_no_sense_are_refused,
    arguments_out_of_range_change_nothing,
    a_handle_that_is_none_fails_every_call,
    a_null_argument_fails_every_call,
}

c_tests! { slot_file on_the_host:
    everything_is_saved_and_comes_back,
    a_save_in_the_background_is_that_of_the_slot_when_it_began,
    a_save_in_the_background_that_is_cancelled_leaves_the_old_file,
    what_makes_no_sense_begins_no_save,
    without_parameters_it_is_a_sequence_file,
    a_file_of_a_plain_save_loads_with_a_note,
    a_draft_state_that_does_not_fit_is_dropped_and_says_why,
    a_damaged_appendix_is_left_out_and_a_damaged_state_refused,
    a_file_of_another_model_is_refused,
    a_file_that_lacks_what_is_required_is_refused,
    a_fingerprint_is_of_files_and_settings,
    a_writer_saves_a_slot_and_a_reader_reads_it,
    a_server_appends_behind_the_checksums_of_a_writer,
    what_a_reader_compares_is_refused_before_it_reads,
    what_makes_no_sense_for_writers_and_readers_is_refused,
    a_name_in_a_directory_has_no_separator,
    what_makes_no_sense_is_refused,
    structs_of_another_size_are_refused,
    a_null_argument_fails_every_call,
}

c_tests! { range on_the_host_and_on_devices:
    a_range_is_the_state_of_its_positions,
    pieces_that_are_added_are_the_whole,
    positions_that_meet_are_refused,
    a_file_of_a_range_is_a_sequence_file,
    the_prompt_of_a_file_is_loaded_without_the_reply,
    a_slot_is_loaded_up_to_a_position,
    a_prefix_whose_window_is_gone_is_refused,
    what_makes_no_sense_is_refused,
    a_null_argument_fails_every_call,
}

c_tests! { autosave on_the_host_and_on_devices:
    a_slot_is_restored_by_the_next_run,
    what_does_not_fit_is_a_cold_start_that_says_why,
    a_save_is_due_after_so_many_tokens_and_runs_in_the_background,
    a_save_can_be_cancelled,
    a_sidecar_has_the_draft,
    a_folder_has_one_keeper_and_a_budget,
    what_was_odd_is_said,
    what_makes_no_sense_is_refused,
    structs_of_another_size_are_refused,
    a_null_argument_fails_every_call,
}

c_tests! { sections on_the_host_and_on_devices:
    a_hybrid_writes_again_what_llama_cpp_wrote,
    a_slot_says_which_rows_a_ubatch_reads_and_writes,
    the_end_is_cut_off_as_far_as_there_are_rollback_planes,
    a_hybrid_resumes_at_a_checkpoint,
    bytes_of_recurrent_states_that_are_not_there_are_refused,
    states_of_the_caller_are_read_and_written_where_they_are,
    recurrent_states_that_make_no_sense_are_refused,
    an_indexer_sits_on_the_cells_of_its_attention_cache,
    a_shared_section_has_nothing_in_a_state,
    a_section_is_described_by_what_its_kind_names,
    arguments_that_make_no_sense_fail_every_call,
}

c_tests! { dsv4 on_the_host_and_on_devices:
    a_dsv4_memory_writes_again_what_llama_cpp_wrote,
    a_dsv4_memory_says_where_its_tensors_are,
    bytes_of_a_dsv4_memory_are_set_and_got,
    a_dsv4_memory_is_adopted,
    a_dsv4_memory_that_makes_no_sense_is_refused,
}

c_tests! { device on_devices:
    devices_are_checked_by_number,
    layers_on_two_devices_and_the_host_have_the_state_of_the_host,
    addresses_of_a_device_are_adopted_whatever_number_is_named,
    the_driver_says_whose_memory_an_address_is,
    a_save_runs_behind_what_is_queued_on_the_stream,
    streams_that_make_no_sense_are_refused,
    a_stream_that_is_being_captured_fails_the_calls,
    pinned_memory_takes_and_gives_states,
    pinned_memory_that_makes_no_sense_is_refused,
    views_share_staging_that_can_be_freed,
    tensors_of_a_device_are_written_and_read_like_any_other,
    a_state_that_stays_on_the_device_can_be_dropped,
    states_are_in_host_memory,
    a_view_on_a_device_is_planned_only_if_its_copies_can_be_had,
    staging_is_freed_on_request,
    a_device_that_is_lost_is_told_by_its_check,
    a_call_of_the_driver_that_fails_is_named,
}

#[test]
fn exceptions_of_cpp_callbacks_pass_around_the_library_and_nothing_is_lost() {
    let dir = temp_dir();
    let mut compiler = cc::cpp();
    compiler.arg("-g").arg(repo("tests/c/view_exceptions.cpp"));
    link(&mut compiler, Link::Dynamic);
    let exe = build(compiler, dir.path(), "view_exceptions");
    run(&mut Command::new(&exe));
    under_valgrind(&exe);
}

// Examples

/// What an example wrote to its folder and to standard output.
#[derive(Debug, PartialEq)]
struct Run {
    stdout: String,
    files: BTreeMap<String, Vec<u8>>,
}

fn run_example(command: &mut Command) -> Run {
    let dir = temp_dir();
    let stdout = run(command.arg(dir.path()));
    let files = fs::read_dir(dir.path())
        .expect("the folder")
        .map(|entry| {
            let entry = entry.expect("an entry");
            (entry.file_name().into_string().expect("UTF-8"), fs::read(entry.path()).expect("a file"))
        })
        .collect();
    Run { stdout, files }
}

fn c_example(how: Link, dir: &Path) -> PathBuf {
    let mut compiler = cc::c();
    compiler.arg("-g").arg(repo("ffi-examples/c/example.c"));
    link(&mut compiler, how);
    build(compiler, dir, "example")
}

#[test]
fn the_c_example_does_the_same_linked_statically_and_dynamically() {
    let dir = temp_dir();
    let dynamic = run_example(&mut Command::new(c_example(Link::Dynamic, dir.path())));
    let fixed = run_example(&mut Command::new(c_example(Link::Static, dir.path())));
    assert_eq!(dynamic, fixed);
    assert_eq!(dynamic.files.keys().collect::<Vec<_>>(), ["checkpoint.bin", "sequence.bin", "slot.bin"]);
    assert!(dynamic.stdout.contains("the same bytes"), "{}", dynamic.stdout);
}

/// Python with the wrapper and the library in reach, or none.
fn python() -> Option<Command> {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: there is no python3");
        return None;
    }
    let mut python = Command::new("python3");
    python.env("KVSTATE_LIB", cc::dylib()).env("PYTHONPATH", repo("ffi-examples/python")).arg("-B");
    Some(python)
}

/// Runs a script of tests/python with caches in host memory, and again with caches on an emulated device.
fn in_python_on_the_host_and_on_a_device(script: &str) {
    let Some(mut python) = python() else { return };
    run(python.arg(repo(&format!("tests/python/{script}.py"))));
    run(with_devices(&mut python));
}

#[test]
fn the_states_of_the_python_example_are_those_of_the_c_example() {
    let Some(mut python) = python() else { return };
    let dir = temp_dir();
    let c = run_example(&mut Command::new(c_example(Link::Dynamic, dir.path())));
    let python = run_example(python.arg(repo("ffi-examples/python/example.py")));
    assert_eq!(c.stdout, python.stdout);
    assert_eq!(c.files.keys().collect::<Vec<_>>(), python.files.keys().collect::<Vec<_>>());
    for (name, bytes) in &c.files {
        assert!(python.files[name] == *bytes, "{name} differs");
    }
}

#[test]
fn the_python_wrapper_takes_buffers_raises_errors_shifts_and_saves_in_the_background() {
    in_python_on_the_host_and_on_a_device("wrapper");
}

#[test]
fn the_python_wrapper_describes_sections_of_every_kind() {
    in_python_on_the_host_and_on_a_device("sections");
}

#[test]
fn the_python_wrapper_saves_and_loads_slot_files() {
    in_python_on_the_host_and_on_a_device("slot_files");
}

#[test]
fn the_python_wrapper_takes_ranges_and_goes_back_to_checkpoints() {
    in_python_on_the_host_and_on_a_device("ranges");
}

#[test]
fn the_python_wrapper_keeps_slots_in_a_folder() {
    in_python_on_the_host_and_on_a_device("autosave");
}

#[test]
fn handles_that_are_closed_and_wrong_arguments_raise_in_python() {
    in_python_on_the_host_and_on_a_device("misuse");
}

#[test]
fn the_structs_of_the_python_wrapper_are_those_of_the_header() {
    let Some(mut python) = python() else { return };
    run(python.arg(repo("tests/python/structs.py")).arg(repo("include")));
}

#[test]
fn the_c_example_is_clean_under_valgrind() {
    let dir = temp_dir();
    under_valgrind(&c_example(Link::Dynamic, dir.path()));
}

#[test]
fn the_cpp_example_is_clean_under_valgrind() {
    let dir = temp_dir();
    let mut compiler = cc::cpp();
    compiler.arg("-g").arg(repo("ffi-examples/cpp/example.cpp"));
    link(&mut compiler, Link::Dynamic);
    under_valgrind(&build(compiler, dir.path(), "example_cpp"));
}

/// Runs a program in a folder of its own: no invalid access, nothing lost.
fn under_valgrind(exe: &Path) {
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("skipped: valgrind is not installed");
        return;
    }
    let checks =
        ["--quiet", "--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite,indirect"];
    run_example(Command::new("valgrind").args(checks).arg(exe));
}
