//! The emulated CUDA driver: built on first use, loaded before anything asks for libcuda, and told what to do.
#![allow(unsafe_code, reason = "calls of a C library")]
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::missing_panics_doc, reason = "tests")]

use std::ffi::{CString, OsStr, c_char, c_int, c_uint};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY, RTLD_NOW};

pub const OUT_OF_MEMORY: i32 = 2;
pub const ILLEGAL_ADDRESS: i32 = 700;
pub const LAUNCH_FAILED: i32 = 719;
pub const UNKNOWN: i32 = 999;

/// When queued work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// When a synchronize or a poll asks for it, and only what that is ordered after.
    Lazy,
    /// On its own, streams in random order, often late.
    Eager { seed: u32 },
}

/// What the program holds, all devices together.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    pub allocations: u64,
    pub bytes: u64,
    pub pinned: u64,
    pub pinned_bytes: u64,
    pub streams: u64,
    pub events: u64,
    pub modules: u64,
    pub contexts: u64,
}

/// The loaded driver with its calls for tests.
#[derive(Debug)]
pub struct FakeCuda {
    library: Library,
    /// The folder with libcuda.so.1, for the search path of other programs.
    pub folder: PathBuf,
    /// The kernels, for `FAKECUDA_KERNELS` of other programs.
    pub kernels: PathBuf,
}

/// The driver for one test alone: counters and failures belong to the process, so tests of one binary take turns.
#[derive(Debug)]
pub struct Alone {
    cuda: &'static FakeCuda,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Alone {
    type Target = FakeCuda;

    fn deref(&self) -> &FakeCuda {
        self.cuda
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.cuda.finish();
        self.cuda.reset();
    }
}

