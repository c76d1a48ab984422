//! Calls whose scratch memory the caller owns: ask how large it has to be, then launch with it.

use super::call::{check_addresses, Call};
use super::run;
use crate::driver::{Kernels, Stream};
use crate::error::{Error, Result};
use crate::launch::{Catalogue as _, Forward, Memory, Shape, Step};

/// Bytes that the addresses of scratch memory are multiples of.
const ALIGNMENT: u64 = 256;

/// Plans change only between multiples of this number of keys: each tile of keys is such a multiple, and the fewest keys
/// for which split-KV is considered are one.
const KEYS: usize = 16;

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

    /// Memory that nobody writes to, so large that no call takes all of it: a plan in it tells what it would take.
    pub(super) const fn imagined(address: u64) -> Self {
        Self { address, bytes: 1 << 62, used: 0 }
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Bytes that plans have taken.
    pub(super) fn used(&self) -> usize {
        self.used as usize
    }

    /// Checks that there are so many bytes.
    pub(super) fn holds(&self, bytes: usize) -> Result<()> {
        if self.bytes < bytes as u64 {
            return Err(Error::argument("scratch", format!("{} bytes", self.bytes), format!("{bytes} bytes")));
        }
        Ok(())
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

impl Call {
    pub(super) fn plan(&self, kernels: &Kernels, scratch: &mut Scratch) -> Result<Vec<Step>> {
        check_addresses(self)?;
        match self {
            Self::Forward(call) if call.lse == 0 => {
                call.shape.check(kernels.planning())?;
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
        let mut scratch = Scratch::imagined(ALIGNMENT);
        self.plan(kernels, &mut scratch)?;
        Ok(scratch.used())
    }

    /// Bytes of scratch memory that suffice for the call and for every call that differs from it by a smaller number of
    /// keys, `shape.seqlen_k`, as in decoding over a cache that grows. The largest number of keys need not take the most.
    ///
    /// # Errors
    ///
    /// As [`scratch_bytes`](Self::scratch_bytes).
    pub fn scratch_bytes_up_to(&self, kernels: &Kernels) -> Result<usize> {
        let mut most = self.scratch_bytes(kernels)?;
        if let Self::Forward(call) = self {
            for seqlen_k in (0..call.shape.seqlen_k).step_by(KEYS) {
                let shape = Shape { seqlen_k, ..call.shape };
                most = most.max(Self::Forward(Forward { shape, ..*call }).scratch_bytes(kernels)?);
            }
        }
        Ok(most)
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
