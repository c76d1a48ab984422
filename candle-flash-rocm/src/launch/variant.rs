//! Names of kernels in a store: operation, element type, head-dim bucket, kind.

use crate::error::{Error, Result};

/// The largest head dim that the kernels serve.
pub(super) const MAX_HEAD_DIM: usize = 512;

/// Element type of a call's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl Dtype {
    /// Its name in a store.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "fp16",
            Self::Bf16 => "bf16",
            Self::F32 => "fp32",
        }
    }

    /// Bytes of an element.
    #[must_use]
    pub fn size(self) -> usize {
        if self == Self::F32 {
            4
        } else {
            2
        }
    }

    /// Elements in 16 bytes, the unit of strides and head dims.
    pub(super) fn vec(self) -> usize {
        16 / self.size()
    }
}

/// The name of the kernel that serves an operation for a head dim and kind.
pub(super) fn name(operation: &str, dtype: Dtype, head_dim: usize, kind: &str) -> Result<String> {
    let buckets: &[usize] = match operation {
        "combine" => &[128],
        "decode" | "decode-paged" | "extend" | "extend-paged" => &[64, 128, 256, 512],
        _ => &[32, 64, 96, 128, 192, 256, 512],
    };
    let bucket = match operation {
        "combine" => buckets.first(),
        _ => buckets.iter().find(|&&bucket| head_dim <= bucket),
    };
    let Some(bucket) = bucket else {
        return Err(Error::Unsupported(format!("head_dim: got {head_dim}, the kernels reach to {MAX_HEAD_DIM}")));
    };
    let kinds: &[&str] = match operation {
        "combine" => &["plain", "wide"],
        "decode" | "decode-paged" | "extend" | "extend-paged" => &["plain", "any"],
        _ if dtype == Dtype::F32 || operation.starts_with("fwd-paged") || *bucket == 512 => &["plain", "any"],
        _ => &["plain", "alibi", "dropout", "softcap", "any"],
    };
    let serving = if kinds.contains(&kind) { kind } else { kinds[kinds.len() - 1] };
    let suffix = if serving == kinds[0] { String::new() } else { format!("-{serving}") };
    Ok(format!("{operation}-{}-d{bucket}{suffix}", dtype.name()))
}
