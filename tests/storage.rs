//! The storage floor against an oracle that moves single bytes.
#![allow(unsafe_code, reason = "adopting memory is unsafe")]

mod place;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use kvstate::error::{Error, Result};
use kvstate::storage::{
    CellMap, Device, Plane, PlaneShape, Region, Scatter, Staging, StagingParams, TensorAccess, TensorBytes,
    Threads, Transfer, copy_cells, gather, scatter, zero_cells,
};
use kvstate::types::Move;
use proptest::prelude::*;
use proptest::sample::select;

/// A transfer on this many threads, through staging buffers for a few rows.
fn on(threads: usize) -> Transfer {
    staged(threads, 200)
}

/// A transfer through staging buffers of `size` bytes, the same for all transfers of a test.
fn staged(threads: usize, size: u64) -> Transfer {
    thread_local! {
        static KEPT: RefCell<HashMap<u64, Transfer>> = RefCell::default();
    }
    let new = || {
        let staging = Staging::new(StagingParams { size, count: 2 }, None).unwrap();
        Transfer::new(Threads::new(threads), staging)
    };
    let mut kept = KEPT.with_borrow_mut(|kept| kept.entry(size).or_insert_with(new).clone());
    kept.threads = Threads::new(threads);
    kept
}

/// Bytes before and behind an adopted plane: odd, so that nothing is aligned, or so that all may be.
fn guard(seed: u64) -> usize {
    [7, 16, 8, 4][(seed % 4) as usize]
}

/// A plane's memory, every byte of it different from its neighbours.
#[derive(Debug)]
struct Memory {
    kv_size: u32,
    shape: PlaneShape,
    guard: usize,
    /// Tells on which device it is, if it is on one.
    layer: usize,
    bytes: Vec<u8>,
    /// Has the bytes once there is a plane, if it is on a device.
    on_device: Option<Plane>,
}

impl Clone for Memory {
    fn clone(&self) -> Self {
        let Self { kv_size, shape, guard, layer, .. } = *self;
        Self { kv_size, shape, guard, layer, bytes: self.bytes(), on_device: None }
    }
}

impl Memory {
    fn new(kv_size: u32, shape: PlaneShape, seed: u64) -> Self {
        let (span, guard) = (usize::try_from(shape.span(kv_size).unwrap()).unwrap(), guard(seed));
        let mut bytes = noise(span + 2 * guard, seed);
        bytes[..guard].fill(0xEE);
        bytes[guard + span..].fill(0xEE);
        Self { kv_size, shape, guard, layer: (seed / 4 % 2) as usize, bytes, on_device: None }
    }

    /// The plane, where this run has planes; it must be gone before the memory is used again.
    fn plane(&mut self) -> Plane {
        let Self { kv_size, shape, guard, .. } = *self;
        if place::place().device(self.layer).is_none() {
            // SAFETY: `bytes` has the span and is neither moved nor used while a test uses the plane.
            return unsafe { Plane::adopt(self.bytes[guard..].as_mut_ptr(), kv_size, shape).unwrap() };
        }
        let memory = self.on_device.get_or_insert_with(|| {
            let memory = place::allocate(self.layer, PlaneShape::dense_rows(self.bytes.len() as u64), 1);
            place::write(&memory, 0, &self.bytes);
            memory
        });
        let start = memory.as_ptr().addr() + guard;
        // SAFETY: it is all in the device's memory, which stays while a test uses the plane.
        unsafe { Plane::adopt_device(start as u64, kv_size, shape).unwrap() }
    }

    /// What is in it now.
    fn bytes(&self) -> Vec<u8> {
        self.on_device.as_ref().map_or_else(|| self.bytes.clone(), place::all)
    }

    /// Channels and bytes of an element.
    fn elems(&self) -> (u64, u64) {
        match self.shape {
            PlaneShape::Rows { row_size, .. } => (1, row_size),
            PlaneShape::Channels { n_channel, elem_size, .. } => (n_channel.into(), elem_size.into()),
        }
    }

    /// Index of every byte of `cells`, in blob order.
    fn blob_order(&self, cells: &[u32]) -> Vec<usize> {
        let (n_channel, elem_size) = self.elems();
        let mut order = Vec::new();
        for channel in 0..n_channel {
            for &cell in cells {
                for byte in 0..elem_size {
                    let offset = match self.shape {
                        PlaneShape::Rows { cell_stride, .. } => u64::from(cell) * cell_stride,
                        PlaneShape::Channels { cell_stride, channel_stride, .. } => {
                            channel * channel_stride + u64::from(cell) * cell_stride
                        }
                    };
                    order.push(self.guard + usize::try_from(offset + byte).unwrap());
                }
            }
        }
        order
    }

    fn gathered(&self, cells: &[u32]) -> Vec<u8> {
        let bytes = self.bytes();
        self.blob_order(cells).into_iter().map(|i| bytes[i]).collect()
    }

    /// Its bytes, but for those of `cells`, which are `blob`.
    fn scattered(&self, blob: &[u8], cells: &[u32]) -> Vec<u8> {
        let mut bytes = self.bytes();
        for (i, byte) in self.blob_order(cells).into_iter().zip(blob) {
            bytes[i] = *byte;
        }
        bytes
    }
}

/// A plane's memory that is reached through calls, of which some succeed before they fail.
#[derive(Debug)]
struct Remote {
    bytes: Mutex<Vec<u8>>,
    guard: usize,
    calls_left: AtomicUsize,
}

const TENSOR: usize = 42;

