//! The kernel stores in a file, a wheel or a directory.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::archive::{Archive, MAX_MEMBER};
use super::{damaged, Store, Version};
use crate::error::{Error, Result};

/// The environment variable that names a store, a wheel or a directory of stores.
const VARIABLE: &str = "CANDLE_FLASH_ROCM_STORE";

/// What has kernel stores.
const SOURCES: &str = "a wheel of flash_attn from this crate's repository, a kernel store such as gfx942.zip, or a \
                       directory of stores. In a clone of the repository, ./build_rocm.sh --store gfx942 writes a store";

/// Suffix of LLVM's names for targets that stand for a family of GPUs.
const GENERIC: &str = "-generic";

/// The directory of the stores in a wheel.
const IN_A_WHEEL: &str = "flash_attn/_kernels/";

/// The stores in a file, a wheel or a directory.
#[derive(Clone, Debug)]
pub struct Stores {
    origin: PathBuf,
    /// Target -> the path of the store, or its bytes if it is inside a wheel.
    found: BTreeMap<String, Place>,
}

#[derive(Clone, Debug)]
enum Place {
    File(PathBuf),
    Member(String),
}

impl Stores {
    /// Opens the stores in the file or directory that the environment variable
    /// `CANDLE_FLASH_ROCM_STORE` names.
    ///
    /// # Errors
    ///
    /// If it is not set, and as [`Stores::open`].
    pub fn from_environment() -> Result<Self> {
        let Some(path) = std::env::var_os(VARIABLE) else {
            return Err(Error::store(format!("{VARIABLE} is not set: set it to the path of {SOURCES}")));
        };
        Self::open(PathBuf::from(path))
    }

    /// Finds the stores in `path`: a store `<target>.zip`, a wheel `*.whl`, or a directory of stores.
    ///
    /// # Errors
    ///
    /// If the path cannot be read, or holds no store.
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
            for member in Archive::open(&origin)?.names() {
                if let Some(name) = member.strip_prefix(IN_A_WHEEL) {
                    add(name, Place::Member(member.clone()));
                }
            }
        } else {
            fs::metadata(&origin).map_err(|error| unreadable(&error))?;
            add(&name(&origin), Place::File(origin.clone()));
        }
        if found.is_empty() {
            let found = "it contains no store (a file <target>.zip)";
            return Err(damaged(&origin, &format!("{found}; name {SOURCES}")));
        }
        Ok(Self { origin, found })
    }

    /// The GPU targets, such as `gfx942`, in order.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        self.found.keys().map(String::as_str)
    }

    /// The file `_ck_planner.so` in the directory of the stores, as an absolute path; `None` if there is none.
    ///
    /// It is loaded only if the manifest of the GPU's store has its digest.
    #[must_use]
    pub fn planner(&self) -> Option<PathBuf> {
        let origin = std::path::absolute(&self.origin).ok()?;
        let directory = if origin.is_dir() { Some(origin.as_path()) } else { origin.parent() };
        directory.map(|directory| directory.join("_ck_planner.so")).filter(|path| path.is_file())
    }

    /// Opens the store that a GPU loads: the store of its target, else one whose manifest names the GPU. `hip` is the
    /// version of HIP, None without HIP.
    ///
    /// # Errors
    ///
    /// If no store serves the GPU with this HIP, and as [`Stores::store`].
    pub fn for_gpu(&self, target: &str, hip: Option<Version>) -> Result<Store> {
        if self.found.contains_key(target) {
            return self.store(target);
        }
        let mut others = Vec::new();
        for family in self.targets().filter(|name| name.ends_with(GENERIC)) {
            let store = self.store(family)?;
            if store.serves(target, hip) {
                return Ok(store);
            }
            others.push(format!("; {family} is for {}", store.served()));
        }
        self.store(target).map_err(|error| Error::store(format!("{error}{}", others.concat())))
    }

    /// Opens the store of a target.
    ///
    /// # Errors
    ///
    /// If there is none, with the targets that there are and how to build it; where it is damaged.
    pub fn store(&self, target: &str) -> Result<Store> {
        match self.found.get(target) {
            Some(Place::File(path)) => Store::open(path),
            Some(Place::Member(member)) => {
                let wheel = Archive::open(&self.origin)?;
                let read = |member: &str| wheel.read(member, MAX_MEMBER);
                let mut store = Store::read(self.origin.join(member), target, read(member)?)?;
                if let Some(base) = store.manifest.base.as_deref() {
                    let path = format!("{IN_A_WHEEL}{base}.zip");
                    store.beside = Some(Archive::new(&self.origin.join(&path), read(&path)?)?);
                }
                Ok(store)
            }
            None => {
                let there: Vec<&str> = self.targets().collect();
                Err(Error::store(format!(
                    "{} has no kernels for {target}, only for {}. Build a store: ./build_rocm.sh --store {target}",
                    self.origin.display(),
                    there.join(", "),
                )))
            }
        }
    }
}

/// Whether a file name's stem names a GPU target: `gfx942`, `sm_90`.
fn is_target(stem: &str) -> bool {
    ["gfx", "sm_"].iter().any(|start| stem.strip_prefix(start).is_some_and(|rest| !rest.is_empty()))
}
