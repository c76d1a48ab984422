//! GPU drivers at run time: AMD's HIP, and NVIDIA's driver for `sm_` targets. Nothing is linked.
//!
//! [`Driver`] opens the library and finds its functions, [`Gpu`] is one of its devices, [`Kernels`] loads, launches and
//! unloads the kernels of a store there. This module and [`crate::raw`] hold all unsafe code of the crate.

#![allow(unsafe_code)]

mod api;
mod gpu;
mod kernels;
mod module;
mod planner;

use std::ffi::{c_char, c_void, CStr};
use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::error::{DriverCode, Error, Result};
use api::Api;
pub use gpu::{Buffer, Event, Gpu, Stream};
pub use kernels::Kernels;
pub use planner::Planner;

/// The platform of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Platform {
    /// AMD's HIP runtime.
    Hip,
    /// NVIDIA's CUDA driver.
    Cuda,
}

impl Platform {
    /// The platform of a GPU target.
    #[must_use]
    pub fn of(target: &str) -> Self {
        if target.starts_with("sm_") {
            Self::Cuda
        } else {
            Self::Hip
        }
    }

    /// File names of the library on Windows or on Linux, in search order.
    fn libraries(self, on_windows: bool) -> &'static [&'static str] {
        match (self, on_windows) {
            (Self::Hip, false) => {
                &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"]
            }
            (Self::Hip, true) => &["amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"],
            (Self::Cuda, false) => &["libcuda.so.1"],
            (Self::Cuda, true) => &["nvcuda.dll"],
        }
    }

    /// What a user installs where no library opens.
    fn remedy(self, on_windows: bool) -> &'static str {
        match (self, on_windows) {
            (Self::Hip, false) => {
                "install ROCm, or AMD's pip package rocm[libraries], and set CANDLE_FLASH_ROCM_HIP to its libamdhip64.so"
            }
            (Self::Hip, true) => {
                "install AMD's driver Adrenalin, which has amdhip64_7.dll, or AMD's pip package rocm[libraries], and set \
                 CANDLE_FLASH_ROCM_HIP to its amdhip64_7.dll"
            }
            (Self::Cuda, _) => "install the NVIDIA driver",
        }
    }

    /// Ends the option list of a launch that passes all arguments as one block.
    fn end_of_extra(self) -> *mut c_void {
        match self {
            Self::Hip => std::ptr::without_provenance_mut(3),
            Self::Cuda => std::ptr::null_mut(),
        }
    }

    /// The environment variable that names the library.
    fn variable(self) -> &'static str {
        match self {
            Self::Hip => "CANDLE_FLASH_ROCM_HIP",
            Self::Cuda => "CANDLE_FLASH_ROCM_CUDA",
        }
    }
}

/// A GPU driver that this process has opened; it stays open as long as the process.
pub struct Driver {
    platform: Platform,
    path: String,
    api: Api,
}

