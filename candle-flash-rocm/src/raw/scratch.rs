//! Calls whose scratch memory the caller owns: ask how large it has to be, then launch with it.

use super::run;
use crate::driver::{Kernels, Stream};
use crate::error::{Error, Result};
use crate::launch::{Backward, Forward, Memory, Step};

/// Bytes that the addresses of scratch memory are multiples of.
const ALIGNMENT: u64 = 256;

/// Scratch memory that the caller owns. A plan takes pieces of it in order.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    address: u64,
    bytes: u64,
    used: u64,
}

impl Scratch {
    /// So many bytes from a device address on, a multiple of 256.
    ///
    /// # Errors
    ///
    /// If the address is no such multiple.
    pub fn new(address: u64, bytes: usize) -> Result<Self> {
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(Error::argument("scratch", format!("{address:#x}"), "a multiple of 256 bytes, or null"));
        }
        Ok(Self { address, bytes: bytes as u64, used: 0 })
    }

    /// Memory that nobody writes to, as large as an address space: a plan in it tells what it would take.
    const fn imagined() -> Self {
        Self { address: ALIGNMENT, bytes: u64::MAX - 2 * ALIGNMENT, used: 0 }
    }
}

impl Memory for Scratch {
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let start = self.used;
        let end = (bytes.max(1) as u64).checked_next_multiple_of(ALIGNMENT).and_then(|size| start.checked_add(size));
        let Some(end) = end.filter(|end| *end <= self.bytes) else {
            let found = format!("{} bytes, of which {start} are taken and the next part needs {bytes}", self.bytes);
            return Err(Error::argument("scratch", found, "as many bytes as Call::scratch_bytes says"));
        };
        self.used = end;
        Ok(self.address + start)
    }
}

/// A forward or a backward on memory of the caller's.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    /// A forward. Where its `lse` is 0, the logarithms lie in the scratch memory and are lost.
    Forward(Forward),
    /// A backward.
    Backward(Backward),
}

impl Call {
    fn plan(&self, kernels: &Kernels, scratch: &mut Scratch) -> Result<Vec<Step>> {
        match self {
            Self::Forward(call) if call.lse == 0 => {
                call.shape.check()?;
                let lse = scratch.allocate(call.shape.lse_elements() * size_of::<f32>())?;
                kernels.sources().forward(&Forward { lse, ..*call }, scratch)
            }
            Self::Forward(call) => kernels.sources().forward(call, scratch),
            Self::Backward(call) => kernels.sources().backward(call, scratch),
        }
    }

    /// Bytes of scratch memory that the call needs on this device: 0 for most. They depend on sizes, options and strides,
    /// not on addresses, except on which addresses are 0.
    ///
    /// # Errors
    ///
    /// As [`raw::forward`](super::forward).
    pub fn scratch_bytes(&self, kernels: &Kernels) -> Result<usize> {
        let mut scratch = Scratch::imagined();
        self.plan(kernels, &mut scratch)?;
        Ok(scratch.used as usize)
    }

    /// Launches the call on a stream.
    ///
    /// # Safety
    ///
    /// As [`raw::forward`](super::forward); the scratch memory lives as long as the other addresses, and nothing else uses
    /// it until the stream has come to the call's end.
    ///
    /// # Errors
    ///
    /// As [`raw::forward`](super::forward) and [`raw::backward`](super::backward), and if the scratch memory is too small.
    pub unsafe fn launch(&self, kernels: &Kernels, stream: &Stream, mut scratch: Scratch) -> Result<()> {
        let steps = self.plan(kernels, &mut scratch)?;
        // SAFETY: the caller's promise; the plan takes no more scratch memory than there is.
        unsafe { run(kernels, stream, &steps) }
    }
}