impl Remote {
    fn new(memory: &Memory, calls_left: usize) -> Arc<Self> {
        let bytes = Mutex::new(memory.bytes());
        Arc::new(Self { bytes, guard: memory.guard, calls_left: AtomicUsize::new(calls_left) })
    }

    fn plane(self: &Arc<Self>, memory: &Memory) -> Plane {
        Plane::remote(self.clone(), TENSOR, memory.kv_size, memory.shape).unwrap()
    }

    fn call(&self, name: &'static str, tensor: usize, piece: &[u8]) -> Result<()> {
        assert!(tensor == TENSOR && !piece.is_empty());
        let left = self.calls_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        left.map(drop).map_err(|_| Error::Callback { name, code: 7 })
    }
}

impl TensorAccess for Remote {
    fn get(&self, tensor: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.call("get", tensor, out)?;
        let offset = self.guard + usize::try_from(offset).unwrap();
        out.copy_from_slice(&self.bytes.lock().unwrap()[offset..][..out.len()]);
        Ok(())
    }

    fn set(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.call("set", tensor, bytes)?;
        let offset = self.guard + usize::try_from(offset).unwrap();
        self.bytes.lock().unwrap()[offset..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    std::iter::repeat_with(|| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        x.to_be_bytes()[0]
    })
    .take(len)
    .collect()
}

fn shapes(kv_size: u32) -> impl Strategy<Value = PlaneShape> {
    let gap = || prop_oneof![Just(0_u64), 1..9_u64, select(vec![8_u64, 16])];
    let size = prop_oneof![1..70_u64, (1..6_u64).prop_map(|n| 16 * n)];
    let rows =
        (size, gap()).prop_map(|(row_size, gap)| PlaneShape::Rows { row_size, cell_stride: row_size + gap });
    let channels = (1..9_u32, select(vec![1_u32, 2, 3, 4, 8, 18]), gap(), gap(), any::<bool>()).prop_map(
        move |(n_channel, elem_size, inner_gap, outer_gap, interleaved)| {
            let inner = u64::from(elem_size) + inner_gap;
            let outer = |count: u32| u64::from(count) * inner + outer_gap;
            let (cell_stride, channel_stride) =
                if interleaved { (outer(n_channel), inner) } else { (inner, outer(kv_size)) };
            PlaneShape::Channels { n_channel, elem_size, cell_stride, channel_stride }
        },
    );
    prop_oneof![rows, channels]
}

/// A plane's memory, and some of its cells: few or many, hence short or long runs.
fn memory_and_cells() -> impl Strategy<Value = (Memory, Vec<u32>)> {
    (1..70_u32)
        .prop_flat_map(|kv_size| {
            let percent = select(vec![0.05, 0.5, 0.95, 1.0]);
            let chosen = percent
                .prop_flat_map(move |p| prop::collection::vec(prop::bool::weighted(p), kv_size as usize));
            (Just(kv_size), shapes(kv_size), any::<u64>(), chosen)
        })
        .prop_map(|(kv_size, shape, seed, chosen)| {
            let cells = (0..kv_size).filter(|&cell| chosen[cell as usize]).collect();
            (Memory::new(kv_size, shape, seed), cells)
        })
}

fn gather_one(region: Region<'_>) -> Vec<u8> {
    let mut out = vec![0; usize::try_from(region.bytes()).unwrap()];
    gather(&[(0, region)], &mut out, &on(1), None).unwrap();
    out
}

fn scatter_one(plane: &mut Plane, map: &CellMap, n_src: u32, src: &[u8]) -> Result<()> {
    scatter_all(vec![Scatter { plane, map, n_src, src: TensorBytes::Memory(src).into() }])
}

fn scatter_all(mut batch: Vec<Scatter<'_>>) -> Result<()> {
    scatter(&mut batch, &on(1), None)
}

fn is_refused(result: &Result<()>) -> bool {
    matches!(result, Err(Error::InvalidArgument { .. }))
}

fn map_of(cells: &[u32]) -> Arc<CellMap> {
    Arc::new(CellMap::of_cells(cells).unwrap())
}

proptest! {
    #[test]
    fn gather_writes_cells_in_blob_order((mut memory, cells) in memory_and_cells()) {
        let expected = memory.gathered(&cells);
        let plane = memory.plane();
        let region = Region::new(&plane, &map_of(&cells)).unwrap();
        prop_assert_eq!(region.bytes(), expected.len() as u64);
        prop_assert_eq!(gather_one(region), expected);
    }

    #[test]
    fn gather_keeps_the_order_of_the_cells(
        (mut memory, cells) in memory_and_cells(), swap in any::<prop::sample::Index>()
    ) {
        let mut cells = cells;
        if !cells.is_empty() {
            let middle = swap.index(cells.len());
            cells.rotate_left(middle);
        }
        let expected = memory.gathered(&cells);
        let plane = memory.plane();
        prop_assert_eq!(gather_one(Region::new(&plane, &map_of(&cells)).unwrap()), expected);
    }

    #[test]
    fn gather_puts_each_region_at_its_offset(
        (mut a, a_cells) in memory_and_cells(), (mut b, b_cells) in memory_and_cells(), gap in 0..9_usize
    ) {
        let (a_blob, b_blob) = (a.gathered(&a_cells), b.gathered(&b_cells));
        let (a, b) = (a.plane(), b.plane());
        let batch = [
            (b_blob.len() as u64 + gap as u64, Region::new(&a, &map_of(&a_cells)).unwrap()),
            (0, Region::new(&b, &map_of(&b_cells)).unwrap()),
        ];
        let expected = [&b_blob[..], &vec![0xEE; gap], &a_blob, &[0xEE; 3]].concat();
        let mut out = vec![0xEE; expected.len()];
        gather(&batch, &mut out, &on(1), None).unwrap();
        prop_assert_eq!(&out, &expected);

        let need = expected.len() - 3;
        if need > 0 {
            let mut out = vec![0xEE; need - 1];
            let error = gather(&batch, &mut out, &on(1), None).unwrap_err();
            let (wanted, size) = (need as u64, need as u64 - 1);
            let named = matches!(error, Error::BufferTooSmall { need, size: s } if (need, s) == (wanted, size));
            prop_assert!(named, "{}", error);
            prop_assert!(out.iter().all(|&byte| byte == 0xEE), "nothing is written");
        }
    }

    #[test]
    fn pieces_of_a_split_make_up_the_region((mut memory, cells) in memory_and_cells(), max in 0..300_u64) {
        let expected = memory.gathered(&cells);
        let (_, elem_size) = memory.elems();
        let least = match memory.shape {
            PlaneShape::Rows { row_size, .. } => row_size,
            PlaneShape::Channels { .. } => elem_size * cells.len() as u64,
        };
        let plane = memory.plane();
        let mut joined = Vec::new();
        for piece in Region::new(&plane, &map_of(&cells)).unwrap().split(max) {
            prop_assert!(piece.bytes() > 0 && piece.bytes() <= max.max(least));
            // Pieces can be split again.
            for piece in piece.split(max / 3) {
                joined.extend(gather_one(piece));
            }
        }
        prop_assert_eq!(joined, expected);
    }

    #[test]
    fn contiguous_bytes_are_what_gather_writes((mut memory, cells) in memory_and_cells(), max in 0..300_u64) {
        let order = memory.blob_order(&cells);
        let plane = memory.plane();
        // Bytes of a device cannot be lent.
        let in_one_piece = plane.device().is_none()
            && !order.is_empty()
            && order.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        let region = Region::new(&plane, &map_of(&cells)).unwrap();
        prop_assert_eq!(region.as_contiguous().is_some(), in_one_piece);
        for piece in region.clone().split(max).chain([region]) {
            if let Some(bytes) = piece.as_contiguous() {
                prop_assert_eq!(bytes, gather_one(piece));
            }
        }
    }

    #[test]
    fn scatter_writes_the_moved_cells_and_no_other_byte(
        (mut memory, cells) in memory_and_cells(), spare in 0..4_u32, seed in any::<u64>(), reverse in any::<bool>()
    ) {
        // The blob has spare cells in front; the others go to `cells`, in order or back to front.
        let n_src = spare + u32::try_from(cells.len()).unwrap();
        let order: Vec<u32> = if reverse { cells.iter().rev().copied().collect() } else { cells };
        let map = CellMap::new(Move::of_pairs((spare..).zip(order.iter().copied()))).unwrap();
        let source = Memory::new(n_src, dense_like(memory.shape, n_src), seed);
        let blob = source.gathered(&(0..n_src).collect::<Vec<_>>());
        let moved = source.gathered(&(spare..n_src).collect::<Vec<_>>());
        let expected = memory.scattered(&moved, &order);

        let mut plane = memory.plane();
        scatter_one(&mut plane, &map, n_src, &blob).unwrap();
        prop_assert_eq!(gather_one(Region::new(&plane, &map_of(&order)).unwrap()), moved);
        prop_assert_eq!(memory.bytes(), expected);
    }

    #[test]
    fn a_remote_plane_is_read_like_one_in_host_memory(
        (memory, cells) in memory_and_cells(), max in 0..300_u64
    ) {
        let remote = Remote::new(&memory, usize::MAX);
        let plane = remote.plane(&memory);
        let region = Region::new(&plane, &map_of(&cells)).unwrap();
        prop_assert_eq!(region.tensor(), TENSOR);
        let pieces: Vec<u8> = region.clone().split(max).flat_map(gather_one).collect();
        prop_assert_eq!(&pieces, &memory.gathered(&cells));
        prop_assert!(region.as_contiguous().is_none());
        prop_assert_eq!(gather_one(region), pieces);
    }

    #[test]
    fn a_remote_plane_is_written_like_one_in_host_memory(
        (memory, cells) in memory_and_cells(), spare in 0..4_u32, reverse in any::<bool>()
    ) {
        let n_src = spare + u32::try_from(cells.len()).unwrap();
        let order: Vec<u32> = if reverse { cells.iter().rev().copied().collect() } else { cells };
        let map = CellMap::new(Move::of_pairs((spare..).zip(order.iter().copied()))).unwrap();
        let source = Memory::new(n_src, dense_like(memory.shape, n_src), 3);
        let blob = source.gathered(&(0..n_src).collect::<Vec<_>>());
        let moved = source.gathered(&(spare..n_src).collect::<Vec<_>>());

        let remote = Remote::new(&memory, usize::MAX);
        let mut plane = remote.plane(&memory);
        scatter_one(&mut plane, &map, n_src, &blob).unwrap();
        prop_assert_eq!(&*remote.bytes.lock().unwrap(), &memory.scattered(&moved, &order));
    }

    #[test]
    fn a_remote_plane_is_zeroed_like_one_in_host_memory((memory, _) in memory_and_cells()) {
        let cells: Vec<u32> = (0..memory.kv_size).collect();
        let zeroes = vec![0; memory.blob_order(&cells).len()];
        let remote = Remote::new(&memory, usize::MAX);
        remote.plane(&memory).zero_all(&on(1)).unwrap();
        prop_assert_eq!(&*remote.bytes.lock().unwrap(), &memory.scattered(&zeroes, &cells));
    }

    #[test]
    fn pieces_are_the_bytes_of_the_region_in_blob_order((mut memory, cells) in memory_and_cells()) {
        let (order, guard) = (memory.blob_order(&cells), memory.guard);
        let plane = memory.plane();
        let mut named = Vec::new();
        let region = Region::new(&plane, &map_of(&cells)).unwrap();
        region.each_piece(|offset, bytes| {
            let start = guard + usize::try_from(offset).unwrap();
            named.extend(start..start + bytes);
            Ok(())
        }).unwrap();
        prop_assert_eq!(named, order);
    }

    #[test]
    fn zero_all_clears_the_cells_and_no_other_byte((mut memory, _) in memory_and_cells()) {
        let cells: Vec<u32> = (0..memory.kv_size).collect();
        let zeroes = vec![0; memory.blob_order(&cells).len()];
        let expected = memory.scattered(&zeroes, &cells);
        memory.plane().zero_all(&on(1)).unwrap();
        prop_assert_eq!(memory.bytes(), expected);
    }

    #[test]
    fn copy_cells_copies_the_cells_and_no_other_byte((mut memory, cells) in memory_and_cells(), seed in any::<u64>()) {
        let mut source = Memory::new(memory.kv_size, memory.shape, seed);
        let expected = memory.scattered(&source.gathered(&cells), &cells);
        copy_cells(vec![(&mut memory.plane(), &source.plane())], &map_of(&cells), &on(1)).unwrap();
        prop_assert_eq!(memory.bytes(), expected);
    }

    #[test]
    fn zero_cells_clears_the_cells_and_no_other_byte(
        (mut a, a_cells) in memory_and_cells(), (mut b, b_cells) in memory_and_cells()
    ) {
        let zeroed = |memory: &Memory, cells: &[u32]| {
            memory.scattered(&vec![0; memory.blob_order(cells).len()], cells)
        };
        let expected = (zeroed(&a, &a_cells), zeroed(&b, &b_cells));
        zero_cells(vec![(&mut a.plane(), &map_of(&a_cells)), (&mut b.plane(), &map_of(&b_cells))], &on(1)).unwrap();
        prop_assert_eq!((a.bytes(), b.bytes()), expected);
    }

    #[test]
    fn get_and_set_reach_any_bytes_of_a_plane_and_no_others(
        (mut memory, _) in memory_and_cells(), start in any::<prop::sample::Index>(), seed in any::<u64>()
    ) {
        let (before, guard) = (memory.bytes(), memory.guard);
        let span = before.len() - 2 * guard;
        let start = start.index(span);
        let bytes = noise(span - start, seed);
        let mut plane = memory.plane();
        let mut got = vec![0; bytes.len()];
        plane.get(start as u64, &mut got, &on(1)).unwrap();
        prop_assert_eq!(&got, &before[guard + start..][..bytes.len()]);
        plane.set(start as u64, &bytes, &on(1)).unwrap();
        let behind = [&bytes[..], &[0]].concat();
        prop_assert!(is_refused(&plane.set(start as u64, &behind, &on(1))));
        prop_assert!(is_refused(&plane.get(start as u64, &mut [&got[..], &[0]].concat(), &on(1))));
        prop_assert_eq!(memory.bytes(), [&before[..guard + start], &bytes, &before[guard + span..]].concat());
    }

    #[test]
    fn a_batch_is_the_same_whatever_the_staging_and_wherever_its_blob(
        (mut a, a_cells) in memory_and_cells(), (mut b, b_cells) in memory_and_cells(), dropped in 0..4_usize,
        size in select(vec![1_u64, 64, 999, 1 << 16]), seed in any::<u64>(),
    ) {
        let transfer = staged(1, size);
        let blob = [a.gathered(&a_cells), b.gathered(&b_cells)].concat();
        let (a_plane, b_plane) = (a.plane(), b.plane());
        let regions = [
            (0, Region::new(&a_plane, &map_of(&a_cells)).unwrap()),
            (a.blob_order(&a_cells).len() as u64, Region::new(&b_plane, &map_of(&b_cells)).unwrap()),
        ];
        let mut out = place::Pinned::new(&vec![0xEE; blob.len()]);
        gather(&regions, &mut out, &transfer, None).unwrap();
        prop_assert_eq!(&out[..], &blob[..]);
        drop(regions);

        // Back to where they were, but for some cells at the start, and other bytes.
        let blob = noise(blob.len(), seed);
        let (a_blob, b_blob) = blob.split_at(a.blob_order(&a_cells).len());
        let pinned = place::Pinned::new(&blob);
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &blob).unwrap();
        let kept = |memory: &Memory, cells: &[u32], blob: &[u8]| {
            let source = Memory::new(u32::try_from(cells.len()).unwrap().max(1), dense_like(memory.shape, u32::try_from(cells.len()).unwrap().max(1)), 0);
            let kept: Vec<u32> = (0..source.kv_size).skip(dropped).take(cells.len().saturating_sub(dropped)).collect();
            let order = source.blob_order(&kept);
            let bytes: Vec<u8> = order.into_iter().map(|i| blob[i - source.guard]).collect();
            memory.scattered(&bytes, &cells[dropped.min(cells.len())..])
        };
        let expected = (kept(&a, &a_cells, a_blob), kept(&b, &b_cells, b_blob));
        let map = |cells: &[u32]| CellMap::new(Move::of_pairs((0..).zip(cells.iter().copied()).skip(dropped))).unwrap();
        let (a_map, b_map) = (map(&a_cells), map(&b_cells));
        for from in 0..3 {
            let (mut a, mut b) = (a.clone(), b.clone());
            let (mut a_plane, mut b_plane) = (a.plane(), b.plane());
            let src = |start: usize, len: usize| match from {
                0 => TensorBytes::Memory(&blob[start..][..len]),
                1 => TensorBytes::Memory(&pinned[start..][..len]),
                _ => TensorBytes::File { file: &file, offset: start as u64, len: len as u64 },
            };
            let n_src = |cells: &[u32]| u32::try_from(cells.len()).unwrap();
            let mut batch = [
                Scatter { plane: &mut a_plane, map: &a_map, n_src: n_src(&a_cells), src: src(0, a_blob.len()).into() },
                Scatter { plane: &mut b_plane, map: &b_map, n_src: n_src(&b_cells), src: src(a_blob.len(), b_blob.len()).into() },
            ];
            scatter(&mut batch, &transfer, None).unwrap();
            prop_assert_eq!((a.bytes(), b.bytes()), expected.clone(), "from {}", ["memory", "pinned memory", "a file"][from]);
        }
    }

