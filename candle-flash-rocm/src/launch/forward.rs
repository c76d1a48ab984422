//! The plan of a forward.

use super::plan::{chunk, line, Catalogue, Device, Launch, Memory, Step};
use super::refuse::refuse;
use super::signature::{set, Name};
use super::tile_lists::plan_lists;
use super::{fp8, int8, split_kv};
use super::{Compute, Dtype, Forward};
use crate::error::Result;

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
    let planning = kernels.planning();
    shape.check(planning)?;
    let tensors = [("q", call.q), ("k", call.k), ("v", call.v), ("out", call.out)];
    for (name, operand) in tensors {
        operand.check(name, shape.vec(), planning)?;
    }
    match shape.options.compute {
        Compute::AsStored => {}
        Compute::Int8 => return int8::plan(call, kernels, memory),
        Compute::Fp8 => return fp8::plan(call, kernels, memory),
    }
    if let Some(pages) = &call.pages {
        pages.check()?;
        refuse(&[("cache_lines", shape.options.lines != 0)], "pages have a block_table instead: leave it out")?;
        let others = [("bias", shape.options.bias.address != 0), ("mask", shape.options.mask.is_used())];
        refuse(&others, "kernels of pages have none: leave it out")?;
    }
    if call.lengths != 0 {
        refuse(&[("bias", shape.options.bias.address != 0)], "not with seqlens_k: let the bias hide keys by -inf")?;
        refuse(&[("mask", shape.options.mask.is_used())], "not with seqlens_k: let the mask hide keys")?;
    }
    if split_kv::is_needed(call, planning)? {
        split_kv::check(call, planning)?;
        return split_kv::plan(call, kernels, device, memory);
    }
    let kernel = kernel_of(call, kernels)?;
    let tile = kernels.tile(&kernel)?;
    if split_kv::is_faster(call, tile.block_m, device, planning) {
        return split_kv::plan(call, kernels, device, memory);
    }

    let (blocks, planes, packed) = shape.grid(planning, tile.block_m, shape.seqlen_q, shape.heads, shape.rows_q());
    let mut steps = Vec::new();
    if blocks * planes == 0 {
        return Ok(call.cleared().into()); // no program clears the rows outside of every sequence
    }
    let (table, table_stride, page_size) =
        call.pages.map_or((0, 0, 1), |pages| (pages.table, pages.stride, pages.size));
    let mut values = shape.values(planning, [&call.q, &call.k, &call.v], call.lse)?;
    values.operand(Name::out, [Name::stride_ob, Name::stride_om, Name::stride_oh], &call.out, shape.dtype.vec())?;
    set!(values.pointers: seqused_k = call.lengths, block_table = table);
    set!(values.sizes:
        stride_tb = table_stride, page_size = page_size, m_blocks = blocks, planes = shape.heads * shape.batch,
        chunk = chunk(planes, shape.is_even(), &tile, planning)
    )?;
    values.ints(&[(
        Name::flags,
        packed | call.flags(planning) | shape.score_flags(planning) | shape.options.mask.flags(&planning.flags),
    )]);
    if shape.options.mask.is_used() {
        let tile = (tile.block_m, tile.block_n);
        steps.push(plan_lists(shape, kernels, tile, false, memory, &mut values)?);
    }
    steps.push(Launch::filled(kernels, kernel, line(blocks * planes)?, &values)?);
    Ok(steps)
}

/// The forward kernel's name. Keys in pages take the faster kernel where no block of them crosses a page.
fn kernel_of(call: &Forward, kernels: &dyn Catalogue) -> Result<String> {
    let (shape, planning) = (&call.shape, kernels.planning());
    let suffix = if shape.head_dim == shape.head_dim_v { "" } else { "-v" };
    let name = |operation: &str| {
        let operation = format!("{operation}{suffix}");
        planning.kernel(&operation, shape.dtype.name(), shape.head_dim, shape.forward_kind())
    };
    if shape.options.mask.is_used() {
        return planning.kernel("sparse-fwd", shape.dtype.name(), shape.head_dim, shape.forward_kind());
    }
    let Some(pages) = call.pages else { return name("fwd") };
    if shape.dtype != Dtype::F32 && shape.options.leftpad == 0 {
        let whole = name("fwd-paged-whole")?;
        let block_n = kernels.tile(&whole)?.block_n;
        if block_n > 0 && pages.size.is_multiple_of(block_n) {
            return Ok(whole);
        }
    }
    name("fwd-paged")
}
