//! Files: what they hold, what is refused, and that neither a failure nor a kill loses the old one.
#![allow(missing_docs, reason = "a test")]

mod place;

use std::fs;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvstate::context::{Shift, UbatchToken};
use kvstate::format::GgmlType;
use kvstate::memory::{KvParams, LayerParams, TensorParams};
use kvstate::session::{seq_file_token_count, seq_file_tokens};
use kvstate::state::{RecordSink, Sink, write_file};
use kvstate::storage::{
    CellMap, Plane, PlaneShape, Progress, ProgressCallback, Region, StagingParams, Threads, Transfer,
};
use kvstate::types::{CellExt, StateFlags};
use kvstate::{Context, ContextParams, Error, Status};
use tempfile::TempDir;

const NONE: StateFlags = StateFlags::empty();

fn params() -> ContextParams {
    let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 32 };
    let kv = KvParams::new(256, 2, LayerParams { k: tensor, v: Some(tensor) });
    ContextParams { arch: "test".into(), ..ContextParams::new(3, vec![kv.into()]) }
}

/// A context whose sequence 0 has `n` tokens.
fn context(n: i32) -> Context {
    let mut context = place::context(params()).unwrap();
    decode(&mut context, n);
    context
}

fn decode(context: &mut Context, n: i32) {
    let token = |pos| UbatchToken { pos, ext: CellExt::default(), seq_ids: &[0] };
    let slot = context.prepare(&(0..n).map(token).collect::<Vec<_>>()).unwrap();
    context.commit(&slot).unwrap();
}

fn whole(context: &mut Context) -> Vec<u8> {
    let mut state = vec![0; usize::try_from(context.state_get_size().unwrap()).unwrap()];
    context.state_get_data(&mut state).unwrap();
    state
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A folder with the slot file of 5 positions and 4 tokens.
fn saved() -> (TempDir, PathBuf, u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let size = context(5).state_seq_save_file(&path, 0, &[7, 8, 9, -1]).unwrap();
    (dir, path, size)
}

/// Loads into a fresh context that must stay as it was, if the load is refused.
fn refused(path: &Path) -> Error {
    let mut target = context(3);
    let before = whole(&mut target);
    let error = target.state_seq_load_file(path, 0, 4).unwrap_err();
    assert_eq!(whole(&mut target), before);
    error
}

#[test]
fn a_sequence_file_is_header_tokens_and_the_state_without_its_own_header() {
    let (_dir, path, size) = saved();
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, size);
    let words: Vec<u32> = bytes[..28].as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect();
    assert_eq!(words, [0x6767_7371, 4, 4, 7, 8, 9, u32::MAX]);
    let mut source = context(5);
    let mut blob = vec![0; usize::try_from(source.state_seq_get_size(0, NONE).unwrap()).unwrap()];
    source.state_seq_get_data(&mut blob, 0, NONE).unwrap();
    assert_eq!(bytes[28..], blob[8..]);
}

#[test]
fn a_sequence_file_gives_back_its_tokens_and_the_end_of_the_state() {
    let (_dir, path, size) = saved();
    let mut target = context(0);
    let loaded = target.state_seq_load_file(&path, 2, 4).unwrap();
    assert_eq!((loaded.tokens, loaded.state_end), (vec![7, 8, 9, -1], size));
    assert_eq!(target.seq_pos_max(2).unwrap(), 4);
    assert_eq!(seq_file_token_count(&path).unwrap(), 4);
    assert_eq!(seq_file_tokens(&path).unwrap(), [7, 8, 9, -1]);
}

#[test]
fn bytes_behind_the_state_are_the_appendices_of_a_sequence_file() {
    let (_dir, path, size) = saved();
    let mut bytes = fs::read(&path).unwrap();
    bytes.extend(*b"SCKP and so on");
    fs::write(&path, &bytes).unwrap();
    assert_eq!(context(0).state_seq_load_file(&path, 0, 4).unwrap().state_end, size);
}