    #[test]
    fn maps_that_leave_the_plane_or_the_blob_are_refused_and_change_nothing(
        (mut memory, cells) in memory_and_cells(), start in any::<u32>(), len in 1..u32::MAX, near in any::<bool>()
    ) {
        let kv_size = memory.kv_size;
        let (start, len) = if near { (start % kv_size, kv_size - start % kv_size + 1) } else { (start, len) };
        prop_assume!(u64::from(start) + u64::from(len) > u64::from(kv_size));
        prop_assume!(start.checked_add(len).is_some());
        let before = memory.bytes();
        let blob = noise(memory.blob_order(&(0..kv_size).collect::<Vec<_>>()).len(), 1);
        let mut other = Memory::new(kv_size, memory.shape, 1);
        let mut fine = Memory::new(kv_size, memory.shape, 2);
        let fine_before = fine.bytes();
        let good = CellMap::of_run(0, kv_size).unwrap();

        let inside = cells.iter().copied().filter(|&cell| cell < start);
        let outside = Arc::new(CellMap::new(Move::of_pairs((0..).zip(inside.chain(start..start + len.min(99))))).unwrap());
        let mut plane = memory.plane();
        if outside.dst_end() > kv_size {
            prop_assert!(is_refused(&copy_cells(vec![(&mut plane, &other.plane())], &outside, &on(1))));
            prop_assert!(is_refused(&Region::new(&plane, &outside).map(drop)));
        }

        let mut fine_plane = fine.plane();
        for bad in [Move { src: start, dst: 0, len }, Move { src: 0, dst: start, len }] {
            // The part before it is fine, but is not written either.
            let bad = CellMap::new(vec![bad]).unwrap();
            let result = scatter_all(vec![
                Scatter { plane: &mut fine_plane, map: &good, n_src: kv_size, src: TensorBytes::Memory(&blob).into() },
                Scatter { plane: &mut plane, map: &bad, n_src: kv_size, src: TensorBytes::Memory(&blob).into() },
            ]);
            prop_assert!(is_refused(&result));
        }
        for src in [&blob[1..], &[&blob[..], &[0]].concat()] {
            let result = scatter_all(vec![
                Scatter { plane: &mut fine_plane, map: &good, n_src: kv_size, src: TensorBytes::Memory(&blob).into() },
                Scatter { plane: &mut plane, map: &good, n_src: kv_size, src: TensorBytes::Memory(src).into() },
            ]);
            prop_assert!(is_refused(&result));
        }
        prop_assert_eq!(memory.bytes(), before);
        prop_assert_eq!(fine.bytes(), fine_before);
    }

