//! The structs of `include/flash_attn_rocm.h`, and the crate's calls that they describe.

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
    seqlen_q: i64,
    seqlen_k: i64,
    total_q: i64,
    total_k: i64,
    softmax_scale: f32,
    softcap: f32,
    window_left: i64,
    window_right: i64,
    alibi_slopes: u64,
    cu_seqlens_q: u64,
    cu_seqlens_k: u64,
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

impl Tensor {
    fn operand(self, name: &'static str) -> Result<Operand> {
        if self.data == 0 {
            return Err(Error::argument(name, "NULL", "the address of a tensor in GPU memory"));
        }
        let strides = [self.batch_stride, self.row_stride, self.head_stride];
        let [batch, row, head] = strides.map(|stride| size(name, stride));
        Ok(Operand { address: self.data, batch: batch?, row: row?, head: head? })
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
        let seqlens = (size("seqlen_q", self.seqlen_q)?, size("seqlen_k", self.seqlen_k)?);
        let heads = (size("heads", self.heads)?, size("heads_k", self.heads_k)?);
        let scale = finite("softmax_scale", self.softmax_scale)?;
        let mut shape =
            Shape::dense(dtype, size("batch", self.batch)?, seqlens, heads, size("head_dim", self.head_dim)?, scale);
        (shape.total_q, shape.total_k) = (size("total_q", self.total_q)?, size("total_k", self.total_k)?);
        (shape.cu_seqlens_q, shape.cu_seqlens_k) = (self.cu_seqlens_q, self.cu_seqlens_k);
        for (name, total, starts) in
            [("total_q", shape.total_q, shape.cu_seqlens_q), ("total_k", shape.total_k, shape.cu_seqlens_k)]
        {
            if total != 0 && starts == 0 {
                return Err(Error::argument(name, total, "0 without cu_seqlens"));
            }
        }
        shape.softcap = finite("softcap", self.softcap)?;
        if shape.softcap < 0.0 {
            return Err(Error::argument("softcap", shape.softcap, "0 for none, or a number above 0"));
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
        shape.alibi_slopes = self.alibi_slopes;
        Ok(shape)
    }
}

/// Reads a struct of the caller's, whose first field is its size.
///
/// # Safety
///
/// The address is null or of a struct that begins with its size and has so many bytes.
unsafe fn read<T: Copy>(name: &'static str, address: *const T) -> Result<T> {
    if address.is_null() {
        return Err(Error::argument("call", "NULL", format!("the address of a {name}")));
    }
    // SAFETY: the first field is a size, whatever header the caller has been compiled with.
    let found = unsafe { address.cast::<usize>().read() };
    if found != size_of::<T>() {
        let expected = format!(
            "sizeof({name}), {}: set it, and compile with the header of this library's release",
            size_of::<T>()
        );
        return Err(Error::argument("struct_size", found, expected));
    }
    // SAFETY: the struct has the size of this one.
    Ok(unsafe { address.read() })
}

impl ForwardCall {
    /// The forward that a caller describes.
    ///
    /// # Safety
    ///
    /// As [`read`].
    pub unsafe fn read(address: *const Self) -> Result<Call> {
        // SAFETY: the caller's promise.
        let call = unsafe { read("flash_attn_rocm_forward_call", address) }?;
        let pages = match call.block_table {
            0 if call.page_size != 0 => {
                return Err(Error::argument("page_size", call.page_size, "0 without a block_table"));
            }
            0 => None,
            table => Some(Pages {
                table,
                stride: size("block_table_stride", call.block_table_stride)?,
                columns: size("block_table_columns", call.block_table_columns)?,
                size: size("page_size", call.page_size)?,
            }),
        };
        Ok(Call::Forward(Forward {
            shape: call.shape.shape()?,
            q: call.q.operand("q")?,
            k: call.k.operand("k")?,
            v: call.v.operand("v")?,
            out: call.out.operand("out")?,
            lse: call.lse,
            pages,
            lengths: call.seqlens_k,
        }))
    }
}

impl BackwardCall {
    /// The backward that a caller describes.
    ///
    /// # Safety
    ///
    /// As [`read`].
    pub unsafe fn read(address: *const Self) -> Result<Call> {
        // SAFETY: the caller's promise.
        let call = unsafe { read("flash_attn_rocm_backward_call", address) }?;
        if call.lse == 0 {
            return Err(Error::argument("lse", "NULL", "the address of the forward's logarithms"));
        }
        Ok(Call::Backward(Backward {
            shape: call.shape.shape()?,
            dout: call.dout.operand("dout")?,
            q: call.q.operand("q")?,
            k: call.k.operand("k")?,
            v: call.v.operand("v")?,
            out: call.out.operand("out")?,
            lse: call.lse,
            dq: call.dq.operand("dq")?,
            dk: call.dk.operand("dk")?,
            dv: call.dv.operand("dv")?,
            may_split: false,
        }))
    }
}
