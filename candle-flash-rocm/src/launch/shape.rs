//! Sizes and options that a forward and its backward have in common.

use super::planning::{bit, Planning};
use super::refuse::{refuse, Used};
use super::signature::{set, Name, Values};
use super::{Bias, Compute, Dtype, Operand, Options};
use crate::error::{argument, Result};

/// Elements of a tensor: more than any GPU has memory for, and far from the largest number.
const MAX_ELEMENTS: usize = 1 << 44;

/// What forward and backward have in common. Addresses of 0 are options that are not used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Element type of q, k, v, out and their gradients.
    pub dtype: Dtype,
    /// Number of sequences.
    pub batch: usize,
    /// Heads of q, a multiple of the heads of k and v.
    pub heads: usize,
    /// Heads of k and v.
    pub heads_k: usize,
    /// Of q and k: a multiple of 8 up to 512.
    pub head_dim: usize,
    /// Of v and the result.
    pub head_dim_v: usize,
    /// Queries of the longest sequence.
    pub seqlen_q: usize,
    /// Keys of the longest sequence.
    pub seqlen_k: usize,
    /// Rows of q in all, with `cu_seqlens_q` only.
    pub total_q: usize,
    /// Rows of k in all, with `cu_seqlens_k` only.
    pub total_k: usize,
    /// Factor of the scores.
    pub softmax_scale: f32,
    /// Cap of the scores; 0 for none.
    pub softcap: f32,
    /// Keys that a query sees before its position; `None` for all.
    pub window_left: Option<usize>,
    /// Keys that a query sees after its position; `None` for all, `Some(0)` for a causal mask.
    pub window_right: Option<usize>,
    /// Device address of fp32 slopes `(heads)`.
    pub alibi_slopes: u64,
    /// Device address of int32 `(batch + 1)`: where each sequence of packed queries starts.
    pub cu_seqlens_q: u64,
    /// As `cu_seqlens_q`, for keys. If both addresses are equal, each sequence has as many keys as
    /// queries.
    pub cu_seqlens_k: u64,
    /// Everything else.
    pub options: Options,
}

impl Shape {
    /// Of dense tensors `(batch, seqlen, heads, head_dim)`, without options. Pairs are of q and of k.
    #[must_use]
    pub fn dense(
        dtype: Dtype,
        batch: usize,
        (seqlen_q, seqlen_k): (usize, usize),
        (heads, heads_k): (usize, usize),
        head_dim: usize,
        softmax_scale: f32,
    ) -> Self {
        Self {
            dtype,
            batch,
            heads,
            heads_k,
            head_dim,
            head_dim_v: head_dim,
            seqlen_q,
            seqlen_k,
            total_q: 0,
            total_k: 0,
            softmax_scale,
            softcap: 0.0,
            window_left: None,
            window_right: None,
            alibi_slopes: 0,
            cu_seqlens_q: 0,
            cu_seqlens_k: 0,
            options: Options::default(),
        }
    }

