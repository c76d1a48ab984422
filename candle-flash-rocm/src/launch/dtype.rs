//! Element types.

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
