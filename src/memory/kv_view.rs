//! The view: an attention cache whose cells and tensors belong to another library (`llama_kv_cache` itself).
//!
//! The same selection, bytes, checks and placement as for a cache whose cells are kept here. What differs is
//! where the cells are: they are visited, and set, through [`ViewCells`].

use std::sync::Arc;

use super::convert::Convert;
use super::geometry::{Geometry, KvParams, Streams};
use super::kv_cache::{KvPlanes, check_adopted};
use super::kv_read::{KvPlan, KvTensor, LegacyRotation, ReadParams};
use super::kv_write::{Scope, WriteParams};
use crate::cells::{CellMeta, Cells, Placement};
use crate::error::{Error, Result};
use crate::state::{Input, Sink, Source};
use crate::storage::{CellMap, Placed, Region, Scatter};
use crate::types::{Pos, PosRange, Seq, StateFlags};

/// A used cell of the owner's.
#[derive(Clone, Copy, Debug)]
pub struct ViewCell {
    /// Index in its stream.
    pub cell: u32,
    /// What it holds.
    pub meta: CellMeta,
    /// By how much its K is still to be rotated.
    pub shift: Pos,
}

/// The cells of a cache, as their owner keeps them.
pub trait ViewCells: std::fmt::Debug {
    /// Calls `each` with every cell of `seq` in `stream` once, or with every used cell; in any order.
    ///
    /// # Errors
    /// What `each` returns, at once; or what keeps the owner from it.
    fn visit(
        &self,
        stream: usize,
        seq: Option<Seq>,
        each: &mut dyn FnMut(ViewCell) -> Result<()>,
    ) -> Result<()>;

    /// Where a search for free cells of `stream` starts.
    fn head(&self, stream: usize) -> u32;

    /// Replaces `seq` (with `None`: everything in the stream) by `cells[i]` holding `metas[i]`.
    ///
    /// The cells are empty, or are those of `seq`, or hold one other sequence whose window has passed them:
    /// that one loses them and all its older positions. The next search starts after the last cell.
    ///
    /// # Errors
    /// What keeps the owner from it.
    fn apply(&mut self, stream: usize, seq: Option<Seq>, cells: &[u32], metas: &[CellMeta]) -> Result<()>;

    /// Removes `seq` (with `None`: everything) and zeroes the data of the cells that only it used.
    ///
    /// # Errors
    /// What keeps the owner from it.
    fn clear(&mut self, seq: Option<Seq>) -> Result<()>;
}

/// The cells that a state's cells sit in, by stream of the state (`slot_info_vec_t`); none for a stream without
/// cells.
pub type SlotInfos = Vec<Vec<u32>>;

/// Metadata and tensor bytes of a state that come through the calls of somebody else (`llama_io_read_i`).
pub trait TensorInput: Input {
    /// Moves the next `bytes` bytes to `tensor`, from `offset` on.
    ///
    /// # Errors
    /// Whatever keeps the input from it.
    fn read_tensor(&mut self, tensor: usize, offset: u64, bytes: usize) -> Result<()>;
}

/// An attention cache of somebody else.
#[derive(Debug)]
pub struct KvView {
    geometry: Geometry,
    planes: KvPlanes,
    /// The cells are another cache's: nothing is written, nothing is read.
    shared: bool,
    legacy_rotation: Option<LegacyRotation>,
    convert: Convert,
    cells: Box<dyn ViewCells>,
}

/// What the restore of a section will do, and to which cache.
#[derive(Debug)]
pub(crate) struct ViewPlan<'a> {
    /// The cells found, by stream of the state.
    pub slots: SlotInfos,
    geometry: Geometry,
    shared: bool,
    /// Address of each plane, and its owner's name for the tensor.
    planes: Vec<(usize, usize)>,
    /// Planned cells that another sequence held, out of its window; ascending.
    taken: Vec<ViewCell>,
    /// `None`: nothing of the section is restored.
    plan: Option<KvPlan<'a>>,
}