    #[test]
    fn a_map_takes_moves_that_are_apart_and_no_others(
        moves in prop::collection::vec((0..12_u32, 0..12_u32, 0..4_u32), 0..5)
    ) {
        let moves: Vec<Move> = moves.into_iter().map(|(src, dst, len)| Move { src, dst, len }).collect();
        let ends: Vec<u32> = moves.iter().map(|m| m.src + m.len).collect();
        let ascends = moves.iter().skip(1).zip(&ends).all(|(m, &end)| m.src >= end);
        let mut named: Vec<u32> = moves.iter().flat_map(|m| m.dst..m.dst + m.len).collect();
        let n_cells = named.len();
        named.sort_unstable();
        named.dedup();
        let is_map = ascends && named.len() == n_cells && moves.iter().all(|m| m.len > 0);
        match CellMap::new(moves) {
            Ok(map) => {
                prop_assert!(is_map);
                prop_assert_eq!(map.n_cells() as usize, n_cells);
                prop_assert_eq!(map.src_end(), ends.last().copied().unwrap_or(0));
                prop_assert_eq!(map.dst_end(), named.last().map_or(0, |cell| cell + 1));
            }
            Err(error) => prop_assert!(!is_map, "{}", error),
        }
    }

    #[test]
    fn check_accepts_channel_after_channel_or_cell_after_cell_and_never_overlap(
        kv_size in 0..6_u32, n_channel in 0..6_u32, elem_size in 0..4_u32, cell_stride in 0..24_u64, channel_stride in 0..24_u64
    ) {
        let shape = PlaneShape::Channels { n_channel, elem_size, cell_stride, channel_stride };
        let mut bytes = Vec::new();
        for channel in 0..u64::from(n_channel) {
            for cell in 0..u64::from(kv_size) {
                let start = channel * channel_stride + cell * cell_stride;
                bytes.extend(start..start + u64::from(elem_size));
            }
        }
        let last = bytes.iter().max().map_or(0, |byte| byte + 1);
        prop_assert_eq!(shape.span(kv_size), Some(last));
        let n_bytes = bytes.len();
        bytes.sort_unstable();
        bytes.dedup();
        let apart = n_bytes > 0 && bytes.len() == n_bytes;
        prop_assert!(apart || shape.check(kv_size).is_err(), "an accepted shape does not overlap");
        // Elements that only interlock are apart as well, but no cache is laid out like that.
        let room = u64::from(elem_size);
        let regular = room > 0 && n_channel > 0 && kv_size > 0
            && ((cell_stride >= room && channel_stride >= u64::from(kv_size) * cell_stride)
                || (channel_stride >= room && cell_stride >= u64::from(n_channel) * channel_stride));
        prop_assert_eq!(shape.check(kv_size).is_ok(), regular);
    }
}

