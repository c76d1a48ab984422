//! A zip archive in memory, read with limits: a damaged or malicious archive costs an error, not the machine's memory.

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

use zip::{CompressionMethod, ZipArchive};

use super::{damaged, unreadable};
use crate::error::Result;

const MIB: usize = 1 << 20;

/// Largest file that is read. The universal wheel has 35 MiB.
const MAX_FILE: usize = 1024 * MIB;

/// Largest member that is unpacked, except for manifests. The largest group of a store has 5 MiB.
pub(super) const MAX_MEMBER: usize = 256 * MIB;

/// Largest dictionary of an LZMA stream, which its decoder allocates. Python's zipfile writes 8 MiB.
const MAX_DICTIONARY: u32 = 64 << 20;

/// Version and size of the properties of LZMA in a zip file, the properties' first byte, and the size of the dictionary.
const LZMA_HEADER: usize = 9;

type Bytes = std::sync::Arc<[u8]>;

#[derive(Debug)]
pub(super) struct Archive {
    path: PathBuf,
    names: Vec<String>,
    /// Clones share the directory of members and the bytes.
    content: ZipArchive<Cursor<Bytes>>,
}

impl Archive {
    /// The archive in a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let unreadable = |error| unreadable(path, error);
        // Opening a pipe would wait for its writer.
        let found = std::fs::metadata(path).map_err(unreadable)?;
        if !found.is_file() {
            return Err(damaged(path, "is no regular file: name a file"));
        }
        let too_large =
            |size: u64| damaged(path, &format!("has {size} bytes, a store or wheel has at most {MAX_FILE}"));
        if found.len() > MAX_FILE as u64 {
            return Err(too_large(found.len()));
        }
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(unreadable)?;
        file.take(MAX_FILE as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() > MAX_FILE {
            return Err(too_large(bytes.len() as u64));
        }
        Self::new(path, bytes)
    }

    pub fn new(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let content = ZipArchive::new(Cursor::new(Bytes::from(bytes)))
            .map_err(|error| damaged(path, &format!("is no zip archive: {error}")))?;
        let names: Result<Vec<_>, _> =
            content.file_names().map(|name| name.map(std::borrow::Cow::into_owned)).collect();
        let names = names.map_err(|error| damaged(path, &format!("has a name that cannot be read: {error}")))?;
        Ok(Self { path: path.to_path_buf(), names, content })
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Reads a whole member. An error if it has more than `limit` bytes, whatever its header
    /// claims.
    pub fn read(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        let content = self.start(name, limit.saturating_add(1))?;
        if content.len() > limit {
            return Err(self.unusable(name, &format!("it has more than {limit} bytes")));
        }
        Ok(content)
    }

    /// The first `end` bytes of a member, or all of it.
    pub fn start(&self, name: &str, end: usize) -> Result<Vec<u8>> {
        let failed = |error: &dyn std::fmt::Display| self.unusable(name, error);
        if end > MAX_MEMBER + 1 {
            return Err(failed(&format!("{end} bytes are asked for, a member has at most {MAX_MEMBER}")));
        }
        let mut archive = self.content.clone();
        let mut raw = archive.by_name_raw(name.as_bytes()).map_err(|error| failed(&error))?;
        if raw.compression() == CompressionMethod::Lzma {
            let mut header = [0; LZMA_HEADER];
            raw.read_exact(&mut header).map_err(|error| failed(&error))?;
            let dictionary = u32::from_le_bytes([header[5], header[6], header[7], header[8]]);
            if dictionary > MAX_DICTIONARY {
                let found = format!("its dictionary has {dictionary} bytes, wanted at most {MAX_DICTIONARY}");
                return Err(failed(&found));
            }
        }
        drop(raw);
        let mut content = Vec::new();
        let member = archive.by_name(name).map_err(|error| failed(&error))?;
        member.take(end as u64).read_to_end(&mut content).map_err(|error| failed(&error))?;
        Ok(content)
    }

    fn unusable(&self, name: &str, reason: &dyn std::fmt::Display) -> crate::Error {
        damaged(&self.path, &format!("{name} cannot be read: {reason}. Build or download it again"))
    }
}
