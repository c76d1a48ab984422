//! One device: its target, its memory, streams and events.

use std::ffi::c_void;
use std::ffi::CStr;
use std::fmt::Display;
use std::sync::Arc;

use super::api::{Handle, Select};
use super::{Driver, Platform};
use crate::error::{Error, Result};
use crate::memory::zeros;
use crate::store::Version;

/// Size in bytes of HIP's `hipDeviceProp_tR0600`, and offsets of the fields read here. The layout
/// is fixed since ROCm 6.0.
const PROPERTIES: usize = 1472;
const COMPUTE_UNITS: usize = 388;
const ARCHITECTURE: usize = 1160;
const ARCHITECTURE_BYTES: usize = 256;

/// CUDA's numbers of device attributes.
const MULTIPROCESSORS: i32 = 16;
const CAPABILITY_MAJOR: i32 = 75;
const CAPABILITY_MINOR: i32 = 76;

/// A device of a driver.
#[derive(Debug)]
pub struct Gpu {
    driver: Arc<Driver>,
    ordinal: i32,
    /// CUDA's primary context, as a number; 0 with HIP.
    context: usize,
    target: String,
    compute_units: usize,
    hip: Option<Version>,
}

impl Gpu {
    /// A device by its number.
    ///
    /// # Errors
    ///
    /// If there is no such device, or the driver refuses.
    pub fn open(driver: Arc<Driver>, ordinal: usize) -> Result<Arc<Self>> {
        let count = driver.devices()?;
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(number) = number else {
            let hint = "look at HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES, and at the rights to /dev/kfd";
            return Err(Error::WrongDevice(format!(
                "no GPU number {ordinal}: {} has {count}, numbered from 0; {hint}",
                driver.path()
            )));
        };
        let (context, target, compute_units, hip) = match &driver.api.select {
            Select::Hip { properties, version, .. } => {
                let mut number_of_hip = 0;
                // SAFETY: the function writes a number.
                driver.check("hipRuntimeGetVersion", unsafe { version(&raw mut number_of_hip) })?;
                let number_of_hip = number_of_hip.unsigned_abs(); // 60443482 is 6.4
                let hip = (number_of_hip / 10_000_000, number_of_hip / 100_000 % 100);
                let mut found = vec![0u64; PROPERTIES / 8 + 64];
                // SAFETY: the buffer is larger than the structure that the function writes.
                let code = unsafe { properties(found.as_mut_ptr().cast(), number) };
                driver.check("hipGetDeviceProperties", code)?;
                let bytes: Vec<u8> = found.iter().flat_map(|word| word.to_le_bytes()).collect();
                let name = CStr::from_bytes_until_nul(&bytes[ARCHITECTURE..ARCHITECTURE + ARCHITECTURE_BYTES]);
                let name = name.map(CStr::to_string_lossy).unwrap_or_default();
                let target = name.split(':').next().unwrap_or_default().to_owned();
                let units = &bytes[COMPUTE_UNITS..COMPUTE_UNITS + 4];
                let units = units.iter().rev().fold(0usize, |sum, &byte| sum << 8 | usize::from(byte));
                (0, target, units, Some(hip))
            }
            Select::Cuda { device, retain, attribute, .. } => {
                let mut handle = 0;
                let mut context: Handle = std::ptr::null_mut();
                // SAFETY: the functions write a handle each; the context stays for the life of the process.
                unsafe {
                    driver.check("cuDeviceGet", device(&raw mut handle, number))?;
                    driver.check("cuDevicePrimaryCtxRetain", retain(&raw mut context, handle))?;
                }
                let ask = |which| {
                    let mut value = 0;
                    // SAFETY: the function writes a number.
                    driver.check("cuDeviceGetAttribute", unsafe { attribute(&raw mut value, which, handle) })?;
                    Ok::<_, Error>(value)
                };
                let target = format!("sm_{}{}", ask(CAPABILITY_MAJOR)?, ask(CAPABILITY_MINOR)?);
                (context as usize, target, ask(MULTIPROCESSORS)?.max(0) as usize, None)
            }
        };
        Ok(Arc::new(Self { driver, ordinal: number, context, target, compute_units, hip }))
    }

    /// The GPU target, such as `gfx942` or `sm_90`.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Major and minor number of HIP; None on an NVIDIA GPU.
    #[must_use]
    pub fn hip(&self) -> Option<Version> {
        self.hip
    }

    /// Multiprocessors, as the driver counts them: compute units, on RDNA work group processors.
    #[must_use]
    pub fn compute_units(&self) -> usize {
        self.compute_units
    }

