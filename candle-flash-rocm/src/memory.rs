//! Memory of the host, with an error where the host refuses it. `vec!` and `collect` would end the process.

use crate::error::Error;

/// Memory that the host refused. A thread that has no memory left can return it, because it takes none on the heap; its
/// message is written where the memory of the call has been freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    what: &'static str,
    /// `usize::MAX` for more than an address space has.
    bytes: usize,
}

/// A result whose error is memory that the host refused.
pub(crate) type Result<T, E = Refused> = std::result::Result<T, E>;

impl From<Refused> for Error {
    fn from(Refused { what, bytes }: Refused) -> Self {
        let reason = format!(
            "the host has no memory for {what}, {bytes} bytes: pass fewer sequences at once, or raise the limit of the \
             process (Linux: ulimit -v)"
        );
        Self::OutOfMemory { reason, source: None }
    }
}

fn refused<T>(count: usize, what: &'static str) -> Refused {
    Refused { what, bytes: count.saturating_mul(size_of::<T>()) }
}

/// Zeros. An error says that memory for `what` was refused.
pub(crate) fn zeros<T: bytemuck::Zeroable>(count: usize, what: &'static str) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(count).map_err(|()| refused::<T>(count, what))
}

/// Zeros for a tensor of this shape. A tensor that was expanded may have more elements than an address space.
#[cfg(feature = "candle")]
pub(crate) fn tensor<T: bytemuck::Zeroable>(shape: [usize; 4], what: &'static str) -> Result<Vec<T>> {
    zeros(shape.into_iter().fold(1, usize::saturating_mul), what)
}

/// An empty vector with a capacity of `count` elements. Pushing up to `count` elements allocates nothing.
#[cfg(feature = "candle")]
pub(crate) fn room<T>(count: usize, what: &'static str) -> Result<Vec<T>> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(count).map_err(|_| refused::<T>(count, what))?;
    Ok(elements)
}

/// The first `count` items.
#[cfg(feature = "candle")]
pub(crate) fn collect<T>(count: usize, items: impl IntoIterator<Item = T>, what: &'static str) -> Result<Vec<T>> {
    let mut elements = room(count, what)?;
    elements.extend(items.into_iter().take(count));
    Ok(elements)
}

/// A copy of bytes.
#[cfg(feature = "candle")]
pub(crate) fn copied(bytes: &[u8], what: &'static str) -> Result<Vec<u8>> {
    let mut copy = room(bytes.len(), what)?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}
