//! The functions of candle-flash-attn for packed sequences of different lengths.

#![allow(clippy::too_many_arguments)] // the signatures of candle-flash-attn

use candle_core::{Result, Tensor};

use crate::arguments::{Options, Pages, Varlen};
use crate::dense::causal_window;
use crate::operation::attend;

fn plain(softmax_scale: f32, window_size_left: Option<usize>, window_size_right: Option<usize>) -> Options {
    Options { softmax_scale, alibi_slopes: None, window_size_left, window_size_right, softcap: None }
}

fn packed(seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize, max_seqlen_k: usize) -> Varlen {
    let (seqlens_q, seqlens_k) = (seqlens_q.clone(), seqlens_k.clone());
    Varlen { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k, pages: None }
}

fn call(q: &Tensor, k: &Tensor, v: &Tensor, varlen: Varlen, options: Options) -> Result<Tensor> {
    attend(q, k, v, options, Some(varlen))
}

/// Attention of packed sequences, each within itself, with a backward.
///
/// `q` is `(rows of all sequences, heads, head_dim)`, `k` and `v` are `(rows, heads_k, head_dim)`. `seqlens_q` and
/// `seqlens_k`, U32, hold the first row of each sequence and the end of the last: `0, length_0, length_0 + length_1`
/// and so on. `max_seqlen_q` and `max_seqlen_k` are the longest lengths. The result has the shape of `q`; rows outside
/// of every sequence are 0. Options are those of [`flash_attn`](crate::flash_attn).
///
/// # Errors
///
/// If shapes, dtypes, lengths or options do not fit; the message names the argument.
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    call(q, k, v, varlen, plain(softmax_scale, None, causal_window(causal)))
}

/// [`flash_attn_varlen`] within a window as of [`flash_attn_windowed`](crate::flash_attn_windowed).
///
/// # Errors
///
/// As [`flash_attn_varlen`].
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    call(q, k, v, varlen, plain(softmax_scale, window_size_left, window_size_right))
}

/// [`flash_attn_varlen_windowed`] over keys and values in pages. It has no backward.
///
/// `k` and `v` are `(pages, page_block_size, heads_k, head_dim)`; row `i` of `block_table`, U32 or I32, names the pages
/// of sequence `i` in order. `seqlens_k` holds cumulative lengths; rows of `k` follow from `block_table` alone.
/// `mm_prefix_ranges`, I32 `(batch, ranges, 2)`, holds ranges of positions, start and end, within which every query
/// sees every key whatever the window says; a range whose end is not above its start is empty.
///
/// # Errors
///
/// As [`flash_attn_varlen`].
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let (block_table, mm_prefix_ranges) = (block_table.clone(), mm_prefix_ranges.cloned());
    let pages = Some(Pages { block_table, mm_prefix_ranges, page_block_size });
    let varlen = Varlen { pages, ..packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k) };
    call(q, k, v, varlen, Options { softcap, ..plain(softmax_scale, window_size_left, window_size_right) })
}

/// [`flash_attn_varlen`] with ALiBi as of [`flash_attn_alibi`](crate::flash_attn_alibi).
///
/// # Errors
///
/// As [`flash_attn_varlen`].
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    let alibi_slopes = Some(alibi_slopes.clone());
    call(q, k, v, varlen, Options { alibi_slopes, ..plain(softmax_scale, None, causal_window(causal)) })
}

/// [`flash_attn_varlen_alibi`] within a window as of [`flash_attn_windowed`](crate::flash_attn_windowed).
///
/// # Errors
///
/// As [`flash_attn_varlen`].
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    let alibi_slopes = Some(alibi_slopes.clone());
    call(q, k, v, varlen, Options { alibi_slopes, ..plain(softmax_scale, window_size_left, window_size_right) })
}

/// [`flash_attn_varlen_windowed`] with optional ALiBi slopes, and scores capped as `softcap * tanh(score / softcap)`.
///
/// # Errors
///
/// As [`flash_attn_varlen`].
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    let options = Options {
        alibi_slopes: alibi_slopes.cloned(),
        softcap: Some(softcap),
        ..plain(softmax_scale, window_size_left, window_size_right)
    };
    call(q, k, v, varlen, options)
}
