//! When the keys of a forward are shared out among programs, and the plan of such a call: attend in parts, join them.

use super::plan::{line, Catalogue, Device, Fill, Launch, Memory, Step};
use super::refuse::refuse;
use super::signature::{Name, Values};
use super::{flags, variant, Dtype, Forward, Operand, Shape};
use crate::error::{argument, Error, Result};

/// Rows of queries that share a key head, which `decode` takes at once, and `extend`.
const DECODE_ROWS: usize = 16;
const EXTEND_ROWS: usize = 64;
/// Below this many keys, split-KV is not considered, because kernel time is negligible.
const LEAST_KEYS: usize = 512;

/// Times of 64 keys by the head dim up to which they hold, in microseconds of one multiprocessor, measured on an H200:
/// the forward kernel with one tile of queries, of each tile where it has several, and of keys that its tiles share.
/// 512 was not measured so: its forward's tile has 64 rows, and `extend` takes at least as long.
const FORWARD: [(usize, f64, f64, f64); 6] = [
    (64, 0.59, 0.36, 0.5),
    (96, 1.61, 1.14, 1.37),
    (128, 0.82, 0.62, 0.93),
    (192, 1.67, 1.89, 2.49),
    (256, 2.04, 2.55, 2.95),
    (512, 5.5, 5.5, 5.9),
];
/// The same of `decode` and of `extend`.
const PARTS: [(usize, f64, f64); 4] = [(64, 0.43, 0.5), (128, 0.93, 0.84), (256, 1.8, 2.11), (512, 3.6, 6.5)];
/// Fixed time of a call, and the time to combine a row of 128 columns, in microseconds.
const START_FORWARD: f64 = 4.0;
const START_DECODE: f64 = 8.0;
const START_EXTEND: f64 = 10.0;
const JOIN: f64 = 0.0005;

/// Programs that share a multiprocessor with their loads in flight, and the most parts of the keys.
const RESIDENT: usize = 2;
const MAX_SPLITS: usize = 256;
/// Costs in time of one block of keys: starting a program, launching the join, joining a part of a row.
const START: f64 = 2.0;
const COMBINE: f64 = 4.0;
const PART: f64 = 0.0015;

/// The page lookup works in units of this many rows, or else of one row, and there are fewer units
/// than this.
const PAGE_UNIT: usize = 16;
const MAX_PAGE_UNITS: usize = 1 << 22;
/// The page size for a cache without pages: each cache line is one page without end.
const ENDLESS: usize = 1 << 30;
/// More parts than this of so few rows are joined many at a time.
const MANY_PARTS: usize = 16;
const FEW_ROWS: usize = 256;

/// A forward as a call over a cache of keys and values.
pub(super) struct Cache<'a> {
    call: &'a Forward,
}

/// Whether only kernels of a cache serve a call: they honour more options, and take every pair of head dims.
pub(super) fn is_needed(call: &Forward) -> bool {
    let shape = &call.shape;
    shape.options.needs_cache() || !variant::serves_pair(shape.head_dim, shape.head_dim_v)
}

impl<'a> Cache<'a> {
    /// The call over a cache where that is faster than the forward kernel, whose tiles have `block_m` rows.
    pub fn of(call: &'a Forward, block_m: usize, device: Device) -> Option<Self> {
        let shape = &call.shape;
        if shape.options.of_whole_sequences().iter().any(|(_, is_used)| *is_used) {
            return None;
        }
        if shape.is_packed() && call.lengths == 0 {
            return None;
        }
        if call.pages.is_some_and(|pages| pages.columns * pages.size >= MAX_PAGE_UNITS) {
            return None;
        }
        is_profitable(shape, block_m, device).then_some(Self { call })
    }

    /// The call over a cache where no other kernel serves it.
    ///
    /// # Errors
    ///
    /// If no kernel serves the call. The error names the option that no kernel has.
    pub fn needed(call: &'a Forward) -> Result<Self> {
        let shape = &call.shape;
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
            let unit = if pages.size.is_multiple_of(PAGE_UNIT) { PAGE_UNIT } else { 1 };
            let room = pages.columns.saturating_mul(pages.size);
            if room / unit >= MAX_PAGE_UNITS {
                let limit = format!("less than {} with {} rows a page", MAX_PAGE_UNITS * unit, pages.size);
                return argument("block_table", format!("room for {room} keys a sequence"), limit);
            }
        }
        Ok(Self { call })
    }
}

/// Whether one tile of `decode` can hold all queries that share a key head.
pub(super) fn is_few(shape: &Shape) -> bool {
    shape.seqlen_q.saturating_mul(shape.heads) <= DECODE_ROWS.saturating_mul(shape.heads_k)
}