#[test]
fn a_whole_context_file_comes_back_and_must_hold_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("session.bin");
    let mut source = context(6);
    source.seq_cp(0, 2, 2, 5).unwrap();
    let size = source.state_save_file(&path, &[1, 2]).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, size);
    assert_eq!(bytes[..12], [0x6e, 0x73, 0x67, 0x67, 11, 0, 0, 0, 2, 0, 0, 0]);

    let mut target = context(1);
    let loaded = target.state_load_file(&path, 2).unwrap();
    assert_eq!((loaded.tokens, loaded.state_end), (vec![1, 2], size));
    assert_eq!(whole(&mut target), whole(&mut source));

    bytes.push(0);
    fs::write(&path, &bytes).unwrap();
    let before = whole(&mut target);
    let error = target.state_load_file(&path, 2).unwrap_err();
    assert_eq!(
        error.to_string(),
        "failed to restore session state: did not read all of the session file data: \
         1 bytes behind the state (expected none)"
    );
    assert_eq!(whole(&mut target), before);
}

#[test]
fn a_whole_context_of_another_architecture_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("session.bin");
    context(2).state_save_file(&path, &[]).unwrap();
    let mut other = place::context(ContextParams { arch: "other".into(), ..params() }).unwrap();
    assert_eq!(
        other.state_load_file(&path, 0).unwrap_err().to_string(),
        "failed to restore session state: wrong model arch: the state has 'test', the cache 'other' \
         (whole context)"
    );
}

#[test]
fn more_tokens_than_the_caller_has_room_for_are_refused() {
    let (_dir, path, _) = saved();
    let error = context(0).state_seq_load_file(&path, 0, 3).unwrap_err();
    assert_eq!(error.to_string(), "token count in sequence state file exceeded capacity! 4 > 3");
}

#[test]
fn another_magic_or_version_is_refused_with_both() {
    let (_dir, path, _) = saved();
    let good = fs::read(&path).unwrap();
    for (at, value, text) in [(0, 0x72, "67677372, 00000004"), (4, 5, "67677371, 00000005")] {
        let mut bytes = good.clone();
        bytes[at] = value;
        fs::write(&path, &bytes).unwrap();
        let want = format!("unknown (magic, version) for sequence state file: {text}");
        assert_eq!(refused(&path).to_string(), want);
        assert_eq!(seq_file_token_count(&path).unwrap_err().to_string(), want);
    }
    // A whole context is no sequence.
    let mut source = context(2);
    source.state_save_file(&path, &[]).unwrap();
    assert_eq!(refused(&path).status(), Status::UnsupportedVersion);
}

#[test]
fn a_file_that_ends_anywhere_is_refused_and_changes_nothing() {
    let (_dir, path, _) = saved();
    let good = fs::read(&path).unwrap();
    for len in place::cases(0..good.len()) {
        fs::write(&path, &good[..len]).unwrap();
        let error = refused(&path);
        assert_eq!(error.status(), Status::Truncated, "{len}: {error}");
    }
    fs::write(&path, [&good[..8], &u32::MAX.to_le_bytes()].concat()).unwrap();
    assert_eq!(seq_file_token_count(&path).unwrap_err().status(), Status::Truncated);
}

#[test]
fn what_is_no_readable_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.bin");
    for path in [missing.as_path(), dir.path(), Path::new("")] {
        let error = refused(path);
        assert_eq!(error.status(), Status::Io);
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
}

#[test]
fn a_save_where_none_is_possible_is_named_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("folder")).unwrap();
    for name in ["nowhere/slot.bin", "folder"] {
        let path = dir.path().join(name);
        let error = context(2).state_seq_save_file(&path, 0, &[]).unwrap_err();
        assert_eq!(error.status(), Status::Io);
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
    assert_eq!(names(dir.path()), ["folder"]);
}

#[test]
fn a_failed_save_leaves_the_old_file_and_nothing_beside_it() {
    let (dir, path, _) = saved();
    let old = fs::read(&path).unwrap();
    let shift = Shift::Callback(Box::new(|_| Err("the device is gone".into())));
    let mut failing = place::context(ContextParams { shift, ..params() }).unwrap();
    decode(&mut failing, 4);
    failing.seq_add(0, 2, -1, 1).unwrap();
    let error = failing.state_seq_save_file(&path, 0, &[]).unwrap_err();
    assert_eq!(error.to_string(), "2 cells have a pending shift: the device is gone (section kv, stream 0)");
    assert_eq!(fs::read(&path).unwrap(), old);
    assert_eq!(names(dir.path()), ["slot.bin"]);
}