impl FakeCuda {
    /// Builds and loads the driver; whoever asks for libcuda afterwards gets this one.
    pub fn load() -> &'static Self {
        static LOADED: OnceLock<FakeCuda> = OnceLock::new();
        LOADED.get_or_init(|| {
            let folder = driver();
            // SAFETY: the library's initialisers only set up its own state.
            let library = unsafe { Library::open(Some(folder.join("libcuda.so.1")), RTLD_NOW | RTLD_GLOBAL) };
            // SAFETY: as above; it holds nothing but a name for the other.
            let alias = unsafe { Library::open(Some(folder.join("libcuda.so")), RTLD_LAZY | RTLD_GLOBAL) };
            std::mem::forget(alias.expect("libcuda.so"));
            let cuda = Self {
                library: library.expect("libcuda.so.1"),
                folder,
                kernels: kernels(&repo("cuda/kv.cu")),
            };
            cuda.set_kernels(&cuda.kernels);
            cuda
        })
    }

    /// The driver for one test: lazy, counters at 0, no failures to come, no faults, the memory of a large device.
    pub fn alone() -> Alone {
        static TURN: Mutex<()> = Mutex::new(());
        // A test that failed has said so.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let cuda = Self::load();
        cuda.finish();
        cuda.reset();
        cuda.set_mode(Mode::Lazy);
        Alone { cuda, _turn: turn }
    }

    /// Calls of a function of the driver so far, or one of the other counters of `driver/control.h`.
    pub fn count(&self, name: &str) -> u64 {
        let name = c_string(name);
        self.call::<unsafe extern "C" fn(*const c_char) -> u64, _>("fakecuda_count", |f| {
            // SAFETY: a C string.
            unsafe { f(name.as_ptr()) }
        })
    }

    /// Calls of the driver so far.
    pub fn calls(&self) -> u64 {
        self.count("calls")
    }

    /// Counters to 0, no failures to come, no faults of the past.
    pub fn reset(&self) {
        self.plain("fakecuda_reset");
    }

    /// The `nth` call of a function from now on fails; 1 is the next.
    pub fn fail(&self, name: &str, nth: u32, code: i32) {
        let name = c_string(name);
        self.call::<unsafe extern "C" fn(*const c_char, c_uint, c_int), _>("fakecuda_fail", |f| {
            // SAFETY: a C string.
            unsafe { f(name.as_ptr(), nth, code) }
        });
    }

    /// The `nth` call from now on fails, of those whose failure a program can act on.
    pub fn fail_at(&self, nth: u32, code: i32) {
        self.call::<unsafe extern "C" fn(c_uint, c_int), _>("fakecuda_fail_at", |f| {
            // SAFETY: plain numbers.
            unsafe { f(nth, code) }
        });
    }

    /// Failures that came to pass since they were asked for.
    pub fn injected(&self) -> u32 {
        // SAFETY: no arguments.
        self.call::<unsafe extern "C" fn() -> c_uint, _>("fakecuda_injected", |f| unsafe { f() })
    }

    /// What the program holds now.
    pub fn live(&self) -> Live {
        let mut live = Live::default();
        self.call::<unsafe extern "C" fn(*mut Live), _>("fakecuda_live", |f| {
            // SAFETY: the layout of `FakeLive`.
            unsafe { f(&raw mut live) }
        });
        live
    }

    /// Pieces of queued work that have not run.
    pub fn pending(&self) -> u64 {
        // SAFETY: no arguments.
        self.call::<unsafe extern "C" fn() -> u64, _>("fakecuda_pending", |f| unsafe { f() })
    }

    /// Pieces of queued work that are known to touch the memory: copies, and launches whose argument points there.
    pub fn unfinished_use(&self, start: u64, bytes: usize) -> u64 {
        self.call::<unsafe extern "C" fn(usize, usize) -> u64, _>("fakecuda_unfinished_use", |f| {
            // SAFETY: plain numbers.
            unsafe { f(usize::try_from(start).expect("an address"), bytes) }
        })
    }

    /// Runs all that is queued.
    pub fn finish(&self) {
        self.plain("fakecuda_finish");
    }

    /// Nothing may be queued.
    pub fn set_mode(&self, mode: Mode) {
        let (eager, seed) = match mode {
            Mode::Lazy => (false, 1),
            Mode::Eager { seed } => (true, seed),
        };
        let set = self.call::<unsafe extern "C" fn(bool, c_uint) -> bool, _>("fakecuda_set_mode", |f| {
            // SAFETY: plain values.
            unsafe { f(eager, seed) }
        });
        assert!(set, "{mode:?}: {} pieces of work are queued", self.pending());
    }

    /// What the allocations of a device may have together. After cuInit.
    pub fn set_memory_limit(&self, device: i32, bytes: usize) {
        let set =
            self.call::<unsafe extern "C" fn(c_int, usize) -> bool, _>("fakecuda_set_memory_limit", |f| {
                // SAFETY: plain numbers.
                unsafe { f(device, bytes) }
            });
        assert!(set, "device {device} is not there");
    }

    /// `devices` (before cuInit), `driver` (12080 for 12.8), `cc` (90 for 9.0), `pools` (0 or 1).
    pub fn set(&self, name: &str, value: i32) {
        let c_name = c_string(name);
        let set = self.call::<unsafe extern "C" fn(*const c_char, c_int) -> bool, _>("fakecuda_set", |f| {
            // SAFETY: a C string.
            unsafe { f(c_name.as_ptr(), value) }
        });
        assert!(set, "{name} is no setting of the emulated driver");
    }

    /// The library of kernels for modules that are loaded from now on.
    pub fn set_kernels(&self, path: &Path) {
        let c_path = c_string(path.to_str().expect("UTF-8"));
        let set = self.call::<unsafe extern "C" fn(*const c_char) -> bool, _>("fakecuda_set_kernels", |f| {
            // SAFETY: a C string.
            unsafe { f(c_path.as_ptr()) }
        });
        assert!(set, "{} has no kernels", path.display());
    }

    /// Device memory as it is now, whatever is queued.
    pub fn peek(&self, src: u64, bytes: usize) -> Vec<u8> {
        let mut dst = vec![0; bytes];
        let done = self.call::<unsafe extern "C" fn(*mut u8, u64, usize) -> bool, _>("fakecuda_peek", |f| {
            // SAFETY: `dst` has as many bytes.
            unsafe { f(dst.as_mut_ptr(), src, bytes) }
        });
        assert!(done, "{bytes} bytes at {src:#x} are not within an allocation");
        dst
    }

    /// Writes device memory now, whatever is queued.
    pub fn poke(&self, dst: u64, src: &[u8]) {
        let done =
            self.call::<unsafe extern "C" fn(u64, *const u8, usize) -> bool, _>("fakecuda_poke", |f| {
                // SAFETY: a slice.
                unsafe { f(dst, src.as_ptr(), src.len()) }
            });
        assert!(done, "{} bytes at {dst:#x} are not within an allocation", src.len());
    }

    fn plain(&self, name: &str) {
        // SAFETY: no arguments.
        self.call::<unsafe extern "C" fn(), _>(name, |f| unsafe { f() });
    }

    /// `F` has to be the type of the function.
    fn call<F: Copy, T>(&self, name: &str, with: impl FnOnce(F) -> T) -> T {
        // SAFETY: each caller names the function's type as driver/control.h has it.
        let function = unsafe { self.library.get::<F>(name) };
        with(*function.unwrap_or_else(|error| panic!("{name}: {error}")))
    }
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("no NUL")
}

