//! When the keys of a forward are shared out among programs, and the plan of such a call: attend in parts, join them.

use super::plan::{line, Catalogue, Device, Fill, Launch, Memory, Step};
use super::planning::{bit, SplitKv};
use super::refuse::refuse;
use super::signature::{set, Name, Values};
use super::{fp8, Dtype, Forward, Operand, Planning, Shape};
use crate::error::{argument, Result};

/// Microseconds of the host for a second launch in a call: 2.4 for a split call, 0.7 for a plain one, from C with a HIP
/// runtime that does nothing (2026-11-28).
const HOST_COST: f64 = 2.0;

/// Whether only kernels of a cache serve a call: they honour more options, and take every pair of head dims.
pub(super) fn is_needed(call: &Forward, planning: &Planning) -> Result<bool> {
    let shape = &call.shape;
    Ok(shape.options.needs_cache() || !planning.serves_pair(shape.head_dim, shape.head_dim_v)?)
}

/// Whether kernels of a cache serve a call, and are faster than the forward kernel, whose tiles have `block_m` rows.
pub(super) fn is_faster(call: &Forward, block_m: usize, device: Device, planning: &Planning) -> bool {
    let (shape, most) = (&call.shape, planning.split_kv.max_page_units);
    !shape.options.of_whole_sequences().iter().any(|(_, is_used)| *is_used)
        && (!shape.is_packed() || call.lengths != 0)
        && call.pages.is_none_or(|pages| pages.columns * pages.size < most)
        && is_profitable(shape, block_m, device, planning)
}

/// Refuses a call that kernels of a cache alone could serve, by the name of the option that they lack.
pub(super) fn check(call: &Forward, planning: &Planning) -> Result<()> {
    let (shape, costs) = (&call.shape, &planning.split_kv);
    let used = shape.options.of_a_cache().into_iter().find(|(_, is_used)| *is_used);
    let name = used.map_or("head_dim_v", |(name, _)| name);
    let remedy = format!("a kernel with {name} cannot honour it: leave one of them out");
    refuse(&shape.options.of_whole_sequences(), &remedy)?;
    let remedy = format!("wanted with packed rows and {name}: pass the number of keys of each sequence");
    refuse(&[("seqlens_k", shape.is_packed() && call.lengths == 0)], &remedy)?;
    if shape.options.appended != 0 || shape.options.lines != 0 {
        let packed_keys = shape.is_packed() && call.pages.is_none();
        refuse(&[("cu_seqlens_k", packed_keys)], "packed keys are no cache: leave out cache_lines and appended")?;
    }
    if let Some(pages) = call.pages {
        let unit = costs.unit_of(pages.size);
        let room = pages.columns.saturating_mul(pages.size);
        if room / unit >= costs.max_page_units {
            let limit = format!("less than {} with {} rows a page", costs.max_page_units * unit, pages.size);
            return argument("block_table", format!("room for {room} keys a sequence"), limit);
        }
    }
    Ok(())
}

/// Whether one tile of `decode` can hold all queries that share a key head.
pub(super) fn is_few(shape: &Shape, planning: &Planning) -> bool {
    shape.seqlen_q.saturating_mul(shape.heads) <= planning.split_kv.decode_rows.saturating_mul(shape.heads_k)
}

/// Whether split-KV saves more GPU time than it costs the host.
pub(super) fn is_profitable(shape: &Shape, block_m: usize, device: Device, planning: &Planning) -> bool {
    let costs = &planning.split_kv;
    if shape.seqlen_k < costs.least_keys || block_m == 0 {
        return false;
    }
    let mut seen = shape.seqlen_k;
    if let (Some(left), Some(right)) = (shape.window_left, shape.window_right) {
        seen = seen.min(left.saturating_add(shape.seqlen_q).saturating_add(right));
    }
    let dim = shape.head_dim.max(shape.head_dim_v);
    let (whole_cost, split_cost) =
        (costs.whole.iter().find(|row| dim <= row.head_dim), costs.split.iter().find(|row| dim <= row.head_dim));
    let (Some(whole_cost), Some(split_cost)) = (whole_cost, split_cost) else { return false };
    let units = device.compute_units as f64;
    let blocks = seen.div_ceil(64);
    let shared = shape.seqlen_q.saturating_mul(shape.group());
    let (rows, block, start) = if shared <= costs.decode_rows {
        (costs.decode_rows, split_cost.decode, costs.start_decode)
    } else {
        (costs.extend_rows, split_cost.extend, costs.start_extend)
    };
    // In f64, where the product of sizes of a caller cannot overflow.
    let product = |sizes: &[usize]| sizes.iter().map(|&size| size as f64).product::<f64>();
    let programs = product(&[shared.div_ceil(rows), shape.heads_k, shape.batch]);
    let mut parts = start + block * programs * blocks as f64 / units;
    if programs < (costs.resident * device.compute_units) as f64 {
        parts += costs.join * product(&[shape.batch, shape.seqlen_q, shape.heads, dim]) / 128.0;
    }
    let tiles = product(&[shape.seqlen_q.div_ceil(block_m), shape.heads, shape.batch]);
    let busy = (whole_cost.tile * tiles).max(whole_cost.read * shape.heads_k as f64 * shape.batch as f64) / units;
    let whole = costs.start_whole + blocks as f64 * whole_cost.alone.max(busy);
    let host_cost = if shape.options.host_cost == 0.0 { HOST_COST } else { shape.options.host_cost };
    costs.margin * parts + host_cost < whole
}