#[test]
fn a_save_replaces_the_file_and_leaves_nothing_beside_it() {
    let (dir, path, _) = saved();
    let size = context(9).state_seq_save_file(&path, 0, &[]).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), size);
    assert_eq!(names(dir.path()), ["slot.bin"]);
}

#[cfg(unix)]
#[test]
fn a_saved_conversation_is_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let (_dir, path, _) = saved();
    let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(), 0o600);
    // What somebody has given to a group stays the group's.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    context(9).state_seq_save_file(&path, 0, &[]).unwrap();
    assert_eq!(mode(), 0o640);
}

#[cfg(unix)]
#[test]
fn a_save_through_a_symbolic_link_replaces_what_it_points_to() {
    let (dir, path, _) = saved();
    let link = dir.path().join("link.bin");
    std::os::unix::fs::symlink("slot.bin", &link).unwrap();
    let size = context(9).state_seq_save_file(&link, 0, &[]).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::metadata(&path).unwrap().len(), size);
}

#[cfg(unix)]
#[test]
fn a_link_to_a_file_that_is_not_there_yet_gets_it() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("link.bin");
    std::os::unix::fs::symlink("later.bin", &link).unwrap();
    context(2).state_seq_save_file(&link, 0, &[]).unwrap();
    assert_eq!(names(dir.path()), ["later.bin", "link.bin"]);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_neither_replaced_nor_read() {
    // A socket stands for devices and pipes: as root, replacing /dev/null would succeed.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let error = context(2).state_seq_save_file(&path, 0, &[]).unwrap_err();
    assert_eq!(error.to_string(), format!("open {}: not a regular file", path.display()));
    assert_eq!(names(dir.path()), ["socket"]);
    assert_eq!(refused(Path::new("/dev/null")).to_string(), "read /dev/null: not a regular file");
}

/// Saves 100 and 200 positions in turn until it is killed.
#[test]
fn killed_saver_child() {
    let Some(path) = std::env::var_os("KVSTATE_TEST_SAVER").map(PathBuf::from) else { return };
    let mut states = [context(100), context(200)];
    loop {
        for state in &mut states {
            state.state_seq_save_file(&path, 0, &[1]).unwrap();
        }
    }
}

#[test]
fn a_process_killed_in_mid_save_leaves_a_whole_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    context(100).state_seq_save_file(&path, 0, &[1]).unwrap();
    let mut seen = [0, 0];
    for round in 0..40 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed_saver_child"])
            .env("KVSTATE_TEST_SAVER", &path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(20_000 + round * 977));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut target = context(0);
        let loaded = target.state_seq_load_file(&path, 0, 1).unwrap();
        assert_eq!(loaded.tokens, [1]);
        match target.seq_pos_max(0).unwrap() {
            99 => seen[0] += 1,
            199 => seen[1] += 1,
            other => panic!("a state of {other} positions was never saved"),
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "killed before it saved: {seen:?}");
}

#[test]
fn an_unsynced_file_has_the_same_bytes_and_replaces_the_old_one_whole() {
    let (dir, path, size) = saved();
    let synced = fs::read(&path).unwrap();
    fs::write(&path, b"an older and shorter file").unwrap();
    let mut context = place::context(ContextParams { sync_files: false, ..params() }).unwrap();
    decode(&mut context, 5);
    assert_eq!(context.state_seq_save_file(&path, 0, &[7, 8, 9, -1]).unwrap(), size);
    assert_eq!(fs::read(&path).unwrap(), synced);
    assert_eq!(names(dir.path()), ["slot.bin"]);
}

// Large files: in chunks, on threads, reported, cancelled

/// Bytes of a row of [`large`], which has two layers of them in K and two in V.
const ROW: usize = 2048;
/// Positions of each sequence of [`large`].
const N_POS: i32 = 768;

