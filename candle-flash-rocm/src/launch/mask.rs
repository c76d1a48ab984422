//! A mask in memory that grows with the length of the sequences.

use super::planning::{bit, Flags};

/// A query sees a key that all parts of the mask show. A part whose address is 0 shows every key. Each part is dense but
/// for its strides of sequences and of heads, in elements, which are 0 where all share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// Device address of bytes `(batch, heads, q_blocks, k_blocks)`: 0 hides a block, 1 shows it where the other
    /// parts do, 2 shows it whatever the other parts, causal and the window hide.
    pub blocks: u64,
    /// Strides of `blocks`.
    pub blocks_strides: [usize; 2],
    /// Queries and keys of a block, multiples of 64.
    pub block_size: [usize; 2],
    /// Device address of int32 `(batch, heads, seqlen_q, 2, 2)`: two ranges of keys for each query, each as its first key
    /// and the key behind its last one. The query sees the keys of both.
    pub ranges: u64,
    /// Strides of `ranges`.
    pub ranges_strides: [usize; 2],
    /// Device addresses of int32 `(batch, seqlen_q)` and `(batch, seqlen_k)`: a query sees the keys with its own id.
    pub ids: [u64; 2],
    /// Elements from one sequence to the next of both `ids`.
    pub ids_batch: [usize; 2],
    /// Device address of int32 `(batch, heads, seqlen_k, 2, 2)`: two ranges of queries for each key, which do not see it.
    pub hidden: u64,
    /// Strides of `hidden`.
    pub hidden_strides: [usize; 2],
}

impl Mask {
    pub(super) fn is_used(&self) -> bool {
        self.blocks != 0 || self.ranges != 0 || self.ids != [0; 2] || self.hidden != 0
    }

    pub(super) fn flags(&self, flags: &Flags) -> i32 {
        bit(self.blocks, flags.has_blocks)
            | bit(self.ranges, flags.has_ranges)
            | bit(self.ids[0], flags.has_ids)
            | bit(self.hidden, flags.has_hidden)
    }
}
