//! The plan of a backward: delta and dq by blocks of queries, then dk and dv by blocks of keys.

use super::plan::{chunk, line, Catalogue, Device, Fill, Launch, Memory, Step};
use super::refuse::refuse;
use super::signature::{set, Name, Values};
use super::sums::{plan_dbias, plan_dsinks, sum};
use super::tile_lists::plan_lists;
use super::{Backward, Compute, Operand, Planning, Shape};
use crate::error::{argument, Result};

/// Plans a backward.
///
/// # Errors
///
/// If sizes, addresses or strides do not fit, or a kernel is missing.
pub fn plan_backward(
    call: &Backward,
    kernels: &dyn Catalogue,
    device: Device,
    memory: &mut dyn Memory,
) -> Result<Vec<Step>> {
    let shape = &call.shape;
    let planning = kernels.planning();
    shape.check(planning)?;
    let tensors = [
        ("dout", call.dout),
        ("q", call.q),
        ("k", call.k),
        ("v", call.v),
        ("out", call.out),
        ("dq", call.dq),
        ("dk", call.dk),
        ("dv", call.dv),
    ];
    for (name, operand) in tensors {
        operand.check(name, shape.vec(), planning)?;
    }
    refuse(&shape.options.of_a_cache(), "a backward cannot honour it: leave it out")?;
    let others = [("leftpad_k", shape.options.leftpad != 0), ("compute", shape.options.compute != Compute::AsStored)];
    refuse(&others, "a backward cannot honour it: leave it out")?;
    let [sinks, bias] = [shape.options.sinks, shape.options.bias.address];
    for (name, gradient, of) in [("dsinks", call.dsinks, sinks), ("dbias", call.dbias, bias)] {
        if gradient != 0 && of == 0 {
            return argument(name, format!("address {gradient:#x}"), format!("none without {}", &name[1..]));
        }
    }
    if !planning.serves_pair(shape.head_dim, shape.head_dim_v)? {
        return argument(
            "head_dim_v",
            format!("{} beside head_dim {}", shape.head_dim_v, shape.head_dim),
            "the same head dim, 64 beside 72 to 128, or 128 beside 136 to 192: pad v, or q and k, with zeros",
        );
    }
    // The kernel of a bias leaves more behind it.
    let arrays = if shape.options.bias.address == 0 { 1 } else { 2 };
    let delta = if shape.lse_elements() == 0 { 0 } else { memory.allocate(arrays * shape.lse_elements() * 4)? };
    let mut steps = Vec::new();
    if shape.is_packed() {
        // The kernel writes the rows of sequences alone.
        steps.push(Step::Fill(Fill { address: delta, pattern: 0, count: shape.lse_elements() }));
    }
    let mut values = shape.values(planning, [&call.q, &call.k, &call.v], call.lse)?;
    values.operand(Name::dout, [Name::stride_gb, Name::stride_gm, Name::stride_gh], &call.dout, shape.dtype.vec())?;
    set!(values.pointers: delta = delta);
    plan_norms(call, kernels, memory, &mut values, &mut steps)?;
    plan_dq(call, kernels, memory, values.clone(), &mut steps)?;
    plan_dkdv(call, kernels, device, memory, values.clone(), &mut steps)?;
    if call.dbias != 0 {
        set!(values.ints: flags = flags_of(shape, planning));
        plan_dbias(call, kernels, memory, values, &mut steps)?;
    }
    steps.extend(plan_dsinks(call, kernels, delta)?);
    Ok(steps)
}

/// Plans the measuring of dout and v for kernels that take the result: fp16 kernels of GPUs whose products flush
/// subnormals.
fn plan_norms(
    call: &Backward,
    kernels: &dyn Catalogue,
    memory: &mut dyn Memory,
    values: &mut Values,
    steps: &mut Vec<Step>,
) -> Result<()> {
    let shape = &call.shape;
    let (planes, planning) = (shape.batch * shape.heads_k, kernels.planning());
    let dq = kernel_of("bwd-dq", shape, planning)?;
    if !kernels.signature(&dq)?.has(Name::norms) {
        return Ok(());
    }
    let norms = memory.allocate(planes * 2 * 4)?;
    set!(values.pointers: norms = norms);
    if planes > 0 {
        let mut of_norms = values.clone();
        set!(of_norms.ints: flags = shape.flags(planning));
        let kernel = planning.kernel("bwd-norms", "fp16", 1, "plain")?;
        steps.push(Launch::filled(kernels, kernel, line(planes)?, &of_norms)?);
    }
    Ok(())
}

/// The flags of dq, dk and dv. Kernels of a bias alone read sinks.
fn flags_of(shape: &Shape, planning: &Planning) -> i32 {
    let of_bias = if shape.options.bias.address == 0 { 0 } else { shape.score_flags(planning) };
    shape.flags(planning) | of_bias | shape.options.mask.flags(&planning.flags)
}

/// Rows of k in all.
fn rows_k(shape: &Shape) -> usize {
    if shape.is_packed() {
        shape.total_k
    } else {
        shape.batch * shape.seqlen_k
    }
}

/// The kernel of a call: for a mask, for v with the head dim of q and k, or for v with another head dim.
fn kernel_of(name: &str, shape: &Shape, planning: &Planning) -> Result<String> {
    let operation = if shape.options.mask.is_used() {
        format!("sparse-{name}")
    } else if shape.head_dim == shape.head_dim_v {
        name.to_owned()
    } else {
        format!("{name}-v")
    };
    planning.kernel(&operation, shape.dtype.name(), shape.head_dim, shape.kind())
}

