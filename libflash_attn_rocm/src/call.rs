//! The structs of `include/flash_attn_rocm.h`, and the crate's calls that they describe.

use std::mem::offset_of;

use crate::growing::{read, Address};
use candle_flash_rocm::launch::{Backward, Dtype, Forward, Operand, Pages, Shape};
use candle_flash_rocm::raw::Call;
use candle_flash_rocm::{Error, Result};

/// `flash_attn_rocm_tensor`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    data: u64,
    batch_stride: i64,
    row_stride: i64,
    head_stride: i64,
    stored: i32,
    reserved: i32,
}

/// `flash_attn_rocm_shape`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sizes {
    dtype: i32,
    causal: i32,
    batch: i64,
    heads: i64,
    heads_k: i64,
    head_dim: i64,
    head_dim_v: i64,
    seqlen_q: i64,
    seqlen_k: i64,
    total_q: i64,
    total_k: i64,
    softmax_scale: f32,
    reserved: i32,
    window_left: i64,
    window_right: i64,
    cu_seqlens_q: u64,
    cu_seqlens_k: u64,
}

/// `flash_attn_rocm_options`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    struct_size: usize,
    softcap: f32,
    host_cost: f32,
    alibi_slopes: u64,
}

/// `flash_attn_rocm_forward_call`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ForwardCall {
    struct_size: usize,
    shape: Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: u64,
    block_table: u64,
    block_table_stride: i64,
    block_table_columns: i64,
    page_size: i64,
    seqlens_k: u64,
    options: Address<Options>,
}

/// `flash_attn_rocm_backward_call`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BackwardCall {
    struct_size: usize,
    shape: Sizes,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: u64,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    options: Address<Options>,
}

fn size(name: &'static str, number: i64) -> Result<usize> {
    usize::try_from(number).map_err(|_| Error::argument(name, number, "0 or more"))
}

fn window(name: &'static str, number: i64) -> Result<Option<usize>> {
    match usize::try_from(number) {
        Ok(keys) => Ok(Some(keys)),
        Err(_) if number == -1 => Ok(None),
        Err(_) => Err(Error::argument(name, number, "-1 for all keys, or a number of keys")),
    }
}

fn finite(name: &'static str, number: f32) -> Result<f32> {
    if number.is_finite() {
        return Ok(number);
    }
    Err(Error::argument(name, number, "a finite number"))
}

/// What fields for later releases hold.
fn reserved(name: &'static str, number: i32) -> Result<()> {
    if number == 0 {
        return Ok(());
    }
    Err(Error::argument(name, number, "0"))
}

/// Names of the ways in which tensors are stored, by the header's numbers from 1 on.
const STORED: [&str; 5] = ["fp16", "bf16", "fp32", "fp8", "q8_0"];

impl Tensor {
    fn operand(self, name: &'static str, dtype: Dtype) -> Result<Operand> {
        if self.data == 0 {
            return Err(Error::argument(name, "NULL", "the address of a tensor in GPU memory"));
        }
        reserved(name, self.reserved)?;
        if self.stored != 0 {
            let index = usize::try_from(self.stored - 1).ok();
            let Some(stored) = index.and_then(|index| STORED.get(index)) else {
                return Err(Error::argument(
                    name,
                    format!("stored {}", self.stored),
                    "a number FLASH_ATTN_ROCM_STORED_..., or 0",
                ));
            };
            if *stored != dtype.name() {
                return Err(Error::Unsupported(format!(
                    "{name}: stored as {stored}, and the call computes in {}: no kernel takes both; convert the tensor \
                     first, and leave `stored` 0",
                    dtype.name()
                )));
            }
        }
        let strides = [self.batch_stride, self.row_stride, self.head_stride];
        let [batch, row, head] = strides.map(|stride| size(name, stride));
        Ok(Operand { address: self.data, batch: batch?, row: row?, head: head? })
    }
}

impl Options {
    /// Puts the options into a call's shape.
    ///
    /// # Safety
    ///
    /// As [`read`]; null is no options.
    unsafe fn apply(address: Address<Self>, shape: &mut Shape) -> Result<()> {
        if address.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let options = unsafe { read("options", address) }?;
        shape.softcap = finite("softcap", options.softcap)?;
        if shape.softcap < 0.0 {
            return Err(Error::argument("softcap", shape.softcap, "0 for none, or a number above 0"));
        }
        shape.alibi_slopes = options.alibi_slopes;
        let cost = finite("host_cost", options.host_cost)?;
        if cost < 0.0 {
            return Err(Error::argument("host_cost", cost, "microseconds, or 0 for 2"));
        }
        if cost > 0.0 {
            shape.options.host_cost = f64::from(cost);
        }
        Ok(())
    }
}

