//! The structs of `include/flash_attn_rocm.h`.

use std::mem::offset_of;

use crate::growing::{Address, Growing};

/// `flash_attn_rocm_tensor`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub data: u64,
    pub batch_stride: i64,
    pub row_stride: i64,
    pub head_stride: i64,
    pub stored: i32,
    pub reserved: i32,
}

/// `flash_attn_rocm_shape`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sizes {
    pub dtype: i32,
    pub causal: i32,
    pub batch: i64,
    pub heads: i64,
    pub heads_k: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub total_q: i64,
    pub total_k: i64,
    pub softmax_scale: f32,
    pub reserved: i32,
    pub window_left: i64,
    pub window_right: i64,
    pub cu_seqlens_q: u64,
    pub cu_seqlens_k: u64,
}

/// `flash_attn_rocm_options`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    pub struct_size: usize,
    pub softcap: f32,
    pub host_cost: f32,
    pub alibi_slopes: u64,
    pub alibi_batch_stride: i64,
    pub sinks: u64,
    pub sinks_stored: i32,
    pub bias_stored: i32,
    pub bias: u64,
    pub bias_batch_stride: i64,
    pub bias_head_stride: i64,
    pub bias_row_stride: i64,
    pub dropout: f32,
    pub second_query: i32,
    pub rng_state: u64,
    pub leftpad_k: u64,
    pub cache_lines: u64,
    pub appended: i64,
    pub attention_chunk: i64,
    pub num_splits: i64,
    pub descales: [u64; 3],
    pub mask_blocks: u64,
    pub mask_blocks_strides: [i64; 2],
    pub mask_block_size: [i64; 2],
    pub mask_ranges: u64,
    pub mask_ranges_strides: [i64; 2],
    pub mask_ids: [u64; 2],
    pub mask_ids_strides: [i64; 2],
    pub mask_hidden: u64,
    pub mask_hidden_strides: [i64; 2],
    pub appended_starts: u64,
}

/// `flash_attn_rocm_forward_call`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ForwardCall {
    pub struct_size: usize,
    pub shape: Sizes,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub out: Tensor,
    pub lse: u64,
    pub block_table: u64,
    pub block_table_stride: i64,
    pub block_table_columns: i64,
    pub page_size: i64,
    pub seqlens_k: u64,
    pub options: Address<Options>,
}

/// `flash_attn_rocm_backward_call`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BackwardCall {
    pub struct_size: usize,
    pub shape: Sizes,
    pub dout: Tensor,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub out: Tensor,
    pub lse: u64,
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
    pub options: Address<Options>,
}

/// `flash_attn_rocm_append_call`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AppendCall {
    pub struct_size: usize,
    pub shape: Sizes,
    pub k_new: Tensor,
    pub v_new: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub seqlen_new: i64,
    pub seqlens_k: u64,
    pub block_table: u64,
    pub block_table_stride: i64,
    pub block_table_columns: i64,
    pub page_size: i64,
    pub cache_lines: u64,
    pub attention_chunk: i64,
    pub rotary_cos: u64,
    pub rotary_sin: u64,
    pub rotary_places: i64,
    pub rotary_half: i64,
    pub rotary_offsets: u64,
    pub rotary_interleaved: i32,
    pub reserved: i32,
    pub q: Tensor,
    pub q_turned: Tensor,
    pub starts_new: u64,
}

// SAFETY: its fields are integers, floats and addresses.
unsafe impl Growing for ForwardCall {
    const NAME: &'static str = "flash_attn_rocm_forward_call";
    const LEAST: usize = offset_of!(Self, lse);
}

// SAFETY: its fields are integers, floats and addresses.
unsafe impl Growing for BackwardCall {
    const NAME: &'static str = "flash_attn_rocm_backward_call";
    const LEAST: usize = offset_of!(Self, options);
}

// SAFETY: its fields are integers, floats and addresses.
unsafe impl Growing for AppendCall {
    const NAME: &'static str = "flash_attn_rocm_append_call";
    const LEAST: usize = offset_of!(Self, seqlens_k);
}

// SAFETY: its fields are integers, floats and addresses.
unsafe impl Growing for Options {
    const NAME: &'static str = "flash_attn_rocm_options";
    const LEAST: usize = size_of::<usize>();
}
