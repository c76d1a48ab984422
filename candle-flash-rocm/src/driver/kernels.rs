//! The kernels of a store on a device: loaded when they are first launched, unloaded together.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use super::api::Handle;
use super::gpu::{Gpu, Stream};
use super::module::{Function, Module};
use super::planner::Planner;
use super::{Driver, Platform};
use crate::error::{Error, Result};
use crate::launch::{Argument, Catalogue, Choice, Device, Fill, Launch, Planning, Signature, Sources, Tile};
use crate::store::{Kernel, Parameter, Store, Stores};

/// A store's kernels on a device.
///
/// Dropping them unloads their code. Until then, launches have to be over, and graphs that captured launches gone.
#[derive(Debug)]
pub struct Kernels {
    gpu: Arc<Gpu>,
    store: Store,
    planner: Option<Planner>,
    loaded: Mutex<HashMap<String, (Module, Function)>>,
}

/// An argument as the driver reads it, at the start of eight bytes.
#[derive(Clone, Copy)]
#[repr(C)]
union Slot {
    address: u64,
    int: i32,
    float: f32,
}

impl Kernels {
    /// Opens the GPU with this number and the store of its target. Composable Kernel serves the calls that it can if the
    /// planner library, whose digest the store's manifest names, is next to the store.
    ///
    /// # Errors
    ///
    /// If the driver does not open, there is no such GPU, or no store for it.
    pub fn open(platform: Platform, ordinal: usize, stores: &Stores) -> Result<Self> {
        let gpu = Gpu::open(Driver::open(platform)?, ordinal)?;
        let store = stores.for_gpu(gpu.target(), gpu.hip())?;
        let planner = match (store.planner(), stores.planner()) {
            (Some(sha256), Some(path)) => Some(Planner::verified(&path, sha256)?),
            _ => None,
        };
        let kernels = Self::new(gpu, store)?;
        Ok(match planner {
            Some(planner) => kernels.with_planner(planner),
            None => kernels,
        })
    }

    /// The kernels of a store for a device.
    ///
    /// # Errors
    ///
    /// If the store is of another target.
    pub fn new(gpu: Arc<Gpu>, store: Store) -> Result<Self> {
        if !store.serves(gpu.target(), gpu.hip()) {
            return Err(Error::store(format!(
                "{} has kernels for {}, the GPU is {target}: build a store with ./build_rocm.sh --store {target}",
                store.path().display(),
                store.served(),
                target = gpu.target(),
            )));
        }
        Ok(Self { gpu, store, planner: None, loaded: Mutex::new(HashMap::new()) })
    }

    /// Adds a planner, so that Composable Kernel serves the calls it supports, if the store has its
    /// kernels.
    #[must_use]
    pub fn with_planner(mut self, planner: Planner) -> Self {
        let composable = |name: &str| {
            let kernel = self.store.get(name);
            kernel.is_some_and(|kernel| matches!(kernel.parameters[..], [Parameter::Structure(_)]))
        };
        if self.store.names().any(composable) {
            self.planner = Some(planner);
        }
        self
    }

