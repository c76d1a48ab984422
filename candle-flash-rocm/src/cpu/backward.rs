//! The backward kernels: all gradients by heads of keys where these keep every thread busy, else dq by blocks of queries,
//! and dk and dv by blocks of keys, which computes the scores twice. Each sum has a fixed order. Each function fails if
//! the host has no memory.
//!
//! With `p = exp(s - lse)` and `delta = rowsum(dout * out)`: `dv = p^T dout`, `ds = p * (dout v^T - delta)`,
//! `dq = scale * ds k`, `dk = scale * ds^T q`.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::call::{Call, Row, Rows, Sequence};
use super::element::{Element, Widened};
use super::forward::{blocks, dispatched, read_turned};
use super::product::{add_product, exp, scale, Left, LANES};
use super::{SCRATCH, TASKS};
use crate::memory::{collect, room, zeros, Result};

/// Keys of a tile, and queries of a tile of dk and dv.
const BLOCK_N: usize = 64;
const BLOCK_M: usize = 64;

/// What both backward kernels read.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub q: &'a dyn Widened,
    pub k: &'a dyn Widened,
    pub v: &'a dyn Widened,
    pub dout: &'a dyn Widened,
    /// `(rows_q, heads)`, of [`super::forward()`].
    pub lse: &'a [f32],
    /// `(rows_q, heads)`, of [`row_sums`].
    pub delta: &'a [f32],
}

/// `rowsum(dout * out)` as `(rows_q, heads)`; 0 for rows outside of every sequence.
pub(crate) fn row_sums(call: &Call, out: &dyn Widened, dout: &dyn Widened) -> Result<Vec<f32>> {
    let mut sums = zeros(call.rows_q * call.heads, "the row sums of dout * out")?;
    let (mut left, mut right) = (zeros(call.dim, SCRATCH)?, zeros(call.dim, SCRATCH)?);
    for sequence in &call.sequences {
        for query in 0..sequence.q.len() {
            for head in 0..call.heads {
                out.read(sequence.batch, sequence.q.start + query, head, &mut left);
                dout.read(sequence.batch, sequence.q.start + query, head, &mut right);
                let sum = left.iter().zip(&right).map(|(a, b)| a * b).sum();
                sums[call.out_row(sequence, query) * call.heads + head] = sum;
            }
        }
    }
    Ok(sums)
}

/// The gradient of q into `dq (rows_q, heads, dim)`, which is zero where no sequence has a row.
pub(crate) fn gradient_of_queries<T: Element>(call: &Call, inputs: Inputs<'_>, dq: &mut [T]) -> Result<()> {
    if dq.is_empty() {
        return Ok(());
    }
    let targets = dq.chunks_mut(call.dim).map(Some);
    let mut rows: Vec<Option<&mut [T]>> = collect(targets.len(), targets, TASKS)?;
    let mut tasks = room(call.sequences.iter().map(|sequence| blocks(call, sequence).count()).sum(), TASKS)?;
    for sequence in &call.sequences {
        for (heads, queries) in blocks(call, sequence) {
            let tile = Rows::new(call, sequence, heads, &queries)?;
            let place = |row: &Row| call.out_row(sequence, row.query) * call.heads + row.head;
            let targets = tile.each.iter().filter_map(|row| rows[place(row)].take());
            let targets: Vec<&mut [T]> = collect(tile.len(), targets, TASKS)?;
            tasks.push((sequence, tile, targets));
        }
    }
    tasks.into_par_iter().try_for_each(|(sequence, rows, targets)| {
        let sums = Arch::new().dispatch(QueryKernel { call, inputs, sequence, rows })?;
        for (line, target) in sums.chunks_exact(call.columns()).zip(targets) {
            T::narrow(&line[..call.dim], target);
        }
        Ok(())
    })
}

