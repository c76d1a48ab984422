//! What a CPU kernel computes: the call's sizes and options, its sequences, and which keys a query sees.

use std::ops::Range;

use super::element::Widened;
use super::SCRATCH;
use crate::memory::{collect, Result};

/// One sequence: where its queries and keys are in their tensors.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    /// Batch entry of a dense tensor; 0 for packed ones.
    pub batch: usize,
    /// First row of the queries in q, and their number.
    pub q: Range<usize>,
    /// First row of the keys in k and v, and their number. Of a paged cache the first is 0.
    pub k: Range<usize>,
    /// Pages of the sequence's keys in a paged cache.
    pub pages: Vec<usize>,
    /// Ranges of positions that see each other regardless of the window.
    pub prefixes: Vec<(i64, i64)>,
}

/// A call of attention with tensors on the CPU.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub heads: usize,
    pub heads_k: usize,
    pub dim: usize,
    pub scale: f32,
    /// 0 for none.
    pub softcap: f32,
    pub window_left: Option<usize>,
    pub window_right: Option<usize>,
    /// A slope for each query head.
    pub slopes: Option<Vec<f32>>,
    pub sequences: Vec<Sequence>,
    /// Rows in a page; 0 without pages.
    pub page_size: usize,
    /// Rows of q in all batch entries.
    pub rows_q: usize,
    /// Rows of q and k in a batch entry; 0 for packed tensors, which have one entry.
    pub entry_q: usize,
    pub entry_k: usize,
}

impl Call {
    /// Query heads that share a key head.
    pub fn group(&self) -> usize {
        self.heads / self.heads_k
    }

    /// Columns of a tile that holds a row of q, k or v.
    pub fn columns(&self) -> usize {
        self.dim.next_multiple_of(super::product::LANES)
    }

    /// Row of a query in the packed result.
    pub fn out_row(&self, sequence: &Sequence, query: usize) -> usize {
        sequence.batch * self.entry_q + sequence.q.start + query
    }

    /// Row of a key in the packed gradients.
    pub fn key_row(&self, sequence: &Sequence, key: usize) -> usize {
        sequence.batch * self.entry_k + sequence.k.start + key
    }

    /// The keys within `0..keys` that the window lets a query at this position see.
    pub fn window(&self, position: i64, keys: usize) -> Range<usize> {
        let keys = keys as i64;
        let wide = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        let low = self.window_left.map_or(0, |left| position.saturating_sub(wide(left)));
        let high = self.window_right.map_or(keys, |right| position.saturating_add(wide(right)).saturating_add(1));
        let (low, high) = (low.clamp(0, keys), high.clamp(0, keys));
        low as usize..(high.max(low)) as usize
    }

    /// Reads keys or values of a sequence into rows of `to`, [`Call::columns`] apart.
    pub fn read_keys(&self, from: &dyn Widened, sequence: &Sequence, keys: Range<usize>, head: usize, to: &mut [f32]) {
        for (row, key) in to.chunks_exact_mut(self.columns()).zip(keys) {
            let (batch, place) = match key.checked_div(self.page_size) {
                Some(page) => (sequence.pages[page], key % self.page_size),
                None => (sequence.batch, sequence.k.start + key),
            };
            from.read(batch, place, head, &mut row[..self.dim]);
        }
    }
}

/// The query of one row of a tile.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub head: usize,
    pub query: usize,
}

/// For each row of a tile, the keys that it sees and its ALiBi slope.
pub(super) struct Rows {
    pub each: Vec<Row>,
    position: Vec<i64>,
    window: Vec<Range<usize>>,
    slope: Vec<f32>,
}

impl Rows {
    /// The rows of a tile. Fails if the host has no memory.
    pub fn new(call: &Call, sequence: &Sequence, heads: Range<usize>, queries: &Range<usize>) -> Result<Self> {
        let count = heads.len() * queries.len();
        let rows = heads.flat_map(|head| queries.clone().map(move |query| Row { head, query }));
        let each = collect(count, rows, SCRATCH)?;
        let shift = sequence.k.len() as i64 - sequence.q.len() as i64;
        let position = collect(count, each.iter().map(|row| row.query as i64 + shift), SCRATCH)?;
        let window = collect(count, position.iter().map(|&at| call.window(at, sequence.k.len())), SCRATCH)?;
        let slopes = each.iter().map(|row| call.slopes.as_ref().map_or(0.0, |slopes| slopes[row.head]));
        let slope = collect(count, slopes, SCRATCH)?;
        Ok(Self { each, position, window, slope })
    }

    pub fn len(&self) -> usize {
        self.each.len()
    }

    /// The keys that any of the rows sees, as one range.
    pub fn keys(&self, sequence: &Sequence) -> Range<usize> {
        let mut low = usize::MAX;
        let mut high = 0;
        for (window, &position) in self.window.iter().zip(&self.position) {
            if !window.is_empty() {
                low = low.min(window.start);
                high = high.max(window.end);
            }
            for &(start, end) in &sequence.prefixes {
                if (start..end).contains(&position) {
                    let keys = sequence.k.len() as i64;
                    low = low.min(start.clamp(0, keys) as usize);
                    high = high.max(end.clamp(0, keys) as usize);
                }
            }
        }
        low.min(high)..high
    }

    /// Scales, caps, biases and masks raw scores `[keys, width]` in place. A column holds the
    /// scores of one row of the tile.
    ///
    /// With a softcap, `slopes` receives the derivative of the cap at each score.
    #[inline(always)]
    pub fn transform(
        &self,
        call: &Call,
        sequence: &Sequence,
        keys: &Range<usize>,
        scores: &mut [f32],
        width: usize,
        mut slopes: Option<&mut [f32]>,
    ) {
        for value in scores.iter_mut() {
            *value *= call.scale;
        }
        if call.softcap > 0.0 {
            for (index, value) in scores.iter_mut().enumerate() {
                let tanh = (*value / call.softcap).tanh();
                *value = tanh * call.softcap;
                if let Some(slopes) = slopes.as_deref_mut() {
                    slopes[index] = 1.0 - tanh * tanh;
                }
            }
        }
        if call.slopes.is_some() {
            for (line, key) in scores.chunks_exact_mut(width).zip(keys.clone()) {
                for (column, value) in line.iter_mut().enumerate().take(self.len()) {
                    *value -= self.slope[column] * (self.position[column] - key as i64).abs() as f32;
                }
            }
        }
        if self.window.iter().all(|window| window.start <= keys.start && keys.end <= window.end) {
            return;
        }
        for (line, key) in scores.chunks_exact_mut(width).zip(keys.clone()) {
            for (column, value) in line.iter_mut().enumerate().take(self.len()) {
                if !self.window[column].contains(&key) && !prefixed(sequence, self.position[column], key as i64) {
                    *value = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// Whether a prefix range holds both a query's position and a key.
fn prefixed(sequence: &Sequence, position: i64, key: i64) -> bool {
    sequence.prefixes.iter().any(|&(start, end)| (start..end).contains(&position) && (start..end).contains(&key))
}
