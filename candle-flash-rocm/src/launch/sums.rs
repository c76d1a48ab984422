//! Sums behind a backward: of parts of dk and dv, and the gradients of a bias and of sinks.

use super::plan::{line, Catalogue, Fill, Launch, Memory, Step};
use super::signature::{set, Name, Values};
use super::{Backward, Operand};
use crate::error::Result;

/// The launch that adds up fp32 parts of a result `(batch, rows, heads, columns)`. parts: of a row, and of a group of them.
/// strides: of the first parts of two rows, of groups, of parts in a group.
pub(super) fn sum(
    kernels: &dyn Catalogue,
    element: &str,
    partial: u64,
    out: &Operand,
    [batch, rows, heads, columns]: [usize; 4],
    [parts, group]: [usize; 2],
    [row, outer, inner]: [usize; 3],
) -> Result<Step> {
    let planning = kernels.planning();
    let kernel = planning.kernel("sum", element, columns, "plain")?;
    let all = batch * rows * heads;
    let blocks = all.div_ceil(kernels.tile(&kernel)?.block_m.max(1));
    let mut values = Values::new();
    set!(values.pointers: partial = partial);
    values.operand(Name::out, [Name::stride_ob, Name::stride_om, Name::stride_oh], out, 1)?;
    set!(values.sizes:
        stride_pm = row, stride_ps = outer, stride_rs = inner, nheads = heads, seqlen_q = rows, head_dim = columns,
        parts = parts, group = group, rows = all
    )?;
    let grid = [line(blocks)?[0], columns.div_ceil(planning.columns("sum")?) as u32, 1];
    Launch::filled(kernels, kernel, grid, &values)
}

/// Plans the gradient of the bias. values: of the kernels of dq, dk and dv.
pub(super) fn plan_dbias(
    call: &Backward,
    kernels: &dyn Catalogue,
    memory: &mut dyn Memory,
    mut values: Values,
    steps: &mut Vec<Step>,
) -> Result<()> {
    let (shape, bias, planning) = (&call.shape, &call.shape.options.bias, kernels.planning());
    let (batch, heads, is_table) = (shape.batch, shape.heads, bias.row < 0);
    let operation = if is_table { "bwd-ddiagonals" } else { "bwd-dbias" };
    let kernel = planning.kernel(operation, shape.dtype.name(), shape.head_dim, "bias")?;
    let tile = kernels.tile(&kernel)?;
    let (block_m, block_n) = (tile.block_m.max(1), tile.block_n.max(1));
    let (m_blocks, n_blocks) = (shape.seqlen_q.div_ceil(block_m), shape.seqlen_k.div_ceil(block_n));
    let planes_b = if bias.batch == 0 { 1 } else { batch };
    let planes_h = if bias.head == 0 { 1 } else { heads };
    set!(values.sizes:
        batch = batch, group = shape.group(), m_blocks = m_blocks, n_blocks = n_blocks, planes_b = planes_b,
        planes_h = planes_h
    )?;
    set!(values.pointers: dbias = call.dbias);
    if !is_table {
        let programs = m_blocks.saturating_mul(n_blocks).saturating_mul(planes_b * planes_h);
        steps.push(Launch::filled(kernels, kernel, line(programs)?, &values)?);
        return Ok(());
    }
    // Two parts of each head, which are one block longer than the diagonals of tiles.
    let length = (m_blocks + n_blocks) * block_m;
    let count = batch * heads * 2 * length;
    let sums = memory.allocate(count * 4)?;
    steps.push(Step::Fill(Fill { address: sums, pattern: 0, count }));
    set!(values.pointers: sums = sums);
    let diagonals = (m_blocks + n_blocks).saturating_sub(1);
    set!(values.ints: diagonals = diagonals as i32, first = 1 - m_blocks as i32);
    let programs = if m_blocks * n_blocks == 0 { 0 } else { batch * heads * diagonals };
    steps.push(Launch::filled(kernels, kernel, line(programs)?, &values)?);
    let columns = (shape.seqlen_q + shape.seqlen_k).saturating_sub(1);
    let partial = sums + 4 * (m_blocks * block_m - shape.seqlen_q) as u64;
    let group = 2 * heads / planes_h.max(1);
    let strides = [group * length, 2 * heads * length, length];
    let parts = [batch / planes_b.max(1) * group, group];
    let element = if bias.is_fp32 { "fp32" } else { shape.dtype.name() };
    let out = Operand::dense(call.dbias, 1, planes_h, columns);
    steps.push(sum(kernels, element, partial, &out, [planes_b, 1, planes_h, columns], parts, strides)?);
    Ok(())
}

/// The launch for the gradient of the sinks. delta: as the kernels of dq leave it.
pub(super) fn plan_dsinks(call: &Backward, kernels: &dyn Catalogue, delta: u64) -> Result<Option<Step>> {
    let (shape, options, planning) = (&call.shape, &call.shape.options, kernels.planning());
    if call.dsinks == 0 {
        return Ok(None);
    }
    let element = if options.sinks_are_fp32 { "fp32" } else { shape.dtype.name() };
    let kernel = planning.kernel("bwd-dsinks", element, 1, "plain")?;
    let (lse_b, lse_h) = shape.lse_strides();
    let mut values = Values::new();
    set!(values.pointers: lse = call.lse, delta = delta, sinks = options.sinks, dsinks = call.dsinks);
    set!(values.sizes:
        stride_lb = lse_b, stride_lh = lse_h, batch = if shape.is_packed() { 1 } else { shape.batch },
        seqlen_q = if shape.is_packed() { shape.total_q } else { shape.seqlen_q }
    )?;
    Launch::filled(kernels, kernel, line(shape.heads)?, &values).map(Some)
}
