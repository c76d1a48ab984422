//! One call of attention, through the store, the launch plan, the driver and AMD's HIP runtime, on memory of the caller's.
//!
//! tests/simulated_calls.py loads this library in a process whose HIP runtime has a pretended GPU, which a simulator of
//! AMD's instructions is. The pretended GPU reads host memory, so nothing is copied, and fills are made here.

use std::ffi::{c_char, c_int, CStr};

use candle_flash_rocm::driver::{Driver, Gpu, Kernels, Planner, Platform, Stream};
use candle_flash_rocm::launch::internals::{Fill, Step};
use candle_flash_rocm::launch::{Backward, Dtype, Forward, Memory, Operand, Shape};
use candle_flash_rocm::store::Stores;
use candle_flash_rocm::{Error, Result};
use serde::Deserialize;

/// A dense or packed call; 0 is an address that is not used.
#[derive(Deserialize)]
struct Request {
    store: String,
    dtype: String,
    batch: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    heads: usize,
    heads_k: usize,
    head_dim: usize,
    total_q: usize,
    total_k: usize,
    scale: f32,
    causal: bool,
    alibi: u64,
    cu_seqlens_q: u64,
    cu_seqlens_k: u64,
    tensors: [u64; 9],
    workspace: [u64; 2],
}

/// Workspaces of a plan, in the caller's memory.
struct Given {
    next: u64,
    end: u64,
}

impl Memory for Given {
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let address = self.next.next_multiple_of(256);
        self.next = address + bytes as u64;
        if self.next > self.end {
            return Err(Error::Unsupported(format!("the workspace has no {bytes} bytes left")));
        }
        Ok(address)
    }
}

impl Request {
    fn shape(&self) -> Shape {
        let dtype = match self.dtype.as_str() {
            "fp16" => Dtype::F16,
            "bf16" => Dtype::Bf16,
            _ => Dtype::F32,
        };
        let seqlens = (self.seqlen_q, self.seqlen_k);
        let mut shape = Shape::dense(dtype, self.batch, seqlens, (self.heads, self.heads_k), self.head_dim, self.scale);
        shape.window_right = self.causal.then_some(0);
        shape.alibi_slopes = self.alibi;
        (shape.cu_seqlens_q, shape.cu_seqlens_k) = (self.cu_seqlens_q, self.cu_seqlens_k);
        (shape.total_q, shape.total_k) = (self.total_q, self.total_k);
        shape
    }

    fn run(&self) -> Result<usize> {
        let gpu = Gpu::open(Driver::open(Platform::Hip)?, 0)?;
        let stores = Stores::open(&self.store)?;
        let mut kernels = Kernels::new(gpu.clone(), stores.for_gpu(gpu.target(), gpu.hip())?)?;
        if let Some(path) = stores.planner() {
            // SAFETY: the test that loads this library names its own planner.
            kernels = kernels.with_planner(unsafe { Planner::open(&path)? });
        }
        // SAFETY: the default stream always exists.
        let stream = unsafe { gpu.foreign_stream(0) };
        let mut memory = Given { next: self.workspace[0], end: self.workspace[0] + self.workspace[1] };
        let shape = self.shape();
        let operand = |address, rows, heads| {
            if shape.cu_seqlens_q == 0 {
                Operand::dense(address, rows, heads, shape.head_dim)
            } else {
                Operand::packed(address, heads, shape.head_dim)
            }
        };
        let of_q = |address| operand(address, self.seqlen_q, self.heads);
        let of_k = |address| operand(address, self.seqlen_k, self.heads_k);
        let [q, k, v, out, lse, dout, dq, dk, dv] = self.tensors;
        let (q, k, v, out) = (of_q(q), of_k(k), of_k(v), of_q(out));
        let forward = Forward { shape, q, k, v, out, lse, pages: None, lengths: 0 };
        let steps = kernels.sources().forward(&forward, &mut memory)?;
        let mut launches = carry_out(&kernels, &stream, &steps)?;
        if dout != 0 {
            let (dout, dq, dk, dv) = (of_q(dout), of_q(dq), of_k(dk), of_k(dv));
            let backward = Backward { shape, dout, q, k, v, out, lse, dq, dk, dv, may_split: false };
            let steps = kernels.sources().backward(&backward, &mut memory)?;
            launches += carry_out(&kernels, &stream, &steps)?;
        }
        Ok(launches)
    }
}

/// Runs the steps of a plan in order; the number of launches.
fn carry_out(kernels: &Kernels, stream: &Stream, steps: &[Step]) -> Result<usize> {
    let mut launches = 0;
    for step in steps {
        match step {
            Step::Launch(launch) => {
                // SAFETY: tests/simulated_calls.py gives tensors of the sizes that it says.
                unsafe { kernels.launch(stream, launch)? };
                launches += 1;
            }
            Step::Fill(Fill { address, pattern, count }) => {
                stream.wait()?;
                // SAFETY: as above; the stream has nothing to do meanwhile.
                unsafe { std::slice::from_raw_parts_mut(*address as *mut u32, *count) }.fill(*pattern);
            }
            Step::Sum(_) => return Err(Error::Unsupported("may_split is not set".into())),
        }
    }
    stream.wait()?;
    Ok(launches)
}

/// Runs a request, JSON. Returns the number of launches, or -1 with a message of at most `capacity` bytes.
///
/// # Safety
///
/// The request ends with a null and its addresses are memory of the sizes that it says; the message has `capacity` bytes.
#[no_mangle]
pub unsafe extern "C" fn candle_flash_rocm_run(request: *const c_char, message: *mut u8, capacity: usize) -> c_int {
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(request) }.to_string_lossy();
    let parsed = serde_json::from_str::<Request>(&text).map_err(|error| error.to_string());
    match parsed.and_then(|request| request.run().map_err(|error| error.to_string())) {
        Ok(launches) => c_int::try_from(launches).unwrap_or(c_int::MAX),
        Err(problem) => {
            let bytes = &problem.as_bytes()[..problem.len().min(capacity.saturating_sub(1))];
            // SAFETY: the caller's promise.
            unsafe {
                message.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                message.add(bytes.len()).write(0);
            }
            -1
        }
    }
}
