//! Checks of a call's arguments: an error names the argument, its value and the valid values.

use candle_core::{DType, Shape, Tensor};

use crate::cpu;
use crate::error::{argument, Result};
use crate::memory;

/// The largest head dim that candle-flash-attn and the CPU kernels accept.
pub(crate) const MAX_HEAD_DIM: usize = 512;

/// Options of a call, named as in candle-flash-attn.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub softmax_scale: f32,
    pub alibi_slopes: Option<Tensor>,
    pub window_size_left: Option<usize>,
    pub window_size_right: Option<usize>,
    pub softcap: Option<f32>,
}

/// The sequences of packed tensors.
#[derive(Clone, Debug)]
pub(crate) struct Varlen {
    pub seqlens_q: Tensor,
    pub seqlens_k: Tensor,
    pub max_seqlen_q: usize,
    pub max_seqlen_k: usize,
    pub pages: Option<Pages>,
}

/// Keys and values in pages.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    pub block_table: Tensor,
    pub mm_prefix_ranges: Option<Tensor>,
    pub page_block_size: usize,
}

/// The sizes that a call's tensors agree on. A packed tensor counts its rows in `seqlen_q` and `seqlen_k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub seqlen_q: usize,
    pub seqlen_k: usize,
    pub heads: usize,
    pub heads_k: usize,
    pub dim: usize,
    /// Number of pages of a paged cache, and rows per page; 0 without pages.
    pub pages: usize,
    pub page_size: usize,
}

impl Sizes {
    /// Of dense tensors `(batch, seqlen, heads, dim)`.
    pub fn dense(q: &Shape, k: &Shape, v: &Shape) -> Result<Self> {
        let (&[batch, seqlen_q, heads, dim], &[batch_k, seqlen_k, heads_k, _]) = (q.dims(), k.dims()) else {
            return argument("q and k", format!("shapes {q:?} and {k:?}"), "rank 4: (batch, seqlen, heads, head_dim)");
        };
        if batch_k != batch {
            return argument("k", format!("shape {k:?}"), format!("the batch size of q, {batch}"));
        }
        Self { batch, seqlen_q, seqlen_k, heads, heads_k, dim, pages: 0, page_size: 0 }.checked(q, k, v)
    }

    /// Of packed tensors `(rows, heads, dim)`.
    pub fn packed(q: &Shape, k: &Shape, v: &Shape) -> Result<Self> {
        let (&[seqlen_q, heads, dim], &[seqlen_k, heads_k, _]) = (q.dims(), k.dims()) else {
            return argument("q and k", format!("shapes {q:?} and {k:?}"), "rank 3: (total rows, heads, head_dim)");
        };
        Self { batch: 1, seqlen_q, seqlen_k, heads, heads_k, dim, pages: 0, page_size: 0 }.checked(q, k, v)
    }

    /// Of packed queries and a cache `(pages, page size, heads, dim)`.
    pub fn paged(q: &Shape, k: &Shape, v: &Shape, page_block_size: usize) -> Result<Self> {
        let &[seqlen_q, heads, dim] = q.dims() else {
            return argument("q", format!("shape {q:?}"), "rank 3: (total rows, heads, head_dim)");
        };
        let &[pages, page_size, heads_k, _] = k.dims() else {
            return argument("k", format!("shape {k:?}"), "rank 4: (pages, page_block_size, heads, head_dim)");
        };
        if page_size != page_block_size || page_size == 0 {
            return argument("page_block_size", page_block_size, format!("rows in a page of k, {page_size}, above 0"));
        }
        Self { batch: 1, seqlen_q, seqlen_k: 0, heads, heads_k, dim, pages, page_size }.checked(q, k, v)
    }

    /// Zeros for a tensor like q. An error says that memory for `what` was refused.
    pub fn like_q<T: bytemuck::Zeroable>(&self, what: &'static str) -> Result<Vec<T>> {
        Ok(memory::tensor([self.batch, self.seqlen_q, self.heads, self.dim], what)?)
    }

    /// Zeros for a tensor like k. Errors as of `like_q`.
    pub fn like_k<T: bytemuck::Zeroable>(&self, what: &'static str) -> Result<Vec<T>> {
        Ok(memory::tensor([self.batch, self.seqlen_k, self.heads_k, self.dim], what)?)
    }