/// Whether split-KV saves more GPU time than it costs the host.
pub(super) fn is_profitable(shape: &Shape, block_m: usize, device: Device) -> bool {
    if shape.seqlen_k < LEAST_KEYS || block_m == 0 {
        return false;
    }
    let mut seen = shape.seqlen_k;
    if let (Some(left), Some(right)) = (shape.window_left, shape.window_right) {
        seen = seen.min(left.saturating_add(shape.seqlen_q).saturating_add(right));
    }
    let dim = shape.head_dim.max(shape.head_dim_v);
    let (Some(&(_, alone, tile, read)), Some(&(_, decode, extend))) =
        (FORWARD.iter().find(|row| dim <= row.0), PARTS.iter().find(|row| dim <= row.0))
    else {
        return false;
    };
    let units = device.compute_units as f64;
    let blocks = seen.div_ceil(64);
    let shared = shape.seqlen_q.saturating_mul(shape.group());
    let (rows, block, start) =
        if shared <= DECODE_ROWS { (DECODE_ROWS, decode, START_DECODE) } else { (EXTEND_ROWS, extend, START_EXTEND) };
    // In f64, where the product of sizes of a caller cannot overflow.
    let product = |sizes: &[usize]| sizes.iter().map(|&size| size as f64).product::<f64>();
    let programs = product(&[shared.div_ceil(rows), shape.heads_k, shape.batch]);
    let mut parts = start + block * programs * blocks as f64 / units;
    if programs < (RESIDENT * device.compute_units) as f64 {
        parts += JOIN * product(&[shape.batch, shape.seqlen_q, shape.heads, dim]) / 128.0;
    }
    let tiles = product(&[shape.seqlen_q.div_ceil(block_m), shape.heads, shape.batch]);
    let busy = (tile * tiles).max(read * shape.heads_k as f64 * shape.batch as f64) / units;
    let whole = START_FORWARD + blocks as f64 * alone.max(busy);
    1.05 * parts + shape.options.host_cost < whole
}

/// The number of splits for `blocks` blocks of keys, where `programs` programs of `rows` rows share the GPU.
///
/// The least of an estimate: waves of programs, each as long as its blocks, and the work of the join.
fn splits(programs: usize, blocks: usize, units: usize, rows: usize) -> usize {
    let slots = units.max(1) * RESIDENT;
    let (mut best, mut least) = (1, f64::INFINITY);
    for count in 1..=blocks.clamp(1, MAX_SPLITS) {
        let waves = programs.saturating_mul(count).div_ceil(slots) as f64;
        let mut time = waves * (blocks.div_ceil(count) as f64 + START);
        if count > 1 {
            time += COMBINE + PART * rows as f64 * count as f64;
        }
        if time < 0.97 * least {
            (best, least) = (count, time);
        }
    }
    best
}

/// Names of FP8 formats. A store has kernels for the format of its GPU.
const FP8: [&str; 2] = ["fp8e4nv", "fp8e4b8"];

/// The kernel for this number of rows per key head, and the rows and keys of its tile.
fn kernel_of(call: &Forward, rows: usize, kernels: &dyn Catalogue) -> Result<(String, usize, usize)> {
    let (shape, options) = (&call.shape, &call.shape.options);
    let kind = match (shape.softcap == 0.0 && shape.alibi_slopes == 0, options.sinks) {
        (false, _) => "any",
        (true, 0) => "plain",
        (true, _) => "sink",
    };
    let dim = shape.head_dim.max(shape.head_dim_v);
    let named = |operation: &str, element| variant::name_of(operation, element, dim, kind);
    let name = |operation: &str| {
        if !options.is_fp8 {
            return named(operation, shape.dtype.name());
        }
        for element in FP8 {
            let name = named(operation, element)?;
            if kernels.has(&name) {
                return Ok(name);
            }
        }
        Err(Error::Unsupported(format!("k: stored as fp8, and this store has no kernel {operation} for it")))
    };
    let mut operation = "decode";
    let mut kernel = name(operation)?;
    let mut tile = kernels.tile(&kernel)?;
    if rows > tile.block_m {
        operation = "extend";
        kernel = name(operation)?;
        tile = kernels.tile(&kernel)?;
    }
    let page_size = call.pages.map_or(ENDLESS, |pages| pages.size);
    let is_padded = call.pages.is_some() && options.leftpad != 0;
    if is_padded || tile.block_n == 0 || !page_size.is_multiple_of(tile.block_n) {
        kernel = name(&format!("{operation}-paged"))?;
        tile = kernels.tile(&kernel)?;
    }
    Ok((kernel, tile.block_m, tile.block_n))
}

