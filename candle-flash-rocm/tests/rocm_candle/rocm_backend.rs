//! A ROCm device for tests, by the names of candle's pull request 3801. Its memory is the host's.
//!
//! `make.py` puts this file into a copy of candle. Operations run on candle's CPU backend, after a wait for the kernels.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::OnceLock;

use half::{bf16, f16};

use crate::backend::{BackendDevice, BackendStorage};
use crate::cpu_backend::CpuDevice;
use crate::op::{BinaryOpT, CmpOp, ReduceOp, UnaryOpT};
use crate::{CpuStorage, DType, DeviceLocation, Error, Layout, Result, Shape};

/// What waits for all kernels of the GPU.
pub static WAIT: OnceLock<fn()> = OnceLock::new();

fn wait() {
    if let Some(wait) = WAIT.get() {
        wait();
    }
}

/// The error type of the device.
#[derive(thiserror::Error, Debug)]
#[error("{0}")]
pub struct RocmError(String);

impl From<String> for RocmError {
    fn from(text: String) -> Self {
        Self(text)
    }
}

/// Memory of elements. Kernels write there through its address.
#[derive(Debug)]
pub struct SendSyncDeviceMemory<T> {
    start: NonNull<T>,
    length: usize,
}

// SAFETY: it owns its memory.
unsafe impl<T: Send> Send for SendSyncDeviceMemory<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for SendSyncDeviceMemory<T> {}

impl<T: Clone> SendSyncDeviceMemory<T> {
    fn new(elements: Vec<T>) -> Self {
        let elements = Box::leak(elements.into_boxed_slice());
        Self { length: elements.len(), start: NonNull::from(elements).cast() }
    }

    /// The address of the first element.
    pub fn as_ptr(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }

    fn elements(&self) -> Vec<T> {
        wait();
        // SAFETY: the memory has so many elements; kernels have come to their end.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }.to_vec()
    }
}

impl<T> Drop for SendSyncDeviceMemory<T> {
    fn drop(&mut self) {
        wait();
        let elements = std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.length);
        // SAFETY: `new` leaked this box.
        drop(unsafe { Box::from_raw(elements) });
    }
}

macro_rules! slices {
    ($($name:ident($type:ty)),*) => {
        /// Elements of a type.
        #[derive(Debug)]
        #[allow(missing_docs)]
        pub enum RocmStorageSlice {
            $($name(SendSyncDeviceMemory<$type>)),*
        }

        impl RocmStorageSlice {
            fn dtype(&self) -> DType {
                match self {
                    $(Self::$name(_) => DType::$name),*
                }
            }

            fn to_cpu(&self) -> CpuStorage {
                match self {
                    $(Self::$name(memory) => CpuStorage::$name(memory.elements())),*
                }
            }

            fn of_cpu(storage: CpuStorage) -> Result<Self> {
                match storage {
                    $(CpuStorage::$name(elements) => Ok(Self::$name(SendSyncDeviceMemory::new(elements))),)*
                    _ => Err(Error::Msg("the stand-in has no tensors of this dtype".into())),
                }
            }
        }
    };
}

slices!(U8(u8), U32(u32), I16(i16), I32(i32), I64(i64), BF16(bf16), F16(f16), F32(f32), F64(f64));

/// The device's one stream.
pub struct Stream;

impl Stream {
    /// The default stream.
    pub fn as_raw(&self) -> *mut c_void {
        std::ptr::null_mut()
    }
}

/// A GPU by its number.
#[derive(Debug, Clone)]
pub struct RocmDevice(usize);

impl RocmDevice {
    /// Its stream.
    pub fn stream(&self) -> &Stream {
        &Stream
    }
}

/// A tensor's elements and their device.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RocmStorage {
    pub slice: RocmStorageSlice,
    pub device: RocmDevice,
}

impl RocmStorage {
    fn like(&self, storage: CpuStorage) -> Result<Self> {
        Ok(Self { slice: RocmStorageSlice::of_cpu(storage)?, device: self.device.clone() })
    }

    fn cpu(&self) -> CpuStorage {
        self.slice.to_cpu()
    }

    /// Lets a function of the CPU backend change the elements.
    fn change(&mut self, change: impl FnOnce(&mut CpuStorage) -> Result<()>) -> Result<()> {
        let mut storage = self.cpu();
        change(&mut storage)?;
        self.slice = RocmStorageSlice::of_cpu(storage)?;
        Ok(())
    }
}

fn missing<T>() -> Result<T> {
    Err(Error::Msg("the stand-in has no such operation".into()))
}

#[rustfmt::skip]
impl BackendStorage for RocmStorage {
    type Device = RocmDevice;

