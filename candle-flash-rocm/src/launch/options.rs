//! The options of a call beside its sizes and its mask.

use super::refuse::Used;
use super::Mask;

/// A number that is added to each score, after softcap; -inf hides a key. Strides are in elements, 0 for an axis that is
/// shared; keys are dense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bias {
    /// Device address of `(batch, heads, seqlen_q, seqlen_k)`; 0 for none.
    pub address: u64,
    /// Elements from one sequence to the next.
    pub batch: usize,
    /// Elements from one head to the next.
    pub head: usize,
    /// Elements from one query to the next. -1 for a table of distances, `(batch, heads, seqlen_q + seqlen_k - 1)`: a
    /// query's row begins one element before the row of the query before it. The address is of the first query's row.
    pub row: i32,
    /// Whether its elements are fp32, and not of the call's type.
    pub is_fp32: bool,
}

/// In which numbers a forward of whole sequences computes its products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compute {
    /// In the type of its tensors.
    #[default]
    AsStored,
    /// Products of queries and keys in INT8, with a scale for a block of rows. RDNA 3 and 4 have kernels.
    Int8,
    /// All products in FP8, with a scale for each sequence and head.
    Fp8,
}

/// Options of a call. The default is none. Addresses of 0 are options that are not used.
#[allow(clippy::struct_excessive_bools)] // each of them an option of its own
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// Microseconds that the host needs for a second launch; 0 for 2. A forward splits its keys where the GPU saves more.
    pub host_cost: f64,
    /// Elements from one sequence's `Shape::alibi_slopes` to the next; 0 where all sequences share them.
    pub alibi_batch: usize,
    /// Device address of the sinks `(heads)`: a score of each head that joins the sum of the softmax and has no value.
    pub sinks: u64,
    /// Whether the sinks are fp32, and not of the call's type.
    pub sinks_are_fp32: bool,
    /// A bias of the scores.
    pub bias: Bias,
    /// Probability of dropping a weight.
    pub dropout: f32,
    /// Device address of int64 `(2)`: seed and offset of the random numbers of dropout.
    pub rng_state: u64,
    /// Device address of int32 `(batch)`: rows before the first key of each sequence.
    pub leftpad: u64,
    /// Keys of one chunk: a query sees the keys of its own chunk only; 0 for no chunks.
    pub chunk: usize,
    /// Device address of int32 `(batch)`: the line of k and v that is a sequence's cache; 0 for lines in order.
    pub lines: u64,
    /// Rows that were appended to each sequence's keys, which `Forward::lengths` does not count; of packed ones all rows.
    pub appended: usize,
    /// Device address of int32 `(batch + 1)`: where each sequence's appended rows started, if they were packed.
    pub appended_starts: u64,
    /// Into how many parts the keys are split; 0 for as many as are fastest.
    pub num_splits: usize,
    /// Whether k and v are in the GPU's FP8 format, whose scales are `descales`.
    pub is_fp8: bool,
    /// Whether q is in FP8 too. The result is bf16.
    pub q_is_fp8: bool,
    /// Whether a row of q is a row of a second query, as wide as v, and behind it `head_dim` columns: v are keys of the
    /// second query too, as in multi-head latent attention.
    pub has_second_query: bool,
    /// Device addresses of the factors of q, k and v in FP8, each fp32 `(batch, heads_k)`. With [`Compute::Fp8`] q's are
    /// `(batch, heads)`, and an address of 0 asks for the factors to be computed, for a tensor that is not FP8.
    pub descales: [u64; 3],
    /// In which numbers products are computed.
    pub compute: Compute,
    /// Device address of fp32 `(batch, heads_k, head_dim)` for [`Compute::Int8`]: the mean key, which is subtracted from
    /// each key. The result stays the same; the logarithms of the sums are of the scores after the subtraction.
    pub k_mean: u64,
    /// Which keys a query sees besides.
    pub mask: Mask,
}

impl Options {
    /// The options that only kernels of a cache honour.
    pub(super) fn of_a_cache(&self) -> [Used; 6] {
        [
            ("attention_chunk", self.chunk != 0),
            ("cache_lines", self.lines != 0),
            ("appended", self.appended != 0),
            ("num_splits", self.num_splits != 0),
            ("descales", self.is_fp8),
            ("second_query", self.has_second_query),
        ]
    }

    pub(super) fn needs_cache(&self) -> bool {
        self.of_a_cache().iter().any(|(_, is_used)| *is_used)
    }

    /// The options that only kernels of whole sequences honour.
    pub(super) fn of_whole_sequences(&self) -> [Used; 3] {
        [("attn_bias", self.bias.address != 0), ("dropout_p", self.dropout != 0.0), ("mask", self.mask.is_used())]
    }
}