    fn checked(self, q: &Shape, k: &Shape, v: &Shape) -> Result<Self> {
        if k.dims() != v.dims() {
            return argument("v", format!("shape {v:?}"), format!("the shape of k, {k:?}"));
        }
        if k.dims().last() != Some(&self.dim) {
            return argument("k", format!("shape {k:?}"), format!("the head dim of q {q:?}"));
        }
        if self.dim == 0 || self.dim > MAX_HEAD_DIM {
            return argument("head_dim", self.dim, format!("1 to {MAX_HEAD_DIM}"));
        }
        if self.heads_k == 0 || !self.heads.is_multiple_of(self.heads_k) {
            return argument("heads of k", self.heads_k, format!("a divisor of the heads of q, {}", self.heads));
        }
        Ok(self)
    }
}

impl Options {
    /// Checks the options that need no tensor, and the slopes.
    pub fn check(&self, sizes: &Sizes) -> Result<()> {
        if !self.softmax_scale.is_finite() {
            return argument("softmax_scale", self.softmax_scale, "a finite number, such as 1 / sqrt(head_dim)");
        }
        if let Some(softcap) = self.softcap.filter(|cap| !cap.is_finite() || *cap < 0.0) {
            return argument("softcap", softcap, "a finite number from 0 on; 0 is no cap");
        }
        if let Some(slopes) = &self.alibi_slopes {
            if slopes.dtype() != DType::F32 {
                return argument("alibi_slopes", format!("dtype {:?}", slopes.dtype()), "dtype F32");
            }
            if slopes.track_op() {
                let wanted = "a tensor without a gradient, which no kernel computes: pass alibi_slopes.detach()";
                return argument("alibi_slopes", "a variable, or a result of one", wanted);
            }
            if slopes.dims() != [sizes.heads] {
                let wanted = format!("shape [{}], a slope for each head of q", sizes.heads);
                return argument("alibi_slopes", format!("shape {:?}", slopes.shape()), wanted);
            }
        }
        Ok(())
    }

    /// The window sizes. `None` means that this side excludes no key. Query `i` sees the keys from
    /// `i + seqlen_k - seqlen_q - left` to `i + seqlen_k - seqlen_q + right`, so the first query
    /// needs `right >= seqlen_q - 1` to see the last key.
    pub fn window(&self, max_seqlen_q: usize, max_seqlen_k: usize) -> (Option<usize>, Option<usize>) {
        let left = self.window_size_left.filter(|&left| left <= max_seqlen_k);
        (left, self.window_size_right.filter(|&right| right <= max_seqlen_q.max(max_seqlen_k)))
    }

    /// The cap of the scores, 0 for none.
    pub fn cap(&self) -> f32 {
        self.softcap.unwrap_or(0.0)
    }
}

impl Varlen {
    /// Number of sequences. Checks the shapes of the index tensors, not their values.
    pub fn batch(&self) -> Result<usize> {
        for (name, tensor) in [("seqlens_q", &self.seqlens_q), ("seqlens_k", &self.seqlens_k)] {
            if !matches!(tensor.dtype(), DType::U32 | DType::I32) {
                return argument(name, format!("dtype {:?}", tensor.dtype()), "dtype U32");
            }
            if tensor.rank() != 1 || tensor.elem_count() < 2 {
                return argument(name, format!("shape {:?}", tensor.shape()), "one axis of batch size + 1, at least 2");
            }
        }
        let batch = self.seqlens_q.elem_count() - 1;
        if self.seqlens_k.elem_count() != batch + 1 {
            let wanted = format!("{} elements, as seqlens_q has", batch + 1);
            return argument("seqlens_k", format!("{} elements", self.seqlens_k.elem_count()), wanted);
        }
        let Some(pages) = &self.pages else { return Ok(batch) };
        if !matches!(pages.block_table.dtype(), DType::U32 | DType::I32) {
            return argument("block_table", format!("dtype {:?}", pages.block_table.dtype()), "dtype U32 or I32");
        }
        if pages.block_table.rank() != 2 || pages.block_table.dims()[0] != batch {
            let wanted = format!("({batch}, pages of a sequence)");
            return argument("block_table", format!("shape {:?}", pages.block_table.shape()), wanted);
        }
        if let Some(ranges) = &pages.mm_prefix_ranges {
            if ranges.dtype() != DType::I32 {
                return argument("mm_prefix_ranges", format!("dtype {:?}", ranges.dtype()), "dtype I32");
            }
            if !matches!(ranges.dims(), &[first, _, 2] if first == batch) {
                let wanted = format!("({batch}, ranges of a sequence, 2)");
                return argument("mm_prefix_ranges", format!("shape {:?}", ranges.shape()), wanted);
            }
        }
        Ok(batch)
    }

