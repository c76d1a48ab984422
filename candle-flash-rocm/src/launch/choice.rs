//! Chooses the kernel provider of a call from the store's table (docs/notes/kernel-store.md in the
//! repository).

use std::collections::{HashMap, HashSet};

use serde::Deserialize;

use super::planning::{MaskKind, Operation};
use super::Shape;

/// A source of kernels in a store.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub enum Source {
    /// AMD's assembly.
    #[serde(rename = "asm")]
    Assembly,
    /// AMD's Composable Kernel.
    #[serde(rename = "ck")]
    ComposableKernel,
    /// This project's Triton kernels.
    #[serde(rename = "triton")]
    Triton,
}

impl MaskKind {
    /// The mask of a call. A window so wide that it hides no key counts as no window.
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
#[derive(Clone, Debug, Deserialize)]
struct Row {
    op: Operation,
    dtypes: Vec<String>,
    dims: (usize, usize),
    masks: Vec<MaskKind>,
    /// Queries of the longest sequence from which the row holds.
    least_q: usize,
    sources: Vec<Source>,
    /// Head dim of v if it differs from q's, otherwise 0. In this crate both are always equal.
    value_dim: usize,
}

/// The table of a store: which kernel provider serves a call on its target.
#[derive(Clone, Debug, Deserialize)]
pub struct Choice {
    /// Calls with a larger head dim use the providers in `larger`.
    max_head_dim: usize,
    /// The first row that a call fits in decides.
    rows: Vec<Row>,
    default: Vec<Source>,
    larger: Vec<Source>,
    /// Element types that always use the providers in `larger`, because the other providers flush
    /// subnormals of this type on this GPU.
    #[serde(default)]
    flushed: Vec<String>,
    /// Who serves calls -> the options that it honours. What a row does not name is not served there.
    serves: HashMap<String, HashSet<String>>,
}

/// The options that a call uses, by their names in the table, beside its mask and its lengths.
fn used(shape: &Shape, is_paged: bool) -> impl Iterator<Item = &'static str> {
    let options = &shape.options;
    [
        ("softcap", shape.softcap != 0.0),
        ("alibi_slopes", shape.alibi_slopes != 0),
        ("s_aux", options.sinks != 0),
        ("attn_bias", options.bias.address != 0),
        ("dropout_p", options.dropout != 0.0),
        ("leftpad_k", options.leftpad != 0),
        ("mask", options.mask.is_used()),
        ("block_table", is_paged),
    ]
    .into_iter()
    .filter_map(|(name, is_used)| is_used.then_some(name))
}

impl Choice {
    /// Whether a row of the table, such as `asm-fwd`, names every option that a call uses.
    pub(super) fn serves(&self, row: &str, shape: &Shape, is_paged: bool) -> bool {
        let honoured = self.serves.get(row);
        used(shape, is_paged).all(|name| honoured.is_some_and(|names| names.contains(name)))
    }

    /// The kernel providers for a call, fastest first. The rows are for calls without score
    /// modifiers. Other calls use the default.
    pub(super) fn sources(&self, operation: Operation, shape: &Shape, is_paged: bool) -> &[Source] {
        if shape.head_dim > self.max_head_dim
            || shape.head_dim_v != shape.head_dim
            || self.flushed.iter().any(|name| name == shape.dtype.name())
        {
            return &self.larger;
        }
        let measured = match operation {
            Operation::Forward => "measured-fwd",
            Operation::Backward => "measured-bwd",
        };
        if !self.serves(measured, shape, is_paged) {
            return &self.default;
        }
        let mask = MaskKind::of(shape);
        let fits = |row: &&Row| {
            row.op == operation
                && row.value_dim == 0
                && row.dtypes.iter().any(|name| name == shape.dtype.name())
                && (row.dims.0..=row.dims.1).contains(&shape.head_dim)
                && row.masks.contains(&mask)
                && row.least_q <= shape.seqlen_q
        };
        self.rows.iter().find(fits).map_or(&self.default, |row| &row.sources)
    }
}