    fn try_clone(&self, _: &Layout) -> Result<Self> { self.like(self.cpu()) }
    fn dtype(&self) -> DType { self.slice.dtype() }
    fn device(&self) -> &RocmDevice { &self.device }
    fn to_cpu_storage(&self) -> Result<CpuStorage> { Ok(self.cpu()) }
    fn affine(&self, l: &Layout, mul: f64, add: f64) -> Result<Self> { self.like(self.cpu().affine(l, mul, add)?) }
    fn powf(&self, l: &Layout, e: f64) -> Result<Self> { self.like(self.cpu().powf(l, e)?) }
    fn elu(&self, l: &Layout, a: f64) -> Result<Self> { self.like(self.cpu().elu(l, a)?) }
    fn reduce_op(&self, op: ReduceOp, l: &Layout, axes: &[usize]) -> Result<Self> {
        self.like(self.cpu().reduce_op(op, l, axes)?)
    }
    fn cmp(&self, op: CmpOp, other: &Self, l: &Layout, r: &Layout) -> Result<Self> {
        self.like(self.cpu().cmp(op, &other.cpu(), l, r)?)
    }
    fn to_dtype(&self, l: &Layout, dtype: DType) -> Result<Self> { self.like(self.cpu().to_dtype(l, dtype)?) }
    fn unary_impl<B: UnaryOpT>(&self, l: &Layout) -> Result<Self> { self.like(self.cpu().unary_impl::<B>(l)?) }
    fn binary_impl<B: BinaryOpT>(&self, other: &Self, l: &Layout, r: &Layout) -> Result<Self> {
        self.like(self.cpu().binary_impl::<B>(&other.cpu(), l, r)?)
    }
    fn where_cond(&self, l: &Layout, t: &Self, t_l: &Layout, f: &Self, f_l: &Layout) -> Result<Self> {
        self.like(self.cpu().where_cond(l, &t.cpu(), t_l, &f.cpu(), f_l)?)
    }
    fn matmul(&self, other: &Self, sizes: (usize, usize, usize, usize), l: &Layout, r: &Layout) -> Result<Self> {
        self.like(self.cpu().matmul(&other.cpu(), sizes, l, r)?)
    }
    fn copy_strided_src(&self, to: &mut Self, offset: usize, l: &Layout) -> Result<()> {
        to.change(|storage| self.cpu().copy_strided_src(storage, offset, l))
    }
    #[allow(clippy::too_many_arguments)]
    fn copy2d(
        &self, to: &mut Self, d1: usize, d2: usize, from_row: usize, to_row: usize, from: usize, at: usize,
    ) -> Result<()> {
        to.change(|storage| self.cpu().copy2d(storage, d1, d2, from_row, to_row, from, at))
    }
    fn const_set(&mut self, value: crate::scalar::Scalar, l: &Layout) -> Result<()> {
        self.change(|storage| storage.const_set(value, l))
    }

    fn conv1d(&self, _: &Layout, _: &Self, _: &Layout, _: &crate::conv::ParamsConv1D) -> Result<Self> { missing() }
    fn conv_transpose1d(
        &self, _: &Layout, _: &Self, _: &Layout, _: &crate::conv::ParamsConvTranspose1D,
    ) -> Result<Self> { missing() }
    fn conv2d(&self, _: &Layout, _: &Self, _: &Layout, _: &crate::conv::ParamsConv2D) -> Result<Self> { missing() }
    fn conv_transpose2d(
        &self, _: &Layout, _: &Self, _: &Layout, _: &crate::conv::ParamsConvTranspose2D,
    ) -> Result<Self> { missing() }
    fn avg_pool2d(&self, _: &Layout, _: (usize, usize), _: (usize, usize)) -> Result<Self> { missing() }
    fn max_pool2d(&self, _: &Layout, _: (usize, usize), _: (usize, usize)) -> Result<Self> { missing() }
    fn upsample_nearest1d(&self, _: &Layout, _: usize) -> Result<Self> { missing() }
    fn upsample_nearest2d(&self, _: &Layout, _: usize, _: usize) -> Result<Self> { missing() }
    fn upsample_bilinear2d(
        &self, _: &Layout, _: usize, _: usize, _: bool, _: Option<f64>, _: Option<f64>,
    ) -> Result<Self> { missing() }
    fn gather(&self, _: &Layout, _: &Self, _: &Layout, _: usize) -> Result<Self> { missing() }
    fn scatter_set(&mut self, _: &Layout, _: &Self, _: &Layout, _: &Self, _: &Layout, _: usize) -> Result<()> {
        missing()
    }
    fn scatter_add_set(&mut self, _: &Layout, _: &Self, _: &Layout, _: &Self, _: &Layout, _: usize) -> Result<()> {
        missing()
    }
    fn index_select(&self, _: &Self, _: &Layout, _: &Layout, _: usize) -> Result<Self> { missing() }
    fn index_add(&self, _: &Layout, _: &Self, _: &Layout, _: &Self, _: &Layout, _: usize) -> Result<Self> { missing() }
}

#[rustfmt::skip]
impl BackendDevice for RocmDevice {
    type Storage = RocmStorage;

    fn new(ordinal: usize) -> Result<Self> { Ok(Self(ordinal)) }
    fn location(&self) -> DeviceLocation { DeviceLocation::Rocm { gpu_id: self.0 } }
    fn same_device(&self, other: &Self) -> bool { self.0 == other.0 }
    fn zeros_impl(&self, shape: &Shape, dtype: DType) -> Result<RocmStorage> {
        self.storage_from_cpu_storage_owned(CpuDevice.zeros_impl(shape, dtype)?)
    }
    unsafe fn alloc_uninit(&self, shape: &Shape, dtype: DType) -> Result<RocmStorage> { self.zeros_impl(shape, dtype) }
    fn storage_from_slice<T: crate::WithDType>(&self, elements: &[T]) -> Result<RocmStorage> {
        self.storage_from_cpu_storage_owned(T::to_cpu_storage(elements))
    }
    fn storage_from_cpu_storage(&self, storage: &CpuStorage) -> Result<RocmStorage> {
        self.storage_from_cpu_storage_owned(storage.clone())
    }
    fn storage_from_cpu_storage_owned(&self, storage: CpuStorage) -> Result<RocmStorage> {
        Ok(RocmStorage { slice: RocmStorageSlice::of_cpu(storage)?, device: self.clone() })
    }
    fn rand_uniform(&self, _: &Shape, _: DType, _: f64, _: f64) -> Result<RocmStorage> { missing() }
    fn rand_normal(&self, _: &Shape, _: DType, _: f64, _: f64) -> Result<RocmStorage> { missing() }
    fn set_seed(&self, _: u64) -> Result<()> { missing() }
    fn get_current_seed(&self) -> Result<u64> { missing() }
    fn synchronize(&self) -> Result<()> { Ok(()) }
}
