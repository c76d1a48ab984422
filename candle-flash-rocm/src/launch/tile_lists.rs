//! The lists of tiles that kernels of a mask visit.

use super::plan::{line, Catalogue, Launch, Memory, Step};
use super::signature::{set, Values};
use super::{Mask, Shape};
use crate::error::Result;

/// Sequences and heads that have a mask of their own.
fn planes(mask: &Mask, shape: &Shape) -> (usize, usize) {
    let strides = [mask.blocks_strides, mask.ranges_strides, mask.hidden_strides];
    let of_batch = [strides[0][0], strides[1][0], strides[2][0], mask.ids_batch[0], mask.ids_batch[1]];
    let of_heads = strides.map(|[_, head]| head);
    let count = |strides: &[usize], all: usize| if strides.iter().any(|&stride| stride != 0) { all } else { 1 };
    (count(&of_batch, shape.batch), count(&of_heads, shape.heads))
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
    let (planning, mask) = (kernels.planning(), &shape.options.mask);
    let (batch, heads) = planes(mask, shape);
    let (rows, cols) = (shape.seqlen_q.div_ceil(tile.0.max(1)), shape.seqlen_k.div_ceil(tile.1.max(1)));
    let (lists, longest) = if by_keys { (cols, rows) } else { (rows, cols) };
    let tiles = memory.allocate(batch * heads * lists * (longest + 1) * 4)?;
    let counts = memory.allocate(batch * heads * lists * 2 * 4)?;
    let [block_q, block_k] = if mask.blocks == 0 { [planning.mask_block; 2] } else { mask.block_size };
    let mask_row = if mask.blocks == 0 { 0 } else { shape.seqlen_k.div_ceil(block_k) };
    set!(values.pointers:
        tiles = tiles, tile_counts = counts, block_mask = mask.blocks, key_ranges = mask.ranges, ids_q = mask.ids[0],
        ids_k = mask.ids[1], hidden_queries = mask.hidden
    );
    set!(values.sizes:
        stride_sb = mask.blocks_strides[0], stride_sh = mask.blocks_strides[1], stride_sm = mask_row,
        ranges_b = mask.ranges_strides[0], ranges_h = mask.ranges_strides[1], ids_qb = mask.ids_batch[0],
        ids_kb = mask.ids_batch[1], hidden_b = mask.hidden_strides[0], hidden_h = mask.hidden_strides[1],
        block_q = block_q, block_k = block_k, list_length = longest + 1,
        lists_b = if batch > 1 { heads * lists } else { 0 }, lists_h = if heads > 1 { lists } else { 0 }
    )?;
    let mut of_lists = values.clone();
    set!(of_lists.sizes:
        nheads = heads, block_m = tile.0, block_n = tile.1, lists = lists, by_keys = usize::from(by_keys)
    )?;
    set!(of_lists.ints: flags = mask.flags(&planning.flags));
    let grid = line(batch * heads * lists)?;
    Launch::filled(kernels, planning.kernel("sparse-lists", "fp16", 1, "")?, grid, &of_lists)
}
