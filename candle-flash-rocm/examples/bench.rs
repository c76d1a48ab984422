//! Time and memory of this crate's CPU kernels, of candle-nn's flash attention on the CPU, and of attention by matmul and
//! softmax, each in a process of its own.
//!
//!     cargo run --release --example bench
//!     cargo run --release --example bench -- 4096 8 2 64      # seqlen, heads, heads of k and v, head dim

use std::process::Command;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_flash_rocm::flash_attn;
use candle_nn::attention::AttnMask;

const METHODS: [&str; 3] = ["this", "candle-nn", "naive"];

#[derive(Clone, Copy)]
struct Size {
    seqlen: usize,
    heads: usize,
    heads_k: usize,
    dim: usize,
    dtype: DType,
}

/// Attention by its definition, with every score in memory.
fn naive(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Result<Tensor> {
    let (batch, seqlen, heads, dim) = q.dims4()?;
    let group = heads / k.dims()[2];
    let spread = |x: &Tensor| -> Result<Tensor> {
        let x = x.transpose(1, 2)?;
        let shape = (batch, heads / group, group, seqlen, dim);
        x.unsqueeze(2)?.broadcast_as(shape)?.reshape((batch, heads, seqlen, dim))?.contiguous()
    };
    let scores = (q.transpose(1, 2)?.contiguous()?.matmul(&spread(k)?.t()?.contiguous()?)? * scale)?;
    let hidden: Vec<f32> =
        (0..seqlen * seqlen).map(|i| if i % seqlen > i / seqlen { f32::NEG_INFINITY } else { 0. }).collect();
    let mask = Tensor::from_vec(hidden, (seqlen, seqlen), q.device())?.to_dtype(q.dtype())?;
    let probabilities = candle_nn::ops::softmax_last_dim(&scores.broadcast_add(&mask)?)?;
    probabilities.matmul(&spread(v)?)?.transpose(1, 2)
}

fn attention(method: &str, q: &Tensor, k: &Tensor, v: &Tensor, size: Size) -> Result<Tensor> {
    let scale = 1. / (size.dim as f32).sqrt();
    match (method, size.dtype) {
        ("this", _) => flash_attn(q, k, v, scale, true),
        ("naive", _) => naive(q, k, v, f64::from(scale)),
        (_, DType::BF16) => {
            candle_nn::attention::flash_attn::<half::bf16>(q, k, v, scale, AttnMask::causal(), None, None)
        }
        _ => candle_nn::attention::flash_attn::<f32>(q, k, v, scale, AttnMask::causal(), None, None),
    }
}

/// The most memory that this process had so far, in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).map_or(0, |kib| kib / 1024)
}

/// The best of a few times, in milliseconds.
fn best(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut least = f64::INFINITY;
    let begun = Instant::now();
    for round in 0..20 {
        let started = Instant::now();
        run()?;
        least = least.min(started.elapsed().as_secs_f64() * 1e3);
        if round > 0 && begun.elapsed().as_secs() >= 4 {
            break;
        }
    }
    Ok(least)
}

fn measure(method: &str, size: Size) -> Result<()> {
    let tensor = |heads| Tensor::randn(0f32, 1., (1, size.seqlen, heads, size.dim), &Device::Cpu)?.to_dtype(size.dtype);
    let (q, k, v) = (tensor(size.heads)?, tensor(size.heads_k)?, tensor(size.heads_k)?);
    let before = peak();
    let forward = best(|| attention(method, &q, &k, &v, size).map(|_| ()))?;
    let memory = peak() - before;
    let backward = if method == "candle-nn" {
        String::from("none")
    } else {
        let (q, k, v) = (Var::from_tensor(&q)?, Var::from_tensor(&k)?, Var::from_tensor(&v)?);
        let both = best(|| {
            let out = attention(method, &q, &k, &v, size)?;
            out.to_dtype(DType::F32)?.sum_all()?.backward().map(|_| ())
        });
        both.map_or_else(|error| format!("none ({error})"), |time| format!("{time:.1}"))
    };
    let Size { seqlen, heads, heads_k, dim, dtype } = size;
    println!(
        "| {seqlen} {heads}/{heads_k} {dim} {} | {method} | {forward:.1} | {backward} | {memory} | {} |",
        dtype.as_str(),
        peak() - before
    );
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| arguments.get(index).and_then(|text| text.parse::<usize>().ok());
    let sizes = match (number(0), number(1), number(2), number(3)) {
        (Some(seqlen), Some(heads), Some(heads_k), Some(dim)) => vec![(seqlen, heads, heads_k, dim)],
        _ => vec![(512, 8, 2, 64), (2048, 8, 2, 64), (2048, 8, 8, 128)],
    };
    if let (Some(method), Some(dtype)) = (arguments.get(4), arguments.get(5)) {
        let dtype = if dtype == "bf16" { DType::BF16 } else { DType::F32 };
        let (seqlen, heads, heads_k, dim) = sizes[0];
        return measure(method, Size { seqlen, heads, heads_k, dim, dtype });
    }
    println!("causal attention, {} threads, best time", rayon::current_num_threads());
    println!("| seqlen heads dim | method | forward ms | with backward ms | forward MiB | with backward MiB |");
    println!("|-|-|-|-|-|-|");
    for (seqlen, heads, heads_k, dim) in sizes {
        for dtype in ["f32", "bf16"] {
            for method in METHODS {
                let mut words = [seqlen, heads, heads_k, dim].map(|size| size.to_string()).to_vec();
                words.extend([method.to_owned(), dtype.to_owned()]);
                let done = Command::new(std::env::current_exe()?).args(words).status()?;
                if !done.success() {
                    println!("| {seqlen} {heads}/{heads_k} {dim} {dtype} | {method} | fails | | | |");
                }
            }
        }
    }
    Ok(())
}
