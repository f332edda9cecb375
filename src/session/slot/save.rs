//! Saving a slot: one pass for each file, in which the checksums are computed while the bytes are on their way.

use std::fmt;
use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::geometry::geometry_of;
use super::{SlotContents, sidecar_path};
use crate::context::{Context, Snapshot};
use crate::error::{Error, Result};
use crate::format::{
    Checkpoints, DraftState, FileKind, Identity, Integrity, Part, PartKind, SEQ_BLOB_HEADER_LEN,
    SectionGeometry, seq_blob_header,
};
use crate::session::replace::{Links, Replacement};
use crate::session::state_file::open_regular;
use crate::session::{file_record, with_path};
use crate::state::{FileWriter, RecordSink};
use crate::storage::{ProgressCallback, Transfer, read_exact_at};
use crate::types::{Seq, SeqId, Token};

/// The state of a sequence that is ready to be written, how it is moved, and what it depends on.
pub(super) struct SeqState<'a> {
    seq_id: SeqId,
    record: RecordSink<'a>,
    transfer: &'a Transfer,
    geometry: Vec<SectionGeometry>,
}

impl<'a> SeqState<'a> {
    fn of_cache(context: &'a Context, seq: Seq) -> Result<Self> {
        let mut record = RecordSink::default();
        context.write_file_state(&mut record, Some(seq))?;
        Ok(Self { seq_id: seq.id(), record, transfer: &context.transfer, geometry: geometry_of(context) })
    }

    /// Of a state that somebody else has composed: what it depends on is not known.
    pub fn of_record(seq_id: SeqId, record: RecordSink<'a>, transfer: &'a Transfer) -> Self {
        Self { seq_id, record, transfer, geometry: Vec::new() }
    }

    pub fn of_snapshot(snapshot: &'a Snapshot, geometry: &[SectionGeometry]) -> Result<Self> {
        let mut record = RecordSink::default();
        snapshot.state.replay(&mut record)?;
        let seq_id = snapshot.seq_id().unwrap_or_default();
        Ok(Self { seq_id, record, transfer: &snapshot.transfer, geometry: geometry.to_vec() })
    }
}

/// A slot file that is ready to be written.
pub(super) struct Contents<'a> {
    pub head: RecordSink<'a>,
    pub target: SeqState<'a>,
    pub checkpoints: Checkpoints<&'a [u8]>,
    pub draft: Option<SeqState<'a>>,
    pub driver: &'a [u8],
    pub identity: &'a Identity,
}

/// The files of a slot that are ready to be written.
pub(in crate::session) struct SlotFiles<'a> {
    target: Contents<'a>,
    /// The draft's state, if it is to be in a file of its own.
    sidecar: Option<Contents<'a>>,
}

/// What tells a slot file from others of its name: its size, and the checksum that it ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::session) struct SavedFile {
    pub bytes: u64,
    pub crc32c: u32,
}

impl SavedFile {
    /// Of the file that is at `path`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn of(path: &Path) -> Result<Self> {
        let (file, bytes) = open_regular(path)?;
        let read = || {
            let mut end = [0; 4];
            let n = bytes.min(4);
            read_exact_at(&file, &mut end[..n as usize], bytes - n)?;
            Ok(Self { bytes, crc32c: u32::from_le_bytes(end) })
        };
        read().map_err(|source| Error::Io { op: "read", path: path.display().to_string(), source })
    }
}

impl fmt::Display for SavedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes with the checksum {:08x}", self.bytes, self.crc32c)
    }
}

/// A file that is whole, and not yet in its place.
struct WrittenFile {
    file: Replacement,
    saved: SavedFile,
}

/// The files of a slot, whole, and not yet in their places. Dropped, they are removed.
pub(in crate::session) struct WrittenSlot {
    target: WrittenFile,
    sidecar: Option<WrittenFile>,
}

/// The files of a slot, in their places.
#[derive(Clone, Copy, Debug)]
pub(in crate::session) struct SavedSlot {
    pub target: SavedFile,
    pub sidecar: Option<SavedFile>,
}

