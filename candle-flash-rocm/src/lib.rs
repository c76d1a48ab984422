#![cfg_attr(feature = "candle", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "candle"),
    doc = "Flash attention on AMD GPUs: plans and launches for memory of the caller's."
)]
#![deny(unsafe_code)]
#![warn(missing_docs, clippy::pedantic)]
// Numbers of the kernels: sizes of tensors fit into every type that they are converted to.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]
// q, k, v and m, n, k are the names of the literature.
#![allow(clippy::many_single_char_names, clippy::similar_names)]
// Without this inlining, the kernels would not be compiled for the vector extensions that are
// chosen at run time.
#![allow(clippy::inline_always)]

#[cfg(feature = "candle")]
mod arguments;
#[cfg(feature = "candle")]
mod context;
#[cfg(feature = "candle")]
mod cpu;
#[cfg(feature = "candle")]
mod dense;
pub mod driver;
mod error;
pub mod launch;
mod memory;
#[cfg(feature = "candle")]
mod operation;
pub mod raw;
pub mod store;
#[cfg(feature = "candle")]
mod varlen;

#[cfg(feature = "candle")]
pub use context::RocmContext;
#[cfg(feature = "candle")]
pub use dense::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap, flash_attn_windowed,
    FlashAttn,
};
pub use error::{Error, Result};
#[cfg(feature = "candle")]
pub use varlen::{
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_paged_windowed, flash_attn_varlen_windowed,
};
