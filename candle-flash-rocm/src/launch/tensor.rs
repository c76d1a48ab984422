//! Tensors of a call by their addresses and strides.

use super::Planning;
use crate::error::{argument, Result};

/// A tensor on the device by its address and strides in elements; its head dim is dense.
///
/// A packed tensor `(rows, heads, head_dim)` has batch stride 0. Address and strides are multiples of 16 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operand {
    /// Device address of the first element.
    pub address: u64,
    /// Elements from one batch entry, or page, to the next.
    pub batch: usize,
    /// Elements from one row to the next.
    pub row: usize,
    /// Elements from one head to the next.
    pub head: usize,
}

impl Operand {
    /// A dense tensor `(batch, rows, heads, head_dim)`.
    #[must_use]
    pub fn dense(address: u64, rows: usize, heads: usize, head_dim: usize) -> Self {
        Self { address, batch: rows.max(1) * heads * head_dim, row: heads * head_dim, head: head_dim }
    }

    /// A dense tensor `(rows, heads, head_dim)`.
    #[must_use]
    pub fn packed(address: u64, heads: usize, head_dim: usize) -> Self {
        Self { address, batch: 0, row: heads * head_dim, head: head_dim }
    }

    /// Packed rows as lines of a cache: each row may start one.
    pub(super) fn as_lines(self) -> Self {
        Self { batch: self.row, ..self }
    }

    pub(super) fn check(&self, name: &'static str, vec: usize, planning: &Planning) -> Result<()> {
        let longest = planning.flags.max_row_stride * vec;
        if !self.address.is_multiple_of(16) {
            return argument(name, format!("address {:#x}", self.address), "a multiple of 16 bytes");
        }
        if [self.batch, self.row, self.head].iter().any(|stride| !stride.is_multiple_of(vec)) {
            return argument(
                name,
                format!("strides {self:?}"),
                format!("multiples of {vec} elements, the 16 bytes that a kernel reads at once"),
            );
        }
        if self.row >= longest {
            return argument(name, format!("row stride {}", self.row), format!("less than {longest}"));
        }
        Ok(())
    }
}

/// Keys and values in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Device address of the block table, int32 `(batch, columns)`.
    pub table: u64,
    /// Elements from one row of the table to the next.
    pub stride: usize,
    /// Pages of a sequence in the table.
    pub columns: usize,
    /// Rows of a page.
    pub size: usize,
}

impl Pages {
    pub(super) fn check(&self) -> Result<()> {
        let sizes = [self.size, self.columns, self.stride];
        if self.size == 0 || sizes.iter().any(|&size| size > i32::MAX as usize) {
            return argument("block_table", format!("{self:?}"), "a page size above 0, and numbers of 31 bits");
        }
        Ok(())
    }
}
