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

/// The largest head dim of q and k of kernels of whole sequences whose v has a head dim of its own, and that head dim.
const VALUE_DIMS: [(usize, usize); 2] = [(128, 64), (192, 128)];

/// Whether kernels of whole sequences take v of this head dim. Kernels of a cache take every pair.
pub(super) fn serves_pair(head_dim: usize, head_dim_v: usize) -> bool {
    let fits = |&(size, value): &(usize, usize)| head_dim <= size && head_dim_v <= value && value < head_dim;
    head_dim == head_dim_v || VALUE_DIMS.iter().find(|row| fits(row)).is_some_and(|row| row.1 == head_dim_v)
}

/// The name of the kernel that serves an operation for a head dim and kind.
pub(super) fn name(operation: &str, dtype: Dtype, head_dim: usize, kind: &str) -> Result<String> {
    name_of(operation, dtype.name(), head_dim, kind)
}

/// As [`name`], for an element type by its name in a store.
pub(super) fn name_of(operation: &str, element: &str, head_dim: usize, kind: &str) -> Result<String> {
    let is_cache = ["decode", "extend"].iter().any(|start| operation.starts_with(start));
    let has_value_dim = operation.ends_with("-v");
    let buckets: &[usize] = match operation {
        "combine" => &[128],
        "append" => &[64],
        _ if is_cache => &[64, 128, 256, 512],
        _ if has_value_dim => &[128, 192],
        _ if operation.starts_with("sparse-") => &[64, 128, 256],
        _ => &[32, 64, 96, 128, 192, 256, 512],
    };
    let bucket = match operation {
        "combine" | "append" => buckets.first(),
        _ => buckets.iter().find(|&&bucket| head_dim <= bucket),
    };
    let Some(bucket) = bucket else {
        return Err(Error::Unsupported(format!("head_dim: got {head_dim}, the kernels reach to {MAX_HEAD_DIM}")));
    };
    let is_wide = element == "fp32" || *bucket == 512;
    let kinds: &[&str] = match operation {
        "combine" => &["plain", "wide"],
        "append" => &["plain"],
        _ if operation.starts_with("sparse-") => &["mask"],
        _ if has_value_dim => &["plain", "any"],
        _ if is_cache || operation.starts_with("fwd-paged") => {
            if is_wide {
                &["plain", "any"]
            } else {
                &["plain", "sink", "any"]
            }
        }
        _ if is_wide => &["plain", "bias", "any"],
        "fwd" => &["plain", "sink", "alibi", "dropout", "softcap", "bias", "any"],
        _ => &["plain", "alibi", "dropout", "softcap", "bias", "any"],
    };
    let serving = if kinds.contains(&kind) { kind } else { kinds[kinds.len() - 1] };
    let suffix = if serving == kinds[0] { String::new() } else { format!("-{serving}") };
    Ok(format!("{operation}-{element}-d{bucket}{suffix}"))
}