/// Plans a call over a cache.
pub(super) fn plan(
    cache: &Cache<'_>,
    kernels: &dyn Catalogue,
    device: Device,
    memory: &mut dyn Memory,
) -> Result<Vec<Step>> {
    let call = cache.call;
    let (shape, options) = (&call.shape, &call.shape.options);
    let rows = shape.seqlen_q * shape.group();
    let (kernel, block_m, block_n) = kernel_of(call, rows, kernels)?;
    let (page_size, table, table_stride, capacity) = match call.pages {
        Some(pages) => (pages.size, pages.table, pages.stride, pages.columns * pages.size),
        // Each packed sequence is a line that starts at its own row.
        None if shape.is_packed() => (ENDLESS, shape.cu_seqlens_k, 1, shape.total_k),
        None if options.lines != 0 => (ENDLESS, options.lines, 1, shape.seqlen_k),
        None => (ENDLESS, 0, 0, shape.seqlen_k),
    };
    let line_of =
        |operand: Operand| if shape.is_packed() && call.pages.is_none() { operand.as_lines() } else { operand };
    let unit = if page_size.is_multiple_of(PAGE_UNIT) { PAGE_UNIT } else { 1 };
    // Keys of the longest sequence, as far as the host knows, with those that were appended and without them.
    let whole = shape.seqlen_k.min(capacity);
    let length = (shape.seqlen_k - options.appended).min(capacity);
    let (left, right) = shape.window();
    let blocks_m = rows.div_ceil(block_m.max(1));
    let programs = blocks_m * shape.heads_k * shape.batch;
    let seen = whole.min(left as usize + right as usize + shape.seqlen_q);
    let blocks = seen.div_ceil(block_n.max(1));
    let num_splits = match options.num_splits {
        0 => splits(programs, blocks, device.compute_units, block_m),
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
    let mut bits = call.flags() & !flags::CU_SEQLENS_K | shape.score_flags();
    let mut descales = [call.lse; 3]; // only FP8 tensors have scales
    if options.is_fp8 {
        descales = options.descales;
        bits |= flags::DESCALE | flags::QUERY_HAS_16_BITS;
        bits |= if shape.dtype == Dtype::F16 { flags::QUERY_IS_FP16 } else { 0 };
    }
    if table != 0 {
        bits |= flags::BLOCK_TABLE;
    }
    let vec = shape.vec();
    let mut values = shape.values(&call.q, &line_of(call.k), &line_of(call.v), call.lse)?;
    values.operand(Name::out, [Name::stride_ob, Name::stride_om, Name::stride_oh], &call.out, vec)?;
    values.pointers(&[
        (Name::partial, partial),
        (Name::partial_lse, partial_lse),
        (Name::cu_seqlens_k, 0), // of packed new keys, which no call here has
        (Name::seqused_k, call.lengths),
        (Name::block_table, table),
        (Name::q_descale, descales[0]),
        (Name::k_descale, descales[1]),
        (Name::v_descale, descales[2]),
    ]);
    values.floats(&[(Name::page_inverse, (unit as f64 / page_size as f64) as f32)]);
    values.sizes(&[
        (Name::stride_tb, table_stride),
        (Name::page_size, page_size),
        (Name::page_shift, if unit == PAGE_UNIT { 4 } else { 0 }),
        (Name::nheads_k, shape.heads_k),
        (Name::seqlen_k, length),
        (Name::seqlen_new, options.appended),
        (Name::capacity, capacity),
        (Name::head_dim_v, shape.head_dim_v / vec),
        (Name::chunk, options.chunk),
        (Name::lse_rows, elements),
        (Name::m_blocks, blocks_m),
        (Name::num_splits, num_splits),
    ])?;
    values.ints(&[(Name::flags, bits)]);
    steps.push(Launch::filled(kernels, kernel, line(programs * num_splits)?, &values)?);
    if num_splits > 1 {
        steps.push(join(call, kernels, partial, partial_lse, num_splits)?);
    }
    Ok(steps)
}

/// The launch that joins the parts.
fn join(call: &Forward, kernels: &dyn Catalogue, partial: u64, partial_lse: u64, num_splits: usize) -> Result<Step> {
    let shape = &call.shape;
    let elements = shape.lse_elements();
    let dim = shape.head_dim_v;
    let kind = if num_splits > MANY_PARTS && elements <= FEW_ROWS { "wide" } else { "plain" };
    let kernel = variant::name("combine", shape.dtype, dim, kind)?;
    kernels.tile(&kernel)?;
    let (lse_b, lse_h) = shape.lse_strides();
    let Operand { batch, row, head, .. } = call.out;
    let mut values = Values::new();
    values.pointers(&[
        (Name::partial, partial),
        (Name::partial_lse, partial_lse),
        (Name::out, call.out.address),
        (Name::lse, call.lse),
    ]);
    values.sizes(&[
        (Name::stride_ps, elements * dim),
        (Name::stride_pb, lse_b * dim),
        (Name::stride_pm, dim),
        (Name::stride_ph, lse_h * dim),
        (Name::stride_rs, elements),
        (Name::stride_rb, lse_b),
        (Name::stride_rm, 1),
        (Name::stride_rh, lse_h),
        (Name::stride_ob, if shape.is_packed() { 0 } else { batch }),
        (Name::stride_om, row),
        (Name::stride_oh, head),
        (Name::stride_lb, lse_b),
        (Name::stride_lm, 1),
        (Name::stride_lh, lse_h),
        (Name::nheads, shape.heads),
        (Name::seqlen_q, if shape.is_packed() { shape.total_q } else { shape.seqlen_q }),
        (Name::head_dim, dim),
        (Name::num_splits, num_splits),
    ])?;
    let grid = [line(elements)?[0], dim.div_ceil(128) as u32, 1];
    Launch::filled(kernels, kernel, grid, &values)
}
