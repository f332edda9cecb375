//! `kvstate convert`: a file of one version, layout or type of K and V written as one of another.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvstate::convert::{ConvertParams, convert};
use kvstate::format::GgmlType;
use kvstate::inspect::{self, Inspected};
use kvstate::memory::LegacyRotation;
use kvstate::storage::MappedFile;

use crate::{Found, Result, of_file, print};

/// What to write. Whatever is not named stays as it is.
#[derive(Args)]
pub struct Convert {
    /// A sequence file, a slot file, or a whole context
    file: PathBuf,
    /// The file to write; one that is there is replaced, the first as well
    output: PathBuf,
    /// 1: V is transposed, as without flash attention; 0: it is not
    #[arg(long, value_name = "0|1", value_parser = clap::value_parser!(u8).range(0..=1))]
    v_trans: Option<u8>,
    /// Type of K, by ggml's name: `f32`, `f16`, `bf16`, `q8_0`, `q4_0`, `q4_1`, `q5_0`, `q5_1`, `iq4_nl`
    #[arg(long, value_name = "TYPE", value_parser = ggml_type)]
    type_k: Option<GgmlType>,
    /// Type of V
    #[arg(long, value_name = "TYPE", value_parser = ggml_type)]
    type_v: Option<GgmlType>,
    /// Size of the Hadamard rotation of K, 0: none; by default as it is, or none if K is quantised no more
    #[arg(long, value_name = "N")]
    n_rot_k: Option<u32>,
    /// Size of the Hadamard rotation of V
    #[arg(long, value_name = "N")]
    n_rot_v: Option<u32>,
    /// Whether a quantised cache in a file older than version 4 is rotated
    #[arg(long, value_name = "WHICH")]
    legacy_rotation: Option<Legacy>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Legacy {
    Rotated,
    Plain,
}

fn ggml_type(name: &str) -> Result<GgmlType, String> {
    GgmlType::KV.into_iter().find(|known| known.name() == name).ok_or_else(|| "no type of K and V".to_owned())
}

impl Convert {
    pub fn run(&self) -> Result<Found> {
        let input = MappedFile::open(&self.file)?;
        let description = inspect::inspect(&input).map_err(of_file(&self.file))?;
        let params = ConvertParams {
            v_trans: self.v_trans.map(|v_trans| v_trans == 1),
            type_k: self.type_k,
            type_v: self.type_v,
            n_rot_k: self.n_rot_k,
            n_rot_v: self.n_rot_v,
            legacy_rotation: self.legacy_rotation.map(|legacy| match legacy {
                Legacy::Rotated => LegacyRotation::Rotated,
                Legacy::Plain => LegacyRotation::Plain,
            }),
        };
        let inspected = Inspected { input: &input, description: &description };
        let converted = convert(&self.file, inspected, &self.output, &params).map_err(of_file(&self.file))?;
        let notes: Vec<_> = converted.notes.iter().map(|note| format!("  {note}\n")).collect();
        let text = format!("{}: {} bytes\n{}", self.output.display(), converted.bytes, notes.concat());
        print(&text)?;
        Ok(Found::Fine)
    }
}
