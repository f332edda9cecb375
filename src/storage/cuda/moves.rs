//! Moves: what a kernel does with a grid of elements, and the tables that tell it.

use std::collections::HashMap;
use std::ffi::CStr;
use std::ptr;

use bytemuck::{Pod, Zeroable};

use super::device::Grid;
use super::driver::DevicePtr;
use super::plane::DeviceGrid;
use crate::error::{Error, Result};
use crate::storage::CellMap;
use crate::storage::region::Rectangle;

/// The kernels: of `cuda/kv.cu`, and the last of `cuda/shift.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kernel {
    /// Any elements.
    Rows,
    /// Elements of a word, aligned.
    Elements1,
    Elements2,
    Elements4,
    Elements8,
    /// Zeroes any elements.
    Zero,
    /// Turns rows of K.
    Shift,
}

impl Kernel {
    pub const ALL: [Self; 7] = [
        Self::Rows,
        Self::Elements1,
        Self::Elements2,
        Self::Elements4,
        Self::Elements8,
        Self::Zero,
        Self::Shift,
    ];

    pub fn name(self) -> &'static CStr {
        match self {
            Self::Rows => c"kv_move_rows",
            Self::Elements1 => c"kv_move_1",
            Self::Elements2 => c"kv_move_2",
            Self::Elements4 => c"kv_move_4",
            Self::Elements8 => c"kv_move_8",
            Self::Zero => c"kv_zero",
            Self::Shift => c"kv_shift_rows",
        }
    }

    /// Blocks that have something to do in a move.
    fn blocks(self, m: &Move) -> u64 {
        /// Elements that a block of [`Kernel::Rows`] has in hand: one a warp.
        const WARPS: u64 = 8;
        match self {
            Self::Rows | Self::Zero => (u64::from(m.n_cells) * u64::from(m.n_channel)).div_ceil(WARPS),
            _ => u64::from(m.n_channel),
        }
    }
}

/// Moves of a launch, at most: what a grid can have in `y`.
pub(super) const MAX_GRID_Y: usize = 65_535;

/// Blocks that fill the largest devices many times over; the kernels take strides.
pub(super) const MAX_GRID_X: u64 = 4096;

/// `KvMove` of `cuda/kv.cu`, byte for byte.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Move {
    pub src: DevicePtr,
    pub dst: DevicePtr,
    pub src_cell_stride: u64,
    pub src_channel_stride: u64,
    pub dst_cell_stride: u64,
    pub dst_channel_stride: u64,
    /// In a table that is being made: 0, or the offset of the list plus [`IN_TABLE`].
    pub src_cells: u64,
    /// As `src_cells`.
    pub dst_cells: u64,
    pub n_cells: u32,
    pub n_channel: u32,
    pub elem_size: u32,
    pub reserved: u32,
}

const _: () = assert!(size_of::<Move>() == 80);

/// Tells an offset of 0 from no list; offsets are multiples of 4.
const IN_TABLE: u64 = 1;

impl Move {
    /// The kernel that is best for it.
    fn kernel(&self) -> Kernel {
        let bits = self.src
            | self.dst
            | self.src_cell_stride
            | self.src_channel_stride
            | self.dst_cell_stride
            | self.dst_channel_stride;
        let is_aligned = bits.is_multiple_of(u64::from(self.elem_size.max(1)));
        match self.elem_size {
            1 => Kernel::Elements1,
            2 if is_aligned => Kernel::Elements2,
            4 if is_aligned => Kernel::Elements4,
            8 if is_aligned => Kernel::Elements8,
            _ => Kernel::Rows,
        }
    }
}

/// Neighbouring moves of a table that one launch does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub kernel: Kernel,
    /// Offset of the first move in the table, bytes.
    pub offset: u64,
    pub grid: Grid,
}

/// The side of a move that is a plane: its cells, as a map names them.
#[derive(Clone, Copy, Debug)]
struct Side {
    /// Address of channel 0 of cell 0.
    base: DevicePtr,
    /// Offset of the list plus [`IN_TABLE`]; 0: the cells from 0 on.
    cells: u64,
}

