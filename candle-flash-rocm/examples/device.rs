//! Compares a GPU with this crate's CPU kernels, forward and backward, and times calls that are on the device already.
//!
//!     cargo run --release --example device -- sm_90.zip
//!     cargo run --release --example device -- flash_attn-2.8.3+rocm-cp310-abi3-manylinux_2_17_x86_64.whl
//!
//! Takes the first GPU of AMD's or NVIDIA's driver that the stores have a target for.

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use candle_flash_rocm::driver::{Driver, Gpu, Kernels, Platform};
use candle_flash_rocm::launch::{Backward, Dtype, Forward, Operand, Shape};
use candle_flash_rocm::raw::{self, Workspace};
use candle_flash_rocm::store::Stores;
use candle_flash_rocm::{
    flash_attn_alibi_windowed_softcap, flash_attn_varlen_paged_windowed, flash_attn_varlen_windowed, Result,
    RocmContext,
};

fn find(stores: &Stores) -> Result<Arc<Gpu>> {
    let platforms = if stores.targets().any(|target| target.starts_with("gfx")) {
        [Platform::Hip, Platform::Cuda]
    } else {
        [Platform::Cuda, Platform::Hip]
    };
    Driver::open(platforms[0]).or_else(|_| Driver::open(platforms[1])).and_then(|driver| Gpu::open(driver, 0))
}

fn random(shape: &[usize], dtype: DType) -> candle_core::Result<Tensor> {
    Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype)
}

/// The largest difference, relative to the largest value.
fn error(got: &Tensor, wanted: &Tensor) -> candle_core::Result<f32> {
    let (got, wanted) = (got.to_dtype(DType::F32)?, wanted.to_dtype(DType::F32)?);
    let largest = |x: &Tensor| x.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    Ok(largest(&(got - &wanted)?)? / largest(&wanted)?.max(1e-3))
}

/// Result and gradients of a call, on the GPU and on the CPU, compared.
fn compare(
    rocm: &RocmContext,
    what: &str,
    [q, k, v]: [&Tensor; 3],
    backward: bool,
    call: impl Fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Result<bool> {
    let compute = || -> candle_core::Result<Vec<Tensor>> {
        let vars = [Var::from_tensor(q)?, Var::from_tensor(k)?, Var::from_tensor(v)?];
        let out = call(&vars[0], &vars[1], &vars[2])?;
        let mut found = vec![out.clone()];
        if backward {
            let weights = Tensor::arange(0f32, out.elem_count() as f32, &Device::Cpu)?.sin()?.reshape(out.shape())?;
            let grads = (out.to_dtype(DType::F32)? * weights)?.sum_all()?.backward()?;
            found.extend(vars.iter().filter_map(|var| grads.get(var).cloned()));
        }
        Ok(found)
    };
    let (got, wanted) = (rocm.scope(compute)?, compute()?);
    let errors: candle_core::Result<Vec<f32>> =
        got.iter().zip(&wanted).map(|(got, wanted)| error(got, wanted)).collect();
    let errors = errors?;
    let limit = if q.dtype() == DType::F32 { 1e-3 } else { 2e-2 };
    let right = errors.len() == if backward { 4 } else { 1 } && errors.iter().all(|error| *error < limit);
    println!("{} {what} {:?}: errors {errors:?}", if right { "right" } else { "WRONG" }, q.dtype());
    Ok(right)
}

fn numerics(rocm: &RocmContext) -> Result<usize> {
    let mut wrong = 0;
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu)?;
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for (seqlen_q, seqlen_k, dim) in [(300, 300, 64), (130, 257, 128), (77, 200, 40), (1, 4000, 128), (64, 64, 250)]
        {
            let q = random(&[2, seqlen_q, 4, dim], dtype)?;
            let (k, v) = (random(&[2, seqlen_k, 2, dim], dtype)?, random(&[2, seqlen_k, 2, dim], dtype)?);
            for (left, right, softcap, alibi) in [
                (None, Some(0), 0., false),
                (None, None, 0., false),
                (Some(40), Some(7), 0., true),
                (None, Some(0), 20., false),
            ] {
                let what = format!(
                    "q {seqlen_q} k {seqlen_k} dim {dim} window {left:?} {right:?} softcap {softcap} alibi {alibi}"
                );
                let slopes = alibi.then_some(&slopes);
                let done = compare(rocm, &what, [&q, &k, &v], true, |q, k, v| {
                    flash_attn_alibi_windowed_softcap(q, k, v, slopes, 0.1, left, right, softcap)
                })?;
                wrong += usize::from(!done);
            }
        }
        // Many query heads share a key head, so dk and dv are computed as partial sums.
        let (q, k) = (random(&[1, 600, 16, 64], dtype)?, random(&[1, 600, 1, 64], dtype)?);
        let done = compare(rocm, "16 heads to 1", [&q, &k, &k], true, |q, k, v| {
            flash_attn_alibi_windowed_softcap(q, k, v, None, 0.1, None, Some(0), 0.)
        })?;
        wrong += usize::from(!done);
        let starts = Tensor::new(&[0u32, 100, 100, 333], &Device::Cpu)?;
        let (q, k) = (random(&[340, 4, 64], dtype)?, random(&[340, 1, 64], dtype)?);
        let done = compare(rocm, "packed", [&q, &k, &k], true, |q, k, v| {
            flash_attn_varlen_windowed(q, k, v, &starts, &starts, 233, 233, 0.1, None, Some(0))
        })?;
        wrong += usize::from(!done);
        let pages: Vec<u32> = (0..60).map(|page| (page * 7 + 3) % 60).collect();
        let table = Tensor::from_vec(pages, (3, 20), &Device::Cpu)?;
        let k = random(&[60, 32, 1, 64], dtype)?;
        let done = compare(rocm, "pages", [&q, &k, &k], false, |q, k, v| {
            flash_attn_varlen_paged_windowed(
                q,
                k,
                v,
                &starts,
                &starts,
                &table,
                None,
                233,
                233,
                0.1,
                None,
                Some(0),
                32,
                None,
            )
        })?;
        wrong += usize::from(!done);
    }
    Ok(wrong)
}