    /// The driver of the device.
    #[must_use]
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Runs driver calls with this device as the thread's current device, and restores the previous
    /// device afterwards.
    pub(super) fn with<T>(&self, calls: impl FnOnce() -> Result<T>) -> Result<T> {
        let driver = &self.driver;
        match &driver.api.select {
            Select::Hip { get, set, .. } => {
                let mut before = 0;
                // SAFETY: the function writes the current device's number.
                driver.check("hipGetDevice", unsafe { get(&raw mut before) })?;
                if before == self.ordinal {
                    return calls();
                }
                // SAFETY: the device exists.
                driver.check("hipSetDevice", unsafe { set(self.ordinal) })?;
                let result = calls();
                // SAFETY: it was the thread's device.
                driver.check("hipSetDevice", unsafe { set(before) })?;
                result
            }
            Select::Cuda { get, push, pop, .. } => {
                let mut before: Handle = std::ptr::null_mut();
                // SAFETY: the function writes the current context.
                driver.check("cuCtxGetCurrent", unsafe { get(&raw mut before) })?;
                if before as usize == self.context {
                    return calls();
                }
                // SAFETY: the context is retained and never released.
                driver.check("cuCtxPushCurrent", unsafe { push(self.context as Handle) })?;
                let result = calls();
                let mut popped: Handle = std::ptr::null_mut();
                // SAFETY: the function writes the context that was pushed above.
                driver.check("cuCtxPopCurrent", unsafe { pop(&raw mut popped) })?;
                result
            }
        }
    }

    /// Turns the code of a call into a result, and clears HIP's last error, which other code would read as its own.
    pub(super) fn check(&self, what: impl Display, code: i32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        if let Select::Hip { last_error, .. } = &self.driver.api.select {
            // SAFETY: the function takes nothing.
            unsafe { last_error() };
        }
        self.driver.check(&format!("{what} on device {}", self.ordinal), code)
    }

    /// Allocates memory; 0 bytes are an allocation of 16.
    ///
    /// # Errors
    ///
    /// If the device has no such memory.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Buffer> {
        let mut address = 0;
        self.with(|| {
            // SAFETY: the function writes an address.
            let code = unsafe { (self.driver.api.malloc)(&raw mut address, bytes.max(16)) };
            self.check(format_args!("allocating {bytes} bytes"), code)
        })?;
        Ok(Buffer { gpu: self.clone(), address, bytes })
    }

    /// Creates a stream that waits for no other stream.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn stream(self: &Arc<Self>) -> Result<Stream> {
        const NON_BLOCKING: u32 = 1; // the same number in both drivers
        let mut handle: Handle = std::ptr::null_mut();
        self.with(|| {
            // SAFETY: the function writes a handle.
            let code = unsafe { (self.driver.api.stream_create)(&raw mut handle, NON_BLOCKING) };
            self.check("creating a stream", code)
        })?;
        Ok(Stream { gpu: self.clone(), handle: handle as usize, owned: true })
    }

    /// A stream of other code, by its handle: a `hipStream_t` or `CUstream` as a number, 0 for the default stream.
    ///
    /// # Safety
    ///
    /// The handle has to be 0 or a stream of this device's context, and its owner must not destroy it before the result
    /// is dropped. The drivers dereference the handle.
    #[must_use]
    pub unsafe fn foreign_stream(self: &Arc<Self>, handle: usize) -> Stream {
        Stream { gpu: self.clone(), handle, owned: false }
    }

    /// Creates an event.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn event(self: &Arc<Self>) -> Result<Event> {
        let mut handle: Handle = std::ptr::null_mut();
        self.with(|| {
            // SAFETY: the function writes a handle.
            let code = unsafe { (self.driver.api.event_create)(&raw mut handle, 0) };
            self.check("creating an event", code)
        })?;
        Ok(Event { gpu: self.clone(), handle: handle as usize })
    }
}

/// Memory of a device, freed when it is dropped.
#[derive(Debug)]
pub struct Buffer {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: usize,
}

impl Buffer {
    /// Its device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let free = self.gpu.driver.api.free;
        // A failure cannot be reported from here. The driver's tools show leaks.
        // SAFETY: the address is of this allocation, which nobody else frees. The drivers wait for work that uses it.
        let _ = self.gpu.with(|| self.gpu.check("freeing memory", unsafe { free(self.address) }));
    }
}

/// An order of copies and launches on a device.
#[derive(Debug)]
pub struct Stream {
    gpu: Arc<Gpu>,
    handle: usize,
    owned: bool,
}

impl Stream {
    /// The driver's handle, a `hipStream_t` or `CUstream` as a number.
    #[must_use]
    pub fn handle(&self) -> usize {
        self.handle
    }

    /// The device of the stream.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Copies bytes to the start of a buffer, and waits until they are there.
    ///
    /// # Errors
    ///
    /// If they do not fit, or the driver refuses. If the wait fails the copy may still be reading: the bytes are
    /// then leaked.
    pub fn upload(&self, from: Vec<u8>, to: &Buffer) -> Result<()> {
        self.fits(from.len(), to)?;
        // SAFETY: the buffer is of this device and large enough.
        unsafe { self.copy_to(from, to.address) }
    }

    /// Copies the first `bytes` of a buffer, and waits until they are there.
    ///
    /// # Errors
    ///
    /// If the buffer has fewer, the host has no memory for them, or the driver refuses. If the wait fails the copy
    /// may still be writing: its target is then leaked.
    pub fn download(&self, from: &Buffer, bytes: usize) -> Result<Vec<u8>> {
        self.fits(bytes, from)?;
        // SAFETY: the buffer is of this device and large enough.
        unsafe { self.copy_from(from.address, bytes) }
    }