impl ViewPlan<'_> {
    pub fn name(&self) -> &str {
        &self.geometry.name
    }

    pub(super) fn kv(&self) -> Option<&KvPlan<'_>> {
        self.plan.as_ref()
    }

    /// Whether it was made for a cache like this one.
    pub fn is_of(&self, view: &KvView) -> bool {
        self.geometry == view.geometry
    }
}

impl KvView {
    /// A view called `name` in messages.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names what does not fit.
    pub fn new(
        name: &str,
        params: &KvParams,
        n_seq_max: u32,
        unified: bool,
        planes: KvPlanes,
        cells: Box<dyn ViewCells>,
    ) -> Result<Self> {
        let geometry = Geometry::new(params, name, Streams::new(n_seq_max, unified)?)?;
        let planes = check_adopted(planes, &geometry)?;
        Ok(Self {
            geometry,
            planes,
            shared: false,
            legacy_rotation: None,
            convert: Convert::default(),
            cells,
        })
    }

    /// A view of a cache that reads the cells of another one: its state is empty.
    #[must_use]
    pub fn shared(self) -> Self {
        Self { shared: true, ..self }
    }

    /// Says what files older than version 4 leave open.
    #[must_use]
    pub fn with_legacy_rotation(self, legacy_rotation: Option<LegacyRotation>) -> Self {
        Self { legacy_rotation, ..self }
    }

    /// Whether states of other types of K and V, or of another rotation, are converted; see
    /// [`crate::ContextParams::convert_types`].
    #[must_use]
    pub fn with_convert_types(self, convert_types: bool) -> Self {
        Self { convert: Convert::allowing(convert_types), ..self }
    }

    /// What the section is called in messages.
    pub(crate) fn name(&self) -> &str {
        &self.geometry.name
    }

    fn writes(&self, flags: StateFlags) -> bool {
        !self.shared && self.geometry.writes(flags)
    }

    fn scope(&self, seq_id: i32) -> Result<Scope> {
        let n_seq_max = self.geometry.streams.n_seq_max;
        match seq_id {
            -1 => Ok(Scope::Whole),
            _ => Seq::new(seq_id, n_seq_max).map(Scope::Seq).ok_or(Error::SeqId { seq_id, n_seq_max }),
        }
    }

