//! Attention of tensors that are on the device already: addresses, strides, a stream.
//!
//! For callers with a GPU memory of their own, such as rocm-rs, cubecl or a candle with a ROCm device. A call plans
//! ([`crate::launch`]) and launches; it waits for nothing.
//!
//! ```no_run
//! use candle_flash_rocm::driver::{Driver, Gpu, Kernels, Platform};
//! use candle_flash_rocm::launch::{Dtype, Forward, Operand, Shape};
//! use candle_flash_rocm::raw::{self, Workspace};
//! use candle_flash_rocm::store::Stores;
//!
//! # fn main() -> candle_flash_rocm::Result<()> {
//! let gpu = Gpu::open(Driver::open(Platform::Hip)?, 0)?;
//! let kernels = Kernels::new(gpu.clone(), Stores::open("gfx942.zip")?.store(gpu.target())?)?;
//! let (batch, seqlen, heads, head_dim) = (2, 4096, 16, 128);
//! let shape = Shape::dense(Dtype::Bf16, batch, (seqlen, seqlen), (heads, heads), head_dim, 0.088);
//! let stream = gpu.stream()?;
//! let mut workspace = Workspace::new(gpu.clone());
//! let bytes = batch * seqlen * heads * head_dim * 2;
//! let [q, k, v, out] = [gpu.allocate(bytes)?, gpu.allocate(bytes)?, gpu.allocate(bytes)?, gpu.allocate(bytes)?];
//! let lse = gpu.allocate(shape.lse_elements() * 4)?;
//! let dense = |address| Operand::dense(address, seqlen, heads, head_dim);
//! let call = Forward {
//!     shape,
//!     q: dense(q.address()),
//!     k: dense(k.address()),
//!     v: dense(v.address()),
//!     out: dense(out.address()),
//!     lse: lse.address(),
//!     pages: None,
//!     lengths: 0,
//! };
//! // SAFETY: the buffers are as large as the shape says and live until the wait.
//! unsafe { raw::forward(&kernels, &stream, &mut workspace, &call)? };
//! stream.wait()?;
//! # Ok(())
//! # }
//! ```

#![allow(unsafe_code)]

mod call;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "candle")]
pub(crate) mod host;
mod planned;
#[cfg(any(feature = "cuda", rocm_device))]
pub(crate) mod resident;
#[cfg(rocm_device)]
mod rocm;
mod scratch;
mod workspace;

use crate::driver::{Kernels, Stream};
use crate::error::Result;
use crate::launch::{plan_append, Append, Backward, Forward, Step};
pub use call::Call;
pub use planned::Plan;
pub use scratch::Scratch;
pub use workspace::Workspace;

/// Launches a forward on a stream.
///
/// # Safety
///
/// Every address of the call has to be memory of the kernels' device, as large as the shape, strides and index tensors
/// say, and to live until the stream has come to the call's end. So do the kernels, and the workspace, which one stream
/// uses at a time. Where the call was captured, all of them have to live as long as the graph.
///
/// # Errors
///
/// If sizes, addresses or strides do not fit, a kernel is missing, or the driver refuses.
pub unsafe fn forward(kernels: &Kernels, stream: &Stream, workspace: &mut Workspace, call: &Forward) -> Result<()> {
    workspace.reset();
    let steps = kernels.sources().forward(call, workspace)?;
    // SAFETY: the caller's promise; workspaces are as large as the plan asked for.
    unsafe { run(kernels, stream, &steps) }
}

/// Launches a backward on a stream.
///
/// # Safety
///
/// As [`forward`].
///
/// # Errors
///
/// As [`forward`].
pub unsafe fn backward(kernels: &Kernels, stream: &Stream, workspace: &mut Workspace, call: &Backward) -> Result<()> {
    workspace.reset();
    let steps = kernels.sources().backward(call, workspace)?;
    // SAFETY: as in `forward`.
    unsafe { run(kernels, stream, &steps) }
}

/// Launches an append on a stream.
///
/// # Safety
///
/// As [`forward`].
///
/// # Errors
///
/// As [`forward`].
pub unsafe fn append(kernels: &Kernels, stream: &Stream, call: &Append) -> Result<()> {
    let steps = plan_append(call, kernels)?;
    // SAFETY: as in `forward`.
    unsafe { run(kernels, stream, &steps) }
}

/// Runs the steps of a plan on a stream.
///
/// # Safety
///
/// As [`forward`], for the addresses of the plan.
///
/// # Errors
///
/// If a kernel is missing, or the driver refuses.
pub(crate) unsafe fn run(kernels: &Kernels, stream: &Stream, steps: &[Step]) -> Result<()> {
    for step in steps {
        match step {
            // SAFETY: the caller's promise.
            Step::Launch(launch) => unsafe { kernels.launch(stream, launch)? },
            // SAFETY: the caller's promise.
            Step::Fill(fill) => unsafe { kernels.fill(stream, fill)? },
        }
    }
    Ok(())
}