    /// Copies bytes to an address, and waits until they are there.
    ///
    /// # Safety
    ///
    /// The address has to be memory of this device with so many bytes.
    pub(crate) unsafe fn copy_to(&self, from: Vec<u8>, address: u64) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let started = self.gpu.with(|| {
            let source: *const c_void = from.as_ptr().cast();
            // SAFETY: the caller's promise; the source lives until the copy is known to be over, see `finish`.
            let code = unsafe { (self.gpu.driver.api.to_device)(address, source, from.len(), self.handle as Handle) };
            self.gpu.check("copying to the device", code)
        });
        self.finish(started, from).map(drop)
    }

    /// Copies `bytes` from an address, and waits until they are there.
    ///
    /// # Safety
    ///
    /// As `copy_to`.
    pub(crate) unsafe fn copy_from(&self, address: u64, bytes: usize) -> Result<Vec<u8>> {
        let mut to: Vec<u8> = zeros(bytes, "a copy from the device")?;
        if to.is_empty() {
            return Ok(to);
        }
        let started = self.gpu.with(|| {
            let target: *mut c_void = to.as_mut_ptr().cast();
            // SAFETY: the caller's promise; the target lives until the copy is known to be over, see `finish`.
            let code = unsafe { (self.gpu.driver.api.to_host)(target, address, bytes, self.handle as Handle) };
            self.gpu.check("copying from the device", code)
        });
        self.finish(started, to)
    }

    /// Waits for a copy and returns its host memory. Where the driver does not confirm that the copy is over, the memory
    /// is leaked, because the GPU may still use it.
    fn finish(&self, started: Result<()>, memory: Vec<u8>) -> Result<Vec<u8>> {
        match started.and_then(|()| self.wait()) {
            Ok(()) => Ok(memory),
            Err(error) => {
                memory.leak();
                Err(error)
            }
        }
    }

    fn fits(&self, bytes: usize, buffer: &Buffer) -> Result<()> {
        if !Arc::ptr_eq(&self.gpu, &buffer.gpu) {
            let (own, other) = (&self.gpu, &buffer.gpu);
            return Err(Error::WrongDevice(format!(
                "a copy on a stream of device {} ({}) to or from a buffer of device {} ({}): take a buffer of the \
                 stream's own Gpu",
                own.ordinal, own.target, other.ordinal, other.target
            )));
        }
        if bytes > buffer.bytes {
            return Err(Error::driver(format!(
                "a copy of {bytes} bytes, the buffer has {}: allocate a larger one",
                buffer.bytes
            )));
        }
        Ok(())
    }

    /// Waits until everything on the stream is done.
    ///
    /// # Errors
    ///
    /// If a kernel or copy failed.
    pub fn wait(&self) -> Result<()> {
        self.gpu.with(|| {
            // SAFETY: the stream lives.
            let code = unsafe { (self.gpu.driver.api.stream_wait)(self.handle as Handle) };
            self.gpu.check("waiting for a stream", code)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            let destroy = self.gpu.driver.api.stream_destroy;
            // SAFETY: the handle is of this stream alone; the drivers let its work finish.
            let _ = self.gpu.with(|| self.gpu.check("destroying a stream", unsafe { destroy(self.handle as Handle) }));
        }
    }
}

/// A point in a stream, with the time at which the GPU reached it.
#[derive(Debug)]
pub struct Event {
    gpu: Arc<Gpu>,
    handle: usize,
}

impl Event {
    /// Records the event after the current work of the stream.
    ///
    /// # Errors
    ///
    /// If the driver refuses.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.gpu.with(|| {
            // SAFETY: event and stream live.
            let code = unsafe { (self.gpu.driver.api.event_record)(self.handle as Handle, stream.handle as Handle) };
            self.gpu.check("recording an event", code)
        })
    }

    /// Waits until the stream has reached the event.
    ///
    /// # Errors
    ///
    /// If a kernel or copy before it failed.
    pub fn wait(&self) -> Result<()> {
        self.gpu.with(|| {
            // SAFETY: the event lives.
            let code = unsafe { (self.gpu.driver.api.event_wait)(self.handle as Handle) };
            self.gpu.check("waiting for an event", code)
        })
    }

    /// Milliseconds from an earlier event to this one; both must have completed.
    ///
    /// # Errors
    ///
    /// If an event has not completed.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32> {
        let mut time = 0.0;
        self.gpu.with(|| {
            let (from, to) = (earlier.handle as Handle, self.handle as Handle);
            // SAFETY: both events live, and the function writes a number.
            let code = unsafe { (self.gpu.driver.api.event_elapsed)(&raw mut time, from, to) };
            self.gpu.check("timing events", code)
        })?;
        Ok(time)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy = self.gpu.driver.api.event_destroy;
        // SAFETY: the handle is of this event alone.
        let _ = self.gpu.with(|| self.gpu.check("destroying an event", unsafe { destroy(self.handle as Handle) }));
    }
}

impl Gpu {
    /// The platform of its driver.
    #[must_use]
    pub fn platform(&self) -> Platform {
        self.driver.platform
    }
}