    /// `llama_kv_cache::state_write`: the section's bytes for one sequence, or with `seq_id` -1 for all.
    ///
    /// # Errors
    /// [`Error::SeqId`], what the owner's calls return, and the sink's errors.
    pub fn state_write<'a>(&'a self, sink: &mut impl Sink<'a>, seq_id: i32, flags: StateFlags) -> Result<()> {
        let scope = self.scope(seq_id)?;
        if !self.writes(flags) {
            return Ok(());
        }
        let params = WriteParams { scope, flags, max_masked_cells: None, range: PosRange::ALL };
        sink.write_u32(self.geometry.streams.n_stream)?;
        for stream in 0..self.geometry.streams.n_stream as usize {
            let cells = match scope {
                Scope::Whole => visited(&self.geometry, &*self.cells, stream, None)?,
                Scope::Seq(seq) if self.geometry.streams.of(seq) != stream => Vec::new(),
                Scope::Seq(seq) => {
                    self.kept(visited(&self.geometry, &*self.cells, stream, Some(seq))?, params)
                }
            };
            let n_shifted = cells.iter().filter(|cell| cell.shift != 0).count();
            if n_shifted > 0 {
                log::warn!(
                    "{n_shifted} cells are saved with a pending shift, which is lost ({})",
                    self.geometry.place(stream)
                );
            }
            let metas = cells.iter().map(|cell| cell.meta);
            let indices: Vec<u32> = cells.iter().map(|cell| cell.cell).collect();
            let planes = self.planes.stream(stream, self.geometry.n_layer());
            self.geometry.write_stream(sink, scope, metas, &indices, planes)?;
        }
        Ok(())
    }

    /// Those of a sequence's cells that its state holds.
    fn kept(&self, mut cells: Vec<ViewCell>, params: WriteParams) -> Vec<ViewCell> {
        let mut entries: Vec<(Pos, u32)> = cells.iter().map(|cell| (cell.meta.pos, cell.cell)).collect();
        if !entries.is_sorted() {
            entries.sort_unstable();
        }
        if let Some(&(first_pos, _)) = entries.get(params.first_kept(&entries, self.geometry.swa)) {
            cells.retain(|cell| cell.meta.pos >= first_pos);
        }
        cells
    }

    /// `llama_kv_cache::state_read_sinfo`, from calls of somebody else: metadata and tensors come in turns, so
    /// the cells are set before all of it is known. On failure the destination is empty and its data zero.
    ///
    /// `sinfos_in` are the cells to use instead of searching. Returns the cells that were used.
    ///
    /// # Errors
    /// Every way in which the bytes may not be a state of this cache, [`Error::NoSpace`], what the owner's calls
    /// and the input return.
    pub fn state_read_sinfo(
        &mut self,
        input: &mut impl TensorInput,
        seq_id: i32,
        flags: StateFlags,
        sinfos_in: Option<&SlotInfos>,
    ) -> Result<SlotInfos> {
        let scope = self.scope(seq_id)?;
        if !self.writes(flags) {
            return Ok(self.no_slots());
        }
        self.read_in_turns(input, scope, sinfos_in).inspect_err(|_| {
            // What went wrong first is what the caller has to know.
            if let Err(error) = self.cells.clear(scope.seq()) {
                log::error!(
                    "section {} could not be emptied after a failed read: {error}",
                    self.geometry.name
                );
            }
        })
    }

    fn read_in_turns(
        &mut self,
        input: &mut impl TensorInput,
        scope: Scope,
        sinfos_in: Option<&SlotInfos>,
    ) -> Result<SlotInfos> {
        let params = ReadParams::new(scope, None);
        let mut slots = self.no_slots();
        let Self { geometry, planes, cells, .. } = self;
        if scope == Scope::Whole {
            cells.clear(None)?;
        }
        let n_stream = geometry.read_streams(input, params, |input, src, metas| {
            let (stream, placement) = match scope {
                Scope::Whole => (src as usize, identity(metas.len())),
                Scope::Seq(dest) => {
                    let stream = geometry.streams.of(dest);
                    // What is dropped would have to be skipped, and such input gives tensors to tensors only.
                    let may_drop = false;
                    let given = given(sinfos_in, src);
                    let (placement, _) = place(geometry, &**cells, stream, dest, &metas, given, may_drop)?;
                    (stream, placement)
                }
            };
            check_given(geometry, stream, given(sinfos_in, src), &placement.cells)?;
            cells.apply(stream, scope.seq(), &placement.cells, &metas)?;
            let map = Arc::new(CellMap::of_cells(&placement.cells)?);
            let n_layer = geometry.n_layer();
            let planes = planes.stream(stream, n_layer);
            geometry.read_data(input, metas.len(), params, |input, tensor, _, _| {
                let plane = match tensor {
                    KvTensor::K(layer) => &planes.k[layer],
                    KvTensor::V(layer) => planes.v[layer]
                        .as_ref()
                        .ok_or_else(|| Error::Internal(format!("layer {layer} has no V to read into")))?,
                };
                let region = Region::new(plane, &map)?;
                region.each_piece(|offset, bytes| input.read_tensor(region.tensor(), offset, bytes))
            })?;
            note(&mut slots, src as usize, placement.cells);
            Ok(())
        })?;
        check_empty_streams(geometry, sinfos_in, n_stream, &slots)?;
        if let (Scope::Seq(dest), true) = (scope, slots.iter().all(Vec::is_empty)) {
            cells.apply(geometry.streams.of(dest), Some(dest), &[], &[])?;
        }
        Ok(slots)
    }

    fn no_slots(&self) -> SlotInfos {
        vec![Vec::new(); self.geometry.streams.n_stream as usize]
    }

    /// Reads and checks the section's bytes and finds cells for them. Changes nothing. With `legacy_partial` a section that a partial state should not hold is read and
    /// dropped.
    pub(crate) fn state_plan<'a>(
        &self,
        source: &mut Source<'a>,
        seq_id: i32,
        flags: StateFlags,
        sinfos_in: Option<&SlotInfos>,
        legacy_partial: bool,
    ) -> Result<ViewPlan<'a>> {
        let scope = self.scope(seq_id)?;
        let Self { legacy_rotation, convert, .. } = *self;
        let params = ReadParams { convert, ..ReadParams::new(scope, legacy_rotation) };
        let mut planned = ViewPlan {
            slots: self.no_slots(),
            geometry: self.geometry.clone(),
            shared: self.shared,
            planes: self.plane_ids().collect(),
            taken: Vec::new(),
            plan: None,
        };
        if !self.writes(flags) {
            if legacy_partial && !self.shared {
                self.geometry.state_read(source, params)?;
            }
            return Ok(planned);
        }
        let state = self.geometry.state_read(source, params)?;
        let n_stream = state.n_stream;
        // Who keeps the tensors gives all of them or none.
        let may_drop = source.tensors_elsewhere().is_none();
        let plan = state.place(&self.geometry, scope, |stream, dest, state| {
            let given = given_at(sinfos_in, state.stream);
            let (placement, taken) =
                place(&self.geometry, &*self.cells, stream, dest, &state.metas, given, may_drop)?;
            planned.taken = taken;
            Ok(placement)
        })?;
        for stream in &plan.streams {
            check_given(&self.geometry, stream.stream, given_at(sinfos_in, stream.src), &stream.cells)?;
            note(&mut planned.slots, stream.src, stream.cells.clone());
        }
        check_empty_streams(&self.geometry, sinfos_in, n_stream, &planned.slots)?;
        Ok(ViewPlan { plan: Some(plan), ..planned })
    }

    /// Address of each plane, and its owner's name for the tensor: what caches of one geometry differ in.
    fn plane_ids(&self) -> impl Iterator<Item = (usize, usize)> {
        let planes = self.planes.k.iter().chain(self.planes.v.iter().flatten());
        planes.map(|plane| (plane.as_ptr().addr(), plane.tensor()))
    }

    /// Checks that this is the cache that was planned for, and that the cells that were found can still be had.
    pub(crate) fn check_plan(&self, planned: &ViewPlan<'_>) -> Result<()> {
        let name = self.name();
        if self.shared != planned.shared {
            let (now, then) = (u32::from(self.shared), u32::from(planned.shared));
            return Err(Error::arg("view.shared", format!("{now}, section {name} was planned with {then}")));
        }
        if let Some((now, then)) = self.plane_ids().zip(&planned.planes).find(|(now, then)| now != *then) {
            let reason = format!(
                "section {name} was planned for another cache: a tensor {:#x} at {:#x}, here {:#x} at {:#x}",
                then.1, then.0, now.1, now.0
            );
            return Err(Error::arg("view", reason));
        }
        let Some(KvPlan { scope: Scope::Seq(dest), streams, .. }) = &planned.plan else { return Ok(()) };
        for stream in streams {
            let mut is_planned = vec![false; self.geometry.kv_size as usize];
            stream.cells.iter().for_each(|&cell| is_planned[cell as usize] = true);
            self.cells.visit(stream.stream, None, &mut |held| {
                let was_taken = || {
                    let at = planned.taken.binary_search_by_key(&held.cell, |taken| taken.cell);
                    at.is_ok_and(|at| planned.taken[at].meta == held.meta)
                };
                let is_planned = is_planned.get(held.cell as usize).copied().unwrap_or(false);
                if !is_planned || held.meta.seqs.single() == Some(*dest) || was_taken() {
                    return Ok(());
                }
                Err(Error::StalePlan { cell: held.cell, place: self.geometry.place(stream.stream) })
            })?;
        }
        Ok(())
    }

    /// Sets the cells as planned; the data follows with [`KvView::scatter`].
    pub(crate) fn commit_cells(&mut self, planned: &ViewPlan<'_>) -> Result<()> {
        let Some(plan) = &planned.plan else { return Ok(()) };
        match plan.scope {
            Scope::Whole => self.cells.clear(None)?,
            Scope::Seq(dest) if plan.streams.is_empty() => {
                return self.cells.apply(self.geometry.streams.of(dest), Some(dest), &[], &[]);
            }
            Scope::Seq(_) => {}
        }
        plan.streams.iter().try_for_each(|stream| {
            self.cells.apply(stream.stream, plan.scope.seq(), &stream.cells, &stream.metas)
        })
    }

    /// What [`KvView::scatter`] will write.
    pub(crate) fn placed<'p>(&'p self, planned: &'p ViewPlan<'_>) -> Vec<Placed<'p>> {
        let n_layer = self.geometry.n_layer();
        planned.plan.as_ref().map_or(Vec::new(), |plan| plan.placed(&self.planes, n_layer))
    }

    pub(crate) fn scatter<'p>(&'p mut self, planned: &'p ViewPlan<'_>) -> Vec<Scatter<'p>> {
        let n_layer = self.geometry.n_layer();
        planned.plan.as_ref().map_or(Vec::new(), |plan| plan.scatter(&mut self.planes, n_layer))
    }
}

