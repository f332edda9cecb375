//! Four threads, each with a context on one of two emulated devices or on both, save, restore and snapshot side by side. No byte
//! is wrong, and nothing is left behind. `KVSTATE_STRESS_SECONDS` says for how long, 2 if it is not set.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(missing_docs, reason = "a test")]

mod gpu;
mod support;

use std::thread;
use std::time::{Duration, Instant};

use gpu::{alone, on_device};
use kvstate::context::Snapshot;
use kvstate::memory::{KvMemory, KvParams, SectionParams};
use kvstate::session::Job;
use kvstate::storage::StagingParams;
use kvstate::types::{Pos, SeqId};
use kvstate::{Context, ContextParams};
use support::place::fakecuda::Mode;
use support::{NONE, ON_DEVICE, decode, is_intact, kv, positions, restore, save, standard};

const N_SEQ: SeqId = 4;

/// What a sequence has to hold: the tokens `0..n` as `origin` decoded them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tokens {
    origin: SeqId,
    n: Pos,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn seq(&mut self) -> SeqId {
        SeqId::try_from(self.below(N_SEQ as u64)).expect("small")
    }

    fn take<T>(&mut self, of: &mut Vec<T>) -> Option<T> {
        let len = of.len() as u64;
        (len > 0).then(|| of.swap_remove(usize::try_from(self.below(len)).expect("small")))
    }
}

/// A context, what it has to hold, and states of it on their way.
struct Server {
    ctx: Context,
    tokens: [Option<Tokens>; N_SEQ as usize],
    blobs: Vec<(Vec<u8>, Option<Tokens>)>,
    snapshots: Vec<(Snapshot, Vec<u8>, Option<Tokens>)>,
    jobs: Vec<(Job<Vec<u8>>, Vec<u8>)>,
    random: Random,
}

impl Server {
    fn new(number: u64) -> Self {
        let sections = [kv(64), standard(64, 8)];
        let params = match number {
            0 => on_device(N_SEQ as u32, &sections, 0),
            1 => on_device(N_SEQ as u32, &sections, 1),
            _ => split(&sections),
        };
        // One stream for all sequences, or one for each: then seq_cp copies on the device.
        let unified = number.is_multiple_of(2);
        let staging = StagingParams { size: 512, count: 2 + usize::try_from(number).expect("small") };
        let ctx = Context::new(ContextParams { unified, staging, ..params }).expect("a context");
        let random = Random(0x9E37_79B9_7F4A_7C15 ^ (number + 1));
        Self {
            ctx,
            tokens: [None; N_SEQ as usize],
            blobs: Vec::new(),
            snapshots: Vec::new(),
            jobs: Vec::new(),
            random,
        }
    }

    fn of(&self, seq: SeqId) -> Option<Tokens> {
        self.tokens[usize::try_from(seq).expect("a sequence")]
    }

    fn holds(&mut self, seq: SeqId, tokens: Option<Tokens>) {
        self.tokens[usize::try_from(seq).expect("a sequence")] = tokens;
    }