/// A fill of zeros of a dense gradient, whose rows have so many elements.
fn clear(operand: &Operand, elements: usize, shape: &Shape) -> Step {
    let bytes = elements * shape.dtype.size();
    Step::Fill(Fill { address: operand.address, pattern: 0, count: bytes / 4 })
}

fn plan_dq(
    call: &Backward,
    kernels: &dyn Catalogue,
    memory: &mut dyn Memory,
    mut values: Values,
    steps: &mut Vec<Step>,
) -> Result<()> {
    let shape = &call.shape;
    let planning = kernels.planning();
    let kernel = kernel_of("bwd-dq", shape, planning)?;
    let tile = kernels.tile(&kernel)?;
    let (blocks, planes, packed) = shape.grid(planning, tile.block_m, shape.seqlen_q, shape.heads, shape.rows_q());
    if blocks * planes == 0 {
        steps.push(clear(&call.dq, shape.rows_q() * shape.heads * shape.head_dim, shape));
        return Ok(());
    }
    let vec = shape.dtype.vec();
    values.operand(Name::out, [Name::stride_ob, Name::stride_om, Name::stride_oh], &call.out, vec)?;
    values.operand(Name::dq, [Name::stride_dqb, Name::stride_dqm, Name::stride_dqh], &call.dq, vec)?;
    set!(values.sizes:
        m_blocks = blocks, planes = shape.heads * shape.batch, chunk = chunk(planes, shape.is_even(), &tile, planning)
    )?;
    set!(values.ints: flags = packed | flags_of(shape, planning));
    if shape.options.mask.is_used() {
        let tile = (tile.block_m, tile.block_n);
        steps.push(plan_lists(shape, kernels, tile, false, memory, &mut values)?);
    }
    steps.push(Launch::filled(kernels, kernel, line(blocks * planes)?, &values)?);
    Ok(())
}

fn plan_dkdv(
    call: &Backward,
    kernels: &dyn Catalogue,
    device: Device,
    memory: &mut dyn Memory,
    mut values: Values,
    steps: &mut Vec<Step>,
) -> Result<()> {
    let shape = &call.shape;
    let planning = kernels.planning();
    let kernel = kernel_of("bwd-dkdv", shape, planning)?;
    let tile = kernels.tile(&kernel)?;
    let total_k = rows_k(shape);
    let (blocks, planes, packed) = shape.grid(planning, tile.block_n, shape.seqlen_k, shape.heads_k, total_k);
    // dk and dv of all parts, in fp32, take no more memory than dq would.
    let most = shape.heads * shape.rows_q() / (2 * shape.heads_k * total_k).max(1);
    let parts = parts(shape, blocks * planes, most, device, planning);
    let planes = planes * parts;
    if blocks * planes == 0 {
        steps.push(clear(&call.dk, total_k * shape.heads_k * shape.head_dim, shape));
        steps.push(clear(&call.dv, total_k * shape.heads_k * shape.head_dim_v, shape));
        return Ok(());
    }
    let (mut dk, mut dv) = (call.dk, call.dv);
    let heads = shape.heads_k * parts;
    if parts > 1 {
        for (operand, dim) in [(&mut dk, shape.head_dim), (&mut dv, shape.head_dim_v)] {
            let count = total_k * heads * dim;
            let address = memory.allocate(count * 4)?;
            if shape.is_packed() {
                steps.push(Step::Fill(Fill { address, pattern: 0, count }));
                *operand = Operand::packed(address, heads, dim);
            } else {
                *operand = Operand::dense(address, shape.seqlen_k, heads, dim);
            }
        }
    }
    let vec = shape.dtype.vec();
    values.operand(Name::dk, [Name::stride_dkb, Name::stride_dkn, Name::stride_dkh], &dk, vec)?;
    values.operand(Name::dv, [Name::stride_dvb, Name::stride_dvn, Name::stride_dvh], &dv, vec)?;
    set!(values.sizes:
        group = shape.group() / parts, parts = parts, total_k = total_k, n_blocks = blocks,
        planes = heads * shape.batch, chunk = chunk(planes, shape.is_even(), &tile, planning)
    )?;
    set!(values.ints: flags = packed | flags_of(shape, planning));
    if shape.options.mask.is_used() {
        let tile = (tile.block_m, tile.block_n);
        steps.push(plan_lists(shape, kernels, tile, true, memory, &mut values)?);
    }
    steps.push(Launch::filled(kernels, kernel, line(blocks * planes)?, &values)?);
    if parts > 1 {
        let (batch, rows) = if shape.is_packed() { (1, total_k) } else { (shape.batch, shape.seqlen_k) };
        for (partial, out, dim) in [(dk, call.dk, shape.head_dim), (dv, call.dv, shape.head_dim_v)] {
            let (sizes, strides) = ([batch, rows, shape.heads_k, dim], [parts * dim, 0, dim]);
            steps.push(sum(kernels, shape.dtype.name(), partial.address, &out, sizes, [parts, parts], strides)?);
        }
    }
    Ok(())
}

/// Into how many parts the query heads of a key head are shared out between programs of dk and dv: as few as keep the
/// GPU busy, no more than half the group and than `most`.
fn parts(shape: &Shape, programs: usize, most: usize, device: Device, planning: &Planning) -> usize {
    let group = shape.group();
    if programs == 0 || group.saturating_mul(shape.seqlen_q) < planning.grid.rows_worth_splits {
        return 1;
    }
    let wanted = planning.grid.programs_of_unit * device.compute_units;
    let possible: Vec<usize> = (1..=(group / 2).min(most)).filter(|parts| group.is_multiple_of(*parts)).collect();
    let enough = possible.iter().copied().find(|parts| programs.saturating_mul(*parts) >= wanted);
    enough.or(possible.last().copied()).unwrap_or(1)
}