    /// The sequences that the index tensors describe. Copies the index tensors to the host.
    pub fn sequences(&self, sizes: &Sizes) -> Result<Vec<cpu::Sequence>> {
        let batch = self.batch()?;
        let starts_q = starts("seqlens_q", &self.seqlens_q, Some(sizes.seqlen_q), self.max_seqlen_q)?;
        let rows_k = self.pages.is_none().then_some(sizes.seqlen_k);
        let starts_k = starts("seqlens_k", &self.seqlens_k, rows_k, self.max_seqlen_k)?;
        let sequences = (0..batch).map(|index| cpu::Sequence {
            batch: 0,
            q: starts_q[index]..starts_q[index + 1],
            k: starts_k[index]..starts_k[index + 1],
            pages: Vec::new(),
            prefixes: Vec::new(),
        });
        let mut found = memory::collect(batch, sequences, "the list of sequences")?;
        let Some(pages) = &self.pages else { return Ok(found) };
        let table = integers(&pages.block_table)?;
        let wide = pages.block_table.dims()[1];
        for (index, sequence) in found.iter_mut().enumerate() {
            sequence.k = 0..sequence.k.len();
            let needed = sequence.k.len().div_ceil(sizes.page_size);
            if needed > wide {
                let wanted = format!("{needed} for the {} keys of sequence {index}", sequence.k.len());
                return argument("block_table", format!("{wide} pages a sequence"), wanted);
            }
            sequence.pages = memory::room(needed, "the pages of a sequence")?;
            for &page in &table[index * wide..index * wide + needed] {
                match usize::try_from(page) {
                    Ok(page) if page < sizes.pages => sequence.pages.push(page),
                    _ => return argument("block_table", page, format!("a page of k, 0 to {}", sizes.pages)),
                }
            }
        }
        if let Some(ranges) = &pages.mm_prefix_ranges {
            let values = integers(ranges)?;
            let each = ranges.dims()[1];
            for (index, sequence) in found.iter_mut().enumerate() {
                let own = &values[index * each * 2..(index + 1) * each * 2];
                let ranges = own.chunks_exact(2).map(|pair| (pair[0], pair[1]));
                sequence.prefixes = memory::collect(each, ranges, "the prefix ranges of a sequence")?;
            }
        }
        Ok(found)
    }
}

/// The values of a tensor of indices, whatever its shape.
fn integers(tensor: &Tensor) -> Result<Vec<i64>> {
    let flat = tensor.flatten_all()?.to_device(&candle_core::Device::Cpu)?.to_dtype(DType::I64)?;
    Ok(flat.to_vec1()?)
}

/// First rows of sequences, checked to ascend from 0 to at most `rows`, no sequence longer than `longest`.
fn starts(name: &'static str, tensor: &Tensor, rows: Option<usize>, longest: usize) -> Result<Vec<usize>> {
    let values = integers(tensor)?;
    if values[0] != 0 {
        return argument(name, format!("first element {}", values[0]), "0");
    }
    for (index, pair) in values.windows(2).enumerate() {
        let length = pair[1] - pair[0];
        if length < 0 {
            return argument(name, format!("{} after {}", pair[1], pair[0]), "cumulative lengths, which never fall");
        }
        if length as usize > longest {
            let wanted = format!("at most its max_seqlen argument, {longest}");
            return argument(name, format!("{length} rows in sequence {index}"), wanted);
        }
    }
    let last = values[values.len() - 1] as usize;
    if let Some(rows) = rows.filter(|&rows| last > rows) {
        return argument(name, format!("last element {last}"), format!("at most the rows of its tensor, {rows}"));
    }
    let starts = values.iter().map(|&value| value as usize);
    Ok(memory::collect(values.len(), starts, "the starts of sequences")?)
}
