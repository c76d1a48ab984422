//! A kernel's argument as a value.

/// A kernel's argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// A device address, 0 for none.
    Pointer(u64),
    /// An integer of 32 bits.
    I32(i32),
    /// A float of 32 bits.
    F32(f32),
    /// A structure, passed by value; or all arguments as one block.
    Structure(Vec<u8>),
}
