//! A cache on device 0 as Markdown: `make bench-device`, or `cargo bench --bench device`.
//!
//! Every call is timed in turn with a plain copy of as many bytes between the same memories, which is the floor.
//!
//! `-- --write FILE` writes the table; `-- --quick` takes a few MiB, `--emulated` the driver of tests/fakecuda, to see that everything
//! runs.
#![allow(unsafe_code, reason = "plain copies by the driver itself")]

mod common;
#[path = "../tests/fakecuda/mod.rs"]
#[allow(clippy::pedantic, reason = "a part of the tests")]
mod fakecuda;

use std::ffi::{CStr, c_void};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{Read, Write as _};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::ptr::null_mut;
use std::time::Duration;

use cudarc::driver::sys;
use kvstate::context::Shift;
use kvstate::format::GgmlType;
use kvstate::memory::{KvMemory, KvParams, RopeParams, SectionParams};
use kvstate::storage::{CallerStream, alloc_pinned, free_pinned};
use kvstate::types::{RopeType, StateFlags};
use kvstate::{Context, ContextParams};

use common::{Layout, NONE, Pair, check_owners, fill, fitting, rows, timed};

struct Options {
    quick: bool,
    emulated: bool,
    write: Option<PathBuf>,
}

impl Options {
    fn parse() -> Result<Self, String> {
        let mut options = Self { quick: false, emulated: false, write: None };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--bench" => {} // from cargo
                "--quick" => options.quick = true,
                "--emulated" => options.emulated = true,
                "--write" => options.write = Some(args.next().ok_or("--write: a file is missing")?.into()),
                _ => return Err(format!("{arg}: possible are --quick, --emulated and --write FILE")),
            }
        }
        if options.write.is_some() && (options.quick || options.emulated) {
            return Err("--write: figures of --quick and --emulated mean nothing".into());
        }
        Ok(options)
    }

    fn n_layer(&self) -> usize {
        if self.quick { 4 } else { 32 }
    }

    /// Tokens of the saved sequence, 4 KiB each in a layer.
    fn n_tokens(&self) -> usize {
        if self.quick { 64 } else { 6900 }
    }

    fn n_pairs(&self) -> usize {
        if self.quick { 3 } else { 7 }
    }
}

// The driver

fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

fn synchronize() {
    // SAFETY: no arguments.
    ok(unsafe { sys::cuCtxSynchronize() });
}

/// Device 0, whose primary context is current on the main thread until the end.
struct Gpu {
    name: String,
    /// As `cuDriverGetVersion` counts.
    version: i32,
    stream: sys::CUstream,
}

impl Gpu {
    fn open() -> Self {
        let (mut device, mut version, mut context, mut stream) = (0, 0, null_mut(), null_mut());
        let mut name = [0; 128];
        // SAFETY: the out-parameters can be written.
        unsafe {
            ok(sys::cuInit(0));
            ok(sys::cuDriverGetVersion(&raw mut version));
            ok(sys::cuDeviceGet(&raw mut device, 0));
            ok(sys::cuDeviceGetName(name.as_mut_ptr(), 128, device));
            ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, device));
            ok(sys::cuCtxSetCurrent(context));
            ok(sys::cuStreamCreate(&raw mut stream, 1));
        }
        // SAFETY: the driver ends it with a NUL.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        Self { name, version, stream }
    }

    fn stream(&self) -> CallerStream {
        // SAFETY: it stays until the process ends.
        unsafe { CallerStream::new(0, self.stream.cast()) }.expect("a stream of device 0")
    }
}

/// Memory of the device for plain copies.
struct DeviceBytes {
    ptr: u64,
    len: usize,
}

impl DeviceBytes {
    fn new(len: usize) -> Self {
        let mut ptr = 0;
        // SAFETY: `ptr` can be written.
        unsafe {
            ok(sys::cuMemAlloc_v2(&raw mut ptr, len));
            ok(sys::cuMemsetD8_v2(ptr, 1, len));
        }
        Self { ptr, len }
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        // SAFETY: it was allocated, and nothing uses it any more.
        ok(unsafe { sys::cuMemFree_v2(self.ptr) });
    }
}

/// Host memory that has been written, so that its pages are there.
enum HostBytes {
    Pageable(Vec<u8>),
    Pinned(*mut u8, usize),
}

// SAFETY: the allocation belongs to the value alone.
unsafe impl Send for HostBytes {}

impl HostBytes {
    fn new(is_pinned: bool, len: usize) -> Self {
        if !is_pinned {
            return Self::Pageable(vec![1; len]);
        }
        let mut bytes = Self::Pinned(alloc_pinned(0, len as u64).expect("pinned memory"), len);
        bytes.as_mut().fill(1);
        bytes
    }
}

