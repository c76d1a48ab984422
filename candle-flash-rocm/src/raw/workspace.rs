//! Memory that plans take their workspaces from, kept from call to call.

use std::sync::Arc;

use crate::driver::{Buffer, Gpu};
use crate::error::Result;
use crate::launch::Memory;

/// Bytes that addresses are multiples of.
const ALIGNMENT: usize = 256;

/// Memory of a device for one stream's workspaces. It grows to the size that the largest call
/// needed.
#[derive(Debug)]
pub struct Workspace {
    gpu: Arc<Gpu>,
    /// The last buffer is free from byte `used` on.
    buffers: Vec<Buffer>,
    used: usize,
}

impl Workspace {
    /// Without memory yet.
    #[must_use]
    pub fn new(gpu: Arc<Gpu>) -> Self {
        Self { gpu, buffers: Vec::new(), used: 0 }
    }

    /// Bytes that the workspace has allocated.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(Buffer::bytes).sum()
    }

    /// Takes back all memory for the next call, and frees buffers that became too small.
    ///
    /// A stream runs calls in order, so the next call on the same stream may write where this one reads.
    pub(super) fn reset(&mut self) {
        self.used = 0;
        if self.buffers.len() > 1 {
            self.buffers.drain(..self.buffers.len() - 1);
        }
    }

    /// [`reset`](Self::reset) that frees nothing, because a captured graph may have addresses of it. Since a buffer is
    /// larger than all before it together, what became too small is less than half.
    #[cfg(any(feature = "cuda", rocm_device))]
    pub(super) fn rewind(&mut self) {
        self.used = 0;
    }
}

impl Memory for Workspace {
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let size = bytes.max(1).next_multiple_of(ALIGNMENT);
        if self.buffers.last().is_none_or(|buffer| buffer.bytes() - self.used < size) {
            // Large enough for everything that this call has taken so far, so that the next call
            // needs only this buffer.
            let whole = size + self.bytes();
            self.buffers.push(self.gpu.allocate(whole)?);
            self.used = 0;
        }
        let start = self.used;
        self.used += size;
        Ok(self.buffers.last().map_or(0, Buffer::address) + start as u64)
    }
}
