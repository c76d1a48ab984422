//! The plan of a backward: delta and dq by blocks of queries, then dk and dv by blocks of keys.

use super::plan::{chunk, line, Arguments, Catalogue, Device, Fill, Launch, Memory, Step, Sum};
use super::{variant, Backward, Dtype, Operand, Shape};
use crate::error::Result;

/// Splitting dk and dv is worthwhile if each program still processes this many queries, counted
/// over its heads.
const ROWS_WORTH_PARTS: usize = 4096;

/// The kernel that measures dout and v first. Only stores for GPUs whose fp16 products flush
/// subnormals have this kernel. There the backward kernels read its result.
const NORMS: &str = "bwd-norms-fp16-d64";

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
    shape.check()?;
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
        operand.check(name, shape.dtype)?;
    }
    let delta = if shape.lse_elements() == 0 { 0 } else { memory.allocate(shape.lse_elements() * 4)? };
    let mut steps = Vec::new();
    if shape.is_packed() {
        // The kernel writes the rows of sequences alone.
        steps.push(Step::Fill(Fill { address: delta, pattern: 0, count: shape.lse_elements() }));
    }
    let norms = plan_norms(call, kernels, memory, &mut steps)?;
    plan_dq(call, kernels, (delta, norms), &mut steps)?;
    plan_dkdv(call, kernels, device, memory, (delta, norms), &mut steps)?;
    Ok(steps)
}

/// Plans the measuring of dout and v. Returns the address of the result, None where the kernels take none.
fn plan_norms(
    call: &Backward,
    kernels: &dyn Catalogue,
    memory: &mut dyn Memory,
    steps: &mut Vec<Step>,
) -> Result<Option<u64>> {
    let shape = &call.shape;
    let planes = shape.batch * shape.heads_k;
    if shape.dtype != Dtype::F16 || planes == 0 || !kernels.has(NORMS) {
        return Ok(None);
    }
    let norms = memory.allocate(planes * 2 * 4)?;
    let vec = shape.dtype.vec();
    let mut arguments = Arguments::default();
    arguments.pointers(&[call.dout.address, call.v.address, norms, shape.cu_seqlens_q, shape.cu_seqlens_k]);
    for operand in [call.dout, call.v] {
        operand.push(&mut arguments, vec)?;
    }
    arguments.sizes(&[shape.heads, shape.group(), shape.seqlen_q, shape.seqlen_k, shape.head_dim / vec])?;
    arguments.ints(&[shape.flags()]);
    steps.push(Step::Launch(Launch { kernel: NORMS.to_owned(), grid: line(planes)?, arguments: arguments.0 }));
    Ok(Some(norms))
}

/// Rows of k in all.
fn rows_k(shape: &Shape) -> usize {
    if shape.is_packed() {
        shape.total_k
    } else {
        shape.batch * shape.seqlen_k
    }
}

/// A fill of zeros of a dense gradient.
fn clear(operand: &Operand, rows: usize, heads: usize, shape: &Shape) -> Step {
    let bytes = rows * heads * shape.head_dim * shape.dtype.size();
    Step::Fill(Fill { address: operand.address, pattern: 0, count: bytes / 4 })
}

fn plan_dq(
    call: &Backward,
    kernels: &dyn Catalogue,
    (delta, norms): (u64, Option<u64>),
    steps: &mut Vec<Step>,
) -> Result<()> {
    let shape = &call.shape;
    let kernel = variant::name("bwd-dq", shape.dtype, shape.head_dim, shape.kind())?;
    let tile = kernels.tile(&kernel)?;
    let (blocks, planes, packed) = shape.grid(tile.block_m, shape.seqlen_q, shape.heads, shape.rows_q());
    if blocks * planes == 0 {
        steps.push(clear(&call.dq, shape.rows_q(), shape.heads, shape));
        return Ok(());
    }
    let vec = shape.dtype.vec();
    let mut arguments = Arguments::default();
    arguments.pointers(&[call.q.address, call.k.address, call.v.address, call.out.address, call.dout.address]);
    arguments.pointers(&[call.lse, delta, call.dq.address]);
    options(shape, norms, &mut arguments);
    for operand in [call.q, call.k, call.v, call.out, call.dout, call.dq] {
        operand.push(&mut arguments, vec)?;
    }
    let (lse_b, lse_h) = shape.lse_strides();
    arguments.sizes(&[lse_b, lse_h, 0, shape.heads, shape.group(), shape.seqlen_q, shape.seqlen_k])?;
    window(shape, &mut arguments)?;
    arguments.sizes(&[blocks, shape.heads * shape.batch, chunk(planes, shape.is_even(), &tile)])?;
    arguments.ints(&[packed | shape.flags()]);
    steps.push(Step::Launch(Launch { kernel, grid: line(blocks * planes)?, arguments: arguments.0 }));
    Ok(())
}