/// The cells of a sequence, or all used ones, ascending, each checked.
fn visited(
    geometry: &Geometry,
    cells: &dyn ViewCells,
    stream: usize,
    seq: Option<Seq>,
) -> Result<Vec<ViewCell>> {
    let kv_size = geometry.kv_size;
    let n_seq_max = geometry.streams.n_seq_max;
    let bad = |cell: u32, reason: String| {
        Error::arg(format!("{}.visit", geometry.name), format!("cell {cell} {reason}"))
    };
    let mut out: Vec<ViewCell> = Vec::new();
    cells.visit(stream, seq, &mut |cell| {
        let ViewCell { cell: index, meta, .. } = cell;
        if index >= kv_size {
            return Err(bad(index, format!("is out of range [0, {kv_size})")));
        }
        if out.len() == kv_size as usize {
            return Err(bad(index, format!("is one more than the {kv_size} cells of the stream")));
        }
        if meta.pos < 0 {
            return Err(bad(index, format!("has position {}, used cells have at least 0", meta.pos)));
        }
        if seq.is_some_and(|seq| !meta.seqs.contains(seq)) {
            return Err(bad(index, "does not belong to the sequence that is visited".into()));
        }
        if meta.seqs.is_empty() || meta.seqs.iter().any(|seq| seq.index() >= n_seq_max as usize) {
            return Err(bad(
                index,
                format!("has none, or not only, of the {n_seq_max} sequences of the cache"),
            ));
        }
        out.push(cell);
        Ok(())
    })?;
    if !out.is_sorted_by_key(|cell| cell.cell) {
        out.sort_unstable_by_key(|cell| cell.cell);
    }
    match out.windows(2).find(|pair| pair[0].cell == pair[1].cell) {
        Some(pair) => Err(bad(pair[0].cell, "was visited twice".into())),
        None => Ok(out),
    }
}

