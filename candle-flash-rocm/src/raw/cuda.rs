//! Tensors of candle's CUDA device.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaStorage, Device, DeviceLocation, Storage};

use super::resident::GpuStorage;
use crate::driver::Platform;
use crate::error::{Error, Result};

fn unsupported<T>(storage: &CudaStorage) -> Result<T> {
    Err(Error::Unsupported(format!("the GPU kernels take no tensors of dtype {:?}", storage.dtype())))
}

/// The address of a slice. Asking cudarc for it also makes cudarc order the streams that use the
/// slice.
fn address<T>(slice: &CudaSlice<T>) -> u64 {
    slice.device_ptr(slice.stream()).0
}

fn written<T>(slice: &mut CudaSlice<T>) {
    let stream = slice.stream().clone();
    drop(slice.device_ptr_mut(&stream));
}

impl GpuStorage for CudaStorage {
    const PLATFORM: Platform = Platform::Cuda;

    fn ordinal(&self) -> usize {
        match self.device().location() {
            DeviceLocation::Cuda { gpu_id } => gpu_id,
            _ => 0,
        }
    }

    fn stream(&self) -> usize {
        self.device().cuda_stream().cu_stream() as usize
    }

    fn address(&self) -> Result<u64> {
        match &self.slice {
            CudaStorageSlice::F16(slice) => Ok(address(slice)),
            CudaStorageSlice::BF16(slice) => Ok(address(slice)),
            CudaStorageSlice::F32(slice) => Ok(address(slice)),
            CudaStorageSlice::U32(slice) => Ok(address(slice)),
            CudaStorageSlice::I32(slice) => Ok(address(slice)),
            _ => unsupported(self),
        }
    }

    fn written(&mut self) -> Result<()> {
        match &mut self.slice {
            CudaStorageSlice::F16(slice) => written(slice),
            CudaStorageSlice::BF16(slice) => written(slice),
            CudaStorageSlice::F32(slice) => written(slice),
            _ => return unsupported(self),
        }
        Ok(())
    }

    fn of(storage: &Storage) -> Option<&Self> {
        match storage {
            Storage::Cuda(storage) => Some(storage),
            _ => None,
        }
    }

    fn into_storage(self) -> Storage {
        Storage::Cuda(self)
    }

    fn candle_device(&self) -> Device {
        Device::Cuda(self.device().clone())
    }
}
