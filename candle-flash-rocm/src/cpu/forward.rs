//! The forward kernel: online softmax over tiles of keys, so that memory grows with the sequence alone.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::call::{Call, Rows, Sequence};
use super::element::{Element, Widened};
use super::product::{add_product, exp, scale, Left, LANES};
use super::{SCRATCH, TASKS};
use crate::memory::{collect, room, zeros, Result};

/// Query rows and keys of a tile.
const BLOCK_M: usize = 64;
const BLOCK_N: usize = 64;

/// The work of one thread: query heads of one key head, a range of queries, and where their result
/// rows are stored.
struct Task<'a, T> {
    sequence: &'a Sequence,
    heads: Range<usize>,
    queries: Range<usize>,
    out: Vec<Target<'a, T>>,
}

/// A row of a head of the result, and the logarithm of its sum.
type Target<'a, T> = (&'a mut [T], &'a mut f32);

/// Attention of q over k and v into `out (rows_q, heads, dim)`, which is zero where no sequence has a row.
///
/// Returns the logarithm of each row's sum of exponentials `(rows_q, heads)`, +inf for a row that sees no key. Fails if
/// the host has no memory.
pub(crate) fn forward<T: Element>(call: &Call, inputs: [&dyn Widened; 3], out: &mut [T]) -> Result<Vec<f32>> {
    let mut lse: Vec<f32> = zeros(call.rows_q * call.heads, "the logarithms of the softmax sums")?;
    lse.fill(f32::INFINITY);
    if out.is_empty() {
        return Ok(lse);
    }
    let targets = out.chunks_mut(call.dim).zip(&mut lse).map(Some);
    let mut rows: Vec<Option<Target<'_, T>>> = collect(targets.len(), targets, TASKS)?;
    let mut tasks = room(call.sequences.iter().map(|sequence| blocks(call, sequence).count()).sum(), TASKS)?;
    for sequence in &call.sequences {
        for (heads, queries) in blocks(call, sequence) {
            let each = heads.clone().flat_map(|head| queries.clone().map(move |query| (head, query)));
            let targets =
                each.filter_map(|(head, query)| rows[call.out_row(sequence, query) * call.heads + head].take());
            let out = collect(heads.len() * queries.len(), targets, TASKS)?;
            tasks.push(Task { sequence, heads, queries, out });
        }
    }
    tasks.into_par_iter().try_for_each(|task| {
        let Task { sequence, heads, queries, out } = task;
        let rows = Rows::new(call, sequence, heads, &queries)?;
        let (lines, sums) = Arch::new().dispatch(Kernel { call, inputs, sequence, rows })?;
        for ((line, sum), (target, logarithm)) in lines.chunks_exact(call.columns()).zip(sums).zip(out) {
            T::narrow(&line[..call.dim], target);
            *logarithm = sum;
        }
        Ok(())
    })?;
    Ok(lse)
}

/// A sequence's heads and queries in blocks of at most [`BLOCK_M`] rows of one key head.
///
/// Heads that share keys share a block where a head has few queries, so that a decoding step reads each key once.
pub(super) fn blocks(call: &Call, sequence: &Sequence) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let (queries, group) = (sequence.q.len(), call.group());
    let together = (BLOCK_M / queries.max(1)).clamp(1, group);
    let heads = (0..call.heads_k * group).step_by(group).flat_map(move |first| {
        let starts = (first..first + group).step_by(together);
        starts.map(move |start| start..(start + together).min(first + group))
    });
    heads.flat_map(move |heads| {
        let starts = (0..queries).step_by(BLOCK_M);
        starts.map(move |start| (heads.clone(), start..(start + BLOCK_M).min(queries)))
    })
}

/// Reads the rows of a tile, turned: element `(d, row)` is at `d * width + row`.
pub(super) fn read_turned(
    call: &Call,
    from: &dyn Widened,
    sequence: &Sequence,
    rows: &Rows,
    width: usize,
    to: &mut [f32],
) -> Result<()> {
    let mut line = zeros(call.dim, SCRATCH)?;
    for (column, row) in rows.each.iter().enumerate() {
        from.read(sequence.batch, sequence.q.start + row.query, row.head, &mut line);
        for (d, &value) in line.iter().enumerate() {
            to[d * width + column] = value;
        }
    }
    Ok(())
}

