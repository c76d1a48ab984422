//! The operation on a GPU, with tensors in host memory.

use std::sync::Arc;

use candle_core::{Tensor, WithDType};

use super::{Attention, HEAD_DIM_MULTIPLE};
use crate::arguments::Sizes;
use crate::context::RocmContext;
use crate::cpu::{Element, Sequence, View};
use crate::error::{argument, Error, Result};
use crate::launch::Shape;
use crate::memory::{collect, room, tensor, zeros};
use crate::raw::host::{HostBackward, HostForward};

/// A call's tensors as the device takes them: dense, with padded head dims, and the index tensors' values.
struct Inputs<T> {
    shape: Shape,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    slopes: Option<Vec<f32>>,
    seqlens: Option<(Vec<i32>, Vec<i32>)>,
    /// The block table, its columns and the page size.
    pages: Option<(Vec<i32>, usize, usize)>,
}

impl<T: Element> Inputs<T> {
    fn forward(&self) -> HostForward<'_> {
        HostForward {
            shape: self.shape,
            q: bytemuck::cast_slice(&self.q),
            k: bytemuck::cast_slice(&self.k),
            v: bytemuck::cast_slice(&self.v),
            slopes: self.slopes.as_deref(),
            seqlens: self.seqlens.as_ref().map(|(q, k)| (q.as_slice(), k.as_slice())),
            pages: self.pages.as_ref().map(|(table, columns, size)| (table.as_slice(), *columns, *size)),
        }
    }
}

/// A tensor `(batch, rows, heads, dim)`, dense, with head dims padded with zeros.
/// `Error::OutOfMemory` if it is too large.
fn gather<T: Element>(view: View<'_, T>, [batch, rows, heads, dim]: [usize; 4], padded: usize) -> Result<Vec<T>> {
    let mut found: Vec<T> = tensor([batch, rows, heads, padded], "the dense copy of a tensor")?;
    if padded > 0 {
        for (index, row) in found.chunks_exact_mut(padded).enumerate() {
            let (head, place) = (index % heads, index / heads);
            view.copy(place / rows, place % rows, head, &mut row[..dim]);
        }
    }
    Ok(found)
}

/// The elements of a dense tensor without the padding of its head dims. `Error::OutOfMemory` if the
/// host has no memory.
fn unpadded<T: Element>(bytes: &[u8], padded: usize, dim: usize) -> Result<Vec<T>> {
    let rows = bytes.len() / size_of::<T>() / padded.max(1);
    let mut elements: Vec<T> = zeros(rows * dim, "a result of the GPU")?;
    if padded > 0 {
        let width = size_of::<T>();
        for (row, from) in elements.chunks_exact_mut(dim).zip(bytes.chunks_exact(padded * width)) {
            bytemuck::cast_slice_mut(row).copy_from_slice(&from[..dim * width]);
        }
    }
    Ok(elements)
}

