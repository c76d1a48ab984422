//! Which of the optional pointers are real, and how blocks lie: bits of the kernels' `flags`.

pub const CU_SEQLENS_Q: i32 = 1;
pub const CU_SEQLENS_K: i32 = 2;
pub const SEQUSED_K: i32 = 4;
pub const LEFTPAD_K: i32 = 8;
pub const ALIBI: i32 = 16;
pub const CACHE_BATCH_IDX: i32 = 32;
pub const ROTARY_SEQLENS: i32 = 64;
pub const DESCALE: i32 = 128;
pub const ROTARY_INTERLEAVED: i32 = 256;
pub const ROTARY_MOVES: i32 = 512;
pub const BLOCK_TABLE: i32 = 1024;
pub const PACKED_BLOCKS: i32 = 2048;
pub const SINKS: i32 = 4096;
pub const SINKS_LIKE_OUT: i32 = 8192;
pub const BIAS_IS_FP32: i32 = 16384;
pub const QUERY_HAS_16_BITS: i32 = 32768;
pub const QUERY_IS_FP16: i32 = 65536;
pub const BLOCKS: i32 = 1 << 17;
pub const RANGES: i32 = 1 << 18;
pub const IDS: i32 = 1 << 19;
pub const HIDDEN: i32 = 1 << 20;
