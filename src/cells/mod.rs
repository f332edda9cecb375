//! Cell metadata of one stream: which cell holds which position of which sequences.
//!
//! The rules are those of llama.cpp's `llama_kv_cells` and `llama_kv_cache`, cell for cell, because callers
//! see them: which cells a batch gets decides the order of the cells in a saved state.
//!
//! Cells are named by index. A caller passes only indices below [`Cells::size`] and sequences below the
//! `n_seq_max` of [`Cells::new`]; both are its own words, checked where they come in.

mod cell_set;
mod pos_index;
mod seq_set;
mod set_table;
mod slot;
#[cfg(test)]
mod tests;

pub use self::seq_set::SeqSet;
pub use self::slot::{Placement, Shortage};

use self::cell_set::CellSet;
use self::pos_index::PosIndex;
use self::set_table::{SetId, SetTable};
use crate::error::{Error, Result};
use crate::types::{CellExt, Pos, PosRange, Seq};

/// What a used cell holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellMeta {
    /// Position, at least 0.
    pub pos: Pos,
    /// What is known beyond the position; the default in a stream without it.
    pub ext: CellExt,
    /// The sequences that see the cell, at least one.
    pub seqs: SeqSet,
}

/// The cells of one stream.
///
/// Operations cost what the sequences that they touch hold, whatever the size of the stream. Only a search for cells
/// walks it: by the holes and the used cells between them, or where there is no sliding window by the holes alone and
/// in steps of up to 4,096 cells.
///
/// 1,024 cells take 8,480 bytes, 8.3 each: position, number of the set of sequences, and a bit in each of two bitmaps
/// of two levels. Each sequence that a cell belongs to adds 8 in its index, whose capacity doubles as it grows. Ext
/// adds 12 to each cell, and the first shift of positions 4. Cells that were never used cost address space only.
#[derive(Clone, Debug)]
pub struct Cells {
    size: u32,
    /// Meaningless where the cell is not used.
    pos: Vec<Pos>,
    /// As `pos`; no entries in a stream without it.
    ext: Vec<CellExt>,
    /// Empty exactly where the cell is not used.
    seqs: Vec<SetId>,
    /// What `seqs` names.
    sets: SetTable,
    used: CellSet,
    /// The cells of each sequence.
    index: Vec<PosIndex>,
    /// `pos` less the position that the cell's K is rotated for, where that is not 0.
    /// Both are in `0..=Pos::MAX`, so the difference fits. No entries before the first shift.
    shift: Vec<Pos>,
    /// The cells whose shift is not 0.
    shifted: CellSet,
    /// Where the next search for free cells starts, at most the size.
    head: u32,
    has_ext: bool,
}

