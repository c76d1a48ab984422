//! The planner library of Composable Kernel's launches, `_ck_planner.so`, which wheels contain beside the stores.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use libloading::Library;

use super::api::why;
use crate::error::{Error, Result};
use crate::launch::{Argument, Call, Launch};

/// The interface version that this crate supports.
const VERSION: c_int = 1;

/// Sizes of `flash_attn_ck_plan`, in bytes.
const MESSAGE: usize = 256;
const NAME: usize = 64;
const ARGUMENTS: usize = 384;
const LAUNCH: usize = NAME + 24 + ARGUMENTS;
const LAUNCHES: usize = 3;
const PLAN: usize = MESSAGE + 8 + LAUNCHES * LAUNCH;

/// The return value of `flash_attn_ck_plan_*` if Composable Kernel has no kernel.
const UNSUPPORTED: c_int = 2;

/// Sizes of `flash_attn_ck_forward` and `flash_attn_ck_backward`, in bytes.
const FORWARD: usize = 104 + 4 * 32 + 48;
const BACKWARD: usize = 104 + 8 * 32 + 40;

type Function = unsafe extern "C" fn(*const c_void, *mut c_void) -> c_int;

/// Opens a library whose digest is about to be compared. On Windows nobody may write or replace the file meanwhile.
fn open_to_load(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    options.read(true);
    #[cfg(windows)]
    {
        use std::os::windows::fs::OpenOptionsExt;
        const FILE_SHARE_READ: u32 = 1;
        options.share_mode(FILE_SHARE_READ);
    }
    options.open(path)
}

/// The path by which the loader finds an open file, not what may lie at its path by now.
#[cfg(target_os = "linux")]
fn loaded_path(_path: &Path, file: &File) -> PathBuf {
    use std::os::fd::AsRawFd;
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The path of a file that is open and cannot be replaced: see [`open_to_load`].
#[cfg(not(target_os = "linux"))]
fn loaded_path(path: &Path, _file: &File) -> PathBuf {
    path.to_path_buf()
}

/// The planner library.
#[derive(Debug)]
pub struct Planner {
    forward: Function,
    backward: Function,
    workspace: unsafe extern "C" fn(*const c_void) -> i64,
    /// Holds the functions in memory.
    _library: Library,
}

impl Planner {
    /// Opens the library if its bytes have the digest that a store's manifest names
    /// ([`Store::planner`](crate::store::Store::planner)).
    ///
    /// # Errors
    ///
    /// If its digest is another one, it does not open, or it has another version.
    pub(crate) fn verified(path: &Path, sha256: &str) -> Result<Self> {
        let unreadable = |error: std::io::Error| Error::Store {
            reason: format!("the planner of Composable Kernel {} cannot be read: {error}", path.display()),
            source: Some(Box::new(error)),
        };
        // The file is opened once, so that the bytes with this digest are the bytes that are loaded.
        let mut file = open_to_load(path).map_err(unreadable)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(unreadable)?;
        let found = crate::store::sha256(&bytes);
        if found != sha256 {
            return Err(Error::store(format!(
                "{} is not the planner of this store: its sha256 is {found}, the manifest says {sha256}. Put the \
                 _ck_planner.so there that was written with the store, or remove the file to do without Composable Kernel",
                path.display()
            )));
        }
        // SAFETY: the library is the one that was built with the store.
        unsafe { Self::open(&loaded_path(path, &file)) }
    }

    /// Opens the library without a check of its digest.
    ///
    /// # Safety
    ///
    /// The file has to be a `_ck_planner.so` of this repository: loading it runs its initializers, and its functions are
    /// called with the structures of `flash_attn_ck.h`.
    ///
    /// # Errors
    ///
    /// If it does not open, or has another version.
    pub unsafe fn open(path: &Path) -> Result<Self> {
        // The loader looks for a name without a directory in its own search path.
        let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let failed = |reason: String| {
            Error::driver(format!(
                "the planner of Composable Kernel {}: {reason}; ./build_rocm.sh --store gfx942 --backend ck writes one",
                path.display()
            ))
        };
        // SAFETY: the caller's promise.
        let library = unsafe { Library::new(path) }.map_err(|error| failed(why(&error)))?;
        macro_rules! find {
            ($name:literal) => {
                // SAFETY: the types are the header's.
                *unsafe { library.get($name) }.map_err(|error| failed(why(&error)))?
            };
        }
        let version: unsafe extern "C" fn() -> c_int = find!(b"flash_attn_ck_version");
        // SAFETY: the function takes nothing.
        let found = unsafe { version() };
        if found != VERSION {
            return Err(failed(format!("it has version {found}, this crate knows {VERSION}")));
        }
        Ok(Self {
            forward: find!(b"flash_attn_ck_plan_forward"),
            backward: find!(b"flash_attn_ck_plan_backward"),
            workspace: find!(b"flash_attn_ck_backward_workspace"),
            _library: library,
        })
    }
}

/// Bytes as a structure whose fields of eight bytes lie at multiples of eight.
fn aligned(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(8).map(|chunk| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))).collect()
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}

impl crate::launch::Planner for Planner {
    fn plan(&self, call: Call, parameters: &[u8]) -> Result<Result<Vec<Launch>, String>> {
        let (function, size) = match call {
            Call::Forward => (self.forward, FORWARD),
            Call::Backward => (self.backward, BACKWARD),
        };
        if parameters.len() != size {
            return Err(Error::driver(format!("a call of {} bytes, the planner takes {size}", parameters.len())));
        }
        let parameters = aligned(parameters);
        let mut plan = vec![0u64; PLAN / 8];
        // SAFETY: both are as large as the header says; the planner never reads what is behind addresses.
        let status = unsafe { function(parameters.as_ptr().cast(), plan.as_mut_ptr().cast()) };
        let bytes: Vec<u8> = plan.iter().flat_map(|word| word.to_le_bytes()).collect();
        match status {
            0 => {}
            UNSUPPORTED => return Ok(Err(text(&bytes[..MESSAGE]))),
            _ => return Err(Error::Unsupported(text(&bytes[..MESSAGE]))),
        }
        let count = (number(&bytes, MESSAGE) as usize).min(LAUNCHES);
        let launches = bytes[MESSAGE + 8..].chunks_exact(LAUNCH).take(count).map(|launch| {
            let grid = [number(launch, NAME), number(launch, NAME + 4), number(launch, NAME + 8)];
            let size = (number(launch, NAME + 16) as usize).min(ARGUMENTS);
            let content = launch[NAME + 24..NAME + 24 + size].to_vec();
            Launch { kernel: text(&launch[..NAME]), grid, arguments: vec![Argument::Structure(content)] }
        });
        Ok(Ok(launches.collect()))
    }

    fn backward_workspace(&self, parameters: &[u8]) -> usize {
        if parameters.len() != BACKWARD {
            return 0;
        }
        // SAFETY: the structure is as large as the header says.
        let bytes = unsafe { (self.workspace)(aligned(parameters).as_ptr().cast()) };
        usize::try_from(bytes).unwrap_or(0)
    }
}
