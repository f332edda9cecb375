//! What a slot file is compared with, before anything changes.

use bitflags::bitflags;

use super::appendices::{Appendices, Found, integrity_at_end};
use super::verifier::Verifier;
use super::{Verify, identity};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::{Identity, Integrity};
use crate::session::StateFile;
use crate::storage::{ProgressCallback, Threads};
use crate::types::PosRange;

const NOTHING_COMPARED: &str = "the file has no identity and no checksums: nothing was compared";

bitflags! {
    /// What a slot file has to have. By default nothing: files of llama.cpp say nothing of themselves.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Require: u32 {
        /// The fingerprint of a model; the caller has to name one too.
        const IDENTITY = 1;
        /// Checksums that are whole.
        const CHECKSUMS = 2;
    }
}

/// What becomes of a file without checksums that is damaged behind the memory state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::session) enum Unrecorded {
    /// The damage is left out.
    Taken,
    /// The file is refused: there had been checksums.
    Refused,
}

/// What a file is compared with.
#[derive(Debug)]
pub(in crate::session) struct Expected {
    identity: Identity,
    pub(super) verify: Verify,
    require: Require,
    pub(super) unrecorded: Unrecorded,
    /// The positions that are wanted.
    pub(super) range: PosRange,
}

impl Expected {
    /// All positions are wanted.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an identity is required and there is none to compare it with.
    pub fn new(identity: Identity, verify: Verify, require: Require) -> Result<Self> {
        if require.contains(Require::IDENTITY) && identity.model.is_empty() {
            return Err(Error::arg("require", "an identity is required, and the caller names no model"));
        }
        Ok(Self { identity, verify, require, unrecorded: Unrecorded::Taken, range: PosRange::ALL })
    }

    /// Finds identity and checksums at the end of the file, and compares them.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Corrupt`], [`Error::Io`], [`Error::Cancelled`].
    pub fn at_end(
        &self,
        file: &StateFile,
        context: Option<&Context>,
        verifier: &mut Verifier<'_>,
        notes: &mut Vec<String>,
    ) -> Result<Option<Found>> {
        let found = integrity_at_end(file);
        if let Some(found) = &found {
            self.compare(file, &found.integrity, context, verifier, notes)?;
        }
        Ok(found)
    }

    /// Reads the appendices behind the memory state. Without `found` at the end of the file, identity and checksums are
    /// compared if they are met on the way: something stands behind them.
    ///
    /// # Errors
    /// As [`Expected::at_end`].
    pub fn behind(
        &self,
        file: &StateFile,
        state_end: u64,
        found: Option<Found>,
        context: Option<&Context>,
        verifier: &mut Verifier<'_>,
        notes: &mut Vec<String>,
    ) -> Result<Appendices> {
        let found = if let Some(found) = found {
            found
        } else {
            let (mut in_turn, mut said) = (Appendices::default(), Vec::new());
            in_turn.read_in_turn(file, state_end, &mut said);
            let Some(found) = in_turn.integrity.take() else {
                if let Some(damage) = in_turn.damage.take_if(|_| self.unrecorded == Unrecorded::Refused) {
                    return Err(damage);
                }
                self.check_without(in_turn.damage.as_ref())?;
                notes.append(&mut said);
                notes.push(NOTHING_COMPARED.to_owned());
                return Ok(in_turn);
            };
            self.compare(file, &found.integrity, context, verifier, notes)?;
            found
        };
        let end = found.end;
        let mut appendices = Appendices::listed(file, state_end, found, verifier, notes)?;
        appendices.read_in_turn(file, end, notes);
        Ok(appendices)
    }

    fn compare(
        &self,
        file: &StateFile,
        integrity: &Integrity,
        context: Option<&Context>,
        verifier: &mut Verifier<'_>,
        notes: &mut Vec<String>,
    ) -> Result<()> {
        if integrity.identity.model.is_empty() {
            self.check_model()?;
        }
        identity::check(integrity, &self.identity, context, notes)?;
        verifier.verify_state(file, integrity)
    }

    /// What compares the file's parts with their checksums.
    pub fn verifier<'a>(&self, threads: Threads, progress: Option<&'a mut ProgressCallback>) -> Verifier<'a> {
        Verifier::new(self.verify, threads, progress)
    }

    /// What is required of a file whose checksums were not found; `damage` is what may be the reason.
    fn check_without(&self, damage: Option<&Error>) -> Result<()> {
        if self.require.contains(Require::CHECKSUMS) {
            let got =
                damage.map_or_else(|| "none".to_owned(), |damage| format!("none that are whole: {damage}"));
            return Err(Error::corrupt("checksums", got, "those of a slot file, which are required"));
        }
        self.check_model()
    }

    fn check_model(&self) -> Result<()> {
        if self.require.contains(Require::IDENTITY) {
            return Err(identity::no_model(&self.identity));
        }
        Ok(())
    }
}
