//! Which of the optional pointers are real, and how blocks lie: bits of the kernels' `flags`.

pub const CU_SEQLENS_Q: i32 = 1;
pub const CU_SEQLENS_K: i32 = 2;
pub const SEQUSED_K: i32 = 4;
pub const ALIBI: i32 = 16;
pub const BLOCK_TABLE: i32 = 1024;
pub const PACKED_BLOCKS: i32 = 2048;
