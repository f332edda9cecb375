//! Saving a slot file: one pass, in which the checksums are computed while the bytes are on their way.

use std::path::Path;

use super::SlotContents;
use super::geometry::geometry_of;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{
    Checkpoints, DraftState, FileKind, Identity, Integrity, Part, PartKind, SectionGeometry, seq_blob_header,
};
use crate::session::replace::Replacement;
use crate::session::{file_record, with_path};
use crate::state::{FileWriter, RecordSink, Sink};
use crate::storage::{ProgressCallback, Transfer};
use crate::types::{Seq, SeqId};

/// A state that is ready to be written, and how it is moved.
pub(super) struct Record<'a> {
    pub record: RecordSink<'a>,
    pub transfer: &'a Transfer,
}

/// All that comes before the checksums.
pub(super) struct Contents<'a> {
    pub head: RecordSink<'a>,
    pub target: Record<'a>,
    pub checkpoints: Checkpoints<&'a [u8]>,
    pub draft: Option<Record<'a>>,
    pub driver: &'a [u8],
}

impl Context {
    /// Writes a slot file to `path`: sequence `seq_id` of this context, and `contents`. Returns the size of the file.
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
        let SlotContents { tokens, checkpoints, draft, driver, identity } = contents;
        let seq = self.seq(seq_id)?;
        let draft = draft.map(|(context, seq_id)| Ok((context.seq(seq_id)?, context))).transpose()?;
        let head = file_record(FileKind::Sequence, tokens)?;
        self.apply_shifts_of(Some(seq))?;
        let mut progress = self.progress.take();
        let save = || {
            let draft = draft.map(|(seq, context)| draft_record(context, seq)).transpose()?;
            let target = target_record(self, seq)?;
            let contents = Contents { head, target, checkpoints: Checkpoints(checkpoints), draft, driver };
            let geometry = geometry_of(self);
            contents.save(path.as_ref(), identity, geometry, self.sync_files, progress.as_mut())
        };
        let saved = save();
        self.progress = progress;
        saved
    }
}

fn target_record(context: &Context, seq: Seq) -> Result<Record<'_>> {
    let mut record = RecordSink::default();
    context.write_file_state(&mut record, Some(seq))?;
    Ok(Record { record, transfer: &context.transfer })
}

/// The draft's state is a blob: it begins with its own header.
fn draft_record(context: &mut Context, seq: Seq) -> Result<Record<'_>> {
    context.apply_shifts_of(Some(seq))?;
    let mut record = RecordSink::default();
    record.write(&seq_blob_header(seq.id()))?;
    context.write_file_state(&mut record, Some(seq))?;
    Ok(Record { record, transfer: &context.transfer })
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

    fn draft_bytes(&self) -> u64 {
        self.draft.as_ref().map_or(0, |draft| draft.record.bytes())
    }

    fn draft_heads(&self) -> ([u8; 16], [u8; 8]) {
        DraftState { draft: self.draft_bytes(), driver: self.driver.len() as u64 }.heads()
    }

    fn write_part(&self, kind: PartKind, out: &mut FileWriter<'_, std::fs::File>) -> Result<()> {
        match kind {
            PartKind::HEAD => out.record(&self.head, self.target.transfer),
            PartKind::STATE => out.record(&self.target.record, self.target.transfer),
            PartKind::CHECKPOINTS => self.checkpoints.write(|bytes| out.bytes(bytes)),
            _ => {
                let (first, second) = self.draft_heads();
                out.bytes(&first)?;
                if let Some(draft) = &self.draft {
                    out.record(&draft.record, draft.transfer)?;
                }
                out.bytes(&second)?;
                out.bytes(self.driver)
            }
        }
    }

    pub fn save(
        &self,
        path: &Path,
        identity: Identity,
        geometry: Vec<SectionGeometry>,
        sync: bool,
        progress: Option<&mut ProgressCallback>,
    ) -> Result<u64> {
        let mut integrity = Integrity { identity, geometry, parts: self.parts()? };
        let before = integrity.parts.iter().map(|part| part.len).sum::<u64>();
        let total = before + integrity.to_bytes()?.len() as u64;
        let mut file = Replacement::create(path)?;
        file.reserve(total)?;
        let write = |out: &mut std::fs::File| {
            let mut out = FileWriter::new(out, total, progress)?.with_checksums();
            for part in &mut integrity.parts {
                self.write_part(part.kind, &mut out)?;
                let written = out.end_part().unwrap_or_default();
                if written.len != part.len {
                    let text = format!("{} of {} bytes of {} were written", written.len, part.len, part.kind);
                    return Err(Error::Internal(text));
                }
                part.crc32c = written.crc32c;
            }
            out.bytes(&integrity.to_bytes()?)?;
            out.finish()
        };
        write(file.writer()).map_err(|error| with_path(error, path))?;
        file.commit(total, sync)?;
        Ok(total)
    }
}