impl AsMut<[u8]> for HostBytes {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Pageable(bytes) => bytes,
            // SAFETY: so many bytes, of this value alone.
            Self::Pinned(start, len) => unsafe { std::slice::from_raw_parts_mut(*start, *len) },
        }
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        if let Self::Pinned(start, _) = self {
            free_pinned(start.addr()).expect("it was allocated");
        }
    }
}

/// What the driver needs for the same bytes, without kvstate.
struct Plain {
    a: DeviceBytes,
    b: DeviceBytes,
    pinned: HostBytes,
    pageable: HostBytes,
}

impl Plain {
    fn new(len: usize) -> Self {
        Self {
            a: DeviceBytes::new(len),
            b: DeviceBytes::new(len),
            pinned: HostBytes::new(true, len),
            pageable: HostBytes::new(false, len),
        }
    }

    fn host(&mut self, is_pinned: bool) -> &mut [u8] {
        if is_pinned { self.pinned.as_mut() } else { self.pageable.as_mut() }
    }

    fn copy_to_host(&mut self, is_pinned: bool, n: usize) -> Duration {
        let src = self.a.ptr;
        let dst = self.host(is_pinned)[..n].as_mut_ptr().cast::<c_void>();
        // SAFETY: both sides have the bytes.
        timed(|| unsafe { ok(sys::cuMemcpyDtoH_v2(dst, src, n)) })
    }

    fn copy_to_device(&mut self, is_pinned: bool, n: usize) -> Duration {
        let dst = self.a.ptr;
        let src = self.host(is_pinned)[..n].as_ptr().cast::<c_void>();
        timed(|| {
            // SAFETY: both sides have the bytes.
            ok(unsafe { sys::cuMemcpyHtoD_v2(dst, src, n) });
            synchronize();
        })
    }

    fn copy_on_device(&self, n: usize) -> Duration {
        assert!(n <= self.a.len);
        timed(|| {
            // SAFETY: both sides have the bytes.
            ok(unsafe { sys::cuMemcpyDtoD_v2(self.b.ptr, self.a.ptr, n) });
            synchronize();
        })
    }
}

// The table

#[derive(Default)]
struct Table(String);

impl Table {
    /// Calls once untimed, then as often as `options` say, `call` with the number of the round.
    fn row(&mut self, options: &Options, work: &str, bytes: usize, mut call: impl FnMut(usize) -> Pair) {
        eprintln!("{work}");
        let pairs: Vec<_> = (0..=options.n_pairs()).map(&mut call).skip(1).collect();
        let (time, plain) = (median(pairs.iter().map(|p| p.call)), median(pairs.iter().map(|p| p.reference)));
        let columns = format!(
            "{:.2} | {:.1} | {:.2} | {:.2}",
            time * 1e3,
            gb_per_s(bytes, time),
            plain * 1e3,
            plain / time
        );
        let _ = writeln!(self.0, "| {work} | {columns} |");
    }

    /// A plain copy alone.
    fn plain(&mut self, options: &Options, work: &str, bytes: usize, mut call: impl FnMut() -> Duration) {
        call();
        let time = median((0..options.n_pairs()).map(|_| call()));
        let _ = writeln!(self.0, "| {work} | {:.2} | {:.1} | | |", time * 1e3, gb_per_s(bytes, time));
    }
}

fn median(times: impl Iterator<Item = Duration>) -> f64 {
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

#[expect(clippy::cast_precision_loss, reason = "a figure to read")]
fn gb_per_s(bytes: usize, time: f64) -> f64 {
    bytes as f64 / time / 1e9
}

fn memory(is_pinned: bool) -> &'static str {
    if is_pinned { "pinned" } else { "pageable" }
}

/// A cache on device 0 with the cells of `owners`, whose K is turned as llama's.
fn cache(kv: KvParams, owners: &[kvstate::types::SeqId], gpu: &Gpu) -> Context {
    let kv = fitting(kv, owners);
    let rope = vec![Some(RopeParams::new(RopeType::Normal, 128)); kv.layers.len()];
    let memory = KvMemory::Devices(vec![Some(0); kv.layers.len()]);
    let params = ContextParams {
        shift: Shift::Rope(vec![rope]),
        sync_files: false,
        ..ContextParams::new(65, vec![SectionParams::Kv { kv, memory }])
    };
    let mut context = Context::new(params).expect("memory for the cache");
    context.set_stream(gpu.stream());
    fill(&mut context, owners);
    context
}

