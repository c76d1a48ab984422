//! Kernel stores: the ahead-of-time compiled kernels of a GPU target, in one file that this project's wheels carry too.
//!
//! A store is a zip archive `<target>.zip` of a manifest and of groups of code objects, compressed by LZMA
//! (docs/notes/kernel-store.md in the repository). [`Stores`] finds the stores in a file, a wheel or a directory; [`Store`]
//! reads one.

mod archive;
mod manifest;
mod stores;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::launch::{Catalogue, Choice, Planning, Signature, Tile};
use archive::Archive;
use manifest::Manifest;
pub use manifest::{Kernel, Parameter, Version};
pub use stores::Stores;

/// The manifest format that this crate reads.
pub const FORMAT: u64 = 6;

/// Largest manifest that is read. That of the store with the most kernels has 1 MiB.
const MAX_MANIFEST: usize = 16 << 20;

/// The kernels of one GPU target.
///
/// A store is code that runs on the GPU, and names the planner library that this process loads: open only stores that
/// you would run a program from.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    target: String,
    manifest: Manifest,
    archive: Archive,
    /// The store of `manifest.base`.
    beside: Option<Archive>,
}

impl Store {
    /// Reads the manifest of a store `<target>.zip`. In a wheel the store of a generic target such as `gfx11-generic`
    /// lacks the code that the store beside it, `gfx1100.zip`, has: that one has to be in the same directory.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, is damaged or has another format.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let target = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let mut store = Self::of(path.to_path_buf(), &target, Archive::open(path)?)?;
        if let Some(base) = store.manifest.base.as_deref() {
            store.beside = Some(Archive::open(&path.with_file_name(format!("{base}.zip")))?);
        }
        Ok(store)
    }

    /// Reads the manifest of a store in memory, which has all code of its kernels. `path` is what errors call it.
    ///
    /// # Errors
    ///
    /// As [`Store::open`].
    pub fn read(path: PathBuf, target: &str, bytes: Vec<u8>) -> Result<Self> {
        let archive = Archive::new(&path, bytes)?;
        Self::of(path, target, archive)
    }

    fn of(path: PathBuf, target: &str, archive: Archive) -> Result<Self> {
        let text = archive.read("manifest.json", MAX_MANIFEST)?;
        let manifest = manifest::parse(&text).map_err(|reason| damaged(&path, &reason))?;
        Ok(Self { path, target: target.to_owned(), manifest, archive, beside: None })
    }

    /// Digest of the planner library that plans launches of the store's Composable Kernel kernels: sha256 in hexadecimal.
    /// `None` for a store without such kernels.
    #[must_use]
    pub fn planner(&self) -> Option<&str> {
        self.manifest.planner.as_deref()
    }

    /// The GPU target, such as `gfx942` or `sm_90`.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Whether a GPU loads the code objects of the store. `hip` is the version of HIP, None without HIP.
    #[must_use]
    pub fn serves(&self, gpu: &str, hip: Option<Version>) -> bool {
        let facts = &self.manifest.facts;
        facts.gpus.iter().any(|one| one == gpu) && (facts.min_hip.is_none() || facts.min_hip <= hip)
    }

    /// Compute units that HIP counts as one multiprocessor of a GPU of this target.
    pub(crate) const fn multiprocessor_units(&self) -> usize {
        self.manifest.facts.multiprocessor_units
    }

    /// The GPUs that load the code objects, for error messages: `gfx1030, gfx1031 with HIP from 6.4 on`.
    #[must_use]
    pub fn served(&self) -> String {
        let facts = &self.manifest.facts;
        let gpus = facts.gpus.join(", ");
        facts.min_hip.map_or_else(|| gpus.clone(), |(major, minor)| format!("{gpus} with HIP from {major}.{minor} on"))
    }

    /// Which source of kernels serves a call.
    pub(crate) fn choice(&self) -> &Choice {
        &self.manifest.choice
    }

    /// Path of the store, for error messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all kernels, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.manifest.kernels.keys().map(String::as_str)
    }

    /// The manifest entry of a kernel, if the store has the kernel.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Kernel> {
        self.manifest.kernels.get(name)
    }

    /// The manifest entry of a kernel.
    ///
    /// # Errors
    ///
    /// If the store lacks the kernel. The error says how to build it.
    pub fn kernel(&self, name: &str) -> Result<&Kernel> {
        self.get(name).ok_or_else(|| {
            let (kernel, target, store) = (name.to_owned(), self.target.clone(), self.path.clone());
            Error::MissingKernel { kernel, target, store }
        })
    }

    /// The code object of a kernel, checked against its digest.
    ///
    /// # Errors
    ///
    /// If the store lacks the kernel or is damaged.
    pub fn image(&self, name: &str) -> Result<Vec<u8>> {
        let kernel = self.kernel(name)?;
        let ends = || damaged(&self.path, &format!("its group {} ends before {name}", kernel.group));
        let mut image = part(&self.archive, &kernel.group, kernel.offset, kernel.size)?.ok_or_else(ends)?;
        if let Some(code) = kernel.code {
            let beside = self.beside.as_ref().ok_or_else(|| {
                let base = self.manifest.base.as_deref().unwrap_or("another target");
                damaged(
                    &self.path,
                    &format!("the code of {name} is in the store of {base}, which is not in the same directory"),
                )
            })?;
            let there = part(beside, &kernel.group, code.offset, code.size)?.filter(|_| code.at <= image.len());
            image.splice(code.at..code.at, there.ok_or_else(ends)?);
        }
        let digest = sha256(&image);
        if digest != kernel.sha256 {
            let start = |text: &str| text.chars().take(16).collect::<String>();
            let found = format!(
                "the code object {name} is corrupt: sha256 {}..., the manifest says {}...",
                start(&digest),
                start(&kernel.sha256)
            );
            return Err(damaged(&self.path, &found));
        }
        Ok(image)
    }
}

/// `size` bytes of a group from `offset` on. None if the group ends before.
fn part(archive: &Archive, group: &str, offset: usize, size: usize) -> Result<Option<Vec<u8>>> {
    let Some(end) = offset.checked_add(size) else { return Ok(None) };
    let mut content = archive.start(group, end)?;
    Ok((content.len() == end).then(|| content.split_off(offset)))
}

/// The sha256 of bytes, in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    let mut digest = String::with_capacity(64);
    for byte in Sha256::digest(bytes) {
        let _ = write!(digest, "{byte:02x}"); // a String takes everything
    }
    digest
}

fn damaged(path: &Path, reason: &str) -> Error {
    Error::store(format!("the kernel store {}: {reason}", path.display()))
}

fn unreadable(path: &Path, error: std::io::Error) -> Error {
    let reason = format!("the kernel store {}: cannot be read: {error}", path.display());
    Error::Store { reason, source: Some(Box::new(error)) }
}
impl Catalogue for Store {
    fn tile(&self, kernel: &str) -> Result<Tile> {
        let found = self.kernel(kernel)?;
        Ok(Tile { block_m: found.block_m, block_n: found.block_n, num_xcds: found.num_xcds })
    }

    fn signature(&self, kernel: &str) -> Result<&Signature> {
        let signature = self.kernel(kernel)?.signature.and_then(|number| self.manifest.signatures.get(number));
        signature.ok_or_else(|| damaged(&self.path, &format!("kernel {kernel} has no names of its arguments")))
    }

    fn has(&self, kernel: &str) -> bool {
        self.get(kernel).is_some()
    }

    fn choice(&self) -> &Choice {
        self.choice()
    }

    fn planning(&self) -> &Planning {
        &self.manifest.planning
    }
}
