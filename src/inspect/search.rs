//! Finds the interpretation under which a memory state ends where it has to.
//!
//! A depth-first search over the sections: each reading of a section ends somewhere, and the next begins there. Where nothing
//! that fits begins is remembered, so that no place is searched twice; and no more than a fixed number of cells and tensors
//! for each byte of the input is looked at in all.

use std::collections::BTreeSet;

use super::cells::CellExtLayout;
use super::reading::{Input, Layers, Reading, Steps, Stop};
use super::state::{Basis, Dsv4Mode, Section, Shape, State, Tensor};
use crate::error::{Error, Result};
use crate::format::{GgmlType, PartKind, SectionGeometry, StateVersion, Tag, TensorShape};

const DSV4_MAGIC: u32 = u32::from_le_bytes(*b"DSV4");

/// Interpretations that are compared.
const MAX_FIT: usize = 16;

/// Sections of a memory whose geometry is not known.
const MAX_SECTIONS: usize = 8;

/// Sections of a memory whose geometry is known: the search goes as deep.
const MAX_RECORDED_SECTIONS: usize = 256;

/// Where the state is, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known<'a> {
    pub bytes: &'a [u8],
    pub start: u64,
    /// The state of a whole context.
    pub whole: bool,
    /// A file holds at least one section; a partial state in memory may have none.
    pub is_file: bool,
    /// Appendices may follow.
    pub may_end_before: bool,
    pub geometry: Option<&'a [SectionGeometry]>,
}

/// Understands a memory state; of versions the first under which it fits.
pub(super) fn understand(known: Known<'_>, versions: &[StateVersion]) -> State {
    let tries = versions.iter().map(|&version| Search::new(known, version).run());
    let mut best: Option<State> = None;
    for state in tries {
        if !matches!(state.basis, Basis::Incomplete { .. }) {
            return state;
        }
        if best.as_ref().is_none_or(|best| state.bytes.end > best.bytes.end) {
            best = Some(state);
        }
    }
    best.unwrap_or_else(|| State {
        bytes: known.start..known.start,
        version: StateVersion::CURRENT,
        dsv4_mode: None,
        sections: Vec::new(),
        basis: Basis::Incomplete { reason: "no version was named".to_owned() },
    })
}

/// The reading that got furthest: the sections before it, and why it ended.
#[derive(Default)]
struct Furthest {
    sections: Vec<Section>,
    stop: Option<Stop>,
}

struct Search<'a> {
    known: Known<'a>,
    input: Input<'a>,
    dsv4_mode: Option<Dsv4Mode>,
    steps: Steps,
    /// Sections that have been read, up to where the search is.
    open: Vec<Section>,
    /// The likeliest of the interpretations that fit, and how many do.
    likeliest: Option<Vec<Section>>,
    n_fit: usize,
    /// Where no section leads to an end, by place and number of the section.
    dead: BTreeSet<(u64, usize)>,
    furthest: Furthest,
}

impl<'a> Search<'a> {
    fn new(known: Known<'a>, version: StateVersion) -> Self {
        let steps = Steps(1_000_000 + known.bytes.len() as u64);
        Self {
            known,
            input: Input { bytes: known.bytes, version, whole: known.whole },
            dsv4_mode: None,
            steps,
            open: Vec::new(),
            likeliest: None,
            n_fit: 0,
            dead: BTreeSet::new(),
            furthest: Furthest::default(),
        }
    }

    fn run(mut self) -> State {
        match self.dsv4_header() {
            Ok(start) => self.sections(start),
            Err(error) => self.stopped(Stop { at: self.known.start, error }),
        }
        let Self { known, input, dsv4_mode, likeliest, n_fit, furthest, .. } = self;
        let (sections, basis) = match likeliest {
            Some(sections) if known.geometry.is_some() => (sections, Basis::Recorded),
            Some(sections) => (sections, Basis::Guessed { n_fit }),
            None => {
                let stop = furthest.stop;
                let reason =
                    stop.map_or_else(|| "no interpretation fits".to_owned(), |stop| stop.error.to_string());
                (furthest.sections, Basis::Incomplete { reason })
            }
        };
        let end = sections.last().map_or(known.start, |section| section.bytes.end);
        State { bytes: known.start..end, version: input.version, dsv4_mode, sections, basis }
    }

    /// What comes before the raw pair of a DSV4 memory. Returns where the sections begin.
    fn dsv4_header(&mut self) -> Result<u64> {
        let Known { start, geometry, .. } = self.known;
        let mut input = self.input.at(start)?;
        let is_expected =
            geometry.is_some_and(|all| all.iter().any(|section| section.kind == SectionGeometry::DSV4));
        if input.clone().u32("DSV4 magic").ok() != Some(DSV4_MAGIC) {
            if is_expected {
                return Err(Error::corrupt("DSV4 magic", "another word", "DSV4"));
            }
            return Ok(start);
        }
        input.u32("DSV4 magic")?;
        let version = input.u32("DSV4 version")?;
        if version != 1 {
            return Err(Error::corrupt("DSV4 version", version, 1));
        }
        self.dsv4_mode = Some(match input.u32("DSV4 mode")? {
            0 => Dsv4Mode::Full,
            1 => Dsv4Mode::Partial,
            other => return Err(Error::corrupt("DSV4 mode", other, "0 or 1")),
        });
        Ok(input.offset() as u64)
    }