fn plan_dkdv(
    call: &Backward,
    kernels: &dyn Catalogue,
    device: Device,
    memory: &mut dyn Memory,
    (delta, norms): (u64, Option<u64>),
    steps: &mut Vec<Step>,
) -> Result<()> {
    let shape = &call.shape;
    let kernel = variant::name("bwd-dkdv", shape.dtype, shape.head_dim, shape.kind())?;
    let tile = kernels.tile(&kernel)?;
    let total_k = rows_k(shape);
    let (blocks, planes, packed) = shape.grid(tile.block_n, shape.seqlen_k, shape.heads_k, total_k);
    // dk and dv of all parts, in fp32, take no more memory than dq would.
    let most = shape.heads * shape.rows_q() / (2 * shape.heads_k * total_k).max(1);
    let parts = if call.may_split { parts(shape, blocks * planes, most, device) } else { 1 };
    let planes = planes * parts;
    if blocks * planes == 0 {
        steps.push(clear(&call.dk, total_k, shape.heads_k, shape));
        steps.push(clear(&call.dv, total_k, shape.heads_k, shape));
        return Ok(());
    }
    let (mut dk, mut dv) = (call.dk, call.dv);
    let rows = total_k * shape.heads_k;
    if parts > 1 {
        let elements = rows * parts * shape.head_dim;
        let sums = memory.allocate(2 * elements * 4)?;
        if shape.is_packed() {
            steps.push(Step::Fill(Fill { address: sums, pattern: 0, count: 2 * elements }));
        }
        let heads = shape.heads_k * parts;
        let operand = |address| {
            if shape.is_packed() {
                Operand::packed(address, heads, shape.head_dim)
            } else {
                Operand::dense(address, shape.seqlen_k, heads, shape.head_dim)
            }
        };
        dk = operand(sums);
        dv = operand(sums + 4 * elements as u64);
    }
    let vec = shape.dtype.vec();
    let mut arguments = Arguments::default();
    arguments.pointers(&[call.q.address, call.k.address, call.v.address, call.dout.address]);
    arguments.pointers(&[call.lse, delta, dk.address, dv.address]);
    options(shape, norms, &mut arguments);
    for operand in [call.q, call.k, call.v, call.dout, dk, dv] {
        operand.push(&mut arguments, vec)?;
    }
    let (lse_b, lse_h) = shape.lse_strides();
    arguments.sizes(&[lse_b, lse_h, 0, shape.heads, shape.group() / parts, parts])?;
    arguments.sizes(&[shape.seqlen_q, shape.seqlen_k, total_k])?;
    window(shape, &mut arguments)?;
    arguments.sizes(&[blocks, shape.heads_k * parts * shape.batch, chunk(planes, shape.is_even(), &tile)])?;
    arguments.ints(&[packed | shape.flags()]);
    steps.push(Step::Launch(Launch { kernel, grid: line(blocks * planes)?, arguments: arguments.0 }));
    if parts > 1 {
        for (from, to) in [(dk, call.dk), (dv, call.dv)] {
            steps.push(Step::Sum(Sum { parts: from.address, count: parts, rows, result: to.address }));
        }
    }
    Ok(())
}

/// The optional pointers and the numbers of the scores, which both kernels take alike.
fn options(shape: &Shape, norms: Option<u64>, arguments: &mut Arguments) {
    // cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state
    arguments.pointers(&[shape.cu_seqlens_q, shape.cu_seqlens_k, 0, 0, shape.alibi_slopes, 0]);
    arguments.pointers(norms.as_slice());
    arguments.floats(&[shape.softmax_scale, shape.softcap, 0.0]);
}

fn window(shape: &Shape, arguments: &mut Arguments) -> Result<()> {
    arguments.size(shape.head_dim / shape.dtype.vec())?;
    let (left, right) = shape.window();
    arguments.ints(&[left, right]);
    Ok(())
}

/// Into how many parts the query heads of a key head are shared out between programs of dk and dv: as few as keep the
/// GPU busy, no more than half the group and than `most`.
fn parts(shape: &Shape, programs: usize, most: usize, device: Device) -> usize {
    let group = shape.group();
    if programs == 0 || group.saturating_mul(shape.seqlen_q) < ROWS_WORTH_PARTS {
        return 1;
    }
    let wanted = 3 * device.compute_units;
    let possible: Vec<usize> = (1..=(group / 2).min(most)).filter(|parts| group.is_multiple_of(*parts)).collect();
    let enough = possible.iter().copied().find(|parts| programs.saturating_mul(*parts) >= wanted);
    enough.or(possible.last().copied()).unwrap_or(1)
}