/// Sequences 0 and 1 in turn in all cells, 6 MiB each.
fn large(threads: usize) -> Context {
    let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 1024 };
    let kv = KvParams::new(2 * N_POS.unsigned_abs(), 2, LayerParams { k: tensor, v: Some(tensor) });
    // On a device: chunks of many rows, and many chunks.
    let staging = StagingParams { size: 256 << 10, count: 3 };
    let params = ContextParams { staging, ..ContextParams::new(3, vec![kv.into()]) };
    let mut context =
        place::context(ContextParams { sync_files: false, threads: Threads::new(threads), ..params })
            .unwrap();
    let token = |i: i32| UbatchToken {
        pos: i / 2,
        ext: CellExt::default(),
        seq_ids: if i % 2 == 0 { &[0] } else { &[1] },
    };
    let slot = context.prepare(&(0..2 * N_POS).map(token).collect::<Vec<_>>()).unwrap();
    context.commit(&slot).unwrap();
    for (seq_id, of_seq) in [(0, 0), (1, 0x40)] {
        let mut state = sequence(&mut context, seq_id);
        // Tensors lie behind each other, 12 bytes of type and row size before each; every row is another.
        let (mut end, tensor) = (state.len(), ROW * N_POS as usize);
        for salt in 0..4_u8 {
            let bytes = &mut state[end - tensor..end];
            for (i, row) in (0_u8..=250).cycle().zip(bytes.chunks_exact_mut(ROW)) {
                row.fill(i ^ salt ^ of_seq);
            }
            end -= tensor + 12;
        }
        context.state_seq_set_data(&state, seq_id, NONE).unwrap();
    }
    context
}

fn sequence(context: &mut Context, seq_id: i32) -> Vec<u8> {
    let mut state = vec![0; usize::try_from(context.state_seq_get_size(seq_id, NONE).unwrap()).unwrap()];
    context.state_seq_get_data(&mut state, seq_id, NONE).unwrap();
    state
}

/// Where the reports of the context's next transfer go. `each` gets the number of the report, from 0.
fn reports(
    context: &mut Context,
    mut each: impl FnMut(usize, Progress) -> ControlFlow<()> + Send + 'static,
) -> Arc<Mutex<Vec<Progress>>> {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let sent = Arc::clone(&reports);
    context.set_progress(Some(ProgressCallback::new(move |progress| {
        let mut sent = sent.lock().unwrap();
        sent.push(progress);
        each(sent.len() - 1, progress)
    })));
    reports
}

/// The reports of what `transfer` does, which runs to its end.
fn reports_of(context: &mut Context, transfer: impl FnOnce(&mut Context)) -> Vec<Progress> {
    let reports = reports(context, |_, _| ControlFlow::Continue(()));
    transfer(context);
    context.set_progress(None);
    Arc::into_inner(reports).unwrap().into_inner().unwrap()
}

