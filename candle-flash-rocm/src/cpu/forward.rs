//! The forward kernel: online softmax over tiles of keys, so that memory grows with the sequence alone.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::call::{Call, Rows, Sequence};
use super::element::{Element, Widened};
use super::product::{add_product, exp, scale, Left, LANES};

/// Query rows and keys of a tile.
const BLOCK_M: usize = 64;
const BLOCK_N: usize = 64;

/// The work of one thread: query heads of one key head, a range of queries, and where their result
/// rows are stored.
struct Task<'a, T> {
    sequence: &'a Sequence,
    heads: Range<usize>,
    queries: Range<usize>,
    out: Vec<&'a mut [T]>,
}

/// Attention of q over k and v into `out (rows_q, heads, dim)`, which is zero where no sequence has a row.
///
/// Returns the logarithm of each row's sum of exponentials `(rows_q, heads)`, +inf for a row that sees no key.
pub(crate) fn forward<T: Element>(call: &Call, inputs: [&dyn Widened; 3], out: &mut [T]) -> Vec<f32> {
    let mut lse = vec![f32::INFINITY; call.rows_q * call.heads];
    if out.is_empty() {
        return lse;
    }
    let mut rows: Vec<Option<&mut [T]>> = out.chunks_mut(call.dim).map(Some).collect();
    let mut tasks = Vec::new();
    for sequence in &call.sequences {
        for (heads, queries) in blocks(call, sequence) {
            let out = heads
                .clone()
                .flat_map(|head| queries.clone().map(move |query| (head, query)))
                .filter_map(|(head, query)| rows[call.out_row(sequence, query) * call.heads + head].take())
                .collect();
            tasks.push(Task { sequence, heads, queries, out });
        }
    }
    let found: Vec<(Task<'_, T>, Vec<f32>)> = tasks
        .into_par_iter()
        .map(|mut task| {
            let Task { sequence, heads, queries, .. } = &task;
            let rows = Rows::new(call, sequence, heads.clone(), queries);
            let (lines, sums) = Arch::new().dispatch(Kernel { call, inputs, sequence, rows });
            for (line, target) in lines.chunks_exact(call.columns()).zip(&mut task.out) {
                T::narrow(&line[..call.dim], target);
            }
            (task, sums)
        })
        .collect();
    for (task, sums) in found {
        let places = task.heads.flat_map(|head| task.queries.clone().map(move |query| (head, query)));
        for ((head, query), sum) in places.zip(sums) {
            lse[call.out_row(task.sequence, query) * call.heads + head] = sum;
        }
    }
    lse
}

/// A sequence's heads and queries in blocks of at most [`BLOCK_M`] rows of one key head.
///
/// Heads that share keys share a block where a head has few queries, so that a decoding step reads each key once.
pub(super) fn blocks(call: &Call, sequence: &Sequence) -> Vec<(Range<usize>, Range<usize>)> {
    let queries = sequence.q.len();
    if queries == 0 {
        return Vec::new();
    }
    let group = call.group();
    let together = (BLOCK_M / queries).clamp(1, group);
    let mut found = Vec::new();
    for head_k in 0..call.heads_k {
        for first in (0..group).step_by(together) {
            let heads = head_k * group + first..head_k * group + (first + together).min(group);
            for start in (0..queries).step_by(BLOCK_M) {
                found.push((heads.clone(), start..(start + BLOCK_M).min(queries)));
            }
        }
    }
    found
}

/// Reads the rows of a tile, turned: element `(d, row)` is at `d * width + row`.
pub(super) fn read_turned(
    call: &Call,
    from: &dyn Widened,
    sequence: &Sequence,
    rows: &Rows,
    width: usize,
    to: &mut [f32],
) {
    let mut line = vec![0.0; call.dim];
    for (column, row) in rows.each.iter().enumerate() {
        from.read(sequence.batch, sequence.q.start + row.query, row.head, &mut line);
        for (d, &value) in line.iter().enumerate() {
            to[d * width + column] = value;
        }
    }
}

/// Gives rows of the result, [`Call::columns`] apart, and the logarithms of their sums.
struct Kernel<'a> {
    call: &'a Call,
    /// q, k and v.
    inputs: [&'a dyn Widened; 3],
    sequence: &'a Sequence,
    rows: Rows,
}

impl WithSimd for Kernel<'_> {
    type Output = (Vec<f32>, Vec<f32>);

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

impl Kernel<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) -> (Vec<f32>, Vec<f32>) {
        let Self { call, inputs: [q, k, v], sequence, rows } = self;
        let (dim, columns) = (call.dim, call.columns());
        let width = rows.len().next_multiple_of(LANES);
        let head_k = rows.each[0].head / call.group();

        let mut turned = vec![0.0; dim * width]; // [dim, width]
        read_turned(call, q, sequence, &rows, width, &mut turned);
        let mut tile = vec![0.0; BLOCK_N * columns]; // [BLOCK_N, columns]
        let mut scores = vec![0.0; BLOCK_N * width]; // [BLOCK_N, width]
        let mut sums = vec![0.0; rows.len() * columns]; // [rows, columns]
        let mut most = vec![f32::NEG_INFINITY; width];
        let mut total = vec![0.0; width];
        let mut shrink = vec![0.0; width];

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
        let logarithms = most.iter().zip(&total).map(natural).take(rows.len()).collect();
        (sums, logarithms)
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
