//! Kernel stores: the ahead-of-time compiled kernels of a GPU target, in one file that this project's wheels carry too.
//!
//! A store is a zip archive `<target>.zip` of a manifest and of groups of code objects, compressed by LZMA
//! (docs/kernel-store.md in the repository). [`Stores`] finds the stores in a file, a wheel or a directory; [`Store`]
//! reads one.

mod archive;
mod manifest;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use archive::Archive;
pub use manifest::{Kernel, Parameter};

/// The manifest format that this crate reads.
pub const FORMAT: u64 = 2;

/// The environment variable that names a store, a wheel or a directory of stores.
const VARIABLE: &str = "CANDLE_FLASH_ROCM_STORE";

/// What has kernel stores.
const SOURCES: &str = "a wheel of flash_attn from this crate's repository, a kernel store such as gfx942.zip, or a \
                       directory of stores. In a clone of the repository, ./build_rocm.sh --store gfx942 writes a store";

/// Where a wheel keeps its stores.
const IN_A_WHEEL: &str = "flash_attn/_kernels/";

/// The stores in a file, a wheel or a directory.
#[derive(Clone, Debug)]
pub struct Stores {
    origin: PathBuf,
    /// Target -> the archive's file, or its bytes where it lies in a wheel.
    found: BTreeMap<String, Place>,
}

#[derive(Clone, Debug)]
enum Place {
    File(PathBuf),
    Member(String),
}

impl Stores {
    /// The stores in what the environment variable `CANDLE_FLASH_ROCM_STORE` names.
    ///
    /// # Errors
    ///
    /// Where it is not set, and as [`Stores::open`].
    pub fn from_environment() -> Result<Self> {
        let Some(path) = std::env::var_os(VARIABLE) else {
            return Err(Error::Store(format!("{VARIABLE} is not set: let it name {SOURCES}")));
        };
        Self::open(PathBuf::from(path))
    }

    /// Finds the stores in `path`: a store `<target>.zip`, a wheel `*.whl`, or a directory of stores.
    ///
    /// # Errors
    ///
    /// Where the path cannot be read, or holds no store.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let origin = path.as_ref().to_path_buf();
        let unreadable =
            |error: &dyn std::fmt::Display| damaged(&origin, &format!("cannot be read: {error}; name {SOURCES}"));
        let mut found = BTreeMap::new();
        let mut add = |name: &str, place| {
            if let Some(target) = name.strip_suffix(".zip").filter(|target| is_target(target)) {
                found.insert(target.to_owned(), place);
            }
        };
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let is_wheel = origin.extension().is_some_and(|extension| extension == "whl");
        if origin.is_dir() {
            for entry in fs::read_dir(&origin).map_err(|error| unreadable(&error))? {
                let path = entry.map_err(|error| unreadable(&error))?.path();
                add(&name(&path), Place::File(path));
            }
        } else if is_wheel {
            for member in read_archive(&origin)?.names() {
                if let Some(name) = member.strip_prefix(IN_A_WHEEL) {
                    add(name, Place::Member(member.clone()));
                }
            }
        } else {
            fs::metadata(&origin).map_err(|error| unreadable(&error))?;
            add(&name(&origin), Place::File(origin.clone()));
        }
        if found.is_empty() {
            let found = "no store in it, which is a file <target>.zip";
            return Err(damaged(&origin, &format!("{found}; name {SOURCES}")));
        }
        Ok(Self { origin, found })
    }

    /// The GPU targets, such as `gfx942`, in order.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        self.found.keys().map(String::as_str)
    }

    /// The planner library of Composable Kernel's launches beside the stores, `_ck_planner.so`, if it is there.
    #[must_use]
    pub fn planner(&self) -> Option<PathBuf> {
        let directory = if self.origin.is_dir() { Some(self.origin.as_path()) } else { self.origin.parent() };
        directory.map(|directory| directory.join("_ck_planner.so")).filter(|path| path.is_file())
    }

    /// Opens the store that a GPU loads: the store of its target, else of the generic target of its family.
    ///
    /// # Errors
    ///
    /// As [`Stores::store`], for the GPU's own target.
    pub fn for_gpu(&self, target: &str) -> Result<Store> {
        match generic(target) {
            Some(family) if !self.found.contains_key(target) && self.found.contains_key(family) => self.store(family),
            _ => self.store(target),
        }
    }

    /// Opens the store of a target.
    ///
    /// # Errors
    ///
    /// Where there is none, with the targets that there are and how to build it; where it is damaged.
    pub fn store(&self, target: &str) -> Result<Store> {
        match self.found.get(target) {
            Some(Place::File(path)) => Store::open(path),
            Some(Place::Member(member)) => {
                let bytes = read_archive(&self.origin)?.read(member, usize::MAX)?;
                Store::read(self.origin.join(member), target, bytes)
            }
            None => {
                let there: Vec<&str> = self.targets().collect();
                Err(Error::Store(format!(
                    "{} has no kernels for {target}, only for {}. Build a store: ./build_rocm.sh --store {target}",
                    self.origin.display(),
                    there.join(", "),
                )))
            }
        }
    }
}

