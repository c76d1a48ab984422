//! Computes CPU tensors on a GPU. candle has no ROCm device, so tensors are copied to the GPU and
//! back.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Gpu, Kernels, Platform, Stream};
use crate::error::{Error, Result};
use crate::raw::host::Session;
use crate::raw::Workspace;
use crate::store::{Store, Stores};

/// Where the calls of a thread are computed.
#[derive(Clone, Debug)]
enum Place {
    Undecided,
    Cpu,
    Gpu(RocmContext),
}

thread_local! {
    static PLACE: RefCell<Place> = const { RefCell::new(Place::Undecided) };
}

/// Whether any thread has ever opened a scope of a GPU. It stays true after the scope: a thread that was started within
/// may call later, and its calls were meant for the GPU.
static HAS_SCOPES: AtomicBool = AtomicBool::new(false);

/// Runs calls with this thread's place set, and restores the place before, also where the calls panic. A thread that had
/// no place computes on the CPU afterwards: it has chosen where its calls run.
fn within<T>(place: Place, calls: impl FnOnce() -> T) -> T {
    struct Restore(Place);
    impl Drop for Restore {
        fn drop(&mut self) {
            PLACE.set(match std::mem::replace(&mut self.0, Place::Undecided) {
                Place::Undecided => Place::Cpu,
                place => place,
            });
        }
    }
    let _restore = Restore(PLACE.replace(place));
    calls()
}

/// A GPU with a kernel store. CPU tensors are computed there where a caller asks for it, and only there.
///
/// Clones share the loaded kernels. Dropping the last one unloads them; a result whose backward can follow keeps one.
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

impl Drop for Inner {
    /// Before the kernels are unloaded, waits for launches of calls that failed half-way; other calls have waited.
    fn drop(&mut self) {
        if self.stream.wait().is_err() {
            self.kernels.keep_loaded();
        }
    }
}

impl RocmContext {
    /// The AMD GPU of a number, with the store that the environment variable `CANDLE_FLASH_ROCM_STORE` names: a file
    /// `gfx942.zip`, a wheel of `flash_attn`, or a directory of stores.
    ///
    /// # Errors
    ///
    /// If the variable is not set, the driver does not open, there is no such GPU, or no store for it.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::with_stores(ordinal, &Stores::from_environment()?)
    }

    /// The AMD GPU of a number, with its store among these.
    ///
    /// Kernels of Composable Kernel serve the calls that they can, if the store has some and `_ck_planner.so`, the library
    /// whose digest the store's manifest names, is in the directory of the stores.
    ///
    /// # Errors
    ///
    /// As [`RocmContext::new`].
    pub fn with_stores(ordinal: usize, stores: &Stores) -> Result<Self> {
        Self::with_kernels(Kernels::open(Platform::Hip, ordinal, stores)?)
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
    /// If the store is of another target, or the driver refuses.
    pub fn on(gpu: Arc<Gpu>, store: Store) -> Result<Self> {
        Self::with_kernels(Kernels::new(gpu, store)?)
    }

    /// The GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.0.kernels.gpu()
    }

    /// Runs calls of this thread on the GPU: forwards within, and the backwards of these, whenever and on whichever thread
    /// they come.
    ///
    /// From the first scope on, calls on other threads need a scope of their own, this one or
    /// [`cpu_scope`](Self::cpu_scope), also after this scope has closed: otherwise they are errors, because work that was
    /// handed to another thread would run on the CPU unnoticed.
    pub fn scope<T>(&self, calls: impl FnOnce() -> T) -> T {
        HAS_SCOPES.store(true, Ordering::SeqCst);
        within(Place::Gpu(self.clone()), calls)
    }

    /// Runs calls of this thread on the CPU, whatever scopes are open.
    pub fn cpu_scope<T>(calls: impl FnOnce() -> T) -> T {
        within(Place::Cpu, calls)
    }

    /// The GPU of this thread's scope, `None` for the CPU.
    ///
    /// # Errors
    ///
    /// If this thread never had a scope and another one had one of a GPU.
    pub(crate) fn current() -> Result<Option<Self>> {
        match PLACE.with_borrow(Clone::clone) {
            Place::Gpu(context) => Ok(Some(context)),
            Place::Undecided if HAS_SCOPES.load(Ordering::SeqCst) => Err(Error::Unsupported(
                "this thread never had a scope, and another thread had a scope of a RocmContext: call within \
                 RocmContext::scope to compute on the GPU, or within RocmContext::cpu_scope to compute on the CPU"
                    .into(),
            )),
            Place::Undecided | Place::Cpu => Ok(None),
        }
    }

    /// Lets one call use the GPU's memory after the earlier calls have finished.
    pub(crate) fn session<T>(&self, call: impl FnOnce(Session<'_>) -> Result<T>) -> Result<T> {
        let inner = &self.0;
        let mut workspace = inner.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        call(Session { kernels: &inner.kernels, stream: &inner.stream, workspace: &mut workspace })
    }
}