/// The gradients of k and v into `dk` and `dv (rows_k, heads_k, dim)`, which are zero where no sequence has a row.
pub(crate) fn gradients_of_keys<T: Element>(call: &Call, inputs: Inputs<'_>, dk: &mut [T], dv: &mut [T]) -> Result<()> {
    if dk.is_empty() {
        return Ok(());
    }
    let targets = dk.chunks_mut(call.dim).zip(dv.chunks_mut(call.dim)).map(Some);
    let mut rows: Vec<Option<(&mut [T], &mut [T])>> = collect(targets.len(), targets, TASKS)?;
    let blocks = call.sequences.iter().map(|sequence| sequence.k.len().div_ceil(BLOCK_N)).sum::<usize>();
    let mut tasks = room(blocks * call.heads_k, TASKS)?;
    for sequence in &call.sequences {
        for head in 0..call.heads_k {
            for start in (0..sequence.k.len()).step_by(BLOCK_N) {
                let keys = start..(start + BLOCK_N).min(sequence.k.len());
                let place = |key| call.key_row(sequence, key) * call.heads_k + head;
                let targets = collect(keys.len(), keys.clone().filter_map(|key| rows[place(key)].take()), TASKS)?;
                tasks.push((sequence, head, keys, targets));
            }
        }
    }
    tasks.into_par_iter().try_for_each(|(sequence, head, keys, targets)| {
        let [dk, dv] = Arch::new().dispatch(KeyKernel { call, inputs, sequence, head, keys })?;
        let lines = dk.chunks_exact(call.columns()).zip(dv.chunks_exact(call.columns()));
        for ((dk, dv), (to_k, to_v)) in lines.zip(targets) {
            T::narrow(&dk[..call.dim], to_k);
            T::narrow(&dv[..call.dim], to_v);
        }
        Ok(())
    })
}

/// The gradients of q, k and v, as of [`gradient_of_queries`] and [`gradients_of_keys`], where the heads of keys keep every
/// thread busy: they go up in the threads, or each thread has two. False, and nothing done, where there are fewer.
pub(crate) fn gradients<T: Element>(call: &Call, inputs: Inputs<'_>, [dq, dk, dv]: [&mut [T]; 3]) -> Result<bool> {
    let (heads, threads) = (call.sequences.len() * call.heads_k, rayon::current_num_threads());
    if dk.is_empty() || (heads < 2 * threads && heads % threads != 0) {
        return Ok(false);
    }
    let targets = dq.chunks_mut(call.dim).map(Some);
    let mut queries: Vec<Option<&mut [T]>> = collect(targets.len(), targets, TASKS)?;
    let targets = dk.chunks_mut(call.dim).zip(dv.chunks_mut(call.dim)).map(Some);
    let mut keys: Vec<Option<(&mut [T], &mut [T])>> = collect(targets.len(), targets, TASKS)?;
    let mut tasks = room(heads, TASKS)?;
    for sequence in &call.sequences {
        for head in 0..call.heads_k {
            let place = |query| call.out_row(sequence, query) * call.heads;
            let heads = head * call.group()..(head + 1) * call.group();
            let targets = heads
                .flat_map(|head| (0..sequence.q.len()).map(move |query| (head, query)))
                .filter_map(|(head, query)| queries[place(query) + head].take());
            let of_queries = collect(call.group() * sequence.q.len(), targets, TASKS)?;
            let place = |key| call.key_row(sequence, key) * call.heads_k + head;
            let targets = (0..sequence.k.len()).filter_map(|key| keys[place(key)].take());
            let of_keys = collect(sequence.k.len(), targets, TASKS)?;
            tasks.push((sequence, head, of_queries, of_keys));
        }
    }
    tasks.into_par_iter().try_for_each(|(sequence, head, of_queries, of_keys)| {
        let mut of_keys = of_keys.into_iter();
        let mut put = |dk: &[f32], dv: &[f32]| {
            let Some((to_k, to_v)) = of_keys.next() else { return };
            T::narrow(&dk[..call.dim], to_k);
            T::narrow(&dv[..call.dim], to_v);
        };
        let tiles = Arch::new().dispatch(HeadKernel { call, inputs, sequence, head, put: &mut put })?;
        let lines = tiles.iter().flat_map(|tile| tile.dq.chunks_exact(call.columns()));
        for (line, target) in lines.zip(of_queries) {
            T::narrow(&line[..call.dim], target);
        }
        Ok(())
    })?;
    Ok(true)
}

