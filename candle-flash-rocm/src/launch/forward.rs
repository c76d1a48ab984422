//! The plan of a forward.

use super::plan::{chunk, line, Arguments, Catalogue, Device, Fill, Launch, Memory, Step};
use super::split_kv::{self, Cache};
use super::{variant, Dtype, Forward};
use crate::error::{Error, Result};

/// Plans a forward.
///
/// # Errors
///
/// If sizes, addresses or strides do not fit, or a kernel is missing.
pub fn plan_forward(
    call: &Forward,
    kernels: &dyn Catalogue,
    device: Device,
    memory: &mut dyn Memory,
) -> Result<Vec<Step>> {
    let shape = &call.shape;
    shape.check()?;
    let tensors = [("q", call.q), ("k", call.k), ("v", call.v), ("out", call.out)];
    for (name, operand) in tensors {
        operand.check(name, shape.dtype)?;
    }
    if let Some(pages) = &call.pages {
        pages.check()?;
    }
    if call.pages.is_some() && !shape.is_packed() {
        return Err(Error::Unsupported("block_table: pages need cu_seqlens_q and cu_seqlens_k".into()));
    }
    let kernel = kernel_of(call, kernels)?;
    let tile = kernels.tile(&kernel)?;
    if let Some(cache) = Cache::of(call, tile.block_m, device) {
        return split_kv::plan(&cache, kernels, device, memory);
    }

    let vec = shape.dtype.vec();
    let (lse_b, lse_h) = shape.lse_strides();
    let (blocks, planes, packed) = shape.grid(tile.block_m, shape.seqlen_q, shape.heads, shape.rows_q());
    let mut steps = Vec::new();
    if blocks * planes == 0 {
        // No program clears the rows outside of every sequence.
        let elements = shape.rows_q() * shape.heads * shape.head_dim;
        steps.push(Step::Fill(Fill {
            address: call.out.address,
            pattern: 0,
            count: elements * shape.dtype.size() / 4,
        }));
        let pattern = f32::INFINITY.to_bits();
        steps.push(Step::Fill(Fill { address: call.lse, pattern, count: shape.lse_elements() }));
        return Ok(steps);
    }
    let (table, table_stride, page_size) =
        call.pages.map_or((0, 0, 1), |pages| (pages.table, pages.stride, pages.size));
    let (left, right) = shape.window();
    let mut arguments = Arguments::default();
    arguments.pointers(&[call.q.address, call.k.address, call.v.address, call.out.address, call.lse]);
    // cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state, block_table
    arguments.pointers(&[shape.cu_seqlens_q, shape.cu_seqlens_k, call.lengths, 0, shape.alibi_slopes, 0, table]);
    if variant::takes_sinks(&kernel) {
        arguments.pointers(&[0]);
    }
    arguments.floats(&[shape.softmax_scale, shape.softcap, 0.0]);
    for (_, operand) in tensors {
        operand.push(&mut arguments, vec)?;
    }
    arguments.sizes(&[lse_b, lse_h, 0, table_stride, page_size])?;
    arguments.sizes(&[shape.heads, shape.group(), shape.seqlen_q, shape.seqlen_k, shape.head_dim / vec])?;
    arguments.ints(&[left, right]);
    arguments.sizes(&[blocks, shape.heads * shape.batch, chunk(planes, shape.is_even(), &tile)])?;
    arguments.ints(&[packed | call.flags()]);
    steps.push(Step::Launch(Launch { kernel, grid: line(blocks * planes)?, arguments: arguments.0 }));
    Ok(steps)
}

/// The forward kernel's name. Keys in pages take the faster kernel where no block of them crosses a page.
fn kernel_of(call: &Forward, kernels: &dyn Catalogue) -> Result<String> {
    let shape = &call.shape;
    let name = |operation| variant::name(operation, shape.dtype, shape.head_dim, shape.kind());
    let Some(pages) = call.pages else { return name("fwd") };
    if shape.dtype != Dtype::F32 {
        let whole = name("fwd-paged-whole")?;
        let block_n = kernels.tile(&whole)?.block_n;
        if block_n > 0 && pages.size.is_multiple_of(block_n) {
            return Ok(whole);
        }
    }
    name("fwd-paged")
}