/// The number of splits for `blocks` blocks of keys, where `programs` programs of `rows` rows share the GPU, which runs
/// `slots` at once.
///
/// The least of an estimate: waves of programs, each as long as its blocks, and the work of the join.
fn splits(programs: usize, blocks: usize, slots: usize, rows: usize, costs: &SplitKv) -> usize {
    let (mut best, mut least) = (1, f64::INFINITY);
    for count in 1..=blocks.clamp(1, costs.max_splits) {
        let waves = programs.saturating_mul(count).div_ceil(slots) as f64;
        let mut time = waves * (blocks.div_ceil(count) as f64 + costs.start);
        if count > 1 {
            time += costs.combine + costs.part * rows as f64 * count as f64;
        }
        if time < costs.gain * least {
            (best, least) = (count, time);
        }
    }
    best
}

/// The kernel for this number of rows per key head, and the rows and keys of its tile.
fn kernel_of(call: &Forward, rows: usize, kernels: &dyn Catalogue) -> Result<(String, usize, usize)> {
    let (shape, options, planning) = (&call.shape, &call.shape.options, kernels.planning());
    let kind = match (shape.softcap == 0.0 && shape.alibi_slopes == 0, options.sinks) {
        (false, _) => "any",
        (true, 0) => "plain",
        (true, _) => "sink",
    };
    let dim = shape.head_dim.max(shape.head_dim_v);
    let named = |operation: &str, element: &str| planning.kernel(operation, element, dim, kind);
    let name = |operation: &str| {
        if !options.is_fp8 {
            return named(operation, shape.dtype.name());
        }
        fp8::kernel_of(kernels, "k: stored as fp8", |element| named(operation, element)).map(|(kernel, _)| kernel)
    };
    let [mut operation, many] =
        if options.has_second_query { ["latent", "latent-extend"] } else { ["decode", "extend"] };
    let mut kernel = name(operation)?;
    let mut tile = kernels.tile(&kernel)?;
    if rows > tile.block_m {
        operation = many;
        kernel = name(operation)?;
        tile = kernels.tile(&kernel)?;
    }
    let page_size = call.pages.map_or(planning.split_kv.endless, |pages| pages.size);
    let is_padded = call.pages.is_some() && options.leftpad != 0;
    if is_padded || tile.block_n == 0 || !page_size.is_multiple_of(tile.block_n) {
        kernel = name(&format!("{operation}-paged"))?;
        tile = kernels.tile(&kernel)?;
    }
    Ok((kernel, tile.block_m, tile.block_n))
}