/// The shape of a blob of `n_cells` cells.
fn dense_like(shape: PlaneShape, n_cells: u32) -> PlaneShape {
    match shape {
        PlaneShape::Rows { row_size, .. } => PlaneShape::dense_rows(row_size),
        PlaneShape::Channels { n_channel, elem_size, .. } => {
            PlaneShape::dense_channels(n_channel, elem_size, n_cells)
        }
    }
}

#[test]
fn dense_shapes_span_their_cells_and_pass_the_check() {
    for shape in [PlaneShape::dense_rows(34), PlaneShape::dense_channels(17, 2, 100)] {
        assert_eq!((shape.cell_bytes(), shape.span(100), shape.check(100)), (34, Some(3400), Ok(())));
    }
}

#[test]
fn check_refuses_overlap_and_overflow() {
    let rows = |row_size, cell_stride| PlaneShape::Rows { row_size, cell_stride };
    assert!(rows(8, 7).check(2).unwrap_err().contains("overlap"));
    assert!(rows(0, 8).check(2).unwrap_err().contains("no bytes"));
    assert!(rows(8, 8).check(0).unwrap_err().contains("no bytes"));
    assert_eq!(rows(8, u64::MAX / 2).span(4), None);
    assert_eq!(rows(u64::MAX, u64::MAX).span(1), Some(u64::MAX));
    assert!(rows(u64::MAX, u64::MAX).check(1).unwrap_err().contains("addressed"));
    let channels = PlaneShape::dense_channels(u32::MAX, u32::MAX, u32::MAX);
    assert_eq!(channels.span(u32::MAX), None);
    assert!(channels.check(u32::MAX).unwrap_err().contains("addressed"));
}