    /// Whether a state may end there.
    fn is_end(&self, at: u64) -> bool {
        let rest = usize::try_from(at).ok().and_then(|at| self.known.bytes.get(at..)).unwrap_or_default();
        let magic = rest.first_chunk().map(|magic| PartKind::from_magic(u32::from_le_bytes(*magic)));
        let is_appendix =
            matches!(magic, Some(PartKind::CHECKPOINTS | PartKind::DRAFT | PartKind::INTEGRITY));
        let is_whole = self.known.geometry.is_none_or(|all| self.open.len() == all.len());
        let may_be_empty = !self.known.is_file || self.known.geometry.is_some();
        if self.open.is_empty() && !may_be_empty {
            return false;
        }
        (rest.is_empty() || (self.known.may_end_before && is_appendix)) && is_whole
    }

    /// Reads the sections from there to the end, in every way that fits.
    fn sections(&mut self, at: u64) {
        if self.is_end(at) && (self.dsv4_mode.is_none() || has_dsv4(&self.open)) {
            self.n_fit += 1;
            // Of equals the first: the search begins with what is most likely.
            let rank = |sections: &[Section]| (!is_of_llama_cpp(sections), sections.len());
            if self.likeliest.as_ref().is_none_or(|best| rank(&self.open) < rank(best)) {
                self.likeliest = Some(self.open.clone());
            }
            return;
        }
        let place = (at, self.open.len());
        let before = self.n_fit;
        if self.dead.contains(&place) {
            return;
        }
        let readings = self.readings(at);
        for reading in readings {
            if self.n_fit >= MAX_FIT {
                break;
            }
            let section = self.input.read(at, reading, &mut self.steps);
            let as_recorded = |section| self.as_recorded(section).map_err(|error| Stop { at, error });
            match section.and_then(as_recorded) {
                Ok(section) => {
                    let end = section.bytes.end;
                    self.open.push(section);
                    self.sections(end);
                    self.open.pop();
                }
                Err(stop) => self.stopped(stop),
            }
        }
        if self.n_fit == before {
            self.dead.insert(place);
        }
    }

    /// A reading has ended without being a section.
    fn stopped(&mut self, stop: Stop) {
        if self.furthest.stop.as_ref().is_none_or(|known| known.at < stop.at) {
            self.furthest = Furthest { sections: self.open.clone(), stop: Some(stop) };
        }
    }

