//! The plan of a forward with queries and keys in INT8: both are cast first.

use super::plan::{chunk, line, Catalogue, Launch, Memory, Step};
use super::refuse::refuse;
use super::signature::{set, Name};
use super::{Dtype, Forward};
use crate::error::{argument, Error, Result};

/// Bytes that a row in INT8 is a multiple of.
const ROW: usize = 16;

/// Plans a forward of dense sequences.
pub(super) fn plan(call: &Forward, kernels: &dyn Catalogue, memory: &mut dyn Memory) -> Result<Vec<Step>> {
    let (shape, planning) = (&call.shape, kernels.planning());
    let unserved = kernels.choice().unserved("int8", shape, call.pages.is_some());
    let others = shape.options.of_a_cache().into_iter().chain([
        (unserved.unwrap_or_default(), unserved.is_some()),
        ("seqlens_k", call.lengths != 0),
        ("cu_seqlens_q", shape.is_packed()),
        ("dtype fp32", shape.dtype == Dtype::F32),
        ("head_dim_v", shape.head_dim_v != shape.head_dim),
    ]);
    refuse(&others.collect::<Vec<_>>(), "a kernel with queries and keys in INT8 cannot honour it: leave it out")?;
    if !shape.head_dim.is_multiple_of(ROW) {
        return argument("head_dim", shape.head_dim, format!("a multiple of {ROW} in INT8: pad q, k and v with zeros"));
    }
    if shape.softmax_scale <= 0.0 {
        return argument("softmax_scale", shape.softmax_scale, "a number above 0 in INT8");
    }
    let kernel = planning.kernel("int8-fwd", shape.dtype.name(), shape.head_dim, "plain")?;
    if !kernels.has(&kernel) {
        return Err(Error::Unsupported(format!("compute: this store has no kernel {kernel}: RDNA 3 and 4 have it")));
    }
    let (tile, vec) = (kernels.tile(&kernel)?, shape.vec());
    let mut values = shape.values(planning, [&call.q, &call.k, &call.v], call.lse)?;
    values.operand(Name::out, [Name::stride_ob, Name::stride_om, Name::stride_oh], &call.out, vec)?;
    let mut steps = Vec::new();
    let mut cast = |operation, x, rows: usize, heads: usize, mean| -> Result<[u64; 2]> {
        let kernel = planning.kernel(operation, shape.dtype.name(), shape.head_dim, "plain")?;
        let blocks = rows.div_ceil(kernels.tile(&kernel)?.block_m.max(1));
        let y = memory.allocate(shape.batch * heads * rows * shape.head_dim)?;
        let scales = memory.allocate(shape.batch * heads * blocks * 4)?;
        let mut values = values.clone();
        values.operand(Name::x, [Name::stride_xb, Name::stride_xm, Name::stride_xh], x, vec)?;
        set!(values.pointers: mean = mean, y = y, scales = scales);
        set!(values.sizes: nheads = heads, seqlen = rows, blocks = blocks, smooth = usize::from(mean != 0))?;
        steps.push(Launch::filled(kernels, kernel, line(blocks * heads * shape.batch)?, &values)?);
        Ok([y, scales])
    };
    let [q, q_scales] = cast("int8-cast-q", &call.q, shape.seqlen_q, shape.heads, 0)?;
    let [k, k_scales] = cast("int8-cast-k", &call.k, shape.seqlen_k, shape.heads_k, shape.options.k_mean)?;
    let (blocks, planes) = (shape.seqlen_q.div_ceil(tile.block_m.max(1)), shape.batch * shape.heads);
    set!(values.pointers: q = q, k = k, q_scales = q_scales, k_scales = k_scales);
    set!(values.sizes: m_blocks = blocks, planes = planes, chunk = chunk(planes, shape.is_even(), &tile, planning))?;
    steps.push(Launch::filled(kernels, kernel, line(blocks * planes)?, &values)?);
    Ok(steps)
}
