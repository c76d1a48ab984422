//! A small Llama, with random weights, by this crate's attention and by attention of candle's own operations.
//!
//!     cargo run --release --example llama
//!     CANDLE_FLASH_ROCM_STORE=gfx942.zip cargo run --release --example llama -- --gpu
//!
//! candle-transformers' models call candle-flash-attn by name, and only with candle's feature `flash-attn`, which needs
//! CUDA. To run one of them with this crate, copy its file into your program and change its attention as `flash` and
//! `plain` differ here. Prints the largest difference of the logits, and the tokens that each attention generates.

use std::time::Instant;

use candle_core::{DType, Device, IndexOp, Result, Tensor, D};
use candle_flash_rocm::{flash_attn, RocmContext};
use candle_nn::{embedding, linear_no_bias, ops, rms_norm, rotary_emb};
use candle_nn::{Embedding, Linear, Module, RmsNorm, VarBuilder, VarMap};

const VOCABULARY: usize = 512;
const HIDDEN: usize = 256;
const HEADS: usize = 8;
const HEADS_K: usize = 2;
const HEAD_DIM: usize = HIDDEN / HEADS;
const LAYERS: usize = 4;
const PROMPT: usize = 64;
const NEW_TOKENS: usize = 16;

/// Attention of q `(batch, seqlen_q, heads, head_dim)` over k and v `(batch, seqlen_k, heads_k, head_dim)`, causal.
type Attention = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

fn scale() -> f32 {
    1. / (HEAD_DIM as f32).sqrt()
}

/// By this crate.
fn flash(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    flash_attn(q, k, v, scale(), true)
}

/// Attention by candle's operations, as in candle-transformers' models without flash attention.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (batch, seqlen_q, _, _) = q.dims4()?;
    let seqlen_k = k.dim(1)?;
    let repeated = |x: &Tensor| {
        let shape = (batch, HEADS_K, HEADS / HEADS_K, seqlen_k, HEAD_DIM);
        x.transpose(1, 2)?.unsqueeze(2)?.broadcast_as(shape)?.reshape((batch, HEADS, seqlen_k, HEAD_DIM))
    };
    let (k, v) = (repeated(k)?, repeated(v)?);
    let scores = (q.transpose(1, 2)?.contiguous()?.matmul(&k.t()?)? * f64::from(scale()))?;
    let shift = seqlen_k - seqlen_q;
    let hidden =
        (0..seqlen_q).flat_map(|i| (0..seqlen_k).map(move |j| if j > i + shift { f32::NEG_INFINITY } else { 0. }));
    let mask = Tensor::from_iter(hidden, q.device())?.reshape((1, 1, seqlen_q, seqlen_k))?;
    let weights = ops::softmax_last_dim(&scores.to_dtype(DType::F32)?.broadcast_add(&mask)?)?;
    weights.to_dtype(v.dtype())?.matmul(&v)?.transpose(1, 2)?.contiguous()
}

/// The keys and values of the positions so far.
type Cache = Option<(Tensor, Tensor)>;

struct Layer {
    attention_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    mlp_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(weights: &VarBuilder<'_>) -> Result<Self> {
        let linear = |inputs, outputs, name: &str| linear_no_bias(inputs, outputs, weights.pp(name));
        Ok(Self {
            attention_norm: rms_norm(HIDDEN, 1e-5, weights.pp("attention_norm"))?,
            q: linear(HIDDEN, HEADS * HEAD_DIM, "q")?,
            k: linear(HIDDEN, HEADS_K * HEAD_DIM, "k")?,
            v: linear(HIDDEN, HEADS_K * HEAD_DIM, "v")?,
            out: linear(HEADS * HEAD_DIM, HIDDEN, "out")?,
            mlp_norm: rms_norm(HIDDEN, 1e-5, weights.pp("mlp_norm"))?,
            gate: linear(HIDDEN, 3 * HIDDEN, "gate")?,
            up: linear(HIDDEN, 3 * HIDDEN, "up")?,
            down: linear(3 * HIDDEN, HIDDEN, "down")?,
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        attention: Attention,
        rotary: &(Tensor, Tensor),
        cache: &mut Cache,
    ) -> Result<Tensor> {
        let (batch, seqlen, _) = x.dims3()?;
        let normed = self.attention_norm.forward(x)?;
        let heads = |x: Tensor, heads| x.reshape((batch, seqlen, heads, HEAD_DIM));
        let q = rotary_emb::rope_thd(&heads(self.q.forward(&normed)?, HEADS)?, &rotary.0, &rotary.1)?;
        let k = rotary_emb::rope_thd(&heads(self.k.forward(&normed)?, HEADS_K)?, &rotary.0, &rotary.1)?;
        let v = heads(self.v.forward(&normed)?, HEADS_K)?;
        let (k, v) = match cache.take() {
            Some((before_k, before_v)) => (Tensor::cat(&[&before_k, &k], 1)?, Tensor::cat(&[&before_v, &v], 1)?),
            None => (k, v),
        };
        let attended = attention(&q, &k, &v)?.reshape((batch, seqlen, HEADS * HEAD_DIM))?;
        *cache = Some((k, v));
        let x = (x + self.out.forward(&attended)?)?;
        let normed = self.mlp_norm.forward(&x)?;
        let gated = (ops::silu(&self.gate.forward(&normed)?)? * self.up.forward(&normed)?)?;
        x + self.down.forward(&gated)?
    }
}

struct Llama {
    tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
}

impl Llama {
    fn new(weights: &VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            tokens: embedding(VOCABULARY, HIDDEN, weights.pp("tokens"))?,
            layers: (0..LAYERS)
                .map(|index| Layer::new(&weights.pp(format!("layers.{index}"))))
                .collect::<Result<_>>()?,
            norm: rms_norm(HIDDEN, 1e-5, weights.pp("norm"))?,
            head: linear_no_bias(HIDDEN, VOCABULARY, weights.pp("head"))?,
        })
    }

