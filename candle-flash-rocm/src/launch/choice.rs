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

/// The options that a call uses beside its window and its lengths: their names in the table, and here.
fn used(shape: &Shape, is_paged: bool) -> impl Iterator<Item = (&'static str, &'static str)> {
    let options = &shape.options;
    [
        ("softcap", "softcap", shape.softcap != 0.0),
        ("alibi_slopes", "alibi_slopes", shape.alibi_slopes != 0),
        ("s_aux", "sinks", options.sinks != 0),
        ("attn_bias", "bias", options.bias.address != 0),
        ("dropout_p", "dropout", options.dropout != 0.0),
        ("leftpad_k", "leftpad_k", options.leftpad != 0),
        ("mask", "mask", options.mask.is_used()),
        ("block_table", "block_table", is_paged),
    ]
    .into_iter()
    .filter_map(|(name, here, is_used)| is_used.then_some((name, here)))
}

impl Choice {
    /// The first option that a call uses and a row of the table, such as `asm-fwd`, does not name.
    pub(super) fn unserved(&self, row: &str, shape: &Shape, is_paged: bool) -> Option<&'static str> {
        let honoured = self.serves.get(row);
        let is_served = |name| honoured.is_some_and(|names| names.contains(name));
        used(shape, is_paged).find_map(|(name, here)| (!is_served(name)).then_some(here))
    }

    /// Whether a row of the table names every option that a call uses.
    pub(super) fn serves(&self, row: &str, shape: &Shape, is_paged: bool) -> bool {
        self.unserved(row, shape, is_paged).is_none()
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