/// Host time of a call and time of its kernels, with tensors on the device.
fn speed(gpu: &Arc<Gpu>, stores: &Stores) -> Result<()> {
    let kernels = Kernels::new(gpu.clone(), stores.for_gpu(gpu.target(), gpu.hip())?)?;
    let stream = gpu.stream()?;
    let mut workspace = Workspace::new(gpu.clone());
    for (batch, seqlen, heads, dim) in [(1, 64, 4, 64), (4, 4096, 16, 128), (2, 8192, 16, 128)] {
        let mut shape = Shape::dense(Dtype::Bf16, batch, (seqlen, seqlen), (heads, heads), dim, 0.088);
        shape.window_right = Some(0);
        let elements = batch * seqlen * heads * dim;
        let buffers = (0..8).map(|_| gpu.allocate(elements * 2)).collect::<Result<Vec<_>>>()?;
        for buffer in &buffers {
            let values: Vec<u8> =
                (0..elements).flat_map(|i| half::bf16::from_f32((i as f32).sin()).to_le_bytes()).collect();
            stream.upload(values, buffer)?;
        }
        let lse = gpu.allocate(shape.lse_elements() * 4)?;
        let tensor = |index: usize| Operand::dense(buffers[index].address(), seqlen, heads, dim);
        let forward = Forward {
            shape,
            q: tensor(0),
            k: tensor(1),
            v: tensor(2),
            out: tensor(3),
            lse: lse.address(),
            pages: None,
            lengths: 0,
        };
        let backward = Backward {
            shape,
            dout: tensor(4),
            q: tensor(0),
            k: tensor(1),
            v: tensor(2),
            out: tensor(3),
            lse: lse.address(),
            dq: tensor(5),
            dk: tensor(6),
            dv: tensor(7),
            dsinks: 0,
            dbias: 0,
        };
        let mut run = |what: &str, work: f64, call: &mut dyn FnMut(&mut Workspace) -> Result<()>| -> Result<()> {
            for _ in 0..5 {
                call(&mut workspace)?;
            }
            stream.wait()?;
            let rounds = 50;
            let (begin, end) = (gpu.event()?, gpu.event()?);
            begin.record(&stream)?;
            let started = Instant::now();
            for _ in 0..rounds {
                call(&mut workspace)?;
            }
            let host = started.elapsed().as_secs_f64() * 1e6 / f64::from(rounds);
            end.record(&stream)?;
            end.wait()?;
            let time = f64::from(end.milliseconds_since(&begin)?) / f64::from(rounds);
            let flops = work * (batch * heads * dim) as f64 * (seqlen as f64).powi(2);
            println!(
                "{batch} x {seqlen} x {heads} x {dim} {what}: {time:.3} ms, {:.0} TFLOP/s, host {host:.1} us",
                flops / time / 1e9
            );
            Ok(())
        };
        // SAFETY: the buffers are as large as the shape says, and live until the events are over.
        run("forward", 2., &mut |workspace| unsafe { raw::forward(&kernels, &stream, workspace, &forward) })?;
        // SAFETY: as above.
        run("backward", 5., &mut |workspace| unsafe { raw::backward(&kernels, &stream, workspace, &backward) })?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "the name of a store, a wheel or a directory".into());
    let stores = Stores::open(path)?;
    let gpu = find(&stores)?;
    println!("{} with {} compute units, {}", gpu.target(), gpu.compute_units(), gpu.driver().path());
    let rocm = RocmContext::on(gpu.clone(), stores.for_gpu(gpu.target(), gpu.hip())?)?;
    let wrong = numerics(&rocm)?;
    speed(&gpu, &stores)?;
    println!("{wrong} wrong");
    std::process::exit(i32::from(wrong > 0));
}
