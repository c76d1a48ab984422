//! The code of one kernel on a device.

use std::ffi::CString;
use std::sync::Arc;

use super::api::{Handle, Select};
use super::gpu::Gpu;
use crate::error::{Error, Result};
use crate::store::Kernel;

/// Bytes of dynamic shared memory that a CUDA kernel may use without opting in to more.
const CUDA_DEFAULT_SHARED: u32 = 48 * 1024;

/// A kernel's code on a device, unloaded when it is dropped.
#[derive(Debug)]
pub(super) struct Module {
    gpu: Arc<Gpu>,
    handle: usize,
    /// HIP reads it for as long as the module is loaded.
    image: Vec<u8>,
}

/// A function of a module: the driver's handle as a number, and what a launch needs to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub handle: usize,
    pub threads: u32,
    pub shared: u32,
}

impl Module {
    /// Loads code that was checked against its digest.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn load(gpu: &Arc<Gpu>, name: &str, image: Vec<u8>) -> Result<Self> {
        let mut handle: Handle = std::ptr::null_mut();
        gpu.with(|| {
            // SAFETY: the function reads the image, which the module keeps.
            let code = unsafe { (gpu.driver().api.module_load)(&raw mut handle, image.as_ptr().cast()) };
            gpu.check(format_args!("loading {name}"), code)
        })?;
        Ok(Self { gpu: gpu.clone(), handle: handle as usize, image })
    }

    /// The function of a kernel.
    ///
    /// # Errors
    ///
    /// If the module has no such function, or the driver refuses.
    pub fn function(&self, name: &str, kernel: &Kernel) -> Result<Function> {
        let (gpu, api) = (&self.gpu, &self.gpu.driver().api);
        let symbol = CString::new(kernel.symbol.as_str())
            .map_err(|_| Error::store(format!("kernel {name}: its symbol has a null character")))?;
        let mut function: Handle = std::ptr::null_mut();
        gpu.with(|| {
            // SAFETY: the module is loaded, and the symbol ends with a null.
            let code = unsafe { (api.module_function)(&raw mut function, self.handle as Handle, symbol.as_ptr()) };
            gpu.check(format_args!("finding {} in {name}", kernel.symbol), code)?;
            if let Select::Cuda { set_attribute, .. } = &api.select {
                const MAX_DYNAMIC_SHARED: i32 = 8;
                if kernel.shared > CUDA_DEFAULT_SHARED {
                    // SAFETY: the function is loaded.
                    let code = unsafe { set_attribute(function, MAX_DYNAMIC_SHARED, kernel.shared as i32) };
                    let what = format_args!("asking for {} bytes of shared memory for {name}", kernel.shared);
                    gpu.check(what, code)?;
                }
            }
            Ok(())
        })?;
        Ok(Function { handle: function as usize, threads: kernel.threads, shared: kernel.shared })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let unload = self.gpu.driver().api.module_unload;
        let unloaded = self.gpu.with(|| {
            // SAFETY: the handle is of this module alone, and its launches are over: the promise of `Kernels::launch`.
            self.gpu.check("unloading a kernel", unsafe { unload(self.handle as Handle) })
        });
        if unloaded.is_err() {
            // HIP refuses while a stream captures a graph. The module stays, and may read its image.
            std::mem::take(&mut self.image).leak();
        }
    }
}