fn identity(n_cells: usize) -> Placement {
    let all: Vec<u32> = (0..u32::try_from(n_cells).unwrap_or(u32::MAX)).collect();
    Placement { kept: all.clone(), cells: all }
}

/// The cells given for stream `src` of a state, if any are given.
fn given(sinfos_in: Option<&SlotInfos>, src: u32) -> Option<&[u32]> {
    given_at(sinfos_in, src as usize)
}

fn given_at(sinfos_in: Option<&SlotInfos>, src: usize) -> Option<&[u32]> {
    sinfos_in.map(|sinfos| sinfos.get(src).map_or(&[][..], Vec::as_slice))
}

/// Cells for a sequence's `metas`: those given, or the first that can be had; and which of them another sequence
/// holds, ascending.
fn place(
    geometry: &Geometry,
    cells: &dyn ViewCells,
    stream: usize,
    dest: Seq,
    metas: &[CellMeta],
    given: Option<&[u32]>,
    may_drop_masked: bool,
) -> Result<(Placement, Vec<ViewCell>)> {
    let used = visited(geometry, cells, stream, None)?;
    if let Some(given) = given {
        if given.len() != metas.len() {
            return Err(geometry.mismatch("mirrored slot layout", metas.len(), given.len(), None));
        }
        let mut is_free = vec![true; geometry.kv_size as usize];
        for cell in used.iter().filter(|cell| cell.meta.seqs.single() != Some(dest)) {
            is_free[cell.cell as usize] = false;
        }
        for &cell in given {
            // Taken twice, or not free even without the destination: the two caches are out of step.
            if !is_free.get_mut(cell as usize).is_some_and(std::mem::take) {
                return Err(Error::arg(
                    "sinfos_in",
                    format!(
                        "cell {cell} of the mirrored slot layout is not free ({})",
                        geometry.place(stream)
                    ),
                ));
            }
        }
        return Ok((Placement { cells: given.to_vec(), ..identity(metas.len()) }, Vec::new()));
    }
    let windowed = !geometry.swa.is_none();
    let searched = |seq: Seq| windowed || seq == dest;
    let of_used = used.iter().map(|cell| (cell.cell, cell.meta));
    let placement =
        Cells::of_used(geometry.kv_size, geometry.streams.n_seq_max, cells.head(stream), of_used, searched)?
            .place(Some(dest), metas, geometry.swa, may_drop_masked)
            .map_err(|shortage| geometry.shortage(shortage, stream))?;
    // Without a window no sequence loses a cell to another.
    let mut taken = Vec::new();
    if windowed {
        let mut is_planned = vec![false; geometry.kv_size as usize];
        placement.cells.iter().for_each(|&cell| is_planned[cell as usize] = true);
        taken = used;
        taken.retain(|cell| is_planned[cell.cell as usize] && cell.meta.seqs.single() != Some(dest));
    }
    Ok((placement, taken))
}

