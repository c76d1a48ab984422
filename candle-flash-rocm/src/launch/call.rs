//! A forward and a backward as values.

use super::plan::{Fill, Step};
use super::planning::{bit, Planning};
use super::{Operand, Pages, Shape};

/// A forward with tensors on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forward {
    /// Sizes and options.
    pub shape: Shape,
    /// Queries.
    pub q: Operand,
    /// Keys, or pages of keys.
    pub k: Operand,
    /// Values, or pages of values.
    pub v: Operand,
    /// The result.
    pub out: Operand,
    /// Logarithms of the sums, fp32, [`Shape::lse_elements`] of them.
    pub lse: u64,
    /// Pages of the keys and values, if they lie in pages.
    pub pages: Option<Pages>,
    /// Device address of int32 `(batch)`: how many keys of each sequence are used; 0 for all. Without it a packed call is
    /// never split over its keys.
    pub lengths: u64,
}

impl Forward {
    /// Fills of the result and the logarithms by what rows outside of every sequence have.
    pub(super) fn cleared(&self) -> [Step; 2] {
        let (shape, pattern) = (&self.shape, f32::INFINITY.to_bits());
        let count = shape.out_elements() * shape.dtype.size() / 4;
        let out = Fill { address: self.out.address, pattern: 0, count };
        [Step::Fill(out), Step::Fill(Fill { address: self.lse, pattern, count: shape.lse_elements() })]
    }

    /// Which of the optional pointers of a kernel of whole sequences are real.
    pub(super) fn flags(&self, planning: &Planning) -> i32 {
        self.shape.flags(planning) | bit(self.lengths, planning.flags.has_seqused_k)
    }
}

/// A backward with tensors on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backward {
    /// Sizes and options, as of the forward.
    pub shape: Shape,
    /// Gradient of the result.
    pub dout: Operand,
    /// Queries.
    pub q: Operand,
    /// Keys.
    pub k: Operand,
    /// Values.
    pub v: Operand,
    /// The forward's result.
    pub out: Operand,
    /// The forward's logarithms of the sums.
    pub lse: u64,
    /// Gradient of q.
    pub dq: Operand,
    /// Gradient of k, dense.
    pub dk: Operand,
    /// Gradient of v, dense.
    pub dv: Operand,
    /// Device address of the gradient of the sinks, of their type; 0: it is not computed.
    pub dsinks: u64,
    /// Device address of the gradient of the bias, of its type: dense `(batch, heads, seqlen_q, seqlen_k)` or, of a table,
    /// `(batch, heads, seqlen_q + seqlen_k - 1)`, without the axes that share the bias; 0: it is not computed.
    pub dbias: u64,
}