/// Cancels `transfer` at the first report, at one in the middle and at the last.
fn cancelled(
    context: &mut Context,
    mut transfer: impl FnMut(&mut Context) -> Result<(), Error>,
    mut check: impl FnMut(&mut Context),
) {
    for part in [0, 1, 2] {
        reports(context, move |i, Progress { done, total }| {
            let now = [i == 0, done * 2 >= total, done == total][part];
            if now { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let error = transfer(context).unwrap_err();
        assert_eq!(error.status(), Status::Cancelled, "{error}");
        context.set_progress(None);
        check(context);
    }
}

fn assert_reports_end_once(reports: &[Progress], at_least: usize) {
    assert!(reports.len() >= at_least, "{reports:?}");
    assert!(reports.windows(2).all(|pair| pair[0].done <= pair[1].done), "{reports:?}");
    let total = reports[0].total;
    assert!(reports.iter().all(|report| report.total == total), "{reports:?}");
    assert_eq!(reports.iter().filter(|report| report.done == total).count(), 1, "{reports:?}");
}

/// A folder with the file of sequence 0 of [`large`].
fn large_saved() -> (TempDir, PathBuf, Context) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let mut context = large(1);
    context.state_seq_save_file(&path, 0, &[5]).unwrap();
    (dir, path, context)
}

#[test]
fn a_file_of_scattered_rows_has_the_bytes_of_the_state() {
    let (_dir, path, mut context) = large_saved();
    assert!(fs::read(&path).unwrap()[16..] == sequence(&mut context, 0)[8..]);
}

#[test]
fn a_file_of_unbroken_tensors_has_the_bytes_of_the_state() {
    let (_dir, path, mut context) = large_saved();
    // The only sequence of a cache that it fills: all of a tensor is written from where it lies.
    let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 1024 };
    let kv = KvParams::new(N_POS.unsigned_abs(), 2, LayerParams { k: tensor, v: Some(tensor) });
    let staging = StagingParams { size: 256 << 10, count: 3 };
    let params = ContextParams { staging, ..ContextParams::new(1, vec![kv.into()]) };
    let mut dense = place::context(params).unwrap();
    let state = sequence(&mut context, 0);
    dense.state_seq_set_data(&state, 0, NONE).unwrap();
    dense.state_seq_save_file(&path, 0, &[5]).unwrap();
    assert!(fs::read(&path).unwrap()[16..] == state[8..]);
}

#[test]
fn a_save_reports_its_bytes_and_the_end_once() {
    let dir = tempfile::tempdir().unwrap();
    for threads in [1, 2] {
        let path = dir.path().join("slot.bin");
        let reports = reports_of(&mut large(threads), |context| {
            context.state_seq_save_file(&path, 0, &[]).unwrap();
        });
        assert_reports_end_once(&reports, 4);
        assert_eq!(reports[0].total, fs::metadata(&path).unwrap().len());
    }
}

#[test]
fn a_cancelled_save_leaves_the_old_file_and_nothing_beside_it() {
    let (dir, path, _) = large_saved();
    let old = fs::read(&path).unwrap();
    for threads in [1, 2] {
        let mut context = large(threads);
        cancelled(
            &mut context,
            |context| context.state_seq_save_file(&path, 1, &[6]).map(drop),
            |_| {
                assert!(fs::read(&path).unwrap() == old);
                assert_eq!(names(dir.path()), ["slot.bin"]);
            },
        );
    }
}

#[test]
fn a_load_reports_the_end_once_wherever_it_goes() {
    let (_dir, path, _) = large_saved();
    let tensors = 4 * ROW * N_POS as usize;
    for threads in [1, 2] {
        let mut context = large(threads);
        // Over the cells of sequence 1; then beside it.
        let over =
            reports_of(&mut context, |context| drop(context.state_seq_load_file(&path, 1, 1).unwrap()));
        assert_reports_end_once(&over, 4);
        assert_eq!(over[0].total, tensors as u64);
        context.seq_rm(1, -1, -1).unwrap();
        let beside =
            reports_of(&mut context, |context| drop(context.state_seq_load_file(&path, 2, 1).unwrap()));
        assert_reports_end_once(&beside, 1);
        // Cells name their sequence; the tensors behind them are the same.
        let (file, state) = (fs::read(&path).unwrap(), sequence(&mut context, 2));
        assert!(state[state.len() - tensors..] == file[file.len() - tensors..], "{threads} threads");
    }
}

#[test]
fn a_cancelled_load_leaves_the_cache_as_it_was() {
    let (_dir, path, _) = large_saved();
    for (threads, dest) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        let mut context = large(threads);
        if dest == 2 {
            context.seq_rm(1, -1, -1).unwrap();
        }
        let before = whole(&mut context);
        cancelled(
            &mut context,
            |context| context.state_seq_load_file(&path, dest, 1).map(drop),
            |context| assert!(whole(context) == before, "{threads} threads, sequence {dest}"),
        );
    }
}

/// Loads a file that is cut in the middle as soon as `when` is true; returns the cache before and after.
fn truncated_in_mid_load(dest: i32, when: fn(Progress) -> bool) -> (Vec<u8>, Context) {
    let (_dir, path, mut context) = large_saved();
    if dest == 2 {
        context.seq_rm(1, -1, -1).unwrap();
    }
    let before = whole(&mut context);
    let file = fs::File::options().write(true).open(&path).unwrap();
    reports(&mut context, move |_, progress| {
        if when(progress) {
            file.set_len(3 << 20).unwrap();
        }
        ControlFlow::Continue(())
    });
    let error = context.state_seq_load_file(&path, dest, 1).unwrap_err();
    assert_eq!(error.status(), Status::Io);
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    context.set_progress(None);
    (before, context)
}