impl Context {
    /// Writes a slot file to `path`: sequence `seq_id` of this context, and `contents`. Returns the bytes of the file, with those
    /// of its sidecar.
    ///
    /// # Errors
    /// As [`Context::state_seq_save_file`], for the draft's context too; [`Error::InvalidArgument`] for a checkpoint without a
    /// state, or an identity of more than 16 MiB. A file that was there is untouched then.
    pub fn slot_save(
        &mut self,
        path: impl AsRef<Path>,
        seq_id: SeqId,
        contents: SlotContents<'_>,
    ) -> Result<u64> {
        let sync = self.sync_files;
        self.with_slot_files(seq_id, contents, |files, progress| files.save(path.as_ref(), sync, progress))
    }

    /// Has `save` write a slot from where its states are.
    pub(in crate::session) fn with_slot_files<T>(
        &mut self,
        seq_id: SeqId,
        contents: SlotContents<'_>,
        save: impl FnOnce(&SlotFiles<'_>, Option<&mut ProgressCallback>) -> Result<T>,
    ) -> Result<T> {
        let SlotContents { tokens, checkpoints, draft, driver, identity, sidecar } = contents;
        let seq = self.seq(seq_id)?;
        let draft = draft.map(|(context, seq_id)| Ok((context.seq(seq_id)?, context))).transpose()?;
        let head = file_record(FileKind::Sequence, tokens)?;
        self.apply_shifts_of(Some(seq))?;
        let mut progress = self.progress.take();
        let save = || {
            let draft = draft.map(|(seq, context)| {
                context.apply_shifts_of(Some(seq))?;
                SeqState::of_cache(context, seq)
            });
            let contents = Contents {
                head,
                target: SeqState::of_cache(self, seq)?,
                checkpoints: Checkpoints(checkpoints),
                draft: draft.transpose()?,
                driver,
                identity: &identity,
            };
            save(&SlotFiles::new(contents, tokens, sidecar)?, progress.as_mut())
        };
        let saved = save();
        self.progress = progress;
        saved
    }
}

impl<'a> SlotFiles<'a> {
    /// With `sidecar`, the draft's state and the driver that goes with it are in a file of their own, which has the same tokens.
    pub(super) fn new(mut target: Contents<'a>, tokens: &[Token], sidecar: bool) -> Result<Self> {
        let draft = if sidecar { target.draft.take() } else { None };
        let sidecar = draft.map(|draft| {
            Ok(Contents {
                head: file_record(FileKind::Sequence, tokens)?,
                target: draft,
                checkpoints: Checkpoints(Vec::new()),
                draft: None,
                driver: std::mem::take(&mut target.driver),
                identity: target.identity,
            })
        });
        Ok(Self { sidecar: sidecar.transpose()?, target })
    }

    /// Bytes of the files.
    pub fn size(&self) -> Result<u64> {
        Ok(self.target.size()? + self.sidecar.as_ref().map_or(Ok(0), Contents::size)?)
    }

    /// Replaces the files at `path`; returns the bytes of the new ones.
    pub(super) fn save(
        &self,
        path: &Path,
        sync: bool,
        progress: Option<&mut ProgressCallback>,
    ) -> Result<u64> {
        let written = self.write(path, Links::Followed, progress)?;
        let bytes = written.bytes();
        written.sync_data(sync)?;
        written.persist(sync)?;
        Ok(bytes)
    }

    /// Writes the files beside what they will replace.
    pub fn write(
        &self,
        path: &Path,
        links: Links,
        mut progress: Option<&mut ProgressCallback>,
    ) -> Result<WrittenSlot> {
        let total = self.size()?;
        let target = self.target.write(path, links, (0, total), progress.as_deref_mut())?;
        let before = target.saved.bytes;
        let sidecar = self
            .sidecar
            .as_ref()
            .map(|sidecar| sidecar.write(&sidecar_path(path)?, links, (before, total), progress));
        Ok(WrittenSlot { sidecar: sidecar.transpose()?, target })
    }
}

impl WrittenSlot {
    /// Bytes of the files.
    pub fn bytes(&self) -> u64 {
        self.target.saved.bytes + self.sidecar.as_ref().map_or(0, |sidecar| sidecar.saved.bytes)
    }

    /// With `sync`, waits until the disk has all bytes.
    pub fn sync_data(&self, sync: bool) -> Result<()> {
        for WrittenFile { file, saved } in [Some(&self.target), self.sidecar.as_ref()].into_iter().flatten() {
            file.sync_data(saved.bytes, sync)?;
        }
        Ok(())
    }

