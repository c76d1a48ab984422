//! Attention as an operation of candle: forward and backward, dense or over packed sequences.

mod gpu;
#[cfg(any(feature = "cuda", rocm_device))]
mod resident;

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Storage, Tensor, WithDType};

use crate::arguments::{Options, Sizes, Varlen};
use crate::context::RocmContext;
use crate::cpu::{self, Element, Strides, View};
use crate::error::{argument, Error, Result};
use crate::memory;

/// Head dims of the GPU kernels are multiples of this number; others are padded with zeros.
const HEAD_DIM_MULTIPLE: usize = 8;

const NO_PAGED_BACKWARD: &str =
    "block_table: a paged cache has no backward, call flash_attn_varlen with packed keys instead";

/// Runs attention for all public functions of this crate.
pub(crate) fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: Options,
    varlen: Option<Varlen>,
) -> candle_core::Result<Tensor> {
    #[cfg(any(feature = "cuda", rocm_device))]
    if !q.device().is_cpu() {
        return resident::attend(q, k, v, options, varlen);
    }
    let attention = Attention { rocm: RocmContext::current()?, ..Attention::new(options, varlen) };
    q.apply_op3(k, v, attention)
}

/// One call of attention. Do not reuse it for another call, because it keeps the results of the
/// forward that the backward needs.
pub(crate) struct Attention {
    options: Options,
    varlen: Option<Varlen>,
    /// The GPU of the thread's scope at call time, which computes CPU tensors; None for the CPU.
    rocm: Option<RocmContext>,
    /// In the layout of the executing backend.
    lse: Mutex<Option<Arc<Vec<f32>>>>,
    /// The forward's results for tensors on candle's GPU device. They stay on the GPU.
    #[cfg(any(feature = "cuda", rocm_device))]
    lse_there: Mutex<Option<Tensor>>,
    /// Whether the forward fills `lse_there`; a backward that finds nothing computes them.
    #[cfg(any(feature = "cuda", rocm_device))]
    keeps_lse: bool,
}

/// The gradients of q, k and v.
type Gradients = (Option<Tensor>, Option<Tensor>, Option<Tensor>);

impl Attention {
    pub fn new(options: Options, varlen: Option<Varlen>) -> Self {
        Self {
            options,
            varlen,
            rocm: None,
            lse: Mutex::new(None),
            #[cfg(any(feature = "cuda", rocm_device))]
            lse_there: Mutex::new(None),
            #[cfg(any(feature = "cuda", rocm_device))]
            keeps_lse: false,
        }
    }

    /// Sizes of a call, with every check that needs no values of index tensors.
    fn sizes(&self, q: &Shape, k: &Shape, v: &Shape) -> Result<Sizes> {
        let sizes = match &self.varlen {
            None => Sizes::dense(q, k, v)?,
            Some(Varlen { pages: Some(pages), .. }) => Sizes::paged(q, k, v, pages.page_block_size)?,
            Some(_) => Sizes::packed(q, k, v)?,
        };
        self.options.check(&sizes)?;
        if let Some(varlen) = &self.varlen {
            varlen.batch()?;
        }
        Ok(sizes)
    }

    /// Converts the call to the arguments of the CPU kernels.
    fn cpu_call(&self, sizes: &Sizes) -> Result<cpu::Call> {
        let dense = || cpu::Sequence {
            batch: 0,
            q: 0..sizes.seqlen_q,
            k: 0..sizes.seqlen_k,
            pages: Vec::new(),
            prefixes: Vec::new(),
        };
        let (sequences, longest_q, longest_k) = if let Some(varlen) = &self.varlen {
            (varlen.sequences(sizes)?, varlen.max_seqlen_q, varlen.max_seqlen_k)
        } else {
            let each = (0..sizes.batch).map(|batch| cpu::Sequence { batch, ..dense() });
            (memory::collect(sizes.batch, each, "the list of sequences")?, sizes.seqlen_q, sizes.seqlen_k)
        };
        let slopes = self.options.alibi_slopes.as_ref();
        let (window_left, window_right) = self.options.window(longest_q, longest_k);
        Ok(cpu::Call {
            heads: sizes.heads,
            heads_k: sizes.heads_k,
            dim: sizes.dim,
            scale: self.options.softmax_scale,
            softcap: self.options.cap(),
            window_left,
            window_right,
            slopes: slopes.map(Tensor::to_vec1).transpose()?,
            sequences,
            page_size: sizes.page_size,
            rows_q: sizes.batch * sizes.seqlen_q,
            entry_q: sizes.seqlen_q,
            entry_k: sizes.seqlen_k,
        })
    }

