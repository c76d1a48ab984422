//! A zip archive in memory, read with bounds so that a damaged one costs an error and no more.

use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

use zip::ZipArchive;

use super::damaged;
use crate::error::Result;

/// No member of a store or wheel is larger; what claims to be is damaged.
const MOST_BYTES: usize = 1 << 30;

#[derive(Debug)]
pub(super) struct Archive {
    path: PathBuf,
    names: Vec<String>,
    bytes: Vec<u8>,
}

impl Archive {
    pub fn new(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        let archive = open(path, &bytes)?;
        let listed: Result<Vec<_>, _> =
            archive.file_names().map(|name| name.map(std::borrow::Cow::into_owned)).collect();
        let names = listed.map_err(|error| damaged(path, &format!("has a name that cannot be read: {error}")))?;
        Ok(Self { path: path.to_path_buf(), names, bytes })
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The first `limit` bytes of a member, or all of it.
    pub fn read(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        let failed = |error: &dyn std::fmt::Display| {
            damaged(&self.path, &format!("{name} cannot be read: {error}. Build or download it again"))
        };
        let mut archive = open(&self.path, &self.bytes)?;
        let member = archive.by_name(name).map_err(|error| failed(&error))?;
        let mut content = Vec::new();
        let most = limit.min(MOST_BYTES) as u64;
        member.take(most).read_to_end(&mut content).map_err(|error| failed(&error))?;
        Ok(content)
    }
}

fn open<'a>(path: &Path, bytes: &'a [u8]) -> Result<ZipArchive<Cursor<&'a [u8]>>> {
    ZipArchive::new(Cursor::new(bytes)).map_err(|error| damaged(path, &format!("is no zip archive: {error}")))
}