fn state_size(context: &Context, flags: StateFlags) -> usize {
    let size = context.state_seq_get_size(0, flags).expect("sequence 0");
    usize::try_from(size).expect("64 bits")
}

/// Saves and restores through host memory, with the cells as they lie.
fn transfers(table: &mut Table, options: &Options, plain: &mut Plain, context: &mut Context, name: &str) {
    let bytes = state_size(context, NONE);
    for is_pinned in [false, true] {
        let mut state = HostBytes::new(is_pinned, bytes);
        let state = state.as_mut();
        table.row(options, &format!("get_data, {name}, {}", memory(is_pinned)), bytes, |_| Pair {
            reference: plain.copy_to_host(is_pinned, bytes),
            call: timed(|| context.state_seq_get_data(state, 0, NONE).expect("it fits")),
        });
        table.row(options, &format!("set_data, {name}, {}", memory(is_pinned)), bytes, |_| Pair {
            reference: plain.copy_to_device(is_pinned, bytes),
            call: timed(|| {
                context.state_seq_set_data(state, 0, NONE).expect("its own state");
                synchronize();
            }),
        });
    }
}

/// States that stay on the device, and snapshots on their way from it.
fn on_device(table: &mut Table, options: &Options, plain: &mut Plain, context: &mut Context, name: &str) {
    let bytes = state_size(context, NONE);
    let mut state = vec![0; state_size(context, StateFlags::ON_DEVICE)];
    table.row(options, &format!("ON_DEVICE get_data, {name}"), bytes, |_| Pair {
        reference: plain.copy_on_device(bytes),
        call: timed(|| {
            context.state_seq_get_data(&mut state, 0, StateFlags::ON_DEVICE).expect("it fits");
            synchronize();
        }),
    });
    table.row(options, &format!("ON_DEVICE set_data, {name}"), bytes, |_| Pair {
        reference: plain.copy_on_device(bytes),
        call: timed(|| {
            context.state_seq_set_data(&state, 0, StateFlags::ON_DEVICE).expect("its own state");
            synchronize();
        }),
    });
    for (until, waits) in [("the call returns", false), ("the device is done", true)] {
        table.row(options, &format!("snapshot, {name}, until {until}"), bytes, |_| {
            let mut snapshot = None;
            let reference = plain.copy_on_device(bytes);
            let call = timed(|| {
                snapshot = Some(context.seq_snapshot(0, NONE).expect("a snapshot"));
                if waits {
                    synchronize();
                }
            });
            synchronize();
            Pair { reference, call }
        });
    }
}

fn background(table: &mut Table, options: &Options, plain: &mut Plain, context: &mut Context) {
    let bytes = state_size(context, NONE);
    for is_pinned in [false, true] {
        let snapshot = context.seq_snapshot(0, NONE).expect("a snapshot");
        let mut dst = Some(HostBytes::new(is_pinned, bytes));
        let work = format!("snapshot to memory in the background, {}", memory(is_pinned));
        table.row(options, &work, bytes, |_| {
            let reference = plain.copy_to_host(is_pinned, bytes);
            let call = timed(|| {
                let job =
                    snapshot.get_data_in_background(dst.take().expect("memory"), None).expect("a thread");
                dst = Some(job.wait().expect("it fits"));
            });
            Pair { reference, call }
        });
    }
}

/// Against a plain copy to or from pinned memory, and a plain write or read of as many bytes.
fn files(table: &mut Table, options: &Options, plain: &mut Plain, context: &mut Context) {
    let bytes = state_size(context, NONE);
    let dir = tempfile::tempdir().expect("a folder");
    let [path, other] = ["saved", "plain"].map(|name| dir.path().join(name));
    table.row(options, "save_file without fsync, against copy and write", bytes, |_| {
        let copy = plain.copy_to_host(true, bytes);
        let write = timed(|| {
            let mut file = File::create_new(&other).expect("a new file");
            file.write_all(&plain.host(true)[..bytes]).expect("room on the disk");
        });
        fs::remove_file(&other).expect("it was written");
        let call = timed(|| context.state_seq_save_file(&path, 0, &[]).expect("room on the disk"));
        fs::remove_file(&path).expect("it was saved");
        Pair { reference: copy + write, call }
    });
    context.state_seq_save_file(&path, 0, &[]).expect("room on the disk");
    table.row(options, "load_file, page cache warm, against read and copy", bytes, |_| {
        let read = timed(|| {
            let mut file = File::open(&path).expect("it was saved");
            // Its header is longer than that of a blob.
            file.read_exact(black_box(&mut plain.host(true)[..bytes])).expect("it is longer");
        });
        let copy = plain.copy_to_device(true, bytes);
        let call = timed(|| {
            context.state_seq_load_file(&path, 0, 0).expect("its own file");
            synchronize();
        });
        Pair { reference: read + copy, call }
    });
}