/// Plans a call over a cache.
pub(super) fn plan(
    call: &Forward,
    kernels: &dyn Catalogue,
    device: Device,
    memory: &mut dyn Memory,
) -> Result<Vec<Step>> {
    let (shape, options) = (&call.shape, &call.shape.options);
    let planning = kernels.planning();
    let (flags, costs) = (&planning.flags, &planning.split_kv);
    let rows = shape.seqlen_q * shape.group();
    let (kernel, block_m, block_n) = kernel_of(call, rows, kernels)?;
    let (page_size, table, table_stride, capacity) = match call.pages {
        Some(pages) => (pages.size, pages.table, pages.stride, pages.columns * pages.size),
        // Each packed sequence is a line that starts at its own row.
        None if shape.is_packed() => (costs.endless, shape.cu_seqlens_k, 1, shape.total_k),
        None if options.lines != 0 => (costs.endless, options.lines, 1, shape.seqlen_k),
        None => (costs.endless, 0, 0, shape.seqlen_k),
    };
    let line_of =
        |operand: Operand| if shape.is_packed() && call.pages.is_none() { operand.as_lines() } else { operand };
    let unit = costs.unit_of(page_size);
    // Keys of the longest sequence, as far as the host knows, with those that were appended and without them.
    let whole = shape.seqlen_k.min(capacity);
    let length = (shape.seqlen_k - options.appended).min(capacity);
    let (left, right) = shape.window(flags.open_window);
    let blocks_m = rows.div_ceil(block_m.max(1));
    let programs = blocks_m * shape.heads_k * shape.batch;
    let seen = whole.min(left as usize + right as usize + shape.seqlen_q);
    let blocks = seen.div_ceil(block_n.max(1));
    let resident = if options.has_second_query { costs.latent_resident } else { costs.resident };
    let num_splits = match options.num_splits {
        0 => splits(programs, blocks, device.compute_units.max(1) * resident, block_m, costs),
        count => count.min(blocks.max(1)),
    };

    let elements = shape.lse_elements();
    let mut steps = Vec::new();
    let (mut partial, mut partial_lse) = (call.lse, call.lse);
    if num_splits > 1 {
        if elements * shape.head_dim_v >= 1 << 31 {
            return argument("q", format!("{elements} rows of {}", shape.head_dim_v), "fewer rows at once");
        }
        partial = memory.allocate(num_splits * elements * shape.head_dim_v * 4)?;
        partial_lse = memory.allocate(num_splits * elements * 4)?;
    }
    if shape.is_packed() {
        // No program writes rows outside of every sequence.
        let pattern = f32::INFINITY.to_bits();
        steps.push(Step::Fill(Fill { address: partial_lse, pattern, count: num_splits * elements }));
        if num_splits == 1 {
            let count = shape.out_elements() * shape.dtype.size() / 4;
            steps.push(Step::Fill(Fill { address: call.out.address, pattern: 0, count }));
        }
    }
    let mut bits = call.flags(planning) & !flags.has_cu_seqlens_k | shape.score_flags(planning);
    let mut descales = [call.lse; 3]; // only FP8 tensors have scales
    if options.is_fp8 {
        descales = options.descales;
        bits |= flags.has_descale | if options.q_is_fp8 { 0 } else { flags.query_has_16_bits };
        bits |= if shape.dtype == Dtype::F16 { flags.query_is_fp16 } else { 0 };
    }
    bits |= bit(table, flags.has_block_table) | bit(options.appended_starts, flags.has_cu_seqlens_k);
    let vec = shape.vec();
    let mut values = shape.values(planning, [&call.q, &line_of(call.k), &line_of(call.v)], call.lse)?;
    values.operand(Name::out, [Name::stride_ob, Name::stride_om, Name::stride_oh], &call.out, vec)?;
    set!(values.pointers:
        partial = partial, partial_lse = partial_lse, cu_seqlens_k = options.appended_starts, seqused_k = call.lengths,
        block_table = table, q_descale = descales[0], k_descale = descales[1], v_descale = descales[2]
    );
    set!(values.floats: page_inverse = (unit as f64 / page_size as f64) as f32);
    set!(values.sizes:
        stride_tb = table_stride, page_size = page_size, page_shift = unit.ilog2() as usize, nheads_k = shape.heads_k,
        seqlen_k = length, seqlen_new = options.appended, capacity = capacity, head_dim_v = shape.head_dim_v / vec,
        chunk = options.chunk, lse_rows = elements, m_blocks = blocks_m, num_splits = num_splits
    )?;
    set!(values.ints: flags = bits);
    steps.push(Launch::filled(kernels, kernel, line(programs * num_splits)?, &values)?);
    if num_splits > 1 {
        steps.push(join(call, kernels, partial, partial_lse, num_splits)?);
    }
    Ok(steps)
}

/// The launch that joins the parts.
fn join(call: &Forward, kernels: &dyn Catalogue, partial: u64, partial_lse: u64, num_splits: usize) -> Result<Step> {
    let shape = &call.shape;
    let (planning, elements, dim) = (kernels.planning(), shape.lse_elements(), shape.head_dim_v);
    let costs = &planning.split_kv;
    let kind = if num_splits > costs.many_splits && elements <= costs.few_rows { "wide" } else { "plain" };
    let kernel = planning.kernel("combine", shape.dtype.name(), dim, kind)?;
    kernels.tile(&kernel)?;
    let (lse_b, lse_h) = shape.lse_strides();
    let Operand { batch, row, head, .. } = call.out;
    let mut values = Values::new();
    set!(values.pointers: partial = partial, partial_lse = partial_lse, out = call.out.address, lse = call.lse);
    set!(values.sizes:
        stride_ps = elements * dim, stride_pb = lse_b * dim, stride_pm = dim, stride_ph = lse_h * dim,
        stride_rs = elements, stride_rb = lse_b, stride_rm = 1, stride_rh = lse_h,
        stride_ob = if shape.is_packed() { 0 } else { batch }, stride_om = row, stride_oh = head, stride_lb = lse_b,
        stride_lm = 1, stride_lh = lse_h, nheads = shape.heads,
        seqlen_q = if shape.is_packed() { shape.total_q } else { shape.seqlen_q }, head_dim = dim,
        num_splits = num_splits
    )?;
    let grid = [line(elements)?[0], dim.div_ceil(planning.columns("combine")?) as u32, 1];
    Launch::filled(kernels, kernel, grid, &values)
}
