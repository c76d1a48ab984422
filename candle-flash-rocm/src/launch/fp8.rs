//! The plan of a forward of whole sequences in FP8: q, k and v are cast first, v is transposed.

use super::plan::{chunk, line, Catalogue, Launch, Memory, Step};
use super::planning::bit;
use super::refuse::refuse;
use super::signature::{set, Name, Values};
use super::{Forward, Operand};
use crate::error::{argument, Error, Result};

/// Elements in 16 bytes of FP8.
const VEC: usize = 16;

/// The kernel for the FP8 format of the store's GPU, and that format. named: the kernel's name for a format.
pub(super) fn kernel_of<'a>(
    kernels: &'a dyn Catalogue,
    what: &str,
    named: impl Fn(&str) -> Result<String>,
) -> Result<(String, &'a str)> {
    let mut missing = String::new();
    for format in kernels.planning().fp8.largest.keys() {
        missing = named(format)?;
        if kernels.has(&missing) {
            return Ok((missing, format));
        }
    }
    Err(Error::Unsupported(format!("{what}, and this store has no kernel such as {missing} for it")))
}

/// Plans the cast of q, k or v, tensor 0, 1 or 2 of a call: the tensor in FP8, v with rows of columns, and the address of
/// what undoes its scale.
fn cast(
    call: &Forward,
    tensor: usize,
    format: &str,
    kernels: &dyn Catalogue,
    memory: &mut dyn Memory,
    steps: &mut Vec<Step>,
) -> Result<(Operand, u64)> {
    let (shape, planning, is_transposed) = (&call.shape, kernels.planning(), tensor == 2);
    let (x, mut descale) = ([&call.q, &call.k, &call.v][tensor], shape.options.descales[tensor]);
    let is_fp8 = if tensor == 0 { shape.options.q_is_fp8 } else { shape.options.is_fp8 };
    if is_fp8 && !is_transposed {
        return Ok((*x, descale));
    }
    let of_q = (shape.cu_seqlens_q, shape.seqlen_q, shape.total_q, shape.heads);
    let of_k = (shape.cu_seqlens_k, shape.seqlen_k, shape.total_k, shape.heads_k);
    let (starts, longest, packed, heads) = if tensor == 0 { of_q } else { of_k };
    let (rows, total) = if starts == 0 { (longest, shape.batch * longest) } else { (packed, packed) };
    let (dim, unit, element) = (shape.head_dim, planning.fp8.columns, if is_fp8 { format } else { shape.dtype.name() });
    let operation = if is_transposed { "fp8-cast-v" } else { "fp8-cast" };
    let kernel = planning.kernel(operation, element, dim, "plain")?;
    let length = match (is_transposed, starts) {
        (false, _) => rows,
        (true, 0) => rows.next_multiple_of(unit),
        (true, _) => (rows / unit + shape.batch + 1) * unit,
    };
    let (sequences, batch) = if starts == 0 { (shape.batch, length * heads * dim) } else { (1, 0) };
    let (row, head) = if is_transposed { (length, dim * length) } else { (heads * dim, dim) };
    let y = Operand { address: memory.allocate(sequences * length * heads * dim)?, batch, row, head };
    let (blocks, planes, mut flags) = shape.grid(planning, kernels.tile(&kernel)?.block_m, rows, heads, total);
    flags |= bit(starts, planning.flags.has_cu_seqlens_q);
    let pieces = dim.div_ceil(planning.columns(operation)?);
    let grid = [line(blocks * planes)?[0], pieces as u32, 1];
    let (mut amax, mut limit) = (descale, if is_fp8 { 0.0 } else { -planning.fp8.largest[format] });
    if descale == 0 {
        descale = memory.allocate(shape.batch * heads * 4)?;
        amax = memory.allocate(planes * blocks * pieces * 4)?;
        limit = -limit;
    }
    let (vec, mut values) = (if is_fp8 { VEC } else { shape.dtype.vec() }, Values::new());
    values.operand(Name::x, [Name::stride_xb, Name::stride_xm, Name::stride_xh], x, vec)?;
    values.operand(Name::y, [Name::stride_yb, Name::stride_ym, Name::stride_yh], &y, VEC)?;
    set!(values.pointers: amax = amax, descale = descale, cu_seqlens_q = starts);
    set!(values.sizes:
        nheads = heads, seqlen = rows, head_dim = dim / vec, m_blocks = blocks, planes = heads * shape.batch, chunk = 1
    )?;
    set!(values.floats: limit = limit);
    set!(values.ints: flags = flags);
    if limit > 0.0 {
        let of_amax = planning.kernel("fp8-amax", element, dim, "plain")?;
        steps.push(Launch::filled(kernels, of_amax, grid, &values)?);
    }
    steps.push(Launch::filled(kernels, kernel, grid, &values)?);
    Ok((y, descale))
}

/// Plans a forward of dense or packed sequences.
pub(super) fn plan(call: &Forward, kernels: &dyn Catalogue, memory: &mut dyn Memory) -> Result<Vec<Step>> {
    let (shape, options, planning) = (&call.shape, &call.shape.options, kernels.planning());
    let unserved = kernels.choice().unserved("fp8", shape, call.pages.is_some());
    let of_a_cache = options.of_a_cache().into_iter().filter(|(name, _)| *name != "descales");
    let others = of_a_cache.chain([
        (unserved.unwrap_or_default(), unserved.is_some()),
        ("seqlens_k", call.lengths != 0),
        ("head_dim_v", shape.head_dim_v != shape.head_dim),
    ]);
    refuse(&others.collect::<Vec<_>>(), "a kernel of whole sequences in FP8 cannot honour it: leave it out")?;
    if !shape.head_dim.is_multiple_of(VEC) {
        return argument("head_dim", shape.head_dim, format!("a multiple of {VEC} in FP8: pad q, k and v with zeros"));
    }
    let named = |format: &str| planning.kernel("fp8-fwd", format, shape.head_dim, shape.kind());
    let (kernel, format) = kernel_of(kernels, "compute: FP8", named)?;
    let mut steps = Vec::new();
    let mut cast = |tensor| cast(call, tensor, format, kernels, memory, &mut steps);
    let ((q, q_descale), (k, k_descale), (v, v_descale)) = (cast(0)?, cast(1)?, cast(2)?);
    if shape.is_packed() {
        steps.extend(call.cleared());
    }
    let (tile, rows) = (kernels.tile(&kernel)?, if shape.is_packed() { shape.total_q } else { shape.seqlen_q });
    let (blocks, planes, flags) = shape.grid(planning, tile.block_m, rows, shape.heads, shape.rows_q());
    let result = planning.fp8.results.iter().position(|name| name == shape.dtype.name()).unwrap_or_default();
    let mut values = shape.values(planning, [&q, &k, &k], call.lse)?;
    values.operand(Name::v, [Name::stride_vb, Name::stride_vd, Name::stride_vh], &v, VEC)?;
    values.operand(Name::out, [Name::stride_ob, Name::stride_om, Name::stride_oh], &call.out, VEC)?;
    set!(values.pointers: q_descale = q_descale, k_descale = k_descale, v_descale = v_descale);
    set!(values.sizes:
        seqlen_q = rows, m_blocks = blocks, planes = shape.heads * shape.batch,
        chunk = chunk(planes, shape.is_even(), &tile, planning), kind = result
    )?;
    set!(values.ints: flags = flags | shape.flags(planning));
    steps.push(Launch::filled(kernels, kernel, line(blocks * planes)?, &values)?);
    Ok(steps)
}