impl Attention {
    fn inputs<T: Element>(&self, sizes: &Sizes, [q, k, v]: [View<'_, T>; 3]) -> Result<Inputs<T>> {
        let Sizes { batch, seqlen_q, seqlen_k, heads, heads_k, dim, pages, page_size } = *sizes;
        let padded = dim.next_multiple_of(HEAD_DIM_MULTIPLE);
        let scale = self.options.softmax_scale;
        let mut shape = Shape::dense(T::DTYPE, batch, (seqlen_q, seqlen_k), (heads, heads_k), padded, scale);
        shape.softcap = self.options.cap();
        let keys = if pages > 0 { [pages, page_size, heads_k, dim] } else { [batch, seqlen_k, heads_k, dim] };
        let (mut longest_q, mut longest_k) = (seqlen_q, seqlen_k);
        let (mut seqlens, mut table) = (None, None);
        if let Some(varlen) = &self.varlen {
            if varlen.pages.as_ref().is_some_and(|pages| pages.mm_prefix_ranges.is_some()) {
                let reason = "mm_prefix_ranges: the GPU kernels have none. Leave them out, or call outside of a \
                              RocmContext's scope, where the CPU kernels take them";
                return Err(Error::Unsupported(reason.into()));
            }
            let sequences = varlen.sequences(sizes)?;
            (longest_q, longest_k) = (varlen.max_seqlen_q, varlen.max_seqlen_k);
            let starts = |name, lengths: &[usize]| -> Result<Vec<i32>> {
                let mut sum = 0usize;
                let mut starts = room(lengths.len() + 1, "the starts of sequences")?;
                starts.push(0);
                for length in lengths {
                    sum += length;
                    let wanted = "at most 2147483647 rows in all, because the GPU kernels count them in 32 bits";
                    starts.push(i32::try_from(sum).or_else(|_| argument(name, format!("{sum} rows"), wanted))?);
                }
                Ok(starts)
            };
            let lengths = |length: fn(&Sequence) -> usize| {
                collect(sequences.len(), sequences.iter().map(length), "the lengths of sequences")
            };
            let (lengths_q, lengths_k) = (lengths(|sequence| sequence.q.len())?, lengths(|sequence| sequence.k.len())?);
            (shape.total_q, shape.total_k) = (seqlen_q, seqlen_k);
            shape.batch = sequences.len();
            shape.seqlen_q = lengths_q.iter().copied().max().unwrap_or(0);
            shape.seqlen_k = lengths_k.iter().copied().max().unwrap_or(0);
            seqlens = Some((starts("seqlens_q", &lengths_q)?, starts("seqlens_k", &lengths_k)?));
            if varlen.pages.is_some() {
                let columns = sequences.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(0).max(1);
                let rows = sequences.iter().flat_map(|sequence| {
                    let pages = sequence.pages.iter().map(|&page| page as i32);
                    pages.chain(std::iter::repeat(0)).take(columns)
                });
                table = Some((collect(sequences.len() * columns, rows, "the block table")?, columns, page_size));
            }
        }
        (shape.window_left, shape.window_right) = self.options.window(longest_q, longest_k);
        Ok(Inputs {
            shape,
            q: gather(q, [batch, seqlen_q, heads, dim], padded)?,
            k: gather(k, keys, padded)?,
            v: gather(v, keys, padded)?,
            slopes: self.options.alibi_slopes.as_ref().map(Tensor::to_vec1).transpose()?,
            seqlens,
            pages: table,
        })
    }

    /// The forward on a GPU: the result's elements. Keeps the logarithms of the sums for the backward.
    pub(super) fn gpu_forward<T: Element>(
        &self,
        rocm: &RocmContext,
        sizes: &Sizes,
        tensors: [View<'_, T>; 3],
    ) -> Result<Vec<T>> {
        let inputs = self.inputs(sizes, tensors)?;
        let (out, lse) = rocm.session(|mut session| session.forward(&inputs.forward()))?;
        self.keep(lse);
        unpadded(&out, inputs.shape.head_dim, sizes.dim)
    }

    /// The backward on a GPU: elements of dq, dk and dv.
    pub(super) fn gpu_backward<T: Element + WithDType>(
        &self,
        rocm: &RocmContext,
        sizes: &Sizes,
        [q, k, v, out, dout]: [View<'_, T>; 5],
    ) -> Result<[Vec<T>; 3]> {
        let inputs = self.inputs(sizes, [q, k, v])?;
        let padded = inputs.shape.head_dim;
        let shape = [sizes.batch, sizes.seqlen_q, sizes.heads, sizes.dim];
        let (out, dout) = (gather(out, shape, padded)?, gather(dout, shape, padded)?);
        let gradients = rocm.session(|mut session| {
            let lse = match self.kept() {
                Some(lse) => lse,
                None => Arc::new(session.forward(&inputs.forward())?.1),
            };
            let call = HostBackward {
                forward: inputs.forward(),
                out: bytemuck::cast_slice(&out),
                dout: bytemuck::cast_slice(&dout),
                lse: &lse,
            };
            session.backward(&call)
        })?;
        let [dq, dk, dv] = gradients.map(|bytes| unpadded(&bytes, padded, sizes.dim));
        Ok([dq?, dk?, dv?])
    }
}