/// Logarithms of the sums, and delta, of rows.
struct Statistics {
    lse: Vec<f32>,
    delta: Vec<f32>,
}

impl Statistics {
    fn new(call: &Call, inputs: &Inputs<'_>, sequence: &Sequence, rows: &Rows, width: usize) -> Result<Self> {
        let place = |row: &Row| call.out_row(sequence, row.query) * call.heads + row.head;
        let rest = width - rows.len();
        let lse = rows.each.iter().map(|row| inputs.lse[place(row)]).chain(std::iter::repeat_n(f32::INFINITY, rest));
        let delta = rows.each.iter().map(|row| inputs.delta[place(row)]).chain(std::iter::repeat_n(0.0, rest));
        Ok(Self { lse: collect(width, lse, SCRATCH)?, delta: collect(width, delta, SCRATCH)? })
    }
}

/// Tiles that turn scores into their gradients, of at most so many rows.
struct Tiles {
    scores: Vec<f32>,  // [BLOCK_N, width]
    weights: Vec<f32>, // [BLOCK_N, width]
    capped: Vec<f32>,  // [BLOCK_N, width], used with softcap alone
}

impl Tiles {
    fn new(call: &Call, width: usize) -> Result<Self> {
        let tile = || zeros(BLOCK_N * width, SCRATCH);
        let capped = if call.softcap > 0.0 { tile()? } else { Vec::new() };
        Ok(Self { scores: tile()?, weights: tile()?, capped })
    }

    /// From tiles of k and v, and q and dout turned, to p in `weights` and ds in `scores`.
    #[inline(always)]
    fn compute<const FMA: bool>(
        &mut self,
        call: &Call,
        sequence: &Sequence,
        rows: &Rows,
        keys: &Range<usize>,
        [k, v, q, dout]: [&[f32]; 4],
        statistics: &Statistics,
    ) {
        let (width, columns) = (statistics.lse.len(), call.columns());
        let size = (keys.len(), width, call.dim);
        let used = keys.len() * width;
        let scores = &mut self.scores[..used];
        let weights = &mut self.weights[..used];
        weights.fill(0.0);
        add_product::<FMA>(weights, Left::Rows(k, columns), q, size);
        let capped = self.capped.get_mut(..used);
        rows.transform(call, sequence, keys, weights, width, capped);
        for line in weights.chunks_exact_mut(width) {
            for (score, &lse) in line.iter_mut().zip(&statistics.lse) {
                *score = if lse == f32::INFINITY { 0.0 } else { exp(*score - lse) };
            }
        }
        scores.fill(0.0);
        add_product::<FMA>(scores, Left::Rows(v, columns), dout, size);
        for (line, weights) in scores.chunks_exact_mut(width).zip(weights.chunks_exact(width)) {
            for ((score, &p), &delta) in line.iter_mut().zip(weights).zip(&statistics.delta) {
                *score = p * (*score - delta);
            }
        }
        for (score, &slope) in scores.iter_mut().zip(&self.capped) {
            *score *= slope;
        }
    }
}

/// Gives rows of dq, [`Call::columns`] apart.
struct QueryKernel<'a> {
    call: &'a Call,
    inputs: Inputs<'a>,
    sequence: &'a Sequence,
    rows: Rows,
}

dispatched!(QueryKernel -> Vec<f32>);

impl QueryKernel<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) -> Result<Vec<f32>> {
        let Self { call, inputs, sequence, rows } = self;
        let (dim, columns, count) = (call.dim, call.columns(), rows.len());
        let width = count.next_multiple_of(LANES);
        let head_k = rows.each[0].head / call.group();
        let mut q = zeros(dim * width, SCRATCH)?;
        let mut dout = zeros(dim * width, SCRATCH)?;
        read_turned(call, inputs.q, sequence, &rows, width, &mut q)?;
        read_turned(call, inputs.dout, sequence, &rows, width, &mut dout)?;
        let mut k = zeros(BLOCK_N * columns, SCRATCH)?;
        let mut v = zeros(BLOCK_N * columns, SCRATCH)?;
        let mut sums = zeros(count * columns, SCRATCH)?;
        let statistics = Statistics::new(call, &inputs, sequence, &rows, width)?;
        let mut tiles = Tiles::new(call, width)?;
        let all = rows.keys(sequence);
        for start in all.clone().step_by(BLOCK_N) {
            let keys = start..(start + BLOCK_N).min(all.end);
            call.read_keys(inputs.k, sequence, keys.clone(), head_k, &mut k);
            call.read_keys(inputs.v, sequence, keys.clone(), head_k, &mut v);
            tiles.compute::<FMA>(call, sequence, &rows, &keys, [&k, &v, &q, &dout], &statistics);
            add_product::<FMA>(&mut sums, Left::Columns(&tiles.scores, width), &k, (count, columns, keys.len()));
        }
        scale(&mut sums, call.scale);
        Ok(sums)
    }
}