/// Three rows with gaps between them: a call for each.
fn remote_rows(calls_left: usize) -> (Memory, Arc<Remote>) {
    let memory = Memory::new(3, PlaneShape::Rows { row_size: 4, cell_stride: 6 }, 1);
    let remote = Remote::new(&memory, calls_left);
    (memory, remote)
}

fn all_rows() -> Arc<CellMap> {
    Arc::new(CellMap::of_run(0, 3).unwrap())
}

#[test]
fn a_get_that_fails_is_the_error_of_gather() {
    for calls_left in 0..3 {
        let (memory, remote) = remote_rows(calls_left);
        let plane = remote.plane(&memory);
        let region = Region::new(&plane, &all_rows()).unwrap();
        let error = gather(&[(0, region)], &mut [0; 12], &Transfer::default(), None).unwrap_err();
        assert_eq!(error.to_string(), "get of the caller failed: 7", "call {calls_left}");
    }
}

#[test]
fn a_set_that_fails_is_the_error_of_scatter_and_zero() {
    for calls_left in 0..3 {
        let (memory, remote) = remote_rows(calls_left);
        let mut plane = remote.plane(&memory);
        let result = scatter_one(&mut plane, &all_rows(), 3, &[9; 12]);
        assert_eq!(result.unwrap_err().to_string(), "set of the caller failed: 7", "call {calls_left}");
        let written = memory.blob_order(&(0..u32::try_from(calls_left).unwrap()).collect::<Vec<_>>());
        let bytes = remote.bytes.lock().unwrap();
        assert!((0..bytes.len()).all(|i| bytes[i] == if written.contains(&i) { 9 } else { memory.bytes[i] }));
        drop(bytes);

        let (memory, remote) = remote_rows(calls_left);
        let error = remote.plane(&memory).zero_all(&on(1)).unwrap_err();
        assert_eq!(error.to_string(), "set of the caller failed: 7", "call {calls_left}");
    }
}

#[test]
fn a_remote_plane_is_checked_like_one_in_host_memory() {
    let (memory, remote) = remote_rows(0);
    let mut plane = remote.plane(&memory);
    assert!(plane.as_ptr().is_null());
    let outside = Arc::new(CellMap::of_run(1, 3).unwrap());
    assert!(is_refused(&Region::new(&plane, &outside).map(drop)));
    assert!(is_refused(&scatter_one(&mut plane, &outside, 3, &[9; 12])));
    let overlapping = PlaneShape::Rows { row_size: 4, cell_stride: 3 };
    assert!(is_refused(&Plane::remote(remote, TENSOR, 2, overlapping).map(drop)));
}

#[test]
fn cells_are_not_copied_between_tensors_behind_calls() {
    let (mut memory, remote) = remote_rows(usize::MAX);
    let mut plane = remote.plane(&memory);
    assert!(is_refused(&copy_cells(vec![(&mut plane, &memory.plane())], &all_rows(), &on(1))));
    let before = memory.bytes();
    assert!(is_refused(&copy_cells(vec![(&mut memory.plane(), &plane)], &all_rows(), &on(1))));
    assert_eq!(memory.bytes(), before);
}

