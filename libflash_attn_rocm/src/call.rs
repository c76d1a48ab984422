//! The crate's calls that the header's structs describe.

use crate::growing::{read, Address};
use crate::structs::{AppendCall, BackwardCall, ForwardCall, Options, Sizes, Tensor};
use candle_flash_rocm::launch::{Append, Backward, Bias, Compute, Dtype, Forward, Mask, Operand, Pages, Rotary, Shape};
use candle_flash_rocm::raw::Call;
use candle_flash_rocm::{Error, Result};

fn size(name: &'static str, number: i64) -> Result<usize> {
    usize::try_from(number).map_err(|_| Error::argument(name, number, "0 or more"))
}

fn sizes(name: &'static str, [first, second]: [i64; 2]) -> Result<[usize; 2]> {
    Ok([size(name, first)?, size(name, second)?])
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

fn switch(name: &'static str, number: i32) -> Result<bool> {
    match number {
        0 | 1 => Ok(number == 1),
        other => Err(Error::argument(name, other, "0 or 1")),
    }
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

/// The name of how a tensor is stored, where a caller says it.
fn stored(name: &'static str, number: i32) -> Result<Option<&'static str>> {
    if number == 0 {
        return Ok(None);
    }
    let index = usize::try_from(number - 1).ok();
    match index.and_then(|index| STORED.get(index)) {
        Some(stored) => Ok(Some(stored)),
        None => Err(Error::argument(name, format!("stored {number}"), "a number FLASH_ATTN_ROCM_STORED_..., or 0")),
    }
}

/// Whether numbers of an option are fp32, and not of the call's type.
fn is_fp32(name: &'static str, number: i32, dtype: Dtype) -> Result<bool> {
    match stored(name, number)? {
        Some("fp32") => Ok(dtype != Dtype::F32),
        None => Ok(false),
        Some(same) if same == dtype.name() => Ok(false),
        Some(other) => Err(Error::Unsupported(format!(
            "{name}: stored as {other}, and kernels take fp32 or the call's type, {}: convert it",
            dtype.name()
        ))),
    }
}

impl Tensor {
    fn operand(self, name: &'static str, dtype: Dtype) -> Result<Operand> {
        if self.data == 0 {
            return Err(Error::argument(name, "NULL", "the address of a tensor in GPU memory"));
        }
        reserved(name, self.reserved)?;
        match stored(name, self.stored)? {
            None => {}
            Some(stored) if stored == dtype.name() => {}
            Some(stored) => {
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

    /// Whether it is stored in FP8. Forgets it, so that `operand` takes the tensor.
    fn take_fp8(&mut self) -> bool {
        let is_fp8 = matches!(stored("", self.stored), Ok(Some("fp8")));
        if is_fp8 {
            self.stored = 0;
        }
        is_fp8
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
        let dtype = shape.dtype;
        let to = &mut shape.options;
        to.host_cost = f64::from(cost);
        to.alibi_batch = size("alibi_batch_stride", options.alibi_batch_stride)?;
        to.sinks = options.sinks;
        to.sinks_are_fp32 = is_fp32("sinks", options.sinks_stored, dtype)?;
        to.bias = Bias {
            address: options.bias,
            batch: size("bias_batch_stride", options.bias_batch_stride)?,
            head: size("bias_head_stride", options.bias_head_stride)?,
            row: i32::try_from(options.bias_row_stride)
                .map_err(|_| Error::argument("bias_row_stride", options.bias_row_stride, "a number of 32 bits"))?,
            is_fp32: is_fp32("bias", options.bias_stored, dtype)?,
        };
        to.dropout = finite("dropout", options.dropout)?;
        to.rng_state = options.rng_state;
        to.has_second_query = switch("second_query", options.second_query)?;
        to.leftpad = options.leftpad_k;
        to.lines = options.cache_lines;
        to.appended = size("appended", options.appended)?;
        to.appended_starts = options.appended_starts;
        to.chunk = size("attention_chunk", options.attention_chunk)?;
        to.num_splits = size("num_splits", options.num_splits)?;
        to.descales = options.descales;
        reserved("options.reserved", options.reserved)?;
        to.compute = match options.compute {
            0 => Compute::AsStored,
            1 => Compute::Int8,
            2 => Compute::Fp8,
            other => return Err(Error::argument("compute", other, "FLASH_ATTN_ROCM_COMPUTE_INT8, _FP8, or 0")),
        };
        to.k_mean = options.k_mean;
        to.mask = Mask {
            blocks: options.mask_blocks,
            blocks_strides: sizes("mask_blocks strides", options.mask_blocks_strides)?,
            block_size: sizes("mask_block_q and mask_block_k", options.mask_block_size)?,
            ranges: options.mask_ranges,
            ranges_strides: sizes("mask_ranges strides", options.mask_ranges_strides)?,
            ids: options.mask_ids,
            ids_batch: sizes("mask_ids strides", options.mask_ids_strides)?,
            hidden: options.mask_hidden,
            hidden_strides: sizes("mask_hidden strides", options.mask_hidden_strides)?,
        };
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
        let mut shape = Shape::dense(dtype, size("batch", self.batch)?, seqlens, heads, head_dim, scale);
        if self.head_dim_v != 0 {
            shape.head_dim_v = size("head_dim_v", self.head_dim_v)?;
        }
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
        if switch("causal", self.causal)? {
            if let Some(keys @ 1..) = shape.window_right {
                return Err(Error::argument("window_right", keys, "-1 or 0, because causal is 1"));
            }
            shape.window_right = Some(0);
        }
        Ok(shape)
    }
}

/// The pages of a cache. numbers: stride and columns of the table, rows of a page.
fn pages(table: u64, numbers: [i64; 3]) -> Result<Option<Pages>> {
    let named = ["block_table_stride", "block_table_columns", "page_size"].into_iter().zip(numbers);
    if table == 0 {
        return match named.into_iter().find(|(_, number)| *number != 0) {
            Some((name, number)) => Err(Error::argument(name, number, "0 without a block_table")),
            None => Ok(None),
        };
    }
    let mut sizes = [0; 3];
    for (to, (name, number)) in sizes.iter_mut().zip(named) {
        *to = size(name, number)?;
    }
    let [stride, columns, size] = sizes;
    Ok(Some(Pages { table, stride, columns, size }))
}

impl AppendCall {
    /// The append that a caller describes.
    ///
    /// # Safety
    ///
    /// As [`read`].
    pub unsafe fn read(address: Address<Self>) -> Result<Append> {
        // SAFETY: the caller's promise.
        let call = unsafe { read("call", address) }?;
        reserved("reserved", call.reserved)?;
        let mut shape = call.shape.shape()?;
        shape.options.lines = call.cache_lines;
        shape.options.chunk = size("attention_chunk", call.attention_chunk)?;
        let operand = |name, tensor: Tensor| tensor.operand(name, shape.dtype);
        let rotary = match (call.rotary_cos, call.rotary_sin) {
            (0, 0) => None,
            (cos, sin) => Some(Rotary {
                cos,
                sin,
                places: size("rotary_places", call.rotary_places)?,
                half: size("rotary_half", call.rotary_half)?,
                is_interleaved: switch("rotary_interleaved", call.rotary_interleaved)?,
                offsets: call.rotary_offsets,
                q: operand("q", call.q)?,
                turned: operand("q_turned", call.q_turned)?,
            }),
        };
        Ok(Append {
            shape,
            k_new: operand("k_new", call.k_new)?,
            v_new: operand("v_new", call.v_new)?,
            k: operand("k", call.k)?,
            v: operand("v", call.v)?,
            pages: pages(call.block_table, [call.block_table_stride, call.block_table_columns, call.page_size])?,
            lengths: call.seqlens_k,
            seqlen_new: size("seqlen_new", call.seqlen_new)?,
            starts: call.starts_new,
            rotary,
        })
    }
}

impl ForwardCall {
    /// The forward that a caller describes.
    ///
    /// # Safety
    ///
    /// As [`read`].
    pub unsafe fn read(address: Address<Self>) -> Result<Call> {
        // SAFETY: the caller's promise.
        let call = unsafe { read("call", address) }?;
        let pages = pages(call.block_table, [call.block_table_stride, call.block_table_columns, call.page_size])?;
        let mut shape = call.shape.shape()?;
        // SAFETY: the caller's promise.
        unsafe { Options::apply(call.options, &mut shape) }?;
        let (mut q, mut k, mut v) = (call.q, call.k, call.v);
        (shape.options.is_fp8, shape.options.q_is_fp8) = (k.take_fp8(), q.take_fp8());
        if v.take_fp8() != shape.options.is_fp8 {
            return Err(Error::argument("v", "stored otherwise than k", "k and v both in FP8, or none"));
        }
        if shape.options.q_is_fp8 && !shape.options.is_fp8 {
            return Err(Error::argument("q", "stored in FP8", "k and v in FP8 too"));
        }
        Ok(Call::Forward(Forward {
            shape,
            q: q.operand("q", shape.dtype)?,
            k: k.operand("k", shape.dtype)?,
            v: v.operand("v", shape.dtype)?,
            out: call.out.operand("out", shape.dtype)?,
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
            dsinks: call.dsinks,
            dbias: call.dbias,
        }))
    }
}
