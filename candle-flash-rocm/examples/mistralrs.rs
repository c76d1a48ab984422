//! The attention that mistral.rs calls, by this crate: two prompts of different lengths, packed, with a sliding window
//! and a soft cap, then a token after the first prompt. Compared with calls of each prompt alone.
//!
//!     cargo run --release --example mistralrs
//!     CANDLE_FLASH_ROCM_STORE=gfx942.zip cargo run --release --example mistralrs -- --gpu
//!
//! mistral.rs calls them in its package `mistralrs-flash-attn`. This crate has them by the same names: see README.md.

use candle_core::{DType, Device, Result, Tensor};
use candle_flash_rocm::{
    flash_attn_alibi_windowed_softcap, flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_windowed,
    flash_attn_windowed, RocmContext,
};

const HEADS: usize = 8;
const HEADS_K: usize = 2;
const HEAD_DIM: usize = 64;
const LENGTHS: [usize; 2] = [300, 77];

/// What mistral.rs knows of a layer: the keys to the left of a query that it sees, and the cap of its scores.
#[derive(Clone, Copy)]
struct Layer {
    window: Option<usize>,
    softcap: Option<f32>,
}

fn scale() -> f32 {
    1. / (HEAD_DIM as f32).sqrt()
}

/// Sequences of one length: q `(batch, seqlen, heads, head_dim)`.
fn dense(layer: Layer, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    match layer.softcap {
        Some(cap) => flash_attn_alibi_windowed_softcap(q, k, v, None, scale(), layer.window, Some(0), cap),
        None => flash_attn_windowed(q, k, v, scale(), layer.window, Some(0)),
    }
}

/// Packed sequences: q `(rows, heads, head_dim)`.
fn packed(layer: Layer, q: &Tensor, k: &Tensor, v: &Tensor, starts: &Tensor) -> Result<Tensor> {
    let longest = LENGTHS[0];
    match layer.softcap {
        Some(cap) => flash_attn_varlen_alibi_windowed_softcap(
            q,
            k,
            v,
            None,
            starts,
            starts,
            longest,
            longest,
            scale(),
            layer.window,
            Some(0),
            cap,
        ),
        None => flash_attn_varlen_windowed(q, k, v, starts, starts, longest, longest, scale(), layer.window, Some(0)),
    }
}

fn largest(x: &Tensor) -> Result<f32> {
    x.to_dtype(DType::F32)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

fn compare(layer: Layer) -> Result<()> {
    let rows = LENGTHS.iter().sum();
    let random = |heads| Tensor::randn(0f32, 1., (rows, heads, HEAD_DIM), &Device::Cpu)?.to_dtype(DType::BF16);
    let (q, k, v) = (random(HEADS)?, random(HEADS_K)?, random(HEADS_K)?);
    let starts = Tensor::new(&[0, LENGTHS[0] as u32, rows as u32], &Device::Cpu)?;
    let together = packed(layer, &q, &k, &v, &starts)?;
    let mut apart = 0f32;
    let mut start = 0;
    for length in LENGTHS {
        let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(0, start, length).and_then(|x| x.unsqueeze(0)));
        let alone = dense(layer, &q?, &k?, &v?)?.squeeze(0)?;
        apart = apart.max(largest(&(together.narrow(0, start, length)? - alone)?)?);
        start += length;
    }
    // The last query of the first prompt alone, over its cache of keys and values.
    let last = LENGTHS[0] - 1;
    let [keys, values] = [&k, &v].map(|x| x.narrow(0, 0, LENGTHS[0]).and_then(|x| x.unsqueeze(0)));
    let decoded = dense(layer, &q.narrow(0, last, 1)?.unsqueeze(0)?, &keys?, &values?)?.squeeze(0)?;
    let step = largest(&(together.narrow(0, last, 1)? - decoded)?)?;
    let Layer { window, softcap } = layer;
    println!("window {window:?}, soft cap {softcap:?}: packed and alone differ by {apart:.1e}, a step by {step:.1e}");
    if apart > 0.02 || step > 0.02 {
        candle_core::bail!("that is more than two steps of bf16");
    }
    Ok(())
}

fn run() -> Result<()> {
    for (window, softcap) in [(None, None), (Some(64), None), (Some(64), Some(50.))] {
        compare(Layer { window, softcap })?;
    }
    Ok(())
}

fn main() -> Result<()> {
    if std::env::args().any(|argument| argument == "--gpu") {
        return RocmContext::new(0)?.scope(run);
    }
    run()
}