#[test]
fn a_large_remote_plane_is_zeroed_in_pieces() {
    let memory = Memory::new(4, PlaneShape::dense_rows(50_000), 1);
    let remote = Remote::new(&memory, 4);
    remote.plane(&memory).zero_all(&on(1)).unwrap();
    assert_eq!(remote.calls_left.load(Ordering::Relaxed), 0);
    let expected = memory.scattered(&vec![0; 200_000], &[0, 1, 2, 3]);
    assert!(*remote.bytes.lock().unwrap() == expected);
}

#[test]
fn a_region_has_every_cell_of_its_blob() {
    let planes = Plane::allocate(&[PlaneShape::dense_rows(1)], 4).unwrap();
    let gap = CellMap::new(vec![Move { src: 1, dst: 0, len: 1 }]).unwrap();
    let error = Region::new(&planes[0], &Arc::new(gap)).unwrap_err();
    assert_eq!(error.to_string(), "map: 1 cells of a blob of 2");
}

#[test]
fn copy_cells_refuses_another_shape_or_size() {
    let run = CellMap::of_run(0, 1).unwrap();
    let rows = PlaneShape::dense_rows;
    let mut plane = Plane::allocate(&[rows(4)], 8).unwrap().remove(0);
    for other in [Plane::allocate(&[rows(5)], 8), Plane::allocate(&[rows(4)], 9)] {
        assert!(is_refused(&copy_cells(vec![(&mut plane, &other.unwrap()[0])], &run, &on(1))));
    }
}

#[test]
fn allocated_planes_are_zeroed_and_apart() {
    let kv_size = 33;
    let shapes = [
        PlaneShape::dense_rows(34),
        PlaneShape::dense_channels(5, 2, kv_size),
        PlaneShape::Rows { row_size: 3, cell_stride: 10 },
    ];
    let mut planes = match place::place().device(0) {
        None => Plane::allocate(&shapes.repeat(2), kv_size),
        Some(device) => Plane::allocate_on(&Device::open(device).unwrap(), &shapes.repeat(2), kv_size),
    }
    .unwrap();
    assert_eq!(planes.len(), 6);
    let all = Arc::new(CellMap::of_run(0, kv_size).unwrap());
    for plane in &planes {
        assert!(gather_one(Region::new(plane, &all).unwrap()).iter().all(|&byte| byte == 0));
    }
    // Planes outlive each other, and hold what was written into them.
    let blobs: Vec<Vec<u8>> = planes
        .iter()
        .zip(0..)
        .map(|(plane, seed)| {
            noise(kv_size as usize * usize::try_from(plane.shape().cell_bytes()).unwrap(), seed)
        })
        .collect();
    let batch = planes
        .iter_mut()
        .zip(&blobs)
        .map(|(plane, src)| Scatter {
            plane,
            map: &all,
            n_src: kv_size,
            src: TensorBytes::Memory(src).into(),
        })
        .collect();
    scatter_all(batch).unwrap();
    drop(planes.remove(0));
    for (plane, blob) in planes.iter().zip(&blobs[1..]) {
        assert_eq!(&gather_one(Region::new(plane, &all).unwrap()), blob);
    }
    assert!(Plane::allocate(&[], kv_size).unwrap().is_empty());
}

#[test]
fn allocated_planes_start_at_multiples_of_64_bytes() {
    // Small and large allocations come from different places.
    let held: Vec<Vec<Plane>> = (0..20)
        .map(|i| Plane::allocate(&[PlaneShape::dense_rows(1 << i), PlaneShape::dense_rows(3)], 1).unwrap())
        .collect();
    assert!(held.iter().flatten().all(|plane| plane.as_ptr().addr() % 64 == 0));
}

#[test]
fn memory_that_cannot_be_had_is_an_error() {
    let huge = PlaneShape::dense_rows(1 << 30);
    for shapes in [vec![huge], vec![huge; 2], vec![huge; 100]] {
        let error = Plane::allocate(&shapes, u32::MAX).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { bytes, .. } if bytes >= 1 << 61), "{error}");
    }
}

#[test]
fn a_large_allocation_costs_nothing_until_it_is_written() {
    // 64 GiB of addresses: more than a test machine has to spare.
    match Plane::allocate(&[PlaneShape::dense_rows(1 << 20)], 1 << 16) {
        Ok(planes) => assert_eq!(gather_one(Region::new(&planes[0], &map_of(&[7])).unwrap()).len(), 1 << 20),
        Err(error) => assert!(matches!(error, Error::OutOfMemory { .. }), "{error}"),
    }
}

#[test]
fn adopt_refuses_null_and_bad_shapes() {
    let shape = PlaneShape::dense_rows(4);
    // SAFETY: NULL is refused before anything is read.
    assert!(unsafe { Plane::adopt(std::ptr::null_mut(), 1, shape) }.is_err());
    let mut bytes = [0_u8; 8];
    let overlapping = PlaneShape::Rows { row_size: 4, cell_stride: 3 };
    // SAFETY: the shape is refused before anything is read.
    assert!(unsafe { Plane::adopt(bytes.as_mut_ptr(), 2, overlapping) }.is_err());
}

#[test]
fn planes_go_between_threads() {
    fn is_send_sync<T: Send + Sync>() {}
    is_send_sync::<Plane>();
    is_send_sync::<Region<'_>>();
}

