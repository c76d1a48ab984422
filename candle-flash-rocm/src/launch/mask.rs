//! A mask in memory that grows with the length of the sequences, and the lists of tiles that kernels visit.

use super::options::{refuse, Used};
use super::plan::{Catalogue, Launch, Memory, Step};
use super::signature::{Name, Values};
use super::{flags, Shape};
use crate::error::{argument, Result};

/// The kernel that lists the tiles, and what block sizes are multiples of.
const LISTS: &str = "sparse-lists-fp16-d64";
const BLOCK: usize = 64;

/// A query sees a key that all parts of the mask show. A part whose address is 0 shows every key. Each part is dense but
/// for its strides of sequences and of heads, in elements, which are 0 where all share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// Device address of bytes `(batch, heads, q_blocks, k_blocks)`: whether a block of queries sees a block of keys.
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
}

impl Mask {
    pub(super) fn is_used(&self) -> bool {
        self.blocks != 0 || self.ranges != 0 || self.ids != [0; 2]
    }

    /// Checks the mask of a call.
    pub(super) fn check(&self, shape: &Shape) -> Result<()> {
        if self.ids.contains(&0) && self.ids != [0; 2] {
            return argument("mask_ids_q and mask_ids_k", "one of them", "both or none");
        }
        if self.blocks == 0 && (self.block_size != [0; 2] || self.blocks_strides != [0; 2]) {
            return argument("mask_blocks", "sizes or strides without an address", "an address, or zeros");
        }
        if self.blocks != 0 && self.block_size.iter().any(|&size| size == 0 || !size.is_multiple_of(BLOCK)) {
            return argument("mask_block_q and mask_block_k", format!("{:?}", self.block_size), "multiples of 64");
        }
        if !self.is_used() {
            return Ok(());
        }
        let others: [Used; 7] = [
            ("cu_seqlens_q", shape.is_packed()),
            ("softcap", shape.softcap != 0.0),
            ("alibi_slopes", shape.alibi_slopes != 0),
            ("bias", shape.options.bias.address != 0),
            ("dropout", shape.options.dropout != 0.0),
            ("leftpad_k", shape.options.leftpad != 0),
            ("head_dim_v", shape.head_dim_v != shape.head_dim),
        ];
        refuse(&others, "a kernel with a mask cannot honour it: leave one of them out")
    }

    /// Sequences and heads that have a mask of their own.
    fn planes(&self, shape: &Shape) -> (usize, usize) {
        let of_batch = [self.blocks_strides[0], self.ranges_strides[0], self.ids_batch[0], self.ids_batch[1]];
        let of_heads = [self.blocks_strides[1], self.ranges_strides[1]];
        let count = |strides: &[usize], all: usize| if strides.iter().any(|&stride| stride != 0) { all } else { 1 };
        (count(&of_batch, shape.batch), count(&of_heads, shape.heads))
    }

    pub(super) fn flags(&self) -> i32 {
        let bit = |address: u64, bit: i32| if address == 0 { 0 } else { bit };
        bit(self.blocks, flags::BLOCKS) | bit(self.ranges, flags::RANGES) | bit(self.ids[0], flags::IDS)
    }
}

/// Plans the launch that lists the tiles of a call with a mask, and gives `values` what its kernels take of the lists.
///
/// A list belongs to a tile's queries, or `by_keys` to a tile's keys.
pub(super) fn plan_lists(
    shape: &Shape,
    kernels: &dyn Catalogue,
    tile: (usize, usize),
    by_keys: bool,
    memory: &mut dyn Memory,
    values: &mut Values,
) -> Result<Step> {
    let mask = &shape.options.mask;
    let (batch, heads) = mask.planes(shape);
    let (rows, cols) = (shape.seqlen_q.div_ceil(tile.0.max(1)), shape.seqlen_k.div_ceil(tile.1.max(1)));
    let (lists, longest) = if by_keys { (cols, rows) } else { (rows, cols) };
    let tiles = memory.allocate(batch * heads * lists * (longest + 1) * 4)?;
    let counts = memory.allocate(batch * heads * lists * 2 * 4)?;
    let [block_q, block_k] = if mask.blocks == 0 { [BLOCK; 2] } else { mask.block_size };
    let mask_row = if mask.blocks == 0 { 0 } else { shape.seqlen_k.div_ceil(block_k) };
    values.pointers(&[
        (Name::tiles, tiles),
        (Name::tile_counts, counts),
        (Name::block_mask, mask.blocks),
        (Name::key_ranges, mask.ranges),
        (Name::ids_q, mask.ids[0]),
        (Name::ids_k, mask.ids[1]),
    ]);
    values.sizes(&[
        (Name::stride_sb, mask.blocks_strides[0]),
        (Name::stride_sh, mask.blocks_strides[1]),
        (Name::stride_sm, mask_row),
        (Name::ranges_b, mask.ranges_strides[0]),
        (Name::ranges_h, mask.ranges_strides[1]),
        (Name::ids_qb, mask.ids_batch[0]),
        (Name::ids_kb, mask.ids_batch[1]),
        (Name::block_q, block_q),
        (Name::block_k, block_k),
        (Name::list_length, longest + 1),
        (Name::lists_b, if batch > 1 { heads * lists } else { 0 }),
        (Name::lists_h, if heads > 1 { lists } else { 0 }),
    ])?;
    let mut of_lists = values.clone();
    of_lists.sizes(&[
        (Name::nheads, heads),
        (Name::block_m, tile.0),
        (Name::block_n, tile.1),
        (Name::lists, lists),
        (Name::by_keys, usize::from(by_keys)),
    ])?;
    of_lists.ints(&[(Name::flags, mask.flags())]);
    let grid = super::plan::line(batch * heads * lists)?;
    Launch::filled(kernels, LISTS.to_owned(), grid, &of_lists)
}