    /// The kernels that plans of calls on the device can choose.
    #[must_use]
    #[doc(hidden)]
    pub fn sources(&self) -> Sources<'_> {
        let planner = self.planner.as_ref().map(|planner| planner as _);
        let compute_units = self.gpu.compute_units() * self.store.multiprocessor_units();
        Sources { kernels: self, planner, device: Device { compute_units } }
    }

    /// The device.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    fn function(&self, name: &str) -> Result<Function> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, function)) = loaded.get(name) {
            return Ok(*function);
        }
        let kernel = self.store.kernel(name)?;
        let module = Module::load(&self.gpu, name, self.store.image(name)?)?;
        let function = module.function(name, kernel)?;
        loaded.insert(name.to_owned(), (module, function));
        Ok(function)
    }

    /// Leaves what is loaded to the process, for a device whose launches may not be over.
    #[cfg(feature = "candle")]
    pub(crate) fn keep_loaded(&self) {
        for loaded in self.loaded.lock().unwrap_or_else(PoisonError::into_inner).drain() {
            std::mem::forget(loaded);
        }
    }

    /// Launches a kernel on a stream. A grid with a zero launches nothing.
    ///
    /// # Safety
    ///
    /// The memory behind every address has to be of this device, as large as the kernel takes it to be, and to live
    /// until the stream has finished the launch. So do these kernels. Where the launch was captured, both have to live as
    /// long as the graph.
    ///
    /// # Errors
    ///
    /// If the store lacks the kernel, an argument is not what it takes, or the driver refuses.
    #[doc(hidden)]
    pub unsafe fn launch(&self, stream: &Stream, launch: &Launch) -> Result<()> {
        let name = &launch.kernel;
        let kernel = self.store.kernel(name)?;
        if launch.grid.contains(&0) {
            return Ok(());
        }
        check_arguments(name, kernel, &launch.arguments)?;
        if self.gpu.platform() == Platform::Hip
            && u64::from(launch.grid[0]) * u64::from(kernel.threads) > u64::from(u32::MAX)
        {
            return Err(Error::Unsupported(format!(
                "kernel {name}: {} blocks of {} threads are more than the 2**32 - 1 threads that a launch on an AMD GPU \
                 may have: pass fewer rows or sequences at once",
                launch.grid[0], kernel.threads
            )));
        }
        let function = self.function(name)?;
        let mut slots = vec![Slot { address: 0 }; kernel.parameters.len()];
        let mut addresses: Vec<*mut c_void> = Vec::with_capacity(slots.len());
        for (index, slot) in slots.iter_mut().enumerate() {
            match launch.arguments.get(index) {
                Some(Argument::Pointer(address)) => slot.address = *address,
                Some(Argument::I32(number)) => slot.int = *number,
                Some(Argument::F32(number)) => slot.float = *number,
                // The driver only reads the structure.
                Some(Argument::Structure(bytes)) => {
                    addresses.push(bytes.as_ptr().cast_mut().cast());
                    continue;
                }
                None => {} // a null pointer that the launch adds
            }
            addresses.push((&raw mut *slot).cast());
        }
        let block = match (&kernel.parameters[..], &launch.arguments[..]) {
            ([Parameter::Block(_)], [Argument::Structure(bytes)]) => Some(bytes),
            _ => None,
        };
        let mut size = block.map_or(0, Vec::len);
        let mut extra: [*mut c_void; 5] = [
            std::ptr::without_provenance_mut(1), // the block's address comes next
            block.map_or(std::ptr::null_mut(), |bytes| bytes.as_ptr().cast_mut().cast()),
            std::ptr::without_provenance_mut(2), // the address of its size comes next
            (&raw mut size).cast(),
            self.gpu.platform().end_of_extra(),
        ];
        let (addresses, extra) = match block {
            Some(_) => (std::ptr::null_mut(), extra.as_mut_ptr()),
            None => (addresses.as_mut_ptr(), std::ptr::null_mut()),
        };
        let [x, y, z] = launch.grid;
        self.gpu.with(|| {
            // SAFETY: the arguments are as many and as large as the manifest of the checked code object says; the caller
            // answers for the memory behind addresses.
            let code = unsafe {
                (self.gpu.driver().api.launch)(
                    function.handle as Handle,
                    x,
                    y,
                    z,
                    function.threads,
                    1,
                    1,
                    function.shared,
                    stream.handle() as Handle,
                    addresses,
                    extra,
                )
            };
            self.gpu.check(format_args!("launching {name}"), code)
        })
    }

    /// Fills memory on a stream.
    ///
    /// # Safety
    ///
    /// The memory has to be of this device and to have so many words, until the stream has come there.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    #[doc(hidden)]
    pub unsafe fn fill(&self, stream: &Stream, fill: &Fill) -> Result<()> {
        if fill.count == 0 {
            return Ok(());
        }
        self.gpu.with(|| {
            let set = self.gpu.driver().api.fill;
            // SAFETY: the caller answers for the memory.
            let code = unsafe { set(fill.address, fill.pattern, fill.count, stream.handle() as Handle) };
            self.gpu.check("filling memory", code)
        })
    }
}

impl Catalogue for Kernels {
    fn tile(&self, kernel: &str) -> Result<Tile> {
        self.store.tile(kernel)
    }

    fn signature(&self, kernel: &str) -> Result<&Signature> {
        self.store.signature(kernel)
    }

    fn has(&self, kernel: &str) -> bool {
        self.store.has(kernel)
    }

    fn choice(&self) -> &Choice {
        self.store.choice()
    }

    fn planning(&self) -> &Planning {
        self.store.planning()
    }
}

/// Compares the arguments of a launch with the manifest's list for the kernel.
fn check_arguments(name: &str, kernel: &Kernel, arguments: &[Argument]) -> Result<()> {
    let wanted = || kernel.parameters.iter().filter(|one| **one != Parameter::Null);
    let fits = |(argument, parameter): (&Argument, &Parameter)| match (argument, parameter) {
        (Argument::Pointer(_), Parameter::Pointer)
        | (Argument::I32(_), Parameter::I32)
        | (Argument::F32(_), Parameter::F32) => true,
        (Argument::Structure(bytes), Parameter::Structure(size) | Parameter::Block(size)) => bytes.len() == *size,
        _ => false,
    };
    if arguments.len() == wanted().count() && arguments.iter().zip(wanted()).all(fits) {
        return Ok(());
    }
    let wanted: Vec<&Parameter> = wanted().collect();
    Err(Error::store(format!(
        "kernel {name} takes {} arguments, {wanted:?}; a launch has {} others: the store and the crate are from different \
         revisions, build both from one",
        wanted.len(),
        arguments.len(),
    )))
}