    /// Keeps the logarithms of the sums for the backward.
    fn keep(&self, lse: Vec<f32>) {
        *self.lse.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(lse));
    }

    /// The logarithms of the sums that the forward kept.
    fn kept(&self) -> Option<Arc<Vec<f32>>> {
        self.lse.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The forward: the result's elements.
    fn forward<T: Element>(&self, sizes: &Sizes, [q, k, v]: [View<'_, T>; 3]) -> Result<Vec<T>> {
        if let Some(rocm) = &self.rocm {
            return self.gpu_forward(rocm, sizes, [q, k, v]);
        }
        cpu::start_threads()?;
        let mut out = sizes.like_q("the result")?;
        let call = self.cpu_call(sizes)?;
        self.keep(cpu::forward(&call, [&q, &k, &v], &mut out)?);
        Ok(out)
    }

    /// The gradients on the CPU: elements of dq, dk and dv.
    fn cpu_backward<T: Element>(&self, sizes: &Sizes, [q, k, v, out, dout]: [View<'_, T>; 5]) -> Result<[Vec<T>; 3]> {
        cpu::start_threads()?;
        let (mut dq, mut dk, mut dv) = (sizes.like_q("dq")?, sizes.like_k("dk")?, sizes.like_k("dv")?);
        let call = self.cpu_call(sizes)?;
        let lse = match self.kept() {
            Some(lse) => lse,
            None => Arc::new(cpu::forward(&call, [&q, &k, &v], &mut sizes.like_q::<T>("the result")?)?),
        };
        let delta = cpu::row_sums(&call, &out, &dout)?;
        let inputs = cpu::Inputs { q: &q, k: &k, v: &v, dout: &dout, lse: &lse, delta: &delta };
        if !cpu::gradients(&call, inputs, [&mut dq, &mut dk, &mut dv])? {
            cpu::gradient_of_queries(&call, inputs, &mut dq)?;
            cpu::gradients_of_keys(&call, inputs, &mut dk, &mut dv)?;
        }
        Ok([dq, dk, dv])
    }

    fn backward<T: Element + WithDType>(&self, tensors: [&Tensor; 5]) -> Result<Gradients> {
        let [q, k, v, _, dout] = tensors;
        let sizes = self.sizes(q.shape(), k.shape(), v.shape())?;
        if sizes.pages > 0 {
            return Err(Error::Unsupported(NO_PAGED_BACKWARD.into()));
        }
        let stored = tensors.map(Tensor::storage_and_layout);
        let mut views = Vec::with_capacity(tensors.len());
        for (storage, layout) in &stored {
            let Storage::Cpu(storage) = &**storage else {
                return Err(Error::WrongDevice(
                    "q, k, v, and their gradients have to be on the CPU, as q is: move them with to_device".into(),
                ));
            };
            views.push(view(storage.as_slice::<T>()?, layout)?);
        }
        let views = [views[0], views[1], views[2], views[3], views[4]];
        let [dq, dk, dv] = match &self.rocm {
            Some(rocm) => self.gpu_backward(rocm, &sizes, views)?,
            None => self.cpu_backward(&sizes, views)?,
        };
        let device = dout.device();
        Ok((
            Some(Tensor::from_vec(dq, q.shape(), device)?),
            Some(Tensor::from_vec(dk, k.shape(), device)?),
            Some(Tensor::from_vec(dv, v.shape(), device)?),
        ))
    }
}

/// Strides of a tensor `(batch, row, head, dim)` or `(row, head, dim)`.
fn strides(layout: &Layout) -> Result<Strides> {
    let offset = layout.start_offset();
    match *layout.stride() {
        [batch, row, head, dim] => Ok(Strides { offset, batch, row, head, dim }),
        [row, head, dim] => Ok(Strides { offset, batch: 0, row, head, dim }),
        _ => argument("q, k, v", format!("shape {:?}", layout.shape()), "rank 3 or 4"),
    }
}

fn view<'a, T>(data: &'a [T], layout: &Layout) -> Result<View<'a, T>> {
    Ok(View { data, strides: strides(layout)? })
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        if self.varlen.is_some() {
            "flash-attn-varlen"
        } else {
            "flash-attn"
        }
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_l: &Layout,
        k: &CpuStorage,
        k_l: &Layout,
        v: &CpuStorage,
        v_l: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let sizes = self.sizes(q_l.shape(), k_l.shape(), v_l.shape())?;
        let result = match (q, k, v) {
            (CpuStorage::F16(q), CpuStorage::F16(k), CpuStorage::F16(v)) => {
                CpuStorage::F16(self.forward(&sizes, [view(q, q_l)?, view(k, k_l)?, view(v, v_l)?])?)
            }
            (CpuStorage::BF16(q), CpuStorage::BF16(k), CpuStorage::BF16(v)) => {
                CpuStorage::BF16(self.forward(&sizes, [view(q, q_l)?, view(k, k_l)?, view(v, v_l)?])?)
            }
            (CpuStorage::F32(q), CpuStorage::F32(k), CpuStorage::F32(v)) => {
                CpuStorage::F32(self.forward(&sizes, [view(q, q_l)?, view(k, k_l)?, view(v, v_l)?])?)
            }
            _ => {
                use candle_core::backend::BackendStorage;
                let found = format!("dtypes {:?}, {:?} and {:?}", q.dtype(), k.dtype(), v.dtype());
                argument("q, k and v", found, "one of F16, BF16 and F32, the same for all")?
            }
        };
        Ok((result, q_l.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        q_l: &Layout,
        k: &candle_core::CudaStorage,
        k_l: &Layout,
        v: &candle_core::CudaStorage,
        v_l: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        self.resident_forward([(q, q_l), (k, k_l), (v, v_l)])
    }

    #[cfg(rocm_device)]
    fn rocm_fwd(
        &self,
        q: &candle_core::RocmStorage,
        q_l: &Layout,
        k: &candle_core::RocmStorage,
        k_l: &Layout,
        v: &candle_core::RocmStorage,
        v_l: &Layout,
    ) -> candle_core::Result<(candle_core::RocmStorage, Shape)> {
        self.resident_forward([(q, q_l), (k, k_l), (v, v_l)])
    }

    fn bwd(&self, q: &Tensor, k: &Tensor, v: &Tensor, out: &Tensor, dout: &Tensor) -> candle_core::Result<Gradients> {
        let tensors = [q, k, v, out, dout];
        #[cfg(feature = "cuda")]
        if q.device().is_cuda() {
            return self.resident_backward::<candle_core::CudaStorage>(tensors);
        }
        #[cfg(rocm_device)]
        if matches!(q.device(), candle_core::Device::Rocm(_)) {
            return self.resident_backward::<candle_core::RocmStorage>(tensors);
        }
        Ok(match q.dtype() {
            DType::F16 => self.backward::<half::f16>(tensors)?,
            DType::BF16 => self.backward::<half::bf16>(tensors)?,
            _ => self.backward::<f32>(tensors)?,
        })
    }
}
