//! Numbers by which a launch is planned. A store's manifest carries them, as Python's backend has them (docs/kernel-store.md
//! of the repository).

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use crate::error::{Error, Result};

/// Bits of the kernels' `flags`, and limits that kernels have in their code.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[rustfmt::skip]
pub(super) struct Flags {
    pub has_cu_seqlens_q: i32, pub has_cu_seqlens_k: i32, pub has_seqused_k: i32, pub has_leftpad_k: i32,
    pub has_alibi_slopes: i32, pub has_cache_batch_idx: i32, pub has_rotary_seqlens: i32, pub has_descale: i32,
    pub has_block_table: i32, pub has_sinks: i32, pub sinks_like_out: i32, pub bias_is_fp32: i32, pub has_blocks: i32,
    pub has_ranges: i32, pub has_ids: i32, pub has_hidden: i32, pub query_has_16_bits: i32, pub query_is_fp16: i32,
    pub packed_blocks: i32, pub rotary_interleaved: i32, pub rotary_moves: i32,
    /// The window size that means "no limit": larger than any sequence.
    pub open_window: i32,
    /// Row strides are smaller than this, in units of 16 bytes.
    pub max_row_stride: usize,
    /// Rows of a bias are closer than this, in elements.
    pub max_bias_row: i32,
}

/// The bit where an address is real.
pub(super) fn bit(address: u64, bit: i32) -> i32 {
    if address == 0 {
        0
    } else {
        bit
    }
}

/// The kernels of an operation: their sizes, and their kinds by element type.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct OperationKernels {
    pub sizes: Vec<usize>,
    /// Whether the one size serves every head dim.
    in_pieces: bool,
    kinds: HashMap<String, Vec<String>>,
    sizes_of_kind: HashMap<String, Vec<usize>>,
    /// The head dim of v, by the largest head dim of q and k.
    value_dims: BTreeMap<usize, usize>,
}

/// Times of 64 keys in the forward kernel, in microseconds of one multiprocessor, for head dims up to `head_dim`.
#[derive(Clone, Debug, Deserialize)]
#[rustfmt::skip]
pub(super) struct WholeCost {
    pub head_dim: usize, pub alone: f64, pub tile: f64, pub read: f64,
}

/// The same times of `decode` and of `extend`.
#[derive(Clone, Debug, Deserialize)]
#[rustfmt::skip]
pub(super) struct SplitCost {
    pub head_dim: usize, pub decode: f64, pub extend: f64,
}

/// When split-KV is profitable, and how many splits are. `flash_attn/kernels/planning.py` describes each number.
#[derive(Clone, Debug, Deserialize)]
#[rustfmt::skip]
pub(super) struct SplitKv {
    pub decode_rows: usize, pub extend_rows: usize, pub least_keys: usize, pub whole: Vec<WholeCost>,
    pub split: Vec<SplitCost>, pub start_whole: f64, pub start_decode: f64, pub start_extend: f64, pub join: f64,
    pub margin: f64, pub resident: usize, pub latent_dim: usize, pub latent_resident: usize, pub max_splits: usize,
    pub start: f64, pub combine: f64, pub part: f64, pub gain: f64, pub many_splits: usize, pub few_rows: usize,
    pub page_unit: usize, pub max_page_units: usize, pub endless: usize,
}

impl SplitKv {
    /// The rows of the unit in which pages of this size are looked up.
    pub(super) fn unit_of(&self, page_size: usize) -> usize {
        if page_size.is_multiple_of(self.page_unit) {
            self.page_unit.max(1)
        } else {
            1
        }
    }
}

/// How programs share the blocks of a call.
#[derive(Clone, Debug, Deserialize)]
#[rustfmt::skip]
pub(super) struct Grid {
    pub chunk: usize, pub packed_share: (usize, usize), pub rows_worth_splits: usize, pub programs_of_unit: usize,
}

/// Composable Kernel: the head dims of its kernels, and the queries of a tile of its forward.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Composable {
    pub head_dims: Vec<usize>,
    pub rows: usize,
}

/// FP8: the largest number of each format, the columns that a sequence of transposed values is a multiple of, and the
/// types of a result in the order in which the kernel numbers them.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Fp8 {
    pub largest: BTreeMap<String, f32>,
    pub columns: usize,
    pub results: Vec<String>,
}