    /// Why nothing from there on can be a section.
    fn refused(&mut self, at: u64, error: Error) -> Vec<Reading<'a>> {
        self.stopped(Stop { at, error });
        Vec::new()
    }

    /// The ways in which the bytes from there on may be a section, the likeliest first.
    fn readings(&mut self, at: u64) -> Vec<Reading<'a>> {
        let Some(geometry) = self.known.geometry else { return self.guessed_readings(at) };
        if geometry.len() > MAX_RECORDED_SECTIONS {
            let most = format_args!("at most {MAX_RECORDED_SECTIONS}");
            return self.refused(at, Error::corrupt("sections", geometry.len(), most));
        }
        let Some(section) = geometry.get(self.open.len()) else {
            let left = self.known.bytes.len() as u64 - at;
            return self.refused(at, Error::corrupt("bytes behind the last section", left, "none"));
        };
        let layers = Layers::Recorded(&section.tensors);
        match section.kind {
            SectionGeometry::ATTENTION => match self.recorded_ext(section) {
                Ok(all) => all.into_iter().map(|ext| Reading::Attention { ext, v: layers }).collect(),
                Err(error) => self.refused(at, error),
            },
            SectionGeometry::RECURRENT => vec![Reading::Recurrent { tensors: layers }],
            SectionGeometry::SHARED => vec![Reading::Shared],
            SectionGeometry::DSV4 => self.dsv4_mode.map(Reading::Dsv4).into_iter().collect(),
            other => self.refused(at, Error::corrupt("kind of section", other, "1 to 4")),
        }
    }

    /// The ext that the geometry tells; both that there are, if it does not.
    fn recorded_ext(&self, section: &SectionGeometry) -> Result<Vec<CellExtLayout>> {
        let all = self.ext_layouts();
        let Some(len) = section.setting(SectionGeometry::CELL_EXT) else { return Ok(all.into()) };
        let ext = all.into_iter().find(|ext| ext.len() == u64::from(len));
        let ext = ext.ok_or_else(|| Error::corrupt("CEXT", len, format_args!("0 or {}", all[1].len())))?;
        Ok(vec![ext])
    }

    /// Layouts of this version.
    fn ext_layouts(&self) -> [CellExtLayout; 2] {
        let ext = if self.input.version.ext_has_token() { CellExtLayout::XyToken } else { CellExtLayout::Xy };
        [CellExtLayout::None, ext]
    }

    fn guessed_readings(&mut self, at: u64) -> Vec<Reading<'a>> {
        if self.open.len() >= MAX_SECTIONS {
            let most = format_args!("at most {MAX_SECTIONS}");
            return self.refused(at, Error::corrupt("sections", "more", most));
        }
        if has_dsv4(&self.open) {
            let left = self.known.bytes.len() as u64 - at;
            return self.refused(at, Error::corrupt("bytes behind the compressed half", left, "none"));
        }
        let mut found = Vec::new();
        for ext in self.ext_layouts() {
            let (n_layer, n_v, stop) = match self.input.probe_v(at, ext, &mut self.steps) {
                Ok(Some(probed)) => probed,
                Ok(None) => {
                    // Without cells nobody can know, and it does not matter.
                    let v = Layers::Guessed { n: 0, has_p: false };
                    found.push(Reading::Attention { ext: CellExtLayout::None, v });
                    break;
                }
                Err(stop) => {
                    self.stopped(stop);
                    continue;
                }
            };
            if let Some(stop) = stop {
                self.stopped(stop);
            }
            let all = Some(n_layer).filter(|&n| n == n_v);
            let others = (1..=n_v).rev().filter(|n| Some(*n) != all);
            // Every layer has a V, or none has, but for models that nobody has made.
            let mut counts: Vec<u32> = all.into_iter().chain([0]).chain(others).collect();
            counts.dedup();
            let v = |n| Layers::Guessed { n, has_p: false };
            found.extend(counts.into_iter().map(|n| Reading::Attention { ext, v: v(n) }));
        }
        if self.dsv4_mode.is_some() {
            found.extend(self.dsv4_mode.map(Reading::Dsv4));
        } else {
            for has_p in [false, true] {
                let probed = self.input.probe_recurrent(at, has_p, &mut self.steps);
                let (least, n, stop) = match probed {
                    Ok((n, stop)) => (u32::from(has_p), n, stop),
                    Err(stop) => (1, 0, Some(stop)),
                };
                // Few have a P; that it is missing says nothing.
                if let Some(stop) = stop.filter(|_| !has_p) {
                    self.stopped(stop);
                }
                // As many S as R, first of all.
                let even = (least..=n).rev().filter(|n| n.is_multiple_of(2));
                let odd = (least..=n).rev().filter(|n| !n.is_multiple_of(2));
                let tensors = |n| Layers::Guessed { n, has_p };
                found.extend(even.chain(odd).map(|n| Reading::Recurrent { tensors: tensors(n) }));
            }
        }
        found
    }

    /// Compares a section with the geometry of the file, if it has one.
    fn as_recorded(&self, section: Section) -> Result<Section> {
        let Some(geometry) = self.known.geometry.and_then(|all| all.get(self.open.len())) else {
            return Ok(section);
        };
        let of_state = |tensor: &Tensor| (tensor.tag, tensor.layer, tensor.ggml_type, tensor.n_embd());
        let recorded = |tensor: &TensorShape| {
            (tensor.tag, Some(tensor.layer), tensor.ggml_type, u64::from(tensor.n_embd))
        };
        let show = |(tag, layer, ggml_type, n): (Tag, Option<u32>, GgmlType, u64)| {
            format!("{tag} of layer {}: {} x {n}", layer.unwrap_or_default(), ggml_type.name())
        };
        let is_dsv4 = matches!(section.shape, Shape::Dsv4 { .. });
        // A section without cells says nothing of its tensors; compressed halves are read by their own counts.
        for stream in section.streams.iter().filter(|stream| !stream.tensors.is_empty() && !is_dsv4) {
            for (tensor, shape) in stream.tensors.iter().zip(&geometry.tensors) {
                let (got, expected) = (of_state(tensor), recorded(shape));
                if got != expected {
                    return Err(Error::corrupt("tensor", show(got), show(expected)));
                }
            }
            if stream.tensors.len() != geometry.tensors.len() {
                return Err(Error::corrupt("tensors", stream.tensors.len(), geometry.tensors.len()));
            }
        }
        Ok(section)
    }
}

fn has_dsv4(sections: &[Section]) -> bool {
    sections.iter().any(|section| matches!(section.shape, Shape::Dsv4 { .. }))
}

/// The sections of llama.cpp's memories, and those of their partial states.
const MEMORIES: [&[&str]; 10] = [
    &[],
    &["attention"],
    &["recurrent"],
    &["attention", "attention"],
    &["attention", "recurrent"],
    &["attention", "attention", "attention"],
    &["attention", "attention", "recurrent"],
    &["attention", "recurrent", "attention"],
    &["attention", "dsv4"],
    &["attention", "attention", "dsv4"],
];

/// Whether one of llama.cpp's memories has such sections.
fn is_of_llama_cpp(sections: &[Section]) -> bool {
    let kinds: Vec<_> = sections.iter().map(Section::kind).collect();
    MEMORIES.contains(&&kinds[..])
}
