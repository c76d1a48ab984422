//! The operation on tensors that candle keeps on a GPU.

use candle_core::{DType, Layout, Result, Shape, Tensor};

use super::{Attention, Gradients, HEAD_DIM_MULTIPLE};
use crate::arguments::{Options, Varlen};
use crate::error::Error;
use crate::raw::resident::{self, Call, GpuStorage};

/// Attention of tensors on a GPU. Tensors that the kernels cannot take as they lie are copied first.
pub(super) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, options: Options, varlen: Option<Varlen>) -> Result<Tensor> {
    let dim = q.dims().last().copied().unwrap_or(0);
    let more = dim.next_multiple_of(HEAD_DIM_MULTIPLE) - dim;
    let alike = [k, v].iter().all(|tensor| tensor.dims().last() == Some(&dim));
    if more == 0 || !alike {
        return apply(&fitting(q)?, &fitting(k)?, &fitting(v)?, Attention::new(options, varlen));
    }
    let padded = |tensor: &Tensor| tensor.pad_with_zeros(tensor.rank() - 1, 0, more);
    let out = apply(&padded(q)?, &padded(k)?, &padded(v)?, Attention::new(options, varlen))?;
    out.narrow(out.rank() - 1, 0, dim)
}

/// Applies the operation. Results for the backward are kept only if a backward can follow, because
/// every additional tensor costs the host microseconds.
fn apply(q: &Tensor, k: &Tensor, v: &Tensor, mut attention: Attention) -> Result<Tensor> {
    attention.keeps_lse = [q, k, v].iter().any(|tensor| tensor.track_op());
    if attention.keeps_lse {
        q.apply_op3(k, v, attention)
    } else {
        q.apply_op3_no_bwd(k, v, &attention)
    }
}

/// A tensor whose rows start at multiples of 16 bytes and are dense: itself or a copy.
fn fitting(tensor: &Tensor) -> Result<Tensor> {
    let unit = match tensor.dtype() {
        DType::F16 | DType::BF16 => 8,
        DType::F32 => 4,
        _ => return Ok(tensor.clone()), // refused later
    };
    let Some((&last, strides)) = tensor.stride().split_last() else { return Ok(tensor.clone()) };
    let starts = strides.iter().chain([tensor.layout().start_offset()].iter()).all(|place| place.is_multiple_of(unit));
    if last == 1 && starts {
        Ok(tensor.clone())
    } else {
        tensor.force_contiguous()
    }
}

impl Attention {
    /// The forward. Keeps the logarithms of the sums where a backward can follow.
    pub(super) fn resident_forward<S: GpuStorage>(&self, tensors: [(&S, &Layout); 3]) -> Result<(S, Shape)> {
        let [q, k, v] = tensors.map(|(_, layout)| layout.shape());
        let sizes = self.sizes(q, k, v)?;
        let call = Call { sizes: &sizes, options: &self.options, varlen: self.varlen.as_ref() };
        let (out, lse) = resident::forward(call, tensors, self.keeps_lse)?;
        *self.lse_there.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = lse;
        Ok((out, q.clone()))
    }

    /// The backward.
    pub(super) fn resident_backward<S: GpuStorage>(&self, tensors: [&Tensor; 5]) -> Result<Gradients> {
        let [q, k, v, ..] = tensors;
        let sizes = self.sizes(q.shape(), k.shape(), v.shape())?;
        if sizes.pages > 0 {
            return Err(Error::Unsupported(super::NO_PAGED_BACKWARD.into()).into());
        }
        let call = Call { sizes: &sizes, options: &self.options, varlen: self.varlen.as_ref() };
        let lse = self.lse_there.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let mut fit = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            fit.push(fitting(tensor)?);
        }
        let [dq, dk, dv] = resident::backward::<S>(call, [&fit[0], &fit[1], &fit[2], &fit[3], &fit[4]], lse)?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