impl fmt::Debug for Driver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Driver")
            .field("platform", &self.platform)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// Opens a platform's driver, once a process.
    ///
    /// The library is the one that `CANDLE_FLASH_ROCM_HIP` or `CANDLE_FLASH_ROCM_CUDA` names, else the first that the
    /// loader finds of `libamdhip64.so.7`, `.so.6`, `.so`, and `/opt/rocm/lib/libamdhip64.so`, or `libcuda.so.1`. On
    /// Windows: of `amdhip64_7.dll`, `amdhip64_6.dll` and `amdhip64.dll`, or `nvcuda.dll`.
    ///
    /// # Errors
    ///
    /// If no library opens, or it lacks a function; the message says what to install.
    pub fn open(platform: Platform) -> Result<Arc<Self>> {
        static HIP: OnceLock<Arc<Driver>> = OnceLock::new();
        static CUDA: OnceLock<Arc<Driver>> = OnceLock::new();
        let slot = if platform == Platform::Hip { &HIP } else { &CUDA };
        if let Some(driver) = slot.get() {
            return Ok(driver.clone());
        }
        let driver = Arc::new(Self::find(platform)?);
        Ok(slot.get_or_init(|| driver).clone())
    }

    fn find(platform: Platform) -> Result<Self> {
        let named = std::env::var(platform.variable()).ok();
        let names: Vec<&str> = match &named {
            Some(name) => vec![name],
            None => platform.libraries(cfg!(windows)).to_vec(),
        };
        let mut problems = Vec::new();
        for name in names {
            match Api::open(platform, name) {
                Ok(api) => {
                    let driver = Self { platform, path: name.to_owned(), api };
                    if platform == Platform::Cuda {
                        // SAFETY: cuInit takes flags, which have to be 0.
                        driver.check("cuInit", unsafe { (driver.api.init)(0) })?;
                    }
                    return Ok(driver);
                }
                Err(problem) => problems.push(problem),
            }
        }
        let install = platform.remedy(cfg!(windows));
        Err(Error::driver(format!("no GPU driver opens: {}; {install}", problems.join("; "))))
    }

    /// The platform of the driver.
    #[must_use]
    pub fn platform(&self) -> Platform {
        self.platform
    }

    /// The library, as it was opened.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The number of devices; a driver without any has 0.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn devices(&self) -> Result<usize> {
        const NO_DEVICE: i32 = 100; // the same number in both drivers
        let mut count = 0;
        // SAFETY: the function writes the number of devices to the address.
        let code = unsafe { (self.api.device_count)(&raw mut count) };
        if code == NO_DEVICE {
            return Ok(0);
        }
        self.check("device count", code)?;
        Ok(count.max(0) as usize)
    }

    /// Turns a driver's code into a result. The error names the call, the driver's name of the
    /// code, and a remedy.
    fn check(&self, what: &str, code: i32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let (name, text) = self.words(code);
        let remedy = remedy(&name).map_or(String::new(), |remedy| format!("; {remedy}"));
        let reason = format!("{what} failed: {name} ({code}): {text}{remedy}");
        let source = DriverCode { code, name };
        Err(match source.name.as_str() {
            OUT_OF_MEMORY_HIP | OUT_OF_MEMORY_CUDA => Error::OutOfMemory { reason, source: Some(Box::new(source)) },
            "hipErrorInvalidDevice" | "CUDA_ERROR_INVALID_DEVICE" => Error::WrongDevice(reason),
            _ => Error::Driver { reason, source: Some(source) },
        })
    }

    /// A code's name and description.
    fn words(&self, code: i32) -> (String, String) {
        let read = |pointer: *const c_char| {
            if pointer.is_null() {
                return String::from("unknown error");
            }
            // SAFETY: the driver gives texts that end with a null and live as long as the process.
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
        };
        match &self.api.errors {
            api::Errors::Hip { name, text } => {
                // SAFETY: both functions take any number.
                unsafe { (read(name(code)), read(text(code))) }
            }
            api::Errors::Cuda { name, text } => {
                let (mut found, mut described) = (std::ptr::null(), std::ptr::null());
                // SAFETY: both functions take any number and write an address.
                unsafe {
                    name(code, &raw mut found);
                    text(code, &raw mut described);
                }
                (read(found), read(described))
            }
        }
    }
}

/// The drivers' names for the out-of-memory error.
const OUT_OF_MEMORY_HIP: &str = "hipErrorOutOfMemory";
const OUT_OF_MEMORY_CUDA: &str = "CUDA_ERROR_OUT_OF_MEMORY";

/// The remedy for an error, by the driver's name of the error.
fn remedy(name: &str) -> Option<&'static str> {
    Some(match name {
        OUT_OF_MEMORY_HIP | OUT_OF_MEMORY_CUDA => {
            "pass fewer sequences at once, or free memory of the GPU"
        }
        "hipErrorNoBinaryForGpu" | "hipErrorInvalidImage" | "hipErrorSharedObjectInitFailed" | "CUDA_ERROR_NO_BINARY_FOR_GPU"
        | "CUDA_ERROR_INVALID_IMAGE" => "the store's code is for another GPU: build one with ./build_rocm.sh --store <target>",
        "hipErrorNoDevice" | "CUDA_ERROR_NO_DEVICE" if cfg!(windows) => {
            "no GPU is visible: look at HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES, and install the GPU's newest driver"
        }
        "hipErrorNoDevice" | "CUDA_ERROR_NO_DEVICE" => {
            "no GPU is visible: look at HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES, and for AMD GPUs at the groups of \
             /dev/kfd and /dev/dri/renderD*"
        }
        "hipErrorInvalidDevice" | "CUDA_ERROR_INVALID_DEVICE" => "devices are numbered from 0, see Driver::devices()",
        "hipErrorIllegalAddress" | "CUDA_ERROR_ILLEGAL_ADDRESS" => {
            "a kernel read or wrote outside of memory: check addresses, strides and lengths of the call; the process has \
             to start again"
        }
        "hipErrorNotFound" | "CUDA_ERROR_NOT_FOUND" => "the store does not fit the crate: build both from one revision",
        "hipErrorNotInitialized" | "hipErrorInsufficientDriver" | "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" => {
            "the kernel driver and the runtime do not fit: update the older one"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_system_has_its_own_names() {
        for platform in [Platform::Hip, Platform::Cuda] {
            assert!(platform
                .libraries(true)
                .iter()
                .all(|name| std::path::Path::new(name).extension() == Some("dll".as_ref())));
            assert!(platform.libraries(false).iter().all(|name| name.contains(".so")));
        }
        assert_eq!(Platform::Hip.libraries(true)[0], "amdhip64_7.dll");
        assert!(Platform::Hip.remedy(true).contains("amdhip64_7.dll"));
        assert!(!Platform::Hip.remedy(true).contains(".so"));
    }
}