/// A mirrored section sits on the cells of its source, all of them. Those of a whole context are not searched, so
/// they may be others than those given.
fn check_given(geometry: &Geometry, stream: usize, given: Option<&[u32]>, cells: &[u32]) -> Result<()> {
    let Some(given) = given else { return Ok(()) };
    if given.len() != cells.len() {
        return Err(geometry.mismatch("mirrored slot layout", cells.len(), given.len(), None));
    }
    match given.iter().zip(cells).find(|(given, cell)| given != cell) {
        Some((given, cell)) => {
            let place = geometry.place(stream);
            let reason = format!("cell {given} is given where a whole context has cell {cell} ({place})");
            Err(Error::arg("sinfos_in", reason))
        }
        None => Ok(()),
    }
}

/// Layouts are by stream, so they mean something only while the streams line up, and where this state has no
/// cells, the source must have none.
fn check_empty_streams(
    geometry: &Geometry,
    sinfos_in: Option<&SlotInfos>,
    n_stream: u32,
    slots: &SlotInfos,
) -> Result<()> {
    let Some(sinfos) = sinfos_in else { return Ok(()) };
    if sinfos.len() != n_stream as usize {
        return Err(geometry.mismatch("streams of the mirrored slot layout", n_stream, sinfos.len(), None));
    }
    for (stream, given) in sinfos.iter().enumerate() {
        let n_here = slots.get(stream).map_or(0, Vec::len);
        if n_here != given.len() {
            return Err(geometry.mismatch("mirrored slot layout", n_here, given.len(), None));
        }
    }
    Ok(())
}

fn note(slots: &mut SlotInfos, src: usize, cells: Vec<u32>) {
    if slots.len() <= src {
        slots.resize(src + 1, Vec::new());
    }
    slots[src] = cells;
}