/// Yields rows of dk and dv, [`Call::columns`] apart.
struct KeyKernel<'a> {
    call: &'a Call,
    inputs: Inputs<'a>,
    sequence: &'a Sequence,
    head: usize,
    keys: Range<usize>,
}

dispatched!(KeyKernel -> [Vec<f32>; 2]);

impl KeyKernel<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) -> Result<[Vec<f32>; 2]> {
        let Self { call, inputs, sequence, head, keys } = self;
        let (dim, columns, count) = (call.dim, call.columns(), keys.len());
        let mut k = zeros(BLOCK_N * columns, SCRATCH)?;
        let mut v = zeros(BLOCK_N * columns, SCRATCH)?;
        call.read_keys(inputs.k, sequence, keys.clone(), head, &mut k);
        call.read_keys(inputs.v, sequence, keys.clone(), head, &mut v);
        let mut dk = zeros(count * columns, SCRATCH)?;
        let mut dv = zeros(count * columns, SCRATCH)?;
        let mut tiles = Tiles::new(call, BLOCK_M)?;
        let group = call.group();
        for head in head * group..(head + 1) * group {
            for start in (0..sequence.q.len()).step_by(BLOCK_M) {
                let queries = start..(start + BLOCK_M).min(sequence.q.len());
                let rows = Rows::new(call, sequence, head..head + 1, &queries)?;
                let seen = rows.keys(sequence);
                if seen.end <= keys.start || keys.end <= seen.start {
                    continue;
                }
                let width = rows.len().next_multiple_of(LANES);
                let mut turned_q = zeros(dim * width, SCRATCH)?;
                let mut turned_dout = zeros(dim * width, SCRATCH)?;
                let q = rows_and_turned(call, inputs.q, sequence, &rows, width, &mut turned_q)?;
                let dout = rows_and_turned(call, inputs.dout, sequence, &rows, width, &mut turned_dout)?;
                let statistics = Statistics::new(call, &inputs, sequence, &rows, width)?;
                let factors = [k.as_slice(), &v, &turned_q, &turned_dout];
                tiles.compute::<FMA>(call, sequence, &rows, &keys, factors, &statistics);
                let size = (count, columns, rows.len());
                add_product::<FMA>(&mut dv, Left::Rows(&tiles.weights, width), &dout, size);
                add_product::<FMA>(&mut dk, Left::Rows(&tiles.scores, width), &q, size);
            }
        }
        scale(&mut dk, call.scale);
        Ok([dk, dv])
    }
}

/// A head of keys of a sequence, and the heads of queries that share it. Gives rows of dq, [`Call::columns`] apart, head
/// by head.
struct HeadKernel<'a> {
    call: &'a Call,
    inputs: Inputs<'a>,
    sequence: &'a Sequence,
    head: usize,
    /// Called with the rows of dk and dv of each key in turn.
    put: &'a mut dyn FnMut(&[f32], &[f32]),
}

/// Queries of a head and the values computed from them, kept during the loop over keys.
struct QueryTile {
    rows: Rows,
    seen: Range<usize>,
    q: Vec<f32>,
    dout: Vec<f32>,
    turned_q: Vec<f32>,
    turned_dout: Vec<f32>,
    statistics: Statistics,
    dq: Vec<f32>,
}

