//! Causal attention forward and backward, on the CPU or, with `--gpu`, on the AMD GPU number 0.
//!
//!     cargo run --release --example attention
//!     CANDLE_FLASH_ROCM_STORE=gfx942.zip cargo run --release --example attention -- --gpu

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_flash_rocm::{flash_attn, RocmContext};

fn train_step() -> Result<()> {
    let (batch, seqlen, heads, heads_k, head_dim) = (2, 512, 8, 2, 64);
    let tensor = |heads| Tensor::randn(0f32, 1., (batch, seqlen, heads, head_dim), &Device::Cpu)?.to_dtype(DType::BF16);
    let (q, k, v) = (Var::from_tensor(&tensor(heads)?)?, tensor(heads_k)?, tensor(heads_k)?);
    let out = flash_attn(&q, &k, &v, 1. / (head_dim as f32).sqrt(), true)?;
    let grads = out.to_dtype(DType::F32)?.sqr()?.mean_all()?.backward()?;
    let dq = grads.get(&q).expect("the gradient of q");
    println!("out {:?} {:?}, dq {:?} {:?}", out.dims(), out.dtype(), dq.dims(), dq.dtype());
    Ok(())
}

fn main() -> Result<()> {
    if std::env::args().any(|argument| argument == "--gpu") {
        let rocm = RocmContext::new(0)?;
        println!("on {} with {} compute units", rocm.gpu().target(), rocm.gpu().compute_units());
        rocm.scope(train_step)
    } else {
        println!("on the CPU");
        train_step()
    }
}
