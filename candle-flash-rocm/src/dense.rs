//! The functions of candle-flash-attn for tensors of equally long sequences.

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};

use crate::arguments::Options;
use crate::context::RocmContext;
use crate::error::Error;
use crate::operation::{attend, Attention};

/// Attention as an operation for [`Tensor::apply_op3`]: `q.apply_op3(k, v, FlashAttn { .. })`.
///
/// Prefer the functions: they keep the logarithms of the softmax sums for the backward, and compute CPU tensors on the GPU
/// of a [`RocmContext`](crate::RocmContext). This operation keeps nothing between its forward and its backward, so within
/// a scope of a GPU it is an error for CPU tensors.
#[derive(Clone, Debug)]
pub struct FlashAttn {
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub softmax_scale: f32,
    /// ALiBi slopes `(heads of q)`, F32.
    pub alibi_slopes: Option<Tensor>,
    /// How many keys before its own position a query sees; `None` for all.
    pub window_size_left: Option<usize>,
    /// How many keys after its own position a query sees; `None` for all. `Some(0)` is a causal mask.
    pub window_size_right: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`; `None` and 0 leave them.
    pub softcap: Option<f32>,
}

impl FlashAttn {
    /// The operation for CPU tensors. An error within the scope of a GPU.
    fn cpu_operation(&self) -> Result<Attention> {
        if RocmContext::current()?.is_some() {
            return Err(Error::Unsupported(
                "FlashAttn: its backward may come after the scope of the RocmContext, and would compute on the CPU: call \
                 flash_attn or another function of the crate, which remembers the GPU, or call it within \
                 RocmContext::cpu_scope"
                    .into(),
            )
            .into());
        }
        Ok(self.operation())
    }

    fn operation(&self) -> Attention {
        let options = Options {
            softmax_scale: self.softmax_scale,
            alibi_slopes: self.alibi_slopes.clone(),
            window_size_left: self.window_size_left,
            window_size_right: self.window_size_right,
            softcap: self.softcap,
        };
        Attention::new(options, None)
    }
}

impl CustomOp3 for FlashAttn {
    fn name(&self) -> &'static str {
        "flash-attn"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.cpu_operation()?.cpu_fwd(s1, l1, s2, l2, s3, l3)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &candle_core::CudaStorage,
        l1: &Layout,
        s2: &candle_core::CudaStorage,
        l2: &Layout,
        s3: &candle_core::CudaStorage,
        l3: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        self.operation().cuda_fwd(s1, l1, s2, l2, s3, l3)
    }

    #[cfg(rocm_device)]
    fn rocm_fwd(
        &self,
        s1: &candle_core::RocmStorage,
        l1: &Layout,
        s2: &candle_core::RocmStorage,
        l2: &Layout,
        s3: &candle_core::RocmStorage,
        l3: &Layout,
    ) -> Result<(candle_core::RocmStorage, Shape)> {
        self.operation().rocm_fwd(s1, l1, s2, l2, s3, l3)
    }

    fn bwd(
        &self,
        arg1: &Tensor,
        arg2: &Tensor,
        arg3: &Tensor,
        res: &Tensor,
        grad_res: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let operation = if arg1.device().is_cpu() { self.cpu_operation()? } else { self.operation() };
        operation.bwd(arg1, arg2, arg3, res, grad_res)
    }
}

/// The window that a causal mask is.
pub(crate) fn causal_window(causal: bool) -> Option<usize> {
    causal.then_some(0)
}

fn call(q: &Tensor, k: &Tensor, v: &Tensor, options: Options) -> Result<Tensor> {
    attend(q, k, v, options, None)
}

/// Attention, `softmax(softmax_scale * q k^T) v`, with a backward.
///
/// `q` is `(batch, seqlen_q, heads, head_dim)`, `k` and `v` are `(batch, seqlen_k, heads_k, head_dim)`; `heads` is a
/// multiple of `heads_k` (grouped-query attention). The result has the shape of `q`. Dtypes: F16, BF16, F32.
///
/// With `causal`, query `i` sees keys up to `i + seqlen_k - seqlen_q`. A query that sees no key gives 0.
///
/// # Errors
///
/// If shapes, dtypes or options do not fit; the message names the argument.
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, causal_window(causal))
}

/// [`flash_attn`] within a sliding window.
///
/// A query at position `p = i + seqlen_k - seqlen_q` sees keys `p - window_size_left` to `p + window_size_right`;
/// `None` opens a side. `None` and `Some(0)` together are a causal mask.
///
/// # Errors
///
/// As [`flash_attn`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let options = Options { softmax_scale, alibi_slopes: None, window_size_left, window_size_right, softcap: None };
    call(q, k, v, options)
}

/// [`flash_attn`] with ALiBi: `alibi_slopes`, F32 `(heads)`, times the distance of key and query is subtracted from a
/// score.
///
/// # Errors
///
/// As [`flash_attn`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, causal_window(causal))
}

/// [`flash_attn_alibi`] within a window as of [`flash_attn_windowed`].
///
/// # Errors
///
/// As [`flash_attn`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let alibi_slopes = Some(alibi_slopes.clone());
    call(q, k, v, Options { softmax_scale, alibi_slopes, window_size_left, window_size_right, softcap: None })
}

/// [`flash_attn_windowed`] with optional ALiBi slopes, and scores capped as `softcap * tanh(score / softcap)`.
///
/// A `softcap` of 0 caps nothing.
///
/// # Errors
///
/// As [`flash_attn`].
#[allow(clippy::too_many_arguments)] // the signature of candle-flash-attn
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let alibi_slopes = alibi_slopes.cloned();
    let softcap = Some(softcap);
    call(q, k, v, Options { softmax_scale, alibi_slopes, window_size_left, window_size_right, softcap })
}
