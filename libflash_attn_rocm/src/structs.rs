//! The structs of `include/flash_attn_rocm.h`.

use std::mem::offset_of;

use crate::growing::{Address, Growing};

/// Declares structs of C, whose fields of one type follow their names.
macro_rules! structs {
    ($($(#[$doc:meta])* $Name:ident { $($($field:ident)* : $Type:ty,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $Name { $($(pub $field: $Type,)*)* }
    )*};
}

structs! {
    /// `flash_attn_rocm_tensor`.
    Tensor {
        data: u64, batch_stride row_stride head_stride: i64, stored reserved: i32,
    }

    /// `flash_attn_rocm_shape`.
    Sizes {
        dtype causal: i32, batch heads heads_k head_dim head_dim_v seqlen_q seqlen_k total_q total_k: i64,
        softmax_scale: f32, reserved: i32, window_left window_right: i64, cu_seqlens_q cu_seqlens_k: u64,
    }

    /// `flash_attn_rocm_options`.
    Options {
        struct_size: usize, softcap host_cost: f32, alibi_slopes: u64, alibi_batch_stride: i64, sinks: u64,
        sinks_stored bias_stored: i32, bias: u64, bias_batch_stride bias_head_stride bias_row_stride: i64, dropout: f32,
        second_query: i32, rng_state leftpad_k cache_lines: u64, appended attention_chunk num_splits: i64,
        descales: [u64; 3], mask_blocks: u64, mask_blocks_strides mask_block_size: [i64; 2], mask_ranges: u64,
        mask_ranges_strides: [i64; 2], mask_ids: [u64; 2], mask_ids_strides: [i64; 2], mask_hidden: u64,
        mask_hidden_strides: [i64; 2], appended_starts: u64, compute reserved: i32, k_mean: u64,
    }

    /// `flash_attn_rocm_forward_call`.
    ForwardCall {
        struct_size: usize, shape: Sizes, q k v out: Tensor, lse block_table: u64,
        block_table_stride block_table_columns page_size: i64, seqlens_k: u64, options: Address<Options>,
    }

    /// `flash_attn_rocm_backward_call`.
    BackwardCall {
        struct_size: usize, shape: Sizes, dout q k v out: Tensor, lse: u64, dq dk dv: Tensor, options: Address<Options>,
        dsinks dbias: u64,
    }

    /// `flash_attn_rocm_append_call`.
    AppendCall {
        struct_size: usize, shape: Sizes, k_new v_new k v: Tensor, seqlen_new: i64, seqlens_k block_table: u64,
        block_table_stride block_table_columns page_size: i64, cache_lines: u64, attention_chunk: i64,
        rotary_cos rotary_sin: u64, rotary_places rotary_half: i64, rotary_offsets: u64,
        rotary_interleaved reserved: i32, q q_turned: Tensor, starts_new: u64,
    }
}

/// Declares structs that grow: their names in the header, and the first field that a program may lack.
macro_rules! growing {
    ($($Name:ident $name:literal $optional:ident;)*) => {$(
        // SAFETY: its fields are integers, floats and addresses.
        unsafe impl Growing for $Name {
            const NAME: &'static str = $name;
            const LEAST: usize = offset_of!(Self, $optional);
        }
    )*};
}

growing! {
    ForwardCall "flash_attn_rocm_forward_call" lse;
    BackwardCall "flash_attn_rocm_backward_call" options;
    AppendCall "flash_attn_rocm_append_call" seqlens_k;
    Options "flash_attn_rocm_options" softcap;
}
