//! The driver's functions by name. HIP and CUDA have the same signatures for nearly all of them.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::Platform;

pub(super) type Handle = *mut c_void;
type Code = c_int;

/// The message of the library loader. The text of the error itself only says that loading failed.
pub(super) fn why(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// How a driver names its errors.
pub(super) enum Errors {
    Hip {
        name: unsafe extern "C" fn(Code) -> *const c_char,
        text: unsafe extern "C" fn(Code) -> *const c_char,
    },
    Cuda {
        name: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
        text: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
    },
}

/// How the driver makes a device the current device of a thread.
pub(super) enum Select {
    Hip {
        get: unsafe extern "C" fn(*mut c_int) -> Code,
        set: unsafe extern "C" fn(c_int) -> Code,
        properties: unsafe extern "C" fn(*mut c_void, c_int) -> Code,
        last_error: unsafe extern "C" fn() -> Code,
        version: unsafe extern "C" fn(*mut c_int) -> Code,
    },
    Cuda {
        device: unsafe extern "C" fn(*mut c_int, c_int) -> Code,
        retain: unsafe extern "C" fn(*mut Handle, c_int) -> Code,
        get: unsafe extern "C" fn(*mut Handle) -> Code,
        push: unsafe extern "C" fn(Handle) -> Code,
        pop: unsafe extern "C" fn(*mut Handle) -> Code,
        attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Code,
        set_attribute: unsafe extern "C" fn(Handle, c_int, c_int) -> Code,
    },
}

type LaunchKernel = unsafe extern "C" fn(
    Handle,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Handle,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Code;

pub(super) struct Api {
    pub init: unsafe extern "C" fn(c_uint) -> Code,
    pub device_count: unsafe extern "C" fn(*mut c_int) -> Code,
    pub malloc: unsafe extern "C" fn(*mut u64, usize) -> Code,
    pub free: unsafe extern "C" fn(u64) -> Code,
    pub to_device: unsafe extern "C" fn(u64, *const c_void, usize, Handle) -> Code,
    pub to_host: unsafe extern "C" fn(*mut c_void, u64, usize, Handle) -> Code,
    pub fill: unsafe extern "C" fn(u64, c_uint, usize, Handle) -> Code,
    pub stream_create: unsafe extern "C" fn(*mut Handle, c_uint) -> Code,
    pub stream_destroy: unsafe extern "C" fn(Handle) -> Code,
    pub stream_wait: unsafe extern "C" fn(Handle) -> Code,
    pub event_create: unsafe extern "C" fn(*mut Handle, c_uint) -> Code,
    pub event_destroy: unsafe extern "C" fn(Handle) -> Code,
    pub event_record: unsafe extern "C" fn(Handle, Handle) -> Code,
    pub event_wait: unsafe extern "C" fn(Handle) -> Code,
    pub event_elapsed: unsafe extern "C" fn(*mut f32, Handle, Handle) -> Code,
    pub module_load: unsafe extern "C" fn(*mut Handle, *const c_void) -> Code,
    pub module_unload: unsafe extern "C" fn(Handle) -> Code,
    pub module_function: unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> Code,
    pub launch: LaunchKernel,
    pub errors: Errors,
    pub select: Select,
    /// Holds the functions in memory.
    _library: Library,
}

impl Api {
    /// Opens a library and looks up every function. The error names what is missing.
    pub fn open(platform: Platform, name: &str) -> Result<Self, String> {
        // SAFETY: a GPU driver's initializers run, as in every program that is linked with it.
        let library = unsafe { Library::new(name) }.map_err(|error| why(&error))?;
        // Looks up a function by its name on this platform. The signatures above are from the
        // drivers' headers.
        macro_rules! find {
            ($hip:expr, $cuda:expr) => {{
                let symbol = if platform == Platform::Hip { $hip } else { $cuda };
                // SAFETY: the field's type is the function's signature in the driver's header.
                *unsafe { library.get(symbol.as_bytes()) }
                    .map_err(|_| format!("{name} has no function {symbol}: it is too old or not a GPU driver"))?
            }};
        }
        let errors = match platform {
            Platform::Hip => Errors::Hip { name: find!("hipGetErrorName", ""), text: find!("hipGetErrorString", "") },
            Platform::Cuda => Errors::Cuda { name: find!("", "cuGetErrorName"), text: find!("", "cuGetErrorString") },
        };
        let select = match platform {
            Platform::Hip => Select::Hip {
                get: find!("hipGetDevice", ""),
                set: find!("hipSetDevice", ""),
                properties: find!("hipGetDevicePropertiesR0600", ""),
                last_error: find!("hipGetLastError", ""),
                version: find!("hipRuntimeGetVersion", ""),
            },
            Platform::Cuda => Select::Cuda {
                device: find!("", "cuDeviceGet"),
                retain: find!("", "cuDevicePrimaryCtxRetain"),
                get: find!("", "cuCtxGetCurrent"),
                push: find!("", "cuCtxPushCurrent_v2"),
                pop: find!("", "cuCtxPopCurrent_v2"),
                attribute: find!("", "cuDeviceGetAttribute"),
                set_attribute: find!("", "cuFuncSetAttribute"),
            },
        };
        Ok(Self {
            init: find!("hipInit", "cuInit"),
            device_count: find!("hipGetDeviceCount", "cuDeviceGetCount"),
            malloc: find!("hipMalloc", "cuMemAlloc_v2"),
            free: find!("hipFree", "cuMemFree_v2"),
            to_device: find!("hipMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2"),
            to_host: find!("hipMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"),
            fill: find!("hipMemsetD32Async", "cuMemsetD32Async"),
            stream_create: find!("hipStreamCreateWithFlags", "cuStreamCreate"),
            stream_destroy: find!("hipStreamDestroy", "cuStreamDestroy_v2"),
            stream_wait: find!("hipStreamSynchronize", "cuStreamSynchronize"),
            event_create: find!("hipEventCreateWithFlags", "cuEventCreate"),
            event_destroy: find!("hipEventDestroy", "cuEventDestroy_v2"),
            event_record: find!("hipEventRecord", "cuEventRecord"),
            event_wait: find!("hipEventSynchronize", "cuEventSynchronize"),
            event_elapsed: find!("hipEventElapsedTime", "cuEventElapsedTime"),
            module_load: find!("hipModuleLoadData", "cuModuleLoadData"),
            module_unload: find!("hipModuleUnload", "cuModuleUnload"),
            module_function: find!("hipModuleGetFunction", "cuModuleGetFunction"),
            launch: find!("hipModuleLaunchKernel", "cuLaunchKernel"),
            errors,
            select,
            _library: library,
        })
    }
}