/// The kernels of one GPU target.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    target: String,
    kernels: BTreeMap<String, Kernel>,
    archive: Archive,
}

impl Store {
    /// Reads the manifest of a store `<target>.zip`.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read, is damaged or has another format.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = fs::read(path).map_err(|error| damaged(path, &format!("cannot be read: {error}")))?;
        let target = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        Self::read(path.to_path_buf(), &target, bytes)
    }

    /// Reads the manifest of a store in memory. `path` is what errors call it.
    ///
    /// # Errors
    ///
    /// As [`Store::open`].
    pub fn read(path: PathBuf, target: &str, bytes: Vec<u8>) -> Result<Self> {
        let archive = Archive::new(&path, bytes)?;
        let text = archive.read("manifest.json", usize::MAX)?;
        let kernels = manifest::parse(&text).map_err(|reason| damaged(&path, &reason))?;
        Ok(Self { path, target: target.to_owned(), kernels, archive })
    }

    /// The GPU target, such as `gfx942` or `sm_90`.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// The file, as errors call it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all kernels, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    /// What the manifest says of a kernel, if the store has it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Kernel> {
        self.kernels.get(name)
    }

    /// What the manifest says of a kernel.
    ///
    /// # Errors
    ///
    /// Where the store lacks the kernel, with how to build it.
    pub fn kernel(&self, name: &str) -> Result<&Kernel> {
        self.get(name).ok_or_else(|| {
            Error::Store(format!(
                "{} has no kernel {name} for {target}. Build a store that has it: ./build_rocm.sh --store {target}",
                self.path.display(),
                target = self.target,
            ))
        })
    }

    /// The code object of a kernel, checked against its digest.
    ///
    /// # Errors
    ///
    /// Where the store lacks the kernel or is damaged.
    pub fn image(&self, name: &str) -> Result<Vec<u8>> {
        let kernel = self.kernel(name)?;
        let end = kernel.offset.checked_add(kernel.size);
        let mut group = self.archive.read(&kernel.group, end.unwrap_or(usize::MAX))?;
        let image = match end {
            Some(end) if end <= group.len() => {
                group.truncate(end);
                group.split_off(kernel.offset)
            }
            _ => return Err(damaged(&self.path, &format!("its group {} ends before {name}", kernel.group))),
        };
        let mut digest = String::with_capacity(64);
        for byte in Sha256::digest(&image) {
            let _ = write!(digest, "{byte:02x}"); // a String takes everything
        }
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

/// The generic target whose code objects a GPU loads too, by LLVM's families.
pub(crate) fn generic(target: &str) -> Option<&'static str> {
    let families = [("gfx103", "gfx10-3-generic"), ("gfx11", "gfx11-generic"), ("gfx120", "gfx12-generic")];
    families.into_iter().find(|(start, _)| target.starts_with(start)).map(|(_, family)| family)
}

/// Whether a file name's stem names a GPU target: `gfx942`, `sm_90`.
fn is_target(stem: &str) -> bool {
    ["gfx", "sm_"].iter().any(|start| stem.strip_prefix(start).is_some_and(|rest| !rest.is_empty()))
}

fn read_archive(path: &Path) -> Result<Archive> {
    let bytes = fs::read(path).map_err(|error| damaged(path, &format!("cannot be read: {error}")))?;
    Archive::new(path, bytes)
}

fn damaged(path: &Path, reason: &str) -> Error {
    Error::Store(format!("the kernel store {}: {reason}", path.display()))
}