    /// Logits `(seqlen, vocabulary)` of tokens whose first position is `start`.
    fn forward(&self, tokens: &[u32], start: usize, attention: Attention, caches: &mut [Cache]) -> Result<Tensor> {
        let mut x = self.tokens.forward(&Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?)?;
        let rotary = rotary(start, tokens.len())?;
        for (layer, cache) in self.layers.iter().zip(caches) {
            x = layer.forward(&x, attention, &rotary, cache)?;
        }
        self.head.forward(&self.norm.forward(&x)?)?.squeeze(0)
    }

    /// The prompt's logits, and the generated tokens. Each token is the most likely one.
    fn generate(&self, prompt: &[u32], attention: Attention) -> Result<(Tensor, Vec<u32>)> {
        let mut caches = vec![None; LAYERS];
        let logits = self.forward(prompt, 0, attention, &mut caches)?;
        let mut last = logits.i(prompt.len() - 1)?;
        let mut generated = Vec::new();
        for step in 0..NEW_TOKENS {
            let token = last.argmax(D::Minus1)?.to_scalar::<u32>()?;
            generated.push(token);
            last = self.forward(&[token], prompt.len() + step, attention, &mut caches)?.i(0)?;
        }
        Ok((logits, generated))
    }
}

/// Cosines and sines `(seqlen, head_dim / 2)` of the positions from `start` on.
fn rotary(start: usize, seqlen: usize) -> Result<(Tensor, Tensor)> {
    let frequency = |index: usize| 10_000f32.powf(-2. * index as f32 / HEAD_DIM as f32);
    let angles =
        (start..start + seqlen).flat_map(|at| (0..HEAD_DIM / 2).map(move |index| at as f32 * frequency(index)));
    let angles = Tensor::from_iter(angles, &Device::Cpu)?.reshape((seqlen, HEAD_DIM / 2))?;
    Ok((angles.cos()?, angles.sin()?))
}

fn compare() -> Result<()> {
    let variables = VarMap::new();
    let model = Llama::new(&VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|index| index * 37 % VOCABULARY as u32).collect();
    let timed = |attention| -> Result<_> {
        let start = Instant::now();
        Ok((model.generate(&prompt, attention)?, start.elapsed()))
    };
    let ((flash_logits, flash_tokens), flash_time) = timed(flash)?;
    let ((plain_logits, plain_tokens), plain_time) = timed(plain)?;
    let difference = (flash_logits - &plain_logits)?.abs()?.max_all()?.to_scalar::<f32>()?;
    let largest = plain_logits.abs()?.max_all()?.to_scalar::<f32>()?;
    println!("candle-flash-rocm {flash_time:.1?}: {flash_tokens:?}");
    println!("candle alone      {plain_time:.1?}: {plain_tokens:?}");
    println!("logits up to {largest:.3}, largest difference {difference:.1e}");
    if difference > 1e-4 * largest.max(1.) || flash_tokens != plain_tokens {
        candle_core::bail!("the two attentions disagree");
    }
    Ok(())
}

fn main() -> Result<()> {
    if std::env::args().any(|argument| argument == "--gpu") {
        RocmContext::new(0)?.scope(compare)
    } else {
        compare()
    }
}