/// What a kernel does.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(super) enum Operation {
    #[serde(rename = "fwd")]
    Forward,
    #[serde(rename = "bwd")]
    Backward,
}

/// Keys that queries do not see.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum MaskKind {
    Plain,
    Causal,
    Window,
}

/// A kernel of AMD's assembly, and the calls that it serves.
#[derive(Clone, Debug, Deserialize)]
#[rustfmt::skip]
pub(super) struct AssemblyKernel {
    pub name: String, pub op: Operation, pub dtype: String, pub mask: MaskKind, pub packed: bool,
    pub least_dim: usize, pub head_dim: usize,
    /// The head dim of v if it differs from q's, else 0.
    pub value_dim: usize,
    /// Queries of a tile.
    pub rows: usize,
}

/// AMD's assembly: its kernels, and what they can address.
#[derive(Clone, Debug, Deserialize)]
#[rustfmt::skip]
pub(super) struct Assembly {
    pub max_bytes: usize, pub max_row_bytes: usize, pub mi308_units: Vec<usize>, pub max_queries_by_heads: usize,
    pub kernels: Vec<AssemblyKernel>,
}

/// All of it.
#[derive(Clone, Debug, Deserialize)]
pub struct Planning {
    pub(super) flags: Flags,
    pub(super) operations: HashMap<String, OperationKernels>,
    /// What the sides of a block mask's blocks are multiples of.
    pub(super) mask_block: usize,
    pub(super) split_kv: SplitKv,
    pub(super) grid: Grid,
    pub(super) fp8: Fp8,
    pub(super) composable: Composable,
    pub(super) assembly: Assembly,
}

impl Planning {
    fn operation(&self, name: &str) -> Result<&OperationKernels> {
        self.operations.get(name).ok_or_else(|| {
            Error::store(format!(
                "the store knows no operation {name}: build the store and the crate from one revision"
            ))
        })
    }

    /// The smallest size of an operation's kernels: the columns that a kernel of all head dims takes at once.
    pub(super) fn columns(&self, operation: &str) -> Result<usize> {
        Ok(self.operation(operation)?.sizes.first().copied().unwrap_or(1).max(1))
    }

    /// The largest head dim that the kernels serve.
    pub(super) fn max_head_dim(&self) -> Result<usize> {
        Ok(self.operation("fwd")?.sizes.last().copied().unwrap_or(0))
    }

    /// Whether kernels of whole sequences take v of this head dim. Kernels of a cache take every pair.
    pub(super) fn serves_pair(&self, head_dim: usize, head_dim_v: usize) -> Result<bool> {
        if head_dim == head_dim_v {
            return Ok(true);
        }
        let mut pairs = self.operation("fwd-v")?.value_dims.iter();
        let first = pairs.find(|&(&size, &value)| head_dim <= size && head_dim_v <= value && value < head_dim);
        Ok(first.is_some_and(|(_, &value)| value == head_dim_v))
    }

    /// The name of the kernel that serves an operation for an element type, a head dim and a kind.
    pub(super) fn kernel(&self, operation: &str, element: &str, head_dim: usize, kind: &str) -> Result<String> {
        let row = self.operation(operation)?;
        let size = row.sizes.iter().copied().find(|&size| row.in_pieces || head_dim <= size);
        let none = |what: &str| Error::Unsupported(format!("{what}: no kernel {operation} of this store serves it"));
        let size = size.ok_or_else(|| none(&format!("head_dim: got {head_dim}")))?;
        let halves = || row.kinds.get("fp16"); // FP8 kernels have the kinds of 16 bits
        let kinds = row.kinds.get(element).or_else(halves).filter(|kinds| !kinds.is_empty());
        let kinds = kinds.ok_or_else(|| none(&format!("dtype: got {element}")))?;
        let has_size = |kind: &str| row.sizes_of_kind.get(kind).unwrap_or(&row.sizes).contains(&size);
        let serving = kinds.iter().find(|name| *name == kind && has_size(kind)).unwrap_or(&kinds[kinds.len() - 1]);
        let suffix = if *serving == kinds[0] { String::new() } else { format!("-{serving}") };
        Ok(format!("{operation}-{element}-d{size}{suffix}"))
    }
}