impl Cells {
    /// `kv_size` empty cells for sequences `0..n_seq_max`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(kv_size: u32, n_seq_max: u32, has_ext: bool) -> Result<Self> {
        let n = kv_size as usize;
        Ok(Self {
            size: kv_size,
            seqs: zeroed(n)?,
            sets: SetTable::default(),
            pos: zeroed(n)?,
            ext: filled(if has_ext { n } else { 0 }, CellExt::default())?,
            used: CellSet::new(kv_size),
            index: vec![PosIndex::default(); n_seq_max as usize],
            shift: Vec::new(),
            shifted: CellSet::new(kv_size),
            head: 0,
            has_ext,
        })
    }

    /// Cells that somebody else keeps, as far as a search for free cells needs them.
    ///
    /// `used` names each used cell once. Only sequences that `is_searched` holds for get positions: the one that
    /// will be replaced, and with a sliding window all of them.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn of_used(
        kv_size: u32,
        n_seq_max: u32,
        head: u32,
        used: impl IntoIterator<Item = (u32, CellMeta)>,
        is_searched: impl Fn(Seq) -> bool,
    ) -> Result<Self> {
        let mut cells = Self::new(kv_size, n_seq_max, false)?;
        for (cell, meta) in used {
            let seqs = cells.sets.hold(meta.seqs, 1);
            cells.fill(cell, &meta, seqs);
            for seq in meta.seqs.iter().filter(|&seq| is_searched(seq)) {
                cells.index[seq.index()].push([(meta.pos, cell)]);
            }
        }
        cells.index.iter_mut().for_each(PosIndex::sort);
        cells.head = head.min(kv_size);
        Ok(cells)
    }

    /// Number of cells.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Number of used cells.
    #[must_use]
    pub fn n_used(&self) -> u32 {
        self.used.len()
    }

    /// One past the last used cell, 0 if there is none.
    #[must_use]
    pub fn used_max_p1(&self) -> u32 {
        self.used.last().map_or(0, |cell| cell + 1)
    }

    /// Where the next search for free cells starts.
    #[must_use]
    pub fn head(&self) -> u32 {
        self.head
    }

    /// Whether cells know more than their position.
    #[must_use]
    pub fn has_ext(&self) -> bool {
        self.has_ext
    }

    /// What `cell` holds; `None` if it is empty.
    #[must_use]
    pub fn meta(&self, cell: u32) -> Option<CellMeta> {
        let i = cell as usize;
        let seqs = self.seqs[i];
        (seqs != SetId::EMPTY).then(|| CellMeta {
            pos: self.pos[i],
            ext: self.ext.get(i).copied().unwrap_or_default(),
            seqs: self.sets.get(seqs),
        })
    }

    /// Whether `cell` holds something.
    #[must_use]
    pub fn is_used(&self, cell: u32) -> bool {
        self.used.contains(cell)
    }

    /// By how much the K of `cell` is still to be rotated.
    #[must_use]
    pub fn shift(&self, cell: u32) -> Pos {
        self.shift.get(cell as usize).copied().unwrap_or(0)
    }

    /// The used cells, ascending.
    pub fn used_cells(&self) -> impl Iterator<Item = u32> + '_ {
        self.used.iter()
    }

    /// Number of cells of `seq`.
    #[must_use]
    pub fn seq_len(&self, seq: Seq) -> usize {
        self.index[seq.index()].as_slice().len()
    }

    /// Smallest position of `seq`; `None` if it has no cell.
    #[must_use]
    pub fn seq_pos_min(&self, seq: Seq) -> Option<Pos> {
        self.index[seq.index()].as_slice().first().map(|&(pos, _)| pos)
    }

    /// Largest position of `seq`; `None` if it has no cell.
    #[must_use]
    pub fn seq_pos_max(&self, seq: Seq) -> Option<Pos> {
        self.index[seq.index()].as_slice().last().map(|&(pos, _)| pos)
    }

    /// `(pos, cell)` of the cells of `seq` in `range`, ordered.
    #[must_use]
    pub fn seq_cells(&self, seq: Seq, range: PosRange) -> &[(Pos, u32)] {
        self.index[seq.index()].range(range)
    }

    /// Empties every cell; the next search starts at 0.
    pub fn clear(&mut self) {
        self.rm(PosRange::ALL);
        self.head = 0;
    }

    /// Takes `seq` out of its cells in `range`.
    pub fn seq_rm(&mut self, seq: Seq, range: PosRange) {
        let taken = self.index[seq.index()].take(range);
        let mut entries = &taken[..];
        while let Some((seqs, run)) = next_run(&self.seqs, &mut entries) {
            if seqs == SetId::of(seq) {
                self.free_all(run);
            } else {
                let mut left = self.sets.get(seqs);
                left.remove(seq);
                self.set_seqs(run, seqs, left);
            }
        }
    }

    /// Empties the cells in `range`, whichever sequences they belong to.
    pub fn rm(&mut self, range: PosRange) {
        for i in 0..self.index.len() {
            let taken = self.index[i].take(range);
            self.free_all(&taken);
        }
    }

    /// Adds `dst` to the cells of `src` in `range`.
    pub fn seq_cp(&mut self, src: Seq, dst: Seq, range: PosRange) {
        let mut to = std::mem::take(&mut self.index[dst.index()]);
        let from = std::mem::take(&mut self.index[src.index()]);
        let mut entries = from.range(range);
        while let Some((seqs, run)) = next_run(&self.seqs, &mut entries) {
            let mut both = self.sets.get(seqs);
            if !both.contains(dst) {
                both.insert(dst);
                self.set_seqs(run, seqs, both);
                to.push(run.iter().copied());
            }
        }
        to.sort();
        self.index[src.index()] = from;
        self.index[dst.index()] = to;
    }

    /// Takes every sequence but `seq` out of all cells.
    pub fn seq_keep(&mut self, seq: Seq) {
        for i in (0..self.index.len()).filter(|&i| i != seq.index()) {
            let taken = self.index[i].take(PosRange::ALL);
            let mut entries = &taken[..];
            while let Some((seqs, run)) = next_run(&self.seqs, &mut entries) {
                if self.sets.contains(seqs, seq) {
                    self.set_seqs(run, seqs, SeqSet::of(seq));
                } else {
                    self.free_all(run);
                }
            }
        }
    }

    /// Adds `delta` to the positions of `seq` in `range`; a cell that gets below 0 is emptied.
    /// A cell that other sequences share moves in them too.
    ///
    /// # Errors
    /// [`Error::PosOverflow`] if a position would get too large; nothing changes then.
    pub fn seq_add(&mut self, seq: Seq, range: PosRange, delta: Pos) -> Result<()> {
        // Not `is_empty`: llama.cpp resets the head for a range that ends before it starts.
        if delta == 0 || i64::from(range.p0) == range.p1 {
            return Ok(());
        }
        if let Some(&(pos, _)) = self.seq_cells(seq, range).last()
            && pos.checked_add(delta).is_none()
        {
            return Err(Error::PosOverflow { pos, delta });
        }
        let first_freed = self.map_pos(seq, range, |pos| pos + delta);
        self.head = first_freed.unwrap_or(0);
        Ok(())
    }

    /// Divides the positions of `seq` in `range` by `d`.
    /// A cell that other sequences share moves in them too.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `d` is below 1.
    pub fn seq_div(&mut self, seq: Seq, range: PosRange, d: i32) -> Result<()> {
        if d < 1 {
            return Err(Error::arg("d", format!("{d} is not a positive divisor")));
        }
        self.map_pos(seq, range, |pos| pos / d);
        Ok(())
    }

    /// Whether some cell's K is still to be rotated.
    #[must_use]
    pub fn has_shift(&self) -> bool {
        self.shifted.len() != 0
    }

    /// The cells whose K is still to be rotated and by how much (never 0), ascending by cell.
    pub fn shifted(&self) -> impl Iterator<Item = (u32, Pos)> {
        self.shifted.iter().map(|cell| (cell, self.shift[cell as usize]))
    }

    /// Every K is rotated for the position of its cell.
    pub fn shift_done(&mut self) {
        let mut from = 0;
        while let Some(cell) = self.shifted.next(from) {
            self.set_shift(cell, 0);
            from = cell + 1;
        }
    }

    /// Makes this stream a copy of sequence `src` of `other`, as sequence `dst`, in the same cells.
    ///
    /// Whatever it held goes. The streams must have the same size; pending shifts come along, since the
    /// rows that are copied with the cells are not rotated yet either.
    pub fn seq_cp_from(&mut self, other: &Self, src: Seq, dst: Seq) {
        self.clear();
        for &(pos, cell) in other.seq_cells(src, PosRange::ALL) {
            let ext = other.ext.get(cell as usize).copied().unwrap_or_default();
            self.fill(cell, &CellMeta { pos, ext, seqs: SeqSet::of(dst) }, SetId::of(dst));
            self.set_shift(cell, other.shift(cell));
        }
        self.index[dst.index()] = other.index[src.index()].clone();
        self.head = other.head;
    }

    /// Moves the cells of `seq` in `range` to `new_pos` of their position.
    /// Returns the first cell that this empties.
    ///
    /// Rotating K by n moves it n positions forward, so the pending shift grows by new - old, for a division
    /// too. llama.cpp adds old - new in `pos_div`: its K-shift turns divided cells away from their new
    /// position, and its own `seq_cp`, which takes pos - shift for the position before the shift, breaks on
    /// them.
    fn map_pos(&mut self, seq: Seq, range: PosRange, new_pos: impl Fn(Pos) -> Pos) -> Option<u32> {
        let mut own = std::mem::take(&mut self.index[seq.index()]);
        let mut others = SeqSet::EMPTY;
        let mut entries = own.range(range);
        while let Some((seqs, _)) = next_run(&self.seqs, &mut entries) {
            others = others.union(self.sets.get(seqs));
        }
        others.remove(seq);
        for other in others.iter() {
            self.index[other.index()].map(range, |pos, cell| {
                let is_shared = self.sets.contains(self.seqs[cell as usize], seq);
                if is_shared { new_pos(pos) } else { pos }
            });
        }
        let mut first_freed = None;
        own.map(range, |old, cell| {
            let new = new_pos(old);
            if new < 0 {
                self.free(cell);
                first_freed = Some(first_freed.map_or(cell, |first: u32| first.min(cell)));
            } else {
                self.pos[cell as usize] = new;
                self.set_shift(cell, self.shift(cell) + (new - old));
            }
            new
        });
        self.index[seq.index()] = own;
        first_freed
    }

    /// Cells that are not shifted, mostly all of them, are not touched.
    fn set_shift(&mut self, cell: u32, shift: Pos) {
        if shift != 0 {
            self.shifted.insert(cell);
            if self.shift.is_empty() {
                self.shift = vec![0; self.size as usize];
            }
        } else if self.shifted.contains(cell) {
            self.shifted.remove(cell);
        } else {
            return;
        }
        self.shift[cell as usize] = shift;
    }

    /// Gives cells, all of `old`, to the sequences `new`.
    fn set_seqs(&mut self, entries: &[(Pos, u32)], old: SetId, new: SeqSet) {
        let new = self.sets.hold(new, entries.len());
        for &(_, cell) in entries {
            self.seqs[cell as usize] = new;
        }
        self.sets.release(old, entries.len());
    }

    /// Sets an empty cell, which is still to be listed, and whose sequences are held as `seqs`.
    fn fill(&mut self, cell: u32, meta: &CellMeta, seqs: SetId) {
        let i = cell as usize;
        self.pos[i] = meta.pos;
        self.seqs[i] = seqs;
        if self.has_ext {
            self.ext[i] = meta.ext;
        }
        self.used.insert(cell);
    }

    fn free_all(&mut self, entries: &[(Pos, u32)]) {
        for &(_, cell) in entries {
            self.free(cell);
        }
    }

    /// Empties a cell that is not listed any more, or will not be. The next search starts there at the latest.
    fn free(&mut self, cell: u32) {
        let seqs = std::mem::take(&mut self.seqs[cell as usize]);
        self.sets.release(seqs, 1);
        self.used.remove(cell);
        self.set_shift(cell, 0);
        self.head = self.head.min(cell);
    }
}

/// Takes the cells at the start of `entries` that belong to the same sequences.
fn next_run<'a>(seqs: &[SetId], entries: &mut &'a [(Pos, u32)]) -> Option<(SetId, &'a [(Pos, u32)])> {
    let &(_, first) = entries.first()?;
    let id = seqs[first as usize];
    let end = entries.iter().position(|&(_, cell)| seqs[cell as usize] != id).unwrap_or(entries.len());
    let run;
    (run, *entries) = entries.split_at(end);
    Some((id, run))
}

/// `n` zeroes that cost no memory until they are written, or an error where `vec!` would abort.
fn zeroed<T: bytemuck::Zeroable>(n: usize) -> Result<Vec<T>> {
    let bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
    bytemuck::allocation::try_zeroed_vec(n).map_err(|()| Error::OutOfMemory { what: "cell metadata", bytes })
}

/// `n` values, or an error where `vec!` would abort.
fn filled<T: Clone>(n: usize, value: T) -> Result<Vec<T>> {
    let mut out = Vec::new();
    let bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
    out.try_reserve_exact(n).map_err(|_| Error::OutOfMemory { what: "cell metadata", bytes })?;
    out.resize(n, value);
    Ok(out)
}