    /// Compares the sizes with the kernels' limits.
    ///
    /// # Errors
    ///
    /// If a size does not fit, with its name.
    pub(crate) fn check(&self, planning: &Planning) -> Result<()> {
        if self.heads_k == 0 || !self.heads.is_multiple_of(self.heads_k) {
            return argument("heads_k", self.heads_k, format!("a divisor of heads, {}", self.heads));
        }
        let (multiple, max_head_dim) = (self.vec().max(8), planning.max_head_dim()?);
        for (name, dim) in [("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)] {
            if dim == 0 || !dim.is_multiple_of(multiple) {
                return argument(name, dim, format!("a multiple of {multiple}: pad q, k and v with zeros"));
            }
            if dim > max_head_dim {
                return argument(name, dim, format!("at most {max_head_dim}"));
            }
        }
        let longest = planning.flags.open_window as usize;
        if self.seqlen_q >= longest || self.seqlen_k >= longest {
            let found = format!("{} and {}", self.seqlen_q, self.seqlen_k);
            return argument("seqlen_q and seqlen_k", found, format!("less than {longest}"));
        }
        // Sizes of 0 count as 1, so that the product of any of the other sizes stays below the limit too.
        let (batch, heads) = (self.batch.max(1), self.heads.max(self.heads_k));
        let padded = batch.checked_mul(self.seqlen_q.max(self.seqlen_k).max(1));
        let rows = padded.map(|rows| rows.max(self.total_q).max(self.total_k));
        let elements = rows.and_then(|rows| rows.checked_mul(heads)?.checked_mul(self.head_dim.max(self.head_dim_v)));
        if elements.is_none_or(|elements| elements > MAX_ELEMENTS) || self.batch >= longest {
            let found = format!("{} sequences of {} heads", self.batch, self.heads);
            return argument("q", found, format!("at most {MAX_ELEMENTS} elements: pass fewer rows at once"));
        }
        if (self.cu_seqlens_q == 0) != (self.cu_seqlens_k == 0) {
            return argument("cu_seqlens_q and cu_seqlens_k", "one of them", "both or none");
        }
        self.check_options(planning)
    }

    /// Compares the options with each other and with the sizes.
    fn check_options(&self, planning: &Planning) -> Result<()> {
        let (options, max_bias_row) = (&self.options, planning.flags.max_bias_row);
        if !(0.0..1.0).contains(&options.dropout) {
            return argument("dropout", options.dropout, "0 for none, or a probability below 1");
        }
        if (options.dropout != 0.0) != (options.rng_state != 0) {
            let wanted = "the address of two numbers of 64 bits with dropout, and none without";
            return argument("rng_state", format!("{:#x} with dropout {}", options.rng_state, options.dropout), wanted);
        }
        if options.alibi_batch != 0 && self.alibi_slopes == 0 {
            return argument("alibi_batch_stride", options.alibi_batch, "0 without alibi_slopes");
        }
        let bias = &options.bias;
        if !(-1..max_bias_row).contains(&bias.row) {
            let wanted = format!("less than {max_bias_row}, or -1 for a table of distances");
            return argument("bias", format!("row stride {}", bias.row), wanted);
        }
        if bias.address == 0 && *bias != Bias::default() {
            return argument("bias", format!("{bias:?}"), "no strides without an address");
        }
        if bias.address != 0 {
            let others = [
                ("cu_seqlens_q", self.cu_seqlens_q != 0),
                ("alibi_slopes", self.alibi_slopes != 0),
                ("dropout", options.dropout != 0.0),
                ("leftpad_k", options.leftpad != 0),
            ];
            refuse(&others, "a kernel with a bias cannot honour it: leave one of them out")?;
        }
        self.check_mask(planning.mask_block)?;
        if options.appended_starts != 0 && options.appended == 0 {
            return argument("appended_starts", "an address", "0 without appended rows");
        }
        if options.appended > self.seqlen_k {
            return argument("appended", options.appended, format!("at most seqlen_k, {}", self.seqlen_k));
        }
        let stored = [options.q_is_fp8, options.is_fp8, options.is_fp8];
        let is_wrong = |(&address, is_fp8): (&u64, bool)| match options.compute {
            Compute::Fp8 => is_fp8 && address == 0,
            _ => (address != 0) != options.is_fp8,
        };
        if options.descales.iter().zip(stored).any(is_wrong) {
            let wanted = "addresses for what is stored in FP8, all three over a cache in FP8, else none";
            return argument("descales", format!("{:?}", options.descales), wanted);
        }
        if options.k_mean != 0 && options.compute != Compute::Int8 {
            return argument("k_mean", "an address", "none without compute in INT8");
        }
        if options.is_fp8 && (self.dtype == Dtype::F32 || (options.q_is_fp8 && self.dtype != Dtype::Bf16)) {
            return argument("dtype", self.dtype.name(), "bf16 over an FP8 cache, or fp16 with queries in fp16");
        }
        if options.has_second_query && self.head_dim > planning.split_kv.latent_dim {
            let longest = format!("at most {} with second_query", planning.split_kv.latent_dim);
            return argument("head_dim", self.head_dim, longest);
        }
        if options.is_fp8 && options.sinks != 0 && !options.sinks_are_fp32 && self.dtype == Dtype::F16 {
            return argument("sinks", "fp16 over an FP8 cache", "fp32");
        }
        Ok(())
    }

    /// Checks the mask, whose blocks have sides that are multiples of `block`.
    fn check_mask(&self, block: usize) -> Result<()> {
        let mask = &self.options.mask;
        if mask.ids.contains(&0) && mask.ids != [0; 2] {
            return argument("mask_ids_q and mask_ids_k", "one of them", "both or none");
        }
        if mask.blocks == 0 && (mask.block_size != [0; 2] || mask.blocks_strides != [0; 2]) {
            return argument("mask_blocks", "sizes or strides without an address", "an address, or zeros");
        }
        if mask.blocks != 0 && mask.block_size.iter().any(|&size| size == 0 || !size.is_multiple_of(block)) {
            return argument(
                "mask_block_q and mask_block_k",
                format!("{:?}", mask.block_size),
                format!("multiples of {block}"),
            );
        }
        if !mask.is_used() {
            return Ok(());
        }
        let others: [Used; 4] = [
            ("cu_seqlens_q", self.is_packed()),
            ("bias", self.options.bias.address != 0),
            ("leftpad_k", self.options.leftpad != 0),
            ("head_dim_v", self.head_dim_v != self.head_dim),
        ];
        refuse(&others, "a kernel with a mask cannot honour it: leave one of them out")
    }

    /// Elements in 16 bytes of the narrowest tensor, the unit of strides and head dims.
    pub(super) fn vec(&self) -> usize {
        if self.options.is_fp8 || self.options.compute == Compute::Fp8 {
            16
        } else {
            self.dtype.vec()
        }
    }

    pub(super) fn is_packed(&self) -> bool {
        self.cu_seqlens_q != 0
    }

    pub(super) fn is_causal(&self) -> bool {
        self.window_left.is_none() && self.window_right == Some(0)
    }

    pub(super) fn group(&self) -> usize {
        self.heads / self.heads_k
    }

    /// The window sizes (left, right), `open` for no limit.
    pub(super) fn window(&self, open: i32) -> (i32, i32) {
        let size = |size: Option<usize>| size.map_or(open, |size| size.min(open as usize) as i32);
        (size(self.window_left), size(self.window_right))
    }

    /// Elements of the result in all.
    pub(super) fn out_elements(&self) -> usize {
        self.rows_q() * self.heads * self.head_dim_v
    }

    /// Rows of q in all.
    pub(super) fn rows_q(&self) -> usize {
        if self.is_packed() {
            self.total_q
        } else {
            self.batch * self.seqlen_q
        }
    }

    /// Elements of the logarithms of the sums: fp32 `(batch, heads, seqlen_q)`, or `(heads, total_q)`.
    #[must_use]
    pub fn lse_elements(&self) -> usize {
        self.heads * self.rows_q()
    }

    /// Strides of the logarithms of the sums: of a batch entry and of a head.
    pub(super) fn lse_strides(&self) -> (usize, usize) {
        if self.is_packed() {
            (0, self.total_q)
        } else {
            (self.heads * self.seqlen_q, self.seqlen_q)
        }
    }

    /// The kind of kernel that the call's scores need.
    pub(super) fn kind(&self) -> &'static str {
        if self.options.bias.address != 0 {
            return "bias";
        }
        let used = [
            ("alibi", self.alibi_slopes != 0),
            ("dropout", self.options.dropout != 0.0),
            ("softcap", self.softcap > 0.0),
        ];
        let mut used = used.into_iter().filter_map(|(kind, is_used)| is_used.then_some(kind));
        match (used.next(), used.next()) {
            // Plain kernels take the maximum of the scores before they scale them.
            _ if self.softmax_scale <= 0.0 => "any",
            (None, _) if self.options.mask.is_used() => "blocks",
            (None, _) => "plain",
            (Some(kind), None) if !self.options.mask.is_used() => kind,
            _ => "any",
        }
    }