// Building

const CPP: [&str; 11] = [
    "-std=c++17",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wconversion",
    "-Werror",
    // A fault leaves the stack of a barrier kernel by longjmp, which the checked one refuses.
    "-U_FORTIFY_SOURCE",
];
/// Calls a hook of kernels/grid.cpp at every access to memory. Loops stay loops, so that each access is one.
const WATCHED: [&str; 4] = [
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fno-tree-loop-distribute-patterns",
    "-O1",
];

/// The folder with libcuda.so.1.
fn driver() -> PathBuf {
    let sources = files(&sources().join("driver"), "cpp");
    let watched = [&sources[..], &files(&self::sources().join("driver"), "h"), &[abi()]].concat();
    built("driver", &watched, |dir| {
        let so = dir.join("libcuda.so.1");
        // One translation unit: most of the time goes into the standard headers.
        let included = sources.iter().flat_map(|source| [OsStr::new("-include"), source.as_os_str()]);
        run(gpp()
            .args(CPP)
            .args(["-O1", "-shared", "-Wl,-soname,libcuda.so.1", "-o"])
            .arg(&so)
            .args(included)
            .args(["-x", "c++", "/dev/null"]));
        // The name that is looked for first; all that it holds is the need for the other.
        run(gpp()
            .args(["-shared", "-Wl,-soname,libcuda.so", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-o"])
            .args([dir.join("libcuda.so"), so]));
    })
}

/// The library of kernels of a source: cuda/kv.cu, or what a test makes of it.
pub fn kernels(source: &Path) -> PathBuf {
    let dir = sources().join("kernels");
    let (kernels, grid) = (dir.join("kernels.cpp"), dir.join("grid.cpp"));
    let watched = [kernels.clone(), grid.clone(), dir.join("shim.h"), abi(), source.to_owned()];
    let define = format!("-DKERNEL_SOURCE=\"{}\"", source.display());
    let folder = built("kernels", &watched, |dir| {
        let kernel_flags = [&WATCHED[..], &[&define]].concat();
        let objects = compile(dir, &[(kernels.clone(), kernel_flags), (grid.clone(), vec!["-O2"])]);
        run(gpp().args(["-shared", "-pthread", "-o"]).arg(dir.join("libkernels.so")).args(objects));
    });
    folder.join("libkernels.so")
}

fn repo(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn sources() -> PathBuf {
    repo("tests/fakecuda")
}

fn abi() -> PathBuf {
    sources().join("kernels/abi.h")
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut found: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    found.retain(|path| path.extension().is_some_and(|found| found == extension));
    found.sort();
    found
}

/// The folder that `build` has filled once for these sources. Complete when it is there: test processes that build
/// it side by side do so in folders of their own, and one of them gets the name.
fn built(name: &str, sources: &[PathBuf], build: impl FnOnce(&Path)) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    include_str!("mod.rs").hash(&mut hasher);
    for source in sources {
        fs::read(source).unwrap_or_else(|error| panic!("{}: {error}", source.display())).hash(&mut hasher);
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target folder").join("fakecuda");
    let folder = target.join(format!("{name}-{:016x}", hasher.finish()));
    if !folder.is_dir() {
        fs::create_dir_all(&target).expect("the folder of the emulated driver");
        let own = tempfile::tempdir_in(&target).expect("a folder to build in");
        build(own.path());
        let own = own.keep();
        if fs::rename(&own, &folder).is_err() {
            assert!(folder.is_dir(), "{} could not be made", folder.display());
            fs::remove_dir_all(own).expect("the folder that is not needed");
        }
    }
    folder
}

/// Compiles files side by side; returns their objects.
fn compile(dir: &Path, sources: &[(PathBuf, Vec<&str>)]) -> Vec<PathBuf> {
    let object = |source: &Path| dir.join(source.file_stem().expect("a name")).with_extension("o");
    std::thread::scope(|scope| {
        let jobs: Vec<_> = sources
            .iter()
            .map(|(source, flags)| {
                let out = object(source);
                scope.spawn(move || run(gpp().args(CPP).arg("-c").args(flags).arg(source).arg("-o").arg(out)))
            })
            .collect();
        for job in jobs {
            job.join().expect("a compiled file");
        }
    });
    sources.iter().map(|(source, _)| object(source)).collect()
}

fn gpp() -> Command {
    Command::new("g++")
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
}