/// Against a copy of K, which reads and writes as much.
fn k_shift(table: &mut Table, options: &Options, plain: &mut Plain, context: &mut Context) {
    let bytes = state_size(context, NONE) / 2;
    table.row(options, "K-shift of all cells (bytes of K)", bytes, |round| {
        context.seq_add(0, 0, -1, if round % 2 == 0 { 1 } else { -1 }).expect("it can be shifted");
        let reference = plain.copy_on_device(bytes);
        let call = timed(|| {
            context.apply_pending_shifts().expect("a shift");
            synchronize();
        });
        Pair { reference, call }
    });
}

fn table(options: &Options, gpu: &Gpu) -> String {
    let kv = || rows(options.n_layer(), GgmlType::F16, 1024);
    let transposed = || KvParams { v_trans: true, ..kv() };
    let mut table = Table::default();
    let mut size = 0;
    let mut plain = None;
    for (kv, layout, name) in [
        (kv(), Layout::OneRun, "one run"),
        (kv(), Layout::EveryOther, "every other cell"),
        (kv(), Layout::RandomHalf, "a random half"),
        (transposed(), Layout::EveryOther, "transposed V, every other cell"),
    ] {
        let owners = layout.owners(options.n_tokens());
        let mut context = cache(kv, &owners, gpu);
        size = state_size(&context, NONE);
        let plain = plain.get_or_insert_with(|| Plain::new(size + (64 << 10)));
        if layout == Layout::OneRun {
            for is_pinned in [false, true] {
                let (there, back) = (
                    format!("cuMemcpyDtoH, {}", memory(is_pinned)),
                    format!("cuMemcpyHtoD, {}", memory(is_pinned)),
                );
                table.plain(options, &there, size, || plain.copy_to_host(is_pinned, size));
                table.plain(options, &back, size, || plain.copy_to_device(is_pinned, size));
            }
            table.plain(options, "cuMemcpyDtoD", size, || plain.copy_on_device(size));
        }
        transfers(&mut table, options, plain, &mut context, name);
        on_device(&mut table, options, plain, &mut context, name);
        check_owners(&context, &owners);
        if layout == Layout::OneRun {
            background(&mut table, options, plain, &mut context);
            files(&mut table, options, plain, &mut context);
            k_shift(&mut table, options, plain, &mut context);
        }
    }
    format!(
        "A state of {} MiB: {} tokens, {} layers, 1024 elements of f16 in K and in V. Medians of {}; `of plain` is the time of a \
         plain copy of as many bytes between the same memories, measured in turn, over that of the call.\n\n\
         | work | ms | GB/s | plain ms | of plain |\n|---|---|---|---|---|\n{}",
        size >> 20,
        options.n_tokens(),
        options.n_layer(),
        options.n_pairs(),
        table.0
    )
}

fn commit() -> String {
    let describe = Command::new("git").args(["describe", "--always", "--dirty"]).output();
    let described = describe.ok().filter(|output| output.status.success());
    let commit = described.and_then(|output| String::from_utf8(output.stdout).ok());
    commit.map_or("unknown".into(), |commit| commit.trim().to_owned())
}

fn report(options: &Options) -> String {
    if options.emulated {
        let cuda = fakecuda::FakeCuda::load();
        // SAFETY: the flags have to be 0.
        ok(unsafe { sys::cuInit(0) });
        cuda.set_memory_limit(0, 8 << 30);
    }
    let gpu = Gpu::open();
    let title = if options.emulated {
        "A cache on an emulated device: these times say nothing about a GPU"
    } else {
        "A cache on a device"
    };
    let module = fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    let module = if options.emulated || module.is_empty() { "" } else { module.trim() };
    format!(
        "# {title}\n\n{}; driver {module} (CUDA {}.{}); host threads: {}; commit {}.\n\n{}",
        gpu.name,
        gpu.version / 1000,
        gpu.version % 1000 / 10,
        kvstate::storage::Threads::default().count(),
        commit(),
        table(options, &gpu)
    )
}

fn run() -> Result<(), String> {
    let options = Options::parse()?;
    if !options.emulated {
        kvstate::storage::Device::open(0).map_err(|error| error.to_string())?;
    }
    let report = report(&options);
    print!("{report}");
    let Some(path) = &options.write else { return Ok(()) };
    fs::write(path, report).map_err(|error| format!("{}: {error}", path.display()))
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