/// What the launches of a transfer read: moves, and lists of cells behind them.
#[derive(Debug, Default)]
pub(super) struct Table {
    moves: Vec<Move>,
    /// Of the list of each map: its cells of the stream, then, if the blob has more cells than are moved, those of the blob.
    cells: Vec<u32>,
    /// Where the lists of a map start in `cells`.
    lists: HashMap<*const CellMap, usize>,
}

/// Moves that are being collected for launches side by side.
#[derive(Debug, Default)]
pub(super) struct Group(Vec<(Kernel, Move)>);

impl Group {
    fn push(&mut self, kernel: Kernel, m: Move) {
        if m.n_cells > 0 && m.n_channel > 0 && m.elem_size > 0 {
            self.0.push((kernel, m));
        }
    }
}

impl Table {
    /// Blob cells of `block` from a plane to `blob`, where they lie in blob order.
    pub fn gather(
        &mut self,
        group: &mut Group,
        plane: &DeviceGrid,
        map: &CellMap,
        block: &Rectangle,
        blob: DevicePtr,
    ) {
        let Some((side, _, n_cells)) = self.sides(plane, map, block) else { return };
        let m = Move {
            src: side.base,
            src_cell_stride: plane.cell_stride,
            src_channel_stride: plane.channel_stride,
            src_cells: side.cells,
            dst: blob,
            dst_cell_stride: block.elem_size,
            dst_channel_stride: block.channel_bytes(),
            ..of_size(plane, block, n_cells)
        };
        group.push(m.kernel(), m);
    }

    /// Blob cells of `block`, which lie at `blob` in blob order, to a plane.
    pub fn scatter(
        &mut self,
        group: &mut Group,
        plane: &DeviceGrid,
        map: &CellMap,
        block: &Rectangle,
        blob: DevicePtr,
    ) {
        let Some((side, blob_cells, n_cells)) = self.sides(plane, map, block) else { return };
        let m = Move {
            src: blob.wrapping_add_signed(blob_cells.shift),
            src_cell_stride: block.elem_size,
            src_channel_stride: block.channel_bytes(),
            src_cells: blob_cells.list,
            dst: side.base,
            dst_cell_stride: plane.cell_stride,
            dst_channel_stride: plane.channel_stride,
            dst_cells: side.cells,
            ..of_size(plane, block, n_cells)
        };
        group.push(m.kernel(), m);
    }

    /// The cells of the stream that `map` names, from a plane to the same cells of another one of the same shape.
    pub fn copy(&mut self, group: &mut Group, dst: &DeviceGrid, src: &DeviceGrid, map: &CellMap) {
        let block = src.all(map.src_end());
        let (Some((from, _, n_cells)), Some((to, ..))) =
            (self.sides(src, map, &block), self.sides(dst, map, &block))
        else {
            return;
        };
        let m = Move {
            src: from.base,
            src_cell_stride: src.cell_stride,
            src_channel_stride: src.channel_stride,
            src_cells: from.cells,
            dst: to.base,
            dst_cell_stride: dst.cell_stride,
            dst_channel_stride: dst.channel_stride,
            dst_cells: to.cells,
            ..of_size(src, &block, n_cells)
        };
        group.push(m.kernel(), m);
    }

    /// Zeroes the cells of the stream that `map` names.
    pub fn zero(&mut self, group: &mut Group, plane: &DeviceGrid, map: &CellMap) {
        let block = plane.all(map.src_end());
        let Some((side, _, n_cells)) = self.sides(plane, map, &block) else { return };
        let m = Move {
            dst: side.base,
            dst_cell_stride: plane.cell_stride,
            dst_channel_stride: plane.channel_stride,
            dst_cells: side.cells,
            ..of_size(plane, &block, n_cells)
        };
        // The neighbours of a channel are one element: a warp is too much for each.
        let is_run =
            side.cells == 0 && plane.n_channel > 1 && plane.cell_stride == u64::from(plane.elem_size);
        match n_cells.checked_mul(plane.elem_size).filter(|_| is_run) {
            Some(elem_size) => group.push(Kernel::Zero, Move { n_cells: 1, elem_size, ..m }),
            None => group.push(Kernel::Zero, m),
        }
    }