/// A kernel that runs with the vector extensions of this machine.
macro_rules! dispatched {
    ($Kernel:ident -> $Output:ty) => {
        impl WithSimd for $Kernel<'_> {
            type Output = Result<$Output>;

            #[inline(always)]
            fn with_simd<S: Simd>(self, _simd: S) -> Self::Output {
                // Every vector extension that `pulp` detects has fused multiplication and addition.
                if S::F32_LANES > 1 {
                    self.run::<true>()
                } else {
                    self.run::<false>()
                }
            }
        }
    };
}
pub(super) use dispatched;

/// Gives rows of the result, [`Call::columns`] apart, and the logarithms of their sums.
struct Kernel<'a> {
    call: &'a Call,
    /// q, k and v.
    inputs: [&'a dyn Widened; 3],
    sequence: &'a Sequence,
    rows: Rows,
}

dispatched!(Kernel -> (Vec<f32>, Vec<f32>));

impl Kernel<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) -> Result<(Vec<f32>, Vec<f32>)> {
        let Self { call, inputs: [q, k, v], sequence, rows } = self;
        let (dim, columns) = (call.dim, call.columns());
        let width = rows.len().next_multiple_of(LANES);
        let head_k = rows.each[0].head / call.group();

        let mut turned = zeros(dim * width, SCRATCH)?; // [dim, width]
        read_turned(call, q, sequence, &rows, width, &mut turned)?;
        let mut tile = zeros(BLOCK_N * columns, SCRATCH)?; // [BLOCK_N, columns]
        let mut scores = zeros(BLOCK_N * width, SCRATCH)?; // [BLOCK_N, width]
        let mut sums = zeros(rows.len() * columns, SCRATCH)?; // [rows, columns]
        let mut most: Vec<f32> = zeros(width, SCRATCH)?;
        most.fill(f32::NEG_INFINITY);
        let mut total = zeros(width, SCRATCH)?;
        let mut shrink = zeros(width, SCRATCH)?;

        let all = rows.keys(sequence);
        for start in all.clone().step_by(BLOCK_N) {
            let keys = start..(start + BLOCK_N).min(all.end);
            let count = keys.len();
            call.read_keys(k, sequence, keys.clone(), head_k, &mut tile);
            let scores = &mut scores[..count * width];
            scores.fill(0.0);
            add_product::<FMA>(scores, Left::Rows(&tile, columns), &turned, (count, width, dim));
            rows.transform(call, sequence, &keys, scores, width, None);
            soften(scores, &mut most, &mut total, &mut shrink);
            for (line, &factor) in sums.chunks_exact_mut(columns).zip(&shrink) {
                if factor < 1.0 {
                    scale(line, factor);
                }
            }
            call.read_keys(v, sequence, keys, head_k, &mut tile);
            add_product::<FMA>(&mut sums, Left::Columns(scores, width), &tile, (rows.len(), columns, count));
        }
        for (line, &sum) in sums.chunks_exact_mut(columns).zip(&total) {
            scale(line, if sum == 0.0 { 0.0 } else { 1.0 / sum });
        }
        let natural = |(&most, &total): (&f32, &f32)| if total == 0.0 { f32::INFINITY } else { most + total.ln() };
        let logarithms = collect(rows.len(), most.iter().zip(&total).map(natural), SCRATCH)?;
        Ok((sums, logarithms))
    }
}

/// One step of the online softmax over scores `[keys, width]`: replaces them by exponentials,
/// updates the maxima `most` and the sums `total`, and sets `shrink`, the factor for earlier sums.
#[inline(always)]
fn soften(scores: &mut [f32], most: &mut [f32], total: &mut [f32], shrink: &mut [f32]) {
    let width = most.len();
    shrink.copy_from_slice(most);
    for line in scores.chunks_exact(width) {
        for (most, &score) in most.iter_mut().zip(line) {
            *most = if score > *most { score } else { *most };
        }
    }
    for ((shrink, &most), total) in shrink.iter_mut().zip(most.iter()).zip(total.iter_mut()) {
        *shrink = if *shrink == f32::NEG_INFINITY { 0.0 } else { exp(*shrink - most) };
        *total *= *shrink;
    }
    for line in scores.chunks_exact_mut(width) {
        for ((score, &most), total) in line.iter_mut().zip(most.iter()).zip(total.iter_mut()) {
            let power = if most == f32::NEG_INFINITY { *score } else { *score - most };
            *score = exp(power);
            *total += *score;
        }
    }
}