/// Beyond the size from which on bytes go past the cache: runs long and short, at every alignment.
#[test]
fn large_regions_are_copied_byte_for_byte_whatever_their_alignment() {
    const KV_SIZE: u32 = 6000;
    const ROW: usize = 1000;
    for shift in [0, 1, 31, 63] {
        let byte = |i: u32| i.wrapping_mul(2_654_435_761).to_be_bytes()[0];
        let bytes: Vec<u8> = (0..KV_SIZE * 1000 + 64).map(byte).collect();
        let mut memory = bytes.clone();
        // SAFETY: the memory outlives the plane, has its span from `shift` on, and is not touched meanwhile.
        let mut plane = unsafe {
            Plane::adopt(memory.as_mut_ptr().add(shift), KV_SIZE, PlaneShape::dense_rows(ROW as u64))
        }
        .unwrap();
        let cells: Vec<u32> = (1..2).chain(3..5).chain(17..2917).collect();
        let row = |cell: u32| &bytes[shift + cell as usize * ROW..][..ROW];
        let expected: Vec<u8> = cells.iter().flat_map(|&cell| row(cell)).copied().collect();

        let mut out = vec![0; expected.len() + 3];
        gather(&[(3, Region::new(&plane, &map_of(&cells)).unwrap())], &mut out, &on(3), None).unwrap();
        assert!(out[3..] == expected, "gather at {shift}");
        assert_eq!(out[..3], [0; 3]);

        // Back to other cells: those are the rows that change, and no other byte.
        let map = CellMap::of_run(2999, 2903).unwrap();
        let src = TensorBytes::Memory(&expected);
        scatter(&mut [Scatter { plane: &mut plane, map: &map, n_src: 2903, src: src.into() }], &on(3), None)
            .unwrap();
        let mut after = bytes.clone();
        after[shift + 2999 * ROW..][..expected.len()].copy_from_slice(&expected);
        assert!(memory == after, "scatter at {shift}");
    }
}

/// As many bytes as threads are started for and as go past the cache: whatever the layout, the threads and the source.
#[test]
fn large_batches_are_the_same_on_any_number_of_threads_and_from_a_file() {
    // Enough for threads to be started and for copies past the cache; emulated kernels take their time.
    let kv_size = if place::place() == place::Place::Host { 24_000 } else { 1_000 };
    let mut x = 0x2545_F491_4F6C_DD1D_u64;
    let mut is_chosen = |_: &u32| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x & 1 == 0
    };
    let random: Vec<u32> = (0..kv_size).filter(&mut is_chosen).collect();
    let runs: Vec<u32> = (0..kv_size).filter(|cell| cell / 300 % 2 == 0 || cell / 16 % 2 == 0).collect();
    let shapes = [
        PlaneShape::dense_rows(256),
        PlaneShape::dense_rows(4),
        PlaneShape::Rows { row_size: 250, cell_stride: 256 },
        PlaneShape::dense_channels(128, 2, kv_size),
        PlaneShape::dense_channels(96, 4, kv_size),
        PlaneShape::dense_channels(300, 1, kv_size),
        PlaneShape::dense_channels(33, 8, kv_size),
        PlaneShape::Channels { n_channel: 128, elem_size: 2, cell_stride: 256, channel_stride: 2 },
    ];
    for cells in [random, runs] {
        let mut memories: Vec<Memory> =
            shapes.iter().zip(1..).map(|(&shape, seed)| Memory::new(kv_size, shape, seed)).collect();
        let expected: Vec<u8> = memories.iter().flat_map(|memory| memory.gathered(&cells)).collect();
        let map = map_of(&cells);
        let n_src = map.n_cells();
        for threads in [1, 2, 3] {
            let planes: Vec<Plane> = memories.iter_mut().map(Memory::plane).collect();
            let mut at = 0;
            let batch: Vec<(u64, Region<'_>)> = planes
                .iter()
                .map(|plane| {
                    let region = Region::new(plane, &map).unwrap();
                    at += region.bytes();
                    (at - region.bytes(), region)
                })
                .collect();
            let mut out = vec![0; expected.len()];
            gather(&batch, &mut out, &staged(threads, 1 << 16), None).unwrap();
            assert!(out == expected, "gather, {threads} threads");
        }

        let blob = noise(expected.len(), 99);
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &blob).unwrap();
        let mut at = 0;
        let after: Vec<Vec<u8>> = memories
            .iter()
            .map(|memory| {
                let n = memory.gathered(&cells).len();
                at += n;
                memory.scattered(&blob[at - n..at], &cells)
            })
            .collect();
        for (threads, from_file) in [(1, false), (2, false), (3, false), (1, true), (3, true)] {
            let mut fresh = memories.clone();
            let mut planes: Vec<Plane> = fresh.iter_mut().map(Memory::plane).collect();
            let mut offset = 0;
            let mut batch: Vec<Scatter<'_>> = planes
                .iter_mut()
                .map(|plane| {
                    let len = u64::from(n_src) * plane.shape().cell_bytes();
                    let start = usize::try_from(offset).unwrap();
                    let src = if from_file {
                        TensorBytes::File { file: &file, offset, len }
                    } else {
                        TensorBytes::Memory(&blob[start..][..usize::try_from(len).unwrap()])
                    };
                    offset += len;
                    Scatter { plane, map: &map, n_src, src: src.into() }
                })
                .collect();
            scatter(&mut batch, &staged(threads, 1 << 16), None).unwrap();
            drop(planes);
            for (i, (fresh, after)) in fresh.iter().zip(&after).enumerate() {
                assert!(fresh.bytes() == *after, "scatter, plane {i}, {threads} threads, file {from_file}");
            }
        }
    }
}