    /// Which cells of the plane and of the blob a block is about, and how many; `None`: none.
    fn sides(
        &mut self,
        plane: &DeviceGrid,
        map: &CellMap,
        block: &Rectangle,
    ) -> Option<(Side, BlobCells, u32)> {
        let mut moves = map.moves_in(block.cells.clone());
        let first = moves.next()?;
        let base = plane.at(block.channels.start, 0);
        // No overflow: the cells lie in a blob that can be addressed.
        let bytes = |n_cells: u32| i64::from(n_cells) * block.elem_size.cast_signed();
        if moves.next().is_none() {
            // One run: its cells are counted from its first on.
            let side = Side { base: base + u64::from(first.dst) * plane.cell_stride, cells: 0 };
            let shift = bytes(first.src - block.cells.start);
            return Some((side, BlobCells { list: 0, shift }, first.len));
        }
        let is_whole = map.n_cells() == map.src_end();
        let start = *self.lists.entry(ptr::from_ref(map)).or_insert_with(|| {
            let start = self.cells.len();
            self.cells.extend(map.moves().iter().flat_map(|m| m.dst..m.dst + m.len));
            if !is_whole {
                self.cells.extend(map.moves().iter().flat_map(|m| m.src..m.src + m.len));
            }
            start
        });
        let count = |range| map.moves_in(range).map(|m| m.len).sum::<u32>();
        let (before, n_cells) = if is_whole {
            (block.cells.start, block.cells.end.min(map.src_end()) - block.cells.start)
        } else {
            (count(0..block.cells.start), count(block.cells.clone()))
        };
        let list = |from: usize| ((from + before as usize) as u64 * 4) | IN_TABLE;
        let blob = if is_whole {
            BlobCells { list: 0, shift: 0 }
        } else {
            // The list names cells of the whole blob.
            BlobCells { list: list(start + map.n_cells() as usize), shift: -bytes(block.cells.start) }
        };
        Some((Side { base, cells: list(start) }, blob, n_cells))
    }

    /// Adds the moves of a group; returns their launches, one for each kernel and 65,535 moves.
    pub fn add(&mut self, group: Group) -> Vec<Launch> {
        let Group(mut moves) = group;
        moves.sort_by_key(|&(kernel, _)| kernel);
        let mut launches = Vec::new();
        for moves in moves.chunk_by(|a, b| a.0 == b.0) {
            for moves in moves.chunks(MAX_GRID_Y) {
                let kernel = moves[0].0;
                let blocks = moves.iter().map(|(_, m)| kernel.blocks(m)).max().unwrap_or(1);
                let grid = Grid::new(blocks.clamp(1, MAX_GRID_X), moves.len());
                let offset = (self.moves.len() * size_of::<Move>()) as u64;
                launches.push(Launch { kernel, offset, grid });
                self.moves.extend(moves.iter().map(|&(_, m)| m));
            }
        }
        launches
    }

    /// Bytes of the table.
    pub fn size(&self) -> usize {
        size_of_val(&self.moves[..]) + size_of_val(&self.cells[..])
    }

    /// Writes the table, which will be at `ptr` of the device.
    pub fn write(&mut self, out: &mut [u8], ptr: DevicePtr) {
        let lists = ptr + size_of_val(&self.moves[..]) as u64;
        let place = |cells: &mut u64| {
            if *cells != 0 {
                *cells += lists - IN_TABLE;
            }
        };
        for m in &mut self.moves {
            place(&mut m.src_cells);
            place(&mut m.dst_cells);
        }
        let (moves, cells) = out.split_at_mut(size_of_val(&self.moves[..]));
        moves.copy_from_slice(bytemuck::cast_slice(&self.moves));
        cells.copy_from_slice(bytemuck::cast_slice(&self.cells));
    }
}

/// The side of a move that is a blob.
#[derive(Clone, Copy, Debug)]
struct BlobCells {
    list: u64,
    /// From where the block's cells lie to the first that is moved, or to cell 0 of the list.
    shift: i64,
}

fn of_size(plane: &DeviceGrid, block: &Rectangle, n_cells: u32) -> Move {
    Move {
        n_cells,
        n_channel: block.channels.end - block.channels.start,
        elem_size: plane.elem_size,
        ..Move::default()
    }
}

/// Sizes of elements that the kernels can take.
pub(super) fn elem_size(bytes: u64) -> Result<u32> {
    u32::try_from(bytes)
        .map_err(|_| Error::arg("shape", format!("rows of {bytes} bytes, a device takes up to 4 GiB")))
}
