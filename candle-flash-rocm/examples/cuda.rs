//! Compares tensors on candle's CUDA device with CPU tensors, forward and backward, and times the host.
//!
//!     CANDLE_FLASH_ROCM_STORE=sm_90.zip cargo run --release --features cuda --example cuda

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_flash_rocm::{
    flash_attn, flash_attn_alibi_windowed_softcap, flash_attn_varlen, flash_attn_varlen_paged_windowed,
};

/// Result and gradients of a call on a device.
fn compute(
    device: &Device,
    tensors: &[Tensor; 3],
    backward: bool,
    call: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let mut inputs = Vec::new();
    for tensor in tensors {
        inputs.push(Var::from_tensor(&tensor.to_device(device)?)?);
    }
    let out = call(&inputs[0], &inputs[1], &inputs[2])?;
    let mut found = vec![out.clone()];
    if backward {
        let weights = Tensor::arange(0f32, out.elem_count() as f32, &Device::Cpu)?.sin()?.reshape(out.shape())?;
        let weights = weights.to_dtype(out.dtype())?.to_device(device)?;
        let gradients = (out * weights)?.sum_all()?.backward()?;
        found.extend(inputs.iter().filter_map(|input| gradients.get(input).cloned()));
    }
    Ok(found)
}

/// The largest difference, against the largest value.
fn error(got: &Tensor, wanted: &Tensor) -> Result<f32> {
    let (got, wanted) = (got.to_device(&Device::Cpu)?.to_dtype(DType::F32)?, wanted.to_dtype(DType::F32)?);
    let largest = |x: &Tensor| x.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    Ok(largest(&(got - &wanted)?)? / largest(&wanted)?.max(1e-3))
}

/// Compares the results of a call on the GPU and on the CPU. Prints and returns whether they agree.
fn compare(
    gpu: &Device,
    what: &str,
    tensors: [Tensor; 3],
    backward: bool,
    call: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<bool> {
    let got = compute(gpu, &tensors, backward, &call)?;
    let wanted = compute(&Device::Cpu, &tensors, backward, &call)?;
    let errors: Result<Vec<f32>> = got.iter().zip(&wanted).map(|(got, wanted)| error(got, wanted)).collect();
    let errors = errors?;
    let dtype = tensors[0].dtype();
    let limit = if dtype == DType::F32 { 1e-3 } else { 2e-2 };
    let right = errors.len() == if backward { 4 } else { 1 } && errors.iter().all(|error| *error < limit);
    println!("{} {what} {dtype:?}: errors {errors:?}", if right { "right" } else { "WRONG" });
    Ok(right)
}

fn numerics(gpu: &Device) -> Result<usize> {
    let mut wrong = 0;
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let random = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype);
        for dim in [64, 128, 100] {
            let dense = [random(&[2, 130, 4, dim])?, random(&[2, 200, 2, dim])?, random(&[2, 200, 2, dim])?];
            wrong += usize::from(!compare(gpu, &format!("causal, dim {dim}"), dense, true, |q, k, v| {
                flash_attn(q, k, v, 0.1, true)
            })?);
        }
        let dense = [random(&[2, 4, 130, 64])?, random(&[2, 2, 200, 64])?, random(&[2, 2, 200, 64])?];
        wrong += usize::from(!compare(gpu, "transposed, ALiBi, softcap, window", dense, true, |q, k, v| {
            let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], q.device())?;
            let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
            flash_attn_alibi_windowed_softcap(&q, &k, &v, Some(&slopes), 0.1, Some(50), Some(20), 10.0)
        })?);
        let packed = [random(&[300, 4, 64])?, random(&[300, 2, 64])?, random(&[300, 2, 64])?];
        wrong += usize::from(!compare(gpu, "packed", packed, true, |q, k, v| {
            let starts = Tensor::new(&[0u32, 100, 297], q.device())?;
            flash_attn_varlen(q, k, v, &starts, &starts, 197, 197, 0.1, true)
        })?);
        let paged = [random(&[130, 4, 64])?, random(&[8, 64, 2, 64])?, random(&[8, 64, 2, 64])?];
        wrong += usize::from(!compare(gpu, "paged", paged, false, |q, k, v| {
            let (starts_q, starts_k) =
                (Tensor::new(&[0u32, 30, 130], q.device())?, Tensor::new(&[0u32, 190, 390], q.device())?);
            let table = Tensor::new(&[[3u32, 1, 7, 0], [2, 6, 5, 4]], q.device())?;
            let (scale, right) = (0.1, Some(0));
            flash_attn_varlen_paged_windowed(
                q, k, v, &starts_q, &starts_k, &table, None, 100, 200, scale, None, right, 64, None,
            )
        })?);
    }
    Ok(wrong)
}

/// Host time of a call in microseconds: the least mean of ten rounds of a hundred calls.
fn host_time(gpu: &Device, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        gpu.synchronize()?;
        let start = Instant::now();
        for _ in 0..100 {
            call()?;
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e4);
    }
    Ok(best)
}

fn main() -> Result<()> {
    let gpu = Device::new_cuda(0)?;
    let wrong = numerics(&gpu)?;
    let q = Tensor::randn(0f32, 1., (1, 128, 8, 64), &Device::Cpu)?.to_dtype(DType::BF16)?.to_device(&gpu)?;
    let variable = Var::from_tensor(&q)?;
    let forward = host_time(&gpu, || flash_attn(&q, &q, &q, 0.125, true).map(drop))?;
    let tracked = host_time(&gpu, || flash_attn(&variable, &variable, &variable, 0.125, true).map(drop))?;
    let negation = host_time(&gpu, || q.neg().map(drop))?;
    println!("host time for 1 x 128 x 8 x 64, in us: forward {forward:.1}, with a variable {tracked:.1}");
    println!("candle's negation of the same tensor: {negation:.1} us");
    println!("{wrong} calls are wrong");
    std::process::exit(i32::from(wrong > 0));
}
