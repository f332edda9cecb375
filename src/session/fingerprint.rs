//! Fingerprints of a model and its settings, for the identity of slot files: `docs/format.md`.

use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::state_file::open_regular;
use super::with_path;
use crate::error::{Error, Result};
use crate::format::{BoundedRead, skip_gguf_head};

/// Largest head of a GGUF: real ones have some megabytes, most of it the vocabulary.
const MAX_HEAD: u64 = 256 << 20;

/// Bytes of a fingerprint: those of SHA-256.
pub const FINGERPRINT_LEN: usize = 32;

/// The fingerprint of a model and its settings, for [`Identity::model`](crate::format::Identity::model).
///
/// `ggufs`: the files of the model in an order of the caller's, each file of one that is split, and what else goes into its
/// states, such as adapters. Of each its head is read: metadata, and names, types and shapes of tensors, not their data.
/// `settings`: keys and values, in any order, for whatever else states depend on.
///
/// # Errors
/// [`Error::InvalidArgument`] for a key that is empty or comes twice, or if there is nothing to take a fingerprint of;
/// [`Error::Gguf`], [`Error::Io`].
pub fn fingerprint<T: AsRef<[u8]>>(
    ggufs: &[impl AsRef<Path>],
    settings: &[(T, T)],
) -> Result<[u8; FINGERPRINT_LEN]> {
    if ggufs.is_empty() && settings.is_empty() {
        return Err(Error::arg("settings", "no GGUF and no setting is named"));
    }
    let mut settings: Vec<_> = settings.iter().map(|(key, value)| (key.as_ref(), value.as_ref())).collect();
    settings.sort_unstable();
    if let Some(pair) = settings.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let [key, first, second] = [pair[0].0, pair[0].1, pair[1].1].map(<[u8]>::escape_ascii);
        return Err(Error::arg("settings", format!("'{key}' comes twice, as '{first}' and '{second}'")));
    }
    let mut hash = Sha256::new();
    hash.update(b"KVSF");
    hash.update(1_u32.to_le_bytes());
    for path in ggufs {
        hash.update(b"GGUF");
        hash.update(gguf_head(path.as_ref())?);
    }
    for (key, value) in settings {
        if key.is_empty() {
            return Err(Error::arg("settings", format!("the key of '{}' is empty", value.escape_ascii())));
        }
        hash.update(b"PAIR");
        for text in [key, value] {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
    }
    Ok(hash.finalize().into())
}

/// SHA-256 of the head of a GGUF.
fn gguf_head(path: &Path) -> Result<[u8; FINGERPRINT_LEN]> {
    let (file, size) = open_regular(path)?;
    let mut head =
        HashedRead { file: BufReader::new(file), hash: Sha256::new(), offset: 0, len: size.min(MAX_HEAD) };
    skip_gguf_head(&mut head).map_err(|error| match with_path(error, path) {
        error @ Error::Io { .. } => error,
        source => Error::Gguf { path: path.display().to_string(), source: Box::new(source) },
    })?;
    Ok(head.hash.finalize().into())
}

/// Reads the beginning of a file, and takes the hash of what it has passed.
struct HashedRead {
    file: BufReader<File>,
    hash: Sha256,
    offset: u64,
    len: u64,
}

impl HashedRead {
    fn check(&self, field: &'static str, n: u64) -> Result<()> {
        let (offset, left) = (self.offset, self.left());
        if n > left {
            let (got, expected) =
                (format_args!("{n} bytes at offset {offset}"), format_args!("at most {left}"));
            return Err(Error::corrupt(field, got, expected));
        }
        Ok(())
    }
}

impl BoundedRead for HashedRead {
    fn read(&mut self, field: &'static str, out: &mut [u8]) -> Result<()> {
        self.check(field, out.len() as u64)?;
        let failed = |source| Error::Io { op: "read", path: String::new(), source };
        self.file.read_exact(out).map_err(failed)?;
        self.hash.update(&*out);
        self.offset += out.len() as u64;
        Ok(())
    }

    fn skip(&mut self, field: &'static str, n: u64) -> Result<Range<u64>> {
        self.check(field, n)?;
        let start = self.offset;
        let mut piece = [0; 4096];
        let mut left = n;
        while left > 0 {
            let len = usize::try_from(left).map_or(piece.len(), |left| left.min(piece.len()));
            self.read(field, &mut piece[..len])?;
            left -= len as u64;
        }
        Ok(start..self.offset)
    }

    fn offset(&self) -> u64 {
        self.offset
    }

    fn left(&self) -> u64 {
        self.len - self.offset
    }
}