    /// The kind of forward kernel. A backward needs no sinks, because the logarithms of the sums hold them.
    pub(super) fn forward_kind(&self) -> &'static str {
        match self.kind() {
            kind if self.options.sinks == 0 || kind == "bias" || kind == "blocks" => kind,
            "plain" => "sink",
            _ => "any",
        }
    }

    /// The arguments that kernels of whole sequences and of a cache have in common, with q, k, v and lse. No call here
    /// has lengths or pages unless it sets them.
    pub(super) fn values(&self, planning: &Planning, [q, k, v]: [&Operand; 3], lse: u64) -> Result<Values> {
        let (mut values, vec, options) = (Values::new(), self.vec(), &self.options);
        values.operand(Name::q, [Name::stride_qb, Name::stride_qm, Name::stride_qh], q, vec)?;
        values.operand(Name::k, [Name::stride_kb, Name::stride_kn, Name::stride_kh], k, vec)?;
        values.operand(Name::v, [Name::stride_vb, Name::stride_vn, Name::stride_vh], v, vec)?;
        set!(values.pointers:
            lse = lse, cu_seqlens_q = self.cu_seqlens_q, cu_seqlens_k = self.cu_seqlens_k, seqused_k = 0,
            leftpad_k = options.leftpad, alibi_slopes = self.alibi_slopes, rng_state = options.rng_state,
            block_table = 0, sinks = options.sinks, bias = options.bias.address
        );
        set!(values.floats: scale = self.softmax_scale, softcap = self.softcap, p_dropout = options.dropout);
        let (lse_b, lse_h) = self.lse_strides();
        set!(values.sizes:
            stride_lb = lse_b, stride_lh = lse_h, stride_ab = options.alibi_batch, stride_sb = options.bias.batch,
            stride_sh = options.bias.head, nheads = self.heads, group = self.group(), seqlen_q = self.seqlen_q,
            seqlen_k = self.seqlen_k, head_dim = self.head_dim / vec
        )?;
        let (left, right) = self.window(planning.flags.open_window);
        set!(values.ints: window_left = left, window_right = right, stride_sm = options.bias.row);
        Ok(values)
    }

    /// Whether all blocks of a plane have the same work.
    pub(super) fn is_even(&self) -> bool {
        !self.is_causal() && !self.is_packed()
    }

    pub(super) fn flags(&self, planning: &Planning) -> i32 {
        let flags = &planning.flags;
        bit(self.cu_seqlens_q, flags.has_cu_seqlens_q)
            | bit(self.cu_seqlens_k, flags.has_cu_seqlens_k)
            | bit(self.alibi_slopes, flags.has_alibi_slopes)
            | bit(self.options.leftpad, flags.has_leftpad_k)
    }

    /// Flags of kernels with sinks, and with a bias.
    pub(super) fn score_flags(&self, planning: &Planning) -> i32 {
        let (flags, Options { sinks, sinks_are_fp32, bias, .. }) = (&planning.flags, self.options);
        let is_fp32 = bias.is_fp32 || (bias.address != 0 && self.dtype == Dtype::F32);
        let like_out = if sinks_are_fp32 { 0 } else { flags.sinks_like_out };
        bit(sinks, flags.has_sinks | like_out) | if is_fp32 { flags.bias_is_fp32 } else { 0 }
    }

    /// A grid of blocks of so many rows: (blocks, planes, flag). As many blocks for each sequence and head as the
    /// longest sequence has; or, where far fewer hold all packed rows, these for each head.
    pub(super) fn grid(
        &self,
        planning: &Planning,
        block: usize,
        longest: usize,
        heads: usize,
        rows: usize,
    ) -> (usize, usize, i32) {
        let blocks = longest.div_ceil(block.max(1));
        let packed = rows / block.max(1) + self.batch;
        let (least, most) = planning.grid.packed_share;
        if most * packed < least * blocks * self.batch {
            (packed, heads, planning.flags.packed_blocks)
        } else {
            (blocks, heads * self.batch, 0)
        }
    }
}