impl Sizes {
    fn shape(&self) -> Result<Shape> {
        let dtype = match self.dtype {
            0 => Dtype::F16,
            1 => Dtype::Bf16,
            2 => Dtype::F32,
            other => return Err(Error::argument("dtype", other, "FLASH_ATTN_ROCM_FP16, _BF16 or _FP32")),
        };
        reserved("shape.reserved", self.reserved)?;
        let seqlens = (size("seqlen_q", self.seqlen_q)?, size("seqlen_k", self.seqlen_k)?);
        let heads = (size("heads", self.heads)?, size("heads_k", self.heads_k)?);
        let scale = finite("softmax_scale", self.softmax_scale)?;
        let head_dim = size("head_dim", self.head_dim)?;
        if ![0, self.head_dim].contains(&self.head_dim_v) {
            return Err(Error::Unsupported(format!(
                "head_dim_v: got {}, and head_dim is {head_dim}: pad v, or q and k, with zeros to the same head dim",
                self.head_dim_v
            )));
        }
        let mut shape = Shape::dense(dtype, size("batch", self.batch)?, seqlens, heads, head_dim, scale);
        (shape.total_q, shape.total_k) = (size("total_q", self.total_q)?, size("total_k", self.total_k)?);
        (shape.cu_seqlens_q, shape.cu_seqlens_k) = (self.cu_seqlens_q, self.cu_seqlens_k);
        for (name, total, starts) in
            [("total_q", shape.total_q, shape.cu_seqlens_q), ("total_k", shape.total_k, shape.cu_seqlens_k)]
        {
            if total != 0 && starts == 0 {
                return Err(Error::argument(name, total, "0 without cu_seqlens"));
            }
        }
        (shape.window_left, shape.window_right) =
            (window("window_left", self.window_left)?, window("window_right", self.window_right)?);
        match (self.causal, shape.window_right) {
            (0, _) => {}
            (1, None | Some(0)) => shape.window_right = Some(0),
            (1, Some(keys)) => {
                return Err(Error::argument("window_right", keys, "-1 or 0, because causal is 1"));
            }
            (other, _) => return Err(Error::argument("causal", other, "0 or 1")),
        }
        Ok(shape)
    }
}

impl ForwardCall {
    /// Bytes up to the last field that every forward needs.
    pub const REQUIRED: usize = offset_of!(Self, lse);

    /// The forward that a caller describes.
    ///
    /// # Safety
    ///
    /// As [`read`].
    pub unsafe fn read(address: Address<Self>) -> Result<Call> {
        // SAFETY: the caller's promise.
        let call = unsafe { read("call", address) }?;
        let pages = match call.block_table {
            0 => {
                let unused = [
                    ("page_size", call.page_size),
                    ("block_table_stride", call.block_table_stride),
                    ("block_table_columns", call.block_table_columns),
                ];
                if let Some((name, number)) = unused.into_iter().find(|(_, number)| *number != 0) {
                    return Err(Error::argument(name, number, "0 without a block_table"));
                }
                None
            }
            table => Some(Pages {
                table,
                stride: size("block_table_stride", call.block_table_stride)?,
                columns: size("block_table_columns", call.block_table_columns)?,
                size: size("page_size", call.page_size)?,
            }),
        };
        let mut shape = call.shape.shape()?;
        // SAFETY: the caller's promise.
        unsafe { Options::apply(call.options, &mut shape) }?;
        Ok(Call::Forward(Forward {
            shape,
            q: call.q.operand("q", shape.dtype)?,
            k: call.k.operand("k", shape.dtype)?,
            v: call.v.operand("v", shape.dtype)?,
            out: call.out.operand("out", shape.dtype)?,
            lse: call.lse,
            pages,
            lengths: call.seqlens_k,
        }))
    }
}

impl BackwardCall {
    /// Bytes up to the last field that every backward needs.
    pub const REQUIRED: usize = offset_of!(Self, options);

    /// The backward that a caller describes.
    ///
    /// # Safety
    ///
    /// As [`read`].
    pub unsafe fn read(address: Address<Self>) -> Result<Call> {
        // SAFETY: the caller's promise.
        let call = unsafe { read("call", address) }?;
        if call.lse == 0 {
            return Err(Error::argument("lse", "NULL", "the address of the forward's logarithms"));
        }
        let mut shape = call.shape.shape()?;
        // SAFETY: the caller's promise.
        unsafe { Options::apply(call.options, &mut shape) }?;
        let operand = |name, tensor: Tensor| tensor.operand(name, shape.dtype);
        Ok(Call::Backward(Backward {
            shape,
            dout: operand("dout", call.dout)?,
            q: operand("q", call.q)?,
            k: operand("k", call.k)?,
            v: operand("v", call.v)?,
            out: operand("out", call.out)?,
            lse: call.lse,
            dq: operand("dq", call.dq)?,
            dk: operand("dk", call.dk)?,
            dv: operand("dv", call.dv)?,
            may_split: false,
        }))
    }
}