    fn step(&mut self) {
        let seq = self.random.seq();
        match self.random.below(10) {
            0 | 1 => self.generate(seq),
            2 => self.blobs.push((save(&mut self.ctx, seq, NONE), self.of(seq))),
            3 => {
                if let Some((blob, tokens)) = self.random.take(&mut self.blobs) {
                    restore(&mut self.ctx, &blob, seq, NONE);
                    self.holds(seq, tokens);
                }
            }
            4 => {
                let snapshot = self.ctx.seq_snapshot(seq, NONE).expect("a snapshot");
                let blob = save(&mut self.ctx, seq, NONE);
                self.snapshots.push((snapshot, blob, self.of(seq)));
            }
            5 => {
                if let Some((snapshot, _, tokens)) = self.random.take(&mut self.snapshots) {
                    self.ctx.seq_restore(&snapshot, seq).expect("a restore");
                    self.holds(seq, tokens);
                }
            }
            6 => {
                if let Some((snapshot, blob, _)) = self.random.take(&mut self.snapshots) {
                    let job = snapshot.get_data_in_background(vec![0; blob.len()], None).expect("a job");
                    self.jobs.push((job, blob));
                }
            }
            7 => {
                let dst = self.random.seq();
                self.ctx.seq_rm(dst, -1, -1).expect("a removal");
                self.holds(dst, None);
                self.ctx.seq_cp(seq, dst, -1, -1).expect("a copy");
                let tokens = if seq == dst { None } else { self.of(seq) };
                self.holds(dst, tokens);
            }
            8 => {
                let (blob, tokens) = (save(&mut self.ctx, seq, ON_DEVICE), self.of(seq));
                self.generate(seq);
                restore(&mut self.ctx, &blob, seq, ON_DEVICE);
                self.holds(seq, tokens);
            }
            _ => {
                if self.random.below(8) == 0 {
                    self.ctx.clear(true).expect("a clear");
                    self.tokens = [None; N_SEQ as usize];
                }
                self.finish_jobs(3);
            }
        }
        // As many as a server would keep.
        self.blobs.truncate(4);
        self.snapshots.truncate(4);
        self.finish_jobs(3);
        self.check();
    }

    /// One token more of what the sequence holds, if it is its own.
    fn generate(&mut self, seq: SeqId) {
        let tokens = self.of(seq).unwrap_or(Tokens { origin: seq, n: 0 });
        if tokens.origin == seq && tokens.n < 12 {
            decode(&mut self.ctx, seq, [tokens.n]);
            self.holds(seq, Some(Tokens { n: tokens.n + 1, ..tokens }));
        }
    }

    fn finish_jobs(&mut self, at_most: usize) {
        while self.jobs.len() > at_most {
            let (job, blob) = self.jobs.remove(0);
            assert!(job.wait().expect("a state") == blob, "a save in the background");
        }
    }

    fn check(&self) {
        for seq in 0..N_SEQ {
            let held = positions(&self.ctx, 0, seq);
            match self.of(seq) {
                None => assert!(held.is_empty(), "sequence {seq} holds {held:?}"),
                Some(Tokens { origin, n }) => {
                    assert_eq!(held, (0..n).collect::<Vec<_>>(), "sequence {seq}");
                    assert!(is_intact(&self.ctx, seq, origin), "sequence {seq} of {origin} has wrong bytes");
                }
            }
        }
    }
}

/// Layers alternate between the devices.
fn split(sections: &[KvParams]) -> ContextParams {
    let section = |kv: &KvParams| SectionParams::Kv {
        kv: kv.clone(),
        memory: KvMemory::Devices((0..).map(|layer| Some(layer % 2)).take(kv.layers.len()).collect()),
    };
    ContextParams::new(N_SEQ as u32, sections.iter().map(section).collect())
}

#[test]
fn four_threads_save_restore_and_snapshot_side_by_side() {
    let cuda = alone();
    let seconds = std::env::var("KVSTATE_STRESS_SECONDS").map_or(2, |text| text.parse().expect("seconds"));
    for mode in [Mode::Eager { seed: 1 }, Mode::Lazy] {
        cuda.set_mode(mode);
        let before = cuda.live();
        let end = Instant::now() + Duration::from_secs(seconds) / 2;
        let steps: u64 = thread::scope(|scope| {
            let run = |number| {
                move || {
                    let mut server = Server::new(number);
                    let mut steps = 0;
                    while Instant::now() < end {
                        server.step();
                        steps += 1;
                    }
                    server.finish_jobs(0);
                    steps
                }
            };
            let threads: Vec<_> = (0..4).map(|number| scope.spawn(run(number))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a thread")).sum()
        });
        println!("{mode:?}: {steps} steps");
        assert!(steps > 40, "{steps} steps");
        cuda.finish();
        assert_eq!(cuda.live(), before, "what is left behind");
    }
}
