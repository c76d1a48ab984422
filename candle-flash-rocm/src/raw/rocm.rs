//! Tensors of candle's ROCm device, by the names of its pull request 3801.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::rocm_backend::RocmStorageSlice;
use candle_core::{Device, DeviceLocation, RocmStorage, Storage};

use super::resident::GpuStorage;
use crate::driver::Platform;
use crate::error::{Error, Result};

impl GpuStorage for RocmStorage {
    const PLATFORM: Platform = Platform::Hip;

    fn ordinal(&self) -> usize {
        match self.device.location() {
            DeviceLocation::Rocm { gpu_id } => gpu_id,
            _ => 0,
        }
    }

    fn stream(&self) -> usize {
        self.device.stream().as_raw() as usize
    }

    /// A ROCm device has one stream, so nobody has to wait.
    fn address(&self) -> Result<u64> {
        let start = match &self.slice {
            RocmStorageSlice::F16(memory) => memory.as_ptr(),
            RocmStorageSlice::BF16(memory) => memory.as_ptr(),
            RocmStorageSlice::F32(memory) => memory.as_ptr(),
            RocmStorageSlice::U32(memory) => memory.as_ptr(),
            RocmStorageSlice::I32(memory) => memory.as_ptr(),
            _ => {
                let reason = format!("the GPU kernels take no tensors of dtype {:?}", self.dtype());
                return Err(Error::Unsupported(reason));
            }
        };
        Ok(start as u64)
    }

    fn written(&mut self) -> Result<()> {
        Ok(())
    }

    fn of(storage: &Storage) -> Option<&Self> {
        match storage {
            Storage::Rocm(storage) => Some(storage),
            _ => None,
        }
    }

    fn into_storage(self) -> Storage {
        Storage::Rocm(self)
    }

    fn candle_device(&self) -> Device {
        Device::Rocm(self.device.clone())
    }
}
