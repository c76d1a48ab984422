//! Which source of kernels serves a call: the table of `flash_attn/backends/choice.py` of the repository.

use super::{Dtype, Shape};

/// A source of kernels in a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// AMD's assembly.
    Assembly,
    /// AMD's Composable Kernel.
    ComposableKernel,
    /// This project's Triton kernels.
    Triton,
}

/// What a kernel does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Forward,
    Backward,
}

/// Keys that queries do not see.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mask {
    Plain,
    Causal,
    Window,
}

impl Mask {
    /// The mask of a call. A limit that no query reaches is none.
    pub fn of(shape: &Shape) -> Self {
        let left = shape.window_left.filter(|left| left.saturating_add(1) < shape.seqlen_k);
        let right = shape.window_right.filter(|right| right.saturating_add(1) < shape.seqlen_q);
        match (left, right) {
            (None, None) => Self::Plain,
            (None, Some(0)) => Self::Causal,
            _ => Self::Window,
        }
    }
}

/// Calls, and the sources to try, the fastest first.
struct Row {
    target: &'static str,
    operation: Operation,
    dtypes: &'static [Dtype],
    dims: std::ops::RangeInclusive<usize>,
    masks: &'static [Mask],
    /// Queries of the longest sequence from which the row holds.
    least_q: usize,
    sources: &'static [Source],
}

const BF16: &[Dtype] = &[Dtype::Bf16];
const BOTH: &[Dtype] = &[Dtype::F16, Dtype::Bf16];
const ANY: &[Mask] = &[Mask::Plain, Mask::Causal, Mask::Window];
const NO_WINDOW: &[Mask] = &[Mask::Plain, Mask::Causal];
const ASM: &[Source] = &[Source::Assembly, Source::Triton, Source::ComposableKernel];
const ASM_OR_CK: &[Source] = &[Source::Assembly, Source::ComposableKernel, Source::Triton];
const TRITON: &[Source] = &[Source::Triton, Source::ComposableKernel];
/// No measurement: as upstream.
const DEFAULT: &[Source] = &[Source::ComposableKernel, Source::Triton];
const TRITON_ALONE: &[Source] = &[Source::Triton];

/// The largest head dim of AMD's kernels.
pub(super) const LARGEST: usize = 256;

const fn row(
    (target, operation): (&'static str, Operation),
    (dtypes, dims): (&'static [Dtype], std::ops::RangeInclusive<usize>),
    (masks, least_q): (&'static [Mask], usize),
    sources: &'static [Source],
) -> Row {
    Row { target, operation, dtypes, dims, masks, least_q, sources }
}

/// The first row that a call fits in decides. The Python file has the cycles behind each, and rows for values with a head
/// dim of their own, which this crate has no calls of.
const ROWS: [Row; 15] = [
    row(("gfx942", Operation::Forward), (BF16, 128..=128), (NO_WINDOW, 129), ASM),
    row(("gfx942", Operation::Forward), (BOTH, 1..=256), (ANY, 1), TRITON),
    row(("gfx942", Operation::Backward), (BOTH, 64..=64), (NO_WINDOW, 1), ASM),
    row(("gfx942", Operation::Backward), (BOTH, 1..=64), (ANY, 1), TRITON),
    row(("gfx942", Operation::Backward), (BOTH, 65..=128), (ANY, 1), ASM),
    row(("gfx942", Operation::Backward), (BOTH, 129..=192), (NO_WINDOW, 1), ASM_OR_CK),
    row(("gfx950", Operation::Forward), (BF16, 128..=128), (NO_WINDOW, 129), ASM),
    row(("gfx950", Operation::Forward), (BOTH, 1..=256), (ANY, 1), TRITON),
    row(("gfx950", Operation::Backward), (BOTH, 64..=64), (NO_WINDOW, 1), ASM),
    row(("gfx950", Operation::Backward), (BOTH, 1..=64), (ANY, 1), TRITON),
    row(("gfx950", Operation::Backward), (BOTH, 65..=128), (ANY, 1), ASM),
    row(("gfx950", Operation::Backward), (BOTH, 129..=256), (ANY, 1), TRITON),
    row(("gfx90a", Operation::Forward), (BOTH, 1..=64), (ANY, 1), TRITON),
    row(("gfx90a", Operation::Forward), (BOTH, 129..=192), (ANY, 1), TRITON),
    row(("gfx90a", Operation::Forward), (BF16, 193..=256), (ANY, 1), TRITON),
];

/// The sources for a call, the fastest first. The table holds for plain scores; other calls stay with one source.
pub(super) fn sources(target: &str, operation: Operation, shape: &Shape, is_paged: bool) -> &'static [Source] {
    if shape.head_dim > LARGEST {
        return TRITON_ALONE;
    }
    if shape.softcap > 0.0 || shape.alibi_slopes != 0 || is_paged {
        return DEFAULT;
    }
    let mask = Mask::of(shape);
    let fits = |row: &&Row| {
        row.target == target
            && row.operation == operation
            && row.dtypes.contains(&shape.dtype)
            && row.dims.contains(&shape.head_dim)
            && row.masks.contains(&mask)
            && row.least_q <= shape.seqlen_q
    };
    ROWS.iter().find(fits).map_or(DEFAULT, |row| row.sources)
}