    /// Renames the files into their places. Between the two, a sidecar does not belong to the slot file beside it, which its
    /// tokens say: the newer target counts.
    pub fn persist(self, sync: bool) -> Result<SavedSlot> {
        let saved =
            SavedSlot { target: self.target.saved, sidecar: self.sidecar.as_ref().map(|file| file.saved) };
        self.target.file.persist(sync)?;
        self.sidecar.map_or(Ok(()), |sidecar| sidecar.file.persist(sync))?;
        Ok(saved)
    }
}

impl Contents<'_> {
    /// The parts of the file with their lengths, in order; no checksum is known yet.
    fn parts(&self) -> Result<Vec<Part>> {
        let part = |kind, len| Part { kind, crc32c: 0, len };
        let mut parts =
            vec![part(PartKind::HEAD, self.head.bytes()), part(PartKind::STATE, self.target.record.bytes())];
        if !self.checkpoints.0.is_empty() {
            let mut len = 0;
            self.checkpoints.write(|bytes| {
                len += bytes.len() as u64;
                Ok(())
            })?;
            parts.push(part(PartKind::CHECKPOINTS, len));
        }
        if self.has_draft_state() {
            let (first, second) = self.draft_heads();
            let heads = (first.len() + second.len()) as u64;
            parts.push(part(PartKind::DRAFT, heads + self.draft_bytes() + self.driver.len() as u64));
        }
        Ok(parts)
    }

    fn has_draft_state(&self) -> bool {
        self.draft.is_some() || !self.driver.is_empty()
    }

    /// The draft's state is a blob: it begins with its own header.
    fn draft_bytes(&self) -> u64 {
        self.draft.as_ref().map_or(0, |draft| SEQ_BLOB_HEADER_LEN + draft.record.bytes())
    }

    fn draft_heads(&self) -> ([u8; 16], [u8; 8]) {
        DraftState { draft: self.draft_bytes(), driver: self.driver.len() as u64 }.heads()
    }

    fn write_part(&self, kind: PartKind, out: &mut FileWriter<'_, File>) -> Result<()> {
        match kind {
            PartKind::HEAD => out.record(&self.head, self.target.transfer),
            PartKind::STATE => out.record(&self.target.record, self.target.transfer),
            PartKind::CHECKPOINTS => self.checkpoints.write(|bytes| out.bytes(bytes)),
            _ => {
                let (first, second) = self.draft_heads();
                out.bytes(&first)?;
                if let Some(draft) = &self.draft {
                    out.bytes(&seq_blob_header(draft.seq_id))?;
                    out.record(&draft.record, draft.transfer)?;
                }
                out.bytes(&second)?;
                out.bytes(self.driver)
            }
        }
    }

    /// What the file ends with, without the checksums.
    fn integrity(&self) -> Result<Integrity> {
        let (identity, geometry) = (self.identity.clone(), self.target.geometry.clone());
        Ok(Integrity { identity, geometry, parts: self.parts()? })
    }

    /// Bytes of the file.
    fn size(&self) -> Result<u64> {
        let integrity = self.integrity()?;
        let before = integrity.parts.iter().map(|part| part.len).sum::<u64>();
        Ok(before + integrity.to_bytes()?.len() as u64)
    }

    /// Writes the file beside `path`. `progress` is told of `total` bytes, `before` of which are written.
    fn write(
        &self,
        path: &Path,
        links: Links,
        (before, total): (u64, u64),
        progress: Option<&mut ProgressCallback>,
    ) -> Result<WrittenFile> {
        let (mut integrity, bytes) = (self.integrity()?, self.size()?);
        let mut file = Replacement::create(path, links)?;
        file.reserve(bytes)?;
        let write = |out: &mut File| {
            let mut out = FileWriter::new(out, total, progress)?.with_checksums().reporting_from(before);
            for part in &mut integrity.parts {
                self.write_part(part.kind, &mut out)?;
                let written = out.end_part().unwrap_or_default();
                if written.len != part.len {
                    let text = format!("{} of {} bytes of {} were written", written.len, part.len, part.kind);
                    return Err(Error::Internal(text));
                }
                part.crc32c = written.crc32c;
            }
            let end = integrity.to_bytes()?;
            out.bytes(&end)?;
            out.finish()?;
            Ok(end.last_chunk().map_or(0, |crc32c| u32::from_le_bytes(*crc32c)))
        };
        let crc32c = write(file.writer()).map_err(|error| with_path(error, path))?;
        Ok(WrittenFile { file, saved: SavedFile { bytes, crc32c } })
    }
}
