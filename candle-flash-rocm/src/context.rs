//! A GPU for CPU tensors: candle has no ROCm device, so tensors go there and back.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Driver, Gpu, Kernels, Planner, Platform, Stream};
use crate::error::Result;
use crate::raw::host::Session;
use crate::raw::Workspace;
use crate::store::{Store, Stores};

thread_local! {
    static CURRENT: RefCell<Option<RocmContext>> = const { RefCell::new(None) };
}

/// A GPU with a kernel store. CPU tensors are computed there where a caller asks for it, and only there.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor};
/// use candle_flash_rocm::{flash_attn, RocmContext};
///
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (1, 4096, 16, 128), &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let rocm = RocmContext::new(0)?;
/// let out = rocm.scope(|| flash_attn(&q, &q, &q, 0.088, true))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RocmContext(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    kernels: Kernels,
    stream: Stream,
    workspace: Mutex<Workspace>,
}

/// The kernels of a GPU by its number, from the store of its target. A planner beside the store comes along.
pub(crate) fn open_kernels(platform: Platform, ordinal: usize, stores: &Stores) -> Result<Kernels> {
    let gpu = Gpu::open(Driver::open(platform)?, ordinal)?;
    let store = stores.for_gpu(gpu.target())?;
    let kernels = Kernels::new(gpu, store)?;
    match stores.planner() {
        Some(path) => Ok(kernels.with_planner(Planner::open(&path)?)),
        None => Ok(kernels),
    }
}

impl RocmContext {
    /// The AMD GPU of a number, with the store that the environment variable `CANDLE_FLASH_ROCM_STORE` names: a file
    /// `gfx942.zip`, a wheel of `flash_attn`, or a directory of stores.
    ///
    /// # Errors
    ///
    /// Where the variable is not set, the driver does not open, there is no such GPU, or no store for it.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::with_stores(ordinal, &Stores::from_environment()?)
    }

    /// The AMD GPU of a number, with its store among these.
    ///
    /// Where a library `_ck_planner.so` lies beside a store with kernels of Composable Kernel, those serve the calls that
    /// they can.
    ///
    /// # Errors
    ///
    /// As [`RocmContext::new`].
    pub fn with_stores(ordinal: usize, stores: &Stores) -> Result<Self> {
        Self::with_kernels(open_kernels(Platform::Hip, ordinal, stores)?)
    }

    fn with_kernels(kernels: Kernels) -> Result<Self> {
        let stream = kernels.gpu().stream()?;
        let workspace = Mutex::new(Workspace::new(kernels.gpu().clone()));
        Ok(Self(Arc::new(Inner { kernels, stream, workspace })))
    }

    /// Any GPU with a store of its target. So an NVIDIA GPU runs the kernels of an `sm_` store.
    ///
    /// # Errors
    ///
    /// Where the store is of another target, or the driver refuses.
    pub fn on(gpu: Arc<Gpu>, store: Store) -> Result<Self> {
        Self::with_kernels(Kernels::new(gpu, store)?)
    }

    /// The GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.0.kernels.gpu()
    }

    /// Runs calls of this thread on the GPU: forwards within, and the backwards of these, whenever they come.
    pub fn scope<T>(&self, calls: impl FnOnce() -> T) -> T {
        // The context before comes back also where the calls panic.
        struct Restore(Option<RocmContext>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.with_borrow_mut(|current| *current = self.0.take());
            }
        }
        let _restore = Restore(CURRENT.with_borrow_mut(|current| current.replace(self.clone())));
        calls()
    }

    /// The context of this thread's scope.
    pub(crate) fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Lets one call use the GPU's memory, when those before have finished.
    pub(crate) fn session<T>(&self, call: impl FnOnce(Session<'_>) -> Result<T>) -> Result<T> {
        let inner = &self.0;
        let mut workspace = inner.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        call(Session { kernels: &inner.kernels, stream: &inner.stream, workspace: &mut workspace })
    }
}