impl QueryTile {
    fn new(call: &Call, inputs: &Inputs<'_>, sequence: &Sequence, head: usize, start: usize) -> Result<Self> {
        let queries = start..(start + BLOCK_M).min(sequence.q.len());
        let rows = Rows::new(call, sequence, head..head + 1, &queries)?;
        let width = rows.len().next_multiple_of(LANES);
        let mut turned_q = zeros(call.dim * width, SCRATCH)?;
        let mut turned_dout = zeros(call.dim * width, SCRATCH)?;
        let q = rows_and_turned(call, inputs.q, sequence, &rows, width, &mut turned_q)?;
        let dout = rows_and_turned(call, inputs.dout, sequence, &rows, width, &mut turned_dout)?;
        let statistics = Statistics::new(call, inputs, sequence, &rows, width)?;
        let dq = zeros(rows.len() * call.columns(), SCRATCH)?;
        Ok(Self { seen: rows.keys(sequence), rows, q, dout, turned_q, turned_dout, statistics, dq })
    }
}

dispatched!(HeadKernel -> Vec<QueryTile>);

impl HeadKernel<'_> {
    #[inline(always)]
    fn run<const FMA: bool>(self) -> Result<Vec<QueryTile>> {
        let Self { call, inputs, sequence, head, put } = self;
        let columns = call.columns();
        let starts = (0..sequence.q.len()).step_by(BLOCK_M);
        let mut queries = room(starts.len() * call.group(), SCRATCH)?;
        for head in head * call.group()..(head + 1) * call.group() {
            for start in starts.clone() {
                queries.push(QueryTile::new(call, &inputs, sequence, head, start)?);
            }
        }
        let mut tiles = Tiles::new(call, BLOCK_M)?;
        let tile = || zeros::<f32>(BLOCK_N * columns, SCRATCH);
        let [mut k, mut v, mut dk, mut dv] = [tile()?, tile()?, tile()?, tile()?];
        for start in (0..sequence.k.len()).step_by(BLOCK_N) {
            let keys = start..(start + BLOCK_N).min(sequence.k.len());
            call.read_keys(inputs.k, sequence, keys.clone(), head, &mut k);
            call.read_keys(inputs.v, sequence, keys.clone(), head, &mut v);
            dk.fill(0.0);
            dv.fill(0.0);
            for tile in &mut queries {
                if tile.seen.end <= keys.start || keys.end <= tile.seen.start {
                    continue;
                }
                let factors = [k.as_slice(), &v, &tile.turned_q, &tile.turned_dout];
                tiles.compute::<FMA>(call, sequence, &tile.rows, &keys, factors, &tile.statistics);
                let (width, rows) = (tile.statistics.lse.len(), tile.rows.len());
                let size = (keys.len(), columns, rows);
                add_product::<FMA>(&mut dv, Left::Rows(&tiles.weights, width), &tile.dout, size);
                add_product::<FMA>(&mut dk, Left::Rows(&tiles.scores, width), &tile.q, size);
                let size = (rows, columns, keys.len());
                add_product::<FMA>(&mut tile.dq, Left::Columns(&tiles.scores, width), &k, size);
            }
            for (dk, dv) in dk.chunks_exact_mut(columns).zip(dv.chunks_exact(columns)).take(keys.len()) {
                scale(dk, call.scale);
                put(dk, dv);
            }
        }
        for tile in &mut queries {
            scale(&mut tile.dq, call.scale);
        }
        Ok(queries)
    }
}

/// The rows of a tile, [`Call::columns`] apart, and the same tile transposed as by [`read_turned`].
fn rows_and_turned(
    call: &Call,
    from: &dyn Widened,
    sequence: &Sequence,
    rows: &Rows,
    width: usize,
    turned: &mut [f32],
) -> Result<Vec<f32>> {
    let columns = call.columns();
    let mut plain = zeros(rows.len() * columns, SCRATCH)?;
    for (column, (line, row)) in plain.chunks_exact_mut(columns).zip(&rows.each).enumerate() {
        from.read(sequence.batch, sequence.q.start + row.query, row.head, &mut line[..call.dim]);
        for (d, &value) in line[..call.dim].iter().enumerate() {
            turned[d * width + column] = value;
        }
    }
    Ok(plain)
}
