//! Structs of the caller's that begin with their size and grow at their end.
//!
//! A program may have been compiled with an older header, whose struct is shorter: what it lacks is zero, which means the
//! field's absence. With a newer header the struct is longer: what this library does not know has to be zero.

use std::mem::MaybeUninit;

use candle_flash_rocm::{Error, Result};

/// An address in a struct of the caller's.
pub type Address<T> = *const T;

/// Fields are multiples of this many bytes, with their padding.
const WORD: usize = size_of::<u64>();

/// Larger structs than this are taken for garbage.
const LARGEST: usize = 4096;

/// A struct that begins with its size.
///
/// # Safety
///
/// It is `repr(C)`, begins with a `usize`, and any bytes are a value of it.
pub unsafe trait Growing: Copy {
    /// Its name in the header.
    const NAME: &'static str;
    /// Bytes that every program has to give. What follows is optional.
    const LEAST: usize;
}

/// Reads a struct of the caller's.
///
/// # Errors
///
/// If the address is null, if the size is none that a header has had, or if a field is set that this library does not know.
///
/// # Safety
///
/// The address is null or of a struct that begins with its size and has so many bytes.
pub unsafe fn read<T: Growing>(name: &'static str, address: Address<T>) -> Result<T> {
    if address.is_null() {
        return Err(Error::argument(name, "NULL", format!("the address of a {}", T::NAME)));
    }
    let bytes = address.cast::<u8>();
    // SAFETY: the first field is a size, whatever header the caller has been compiled with.
    let size = unsafe { address.cast::<usize>().read_unaligned() };
    if !(T::LEAST..=LARGEST).contains(&size) || size % WORD != 0 {
        return Err(Error::argument(
            "struct_size",
            size,
            format!("sizeof({}), {} in this release", T::NAME, size_of::<T>()),
        ));
    }
    let own = size_of::<T>();
    for place in own..size {
        // SAFETY: the struct has `size` bytes.
        if unsafe { bytes.add(place).read() } != 0 {
            let field = place / WORD * WORD;
            return Err(Error::argument(
                "struct_size",
                format!("{size} and a field at byte {field} of {} that is not zero", T::NAME),
                format!(
                    "zeros from byte {own} on: this is release {}, which lacks the field: install a newer one, or leave \
                     the field out",
                    env!("CARGO_PKG_VERSION")
                ),
            ));
        }
    }
    let mut known = MaybeUninit::<T>::zeroed();
    // SAFETY: both have as many bytes, and any bytes are a value.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes, known.as_mut_ptr().cast::<u8>(), size.min(own));
        Ok(known.assume_init())
    }
}