#[test]
fn a_file_truncated_in_mid_load_is_an_error_and_the_cache_is_as_it_was() {
    for dest in [1, 2] {
        let (before, mut context) = truncated_in_mid_load(dest, |_| true);
        assert!(whole(&mut context) == before, "sequence {dest}");
    }
}

#[test]
fn a_file_truncated_while_it_is_turned_is_an_error_and_the_cache_is_as_it_was() {
    let (_dir, path, mut context) = large_saved();
    let turned = || {
        let tensor = TensorParams { ggml_type: GgmlType::F16, n_embd: 1024 };
        let kv = KvParams::new(2 * N_POS.unsigned_abs(), 2, LayerParams { k: tensor, v: Some(tensor) });
        let kv = KvParams { v_trans: true, ..kv };
        place::context(ContextParams::new(3, vec![kv.into()])).unwrap()
    };
    let mut into = turned();
    let other = sequence(&mut context, 1);
    into.state_seq_set_data(&other, 1, NONE).unwrap();
    let before = whole(&mut into);
    let file = fs::File::options().write(true).open(&path).unwrap();
    reports(&mut into, move |_, _| {
        file.set_len(3 << 20).unwrap();
        ControlFlow::Continue(())
    });
    let error = into.state_seq_load_file(&path, 0, 1).unwrap_err();
    let expected = format!("read {}: the file has become shorter", path.display());
    assert!(error.to_string().ends_with(&expected), "{error}");
    into.set_progress(None);
    assert!(whole(&mut into) == before);
}

#[test]
fn a_file_truncated_when_cells_are_overwritten_leaves_the_destination_empty() {
    let (_, mut context) = truncated_in_mid_load(1, |progress| progress.done == progress.total);
    assert_eq!((context.seq_pos_max(0).unwrap(), context.seq_pos_max(1).unwrap()), (N_POS - 1, -1));
    assert!(sequence(&mut context, 0) == sequence(&mut large(1), 0));
}

/// Takes so many bytes.
struct Narrow(usize);

impl Write for Narrow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.0);
        self.0 -= n;
        if n > 0 { Ok(n) } else { Err(io::Error::other("no more room")) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_failed_write_is_the_error_wherever_it_is() {
    const N_CELLS: u32 = 8192;
    // Gaps between the rows: all of it is gathered.
    let shape = PlaneShape::Rows { row_size: 1024, cell_stride: 2048 };
    let planes = Plane::allocate(&[shape], N_CELLS).unwrap();
    let mut record = RecordSink::default();
    let map = Arc::new(CellMap::of_run(0, N_CELLS).unwrap());
    record.write_tensor(Region::new(&planes[0], &map).unwrap()).unwrap();
    for room in [0, 1 << 20, (8 << 20) - 1] {
        let error = write_file(&record, &mut Narrow(room), &Transfer::default(), None).unwrap_err();
        assert_eq!(error.to_string(), "write : no more room", "{room} bytes");
    }
    write_file(&record, &mut Narrow(8 << 20), &Transfer::default(), None).unwrap();
}

#[test]
fn a_temporary_file_that_somebody_shortens_is_not_renamed_into_place() {
    let (dir, path, _) = large_saved();
    let old = fs::read(&path).unwrap();
    let mut context = large(1);
    let folder = dir.path().to_owned();
    reports(&mut context, move |_, Progress { done, total }| {
        if done == total {
            let temporary = names(&folder).into_iter().find(|name| name.starts_with(".kvstate-")).unwrap();
            fs::File::options().write(true).open(folder.join(temporary)).unwrap().set_len(1000).unwrap();
        }
        ControlFlow::Continue(())
    });
    let error = context.state_seq_save_file(&path, 1, &[6]).unwrap_err().to_string();
    assert!(error.contains("somebody has changed it: it has 1000 bytes"), "{error}");
    assert!(fs::read(&path).unwrap() == old);
    assert_eq!(names(dir.path()), ["slot.bin"]);
}

#[test]
fn a_load_that_moves_nothing_reports_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slot.bin");
    let mut context = context(0);
    context.state_seq_save_file(&path, 0, &[5]).unwrap();
    let told = reports_of(&mut context, |context| drop(context.state_seq_load_file(&path, 1, 1).unwrap()));
    assert_eq!(told, []);
}
