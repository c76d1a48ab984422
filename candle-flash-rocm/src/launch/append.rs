//! The plan of an append: new keys and values into their cache, with rotary embedding of them and of the queries.

use super::plan::{Catalogue, Launch, Step};
use super::refuse::refuse;
use super::signature::{set, Name, Values};
use super::{Operand, Pages, Planning, Shape};
use crate::error::{argument, Result};

/// Rotary embedding of new keys and of queries. Tables are dense, `(places, half)`, of the call's type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Device address of the cosines.
    pub cos: u64,
    /// Device address of the sines.
    pub sin: u64,
    /// Rows of the tables.
    pub places: usize,
    /// Columns of the tables: so many pairs of columns turn.
    pub half: usize,
    /// Whether columns 0 and 1 are a pair, and not 0 and `half`.
    pub is_interleaved: bool,
    /// Device address of int32 `(batch)`: the place of each sequence's first new key; 0 for its number of keys before.
    pub offsets: u64,
    /// Queries, and the turned queries.
    pub q: Operand,
    /// See `q`.
    pub turned: Operand,
}

/// Rows that go to the end of each sequence in a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Append {
    /// Of the attention that follows: `seqlen_k` counts the new rows too. Mask and chunks say whether each query turns by
    /// its own position.
    pub shape: Shape,
    /// New keys, `(batch, seqlen_new, heads_k, head_dim)`.
    pub k_new: Operand,
    /// New values.
    pub v_new: Operand,
    /// The cache of keys.
    pub k: Operand,
    /// The cache of values.
    pub v: Operand,
    /// Pages of the cache, if it lies in pages.
    pub pages: Option<Pages>,
    /// Device address of int32 `(batch)`: keys of each sequence before the new ones; 0: each has all but the new ones.
    pub lengths: u64,
    /// New rows of each sequence; of packed ones, of all sequences.
    pub seqlen_new: usize,
    /// Device address of int32 `(batch + 1)`: where each sequence's packed new rows start; 0 where they are not packed.
    pub starts: u64,
    /// Rotary embedding, if there is any.
    pub rotary: Option<Rotary>,
}

impl Append {
    fn check(&self, planning: &Planning) -> Result<()> {
        let shape = &self.shape;
        shape.check(planning)?;
        refuse(&[("k", shape.options.is_fp8)], "nothing is appended to a cache in FP8: write its rows yourself")?;
        for (name, operand) in [("k_new", self.k_new), ("v_new", self.v_new), ("k", self.k), ("v", self.v)] {
            operand.check(name, shape.vec(), planning)?;
        }
        if self.seqlen_new == 0 || self.seqlen_new > shape.seqlen_k {
            return argument("seqlen_new", self.seqlen_new, format!("1 to seqlen_k, {}", shape.seqlen_k));
        }
        if let Some(pages) = &self.pages {
            pages.check()?;
            refuse(&[("cache_lines", shape.options.lines != 0)], "pages have a block_table instead: leave it out")?;
        }
        if let Some(Rotary { cos, sin, places, half, q, turned, .. }) = &self.rotary {
            q.check("q", shape.vec(), planning)?;
            turned.check("q_turned", shape.vec(), planning)?;
            if [*cos, *sin].contains(&0) {
                return argument("rotary_cos and rotary_sin", "NULL", "addresses of both tables");
            }
            if *half == 0 || 2 * half > shape.head_dim {
                return argument("rotary_half", half, format!("1 to half of head_dim, {}", shape.head_dim / 2));
            }
            if *places < shape.seqlen_k {
                return argument("rotary_places", places, format!("at least seqlen_k, {}", shape.seqlen_k));
            }
        }
        Ok(())
    }
}

/// Plans an append.
///
/// # Errors
///
/// If sizes, addresses or strides do not fit, or a kernel is missing.
pub fn plan_append(call: &Append, kernels: &dyn Catalogue) -> Result<Vec<Step>> {
    let planning = kernels.planning();
    call.check(planning)?;
    let (shape, flags) = (&call.shape, &planning.flags);
    let kernel = planning.kernel("append", shape.dtype.name(), shape.head_dim, "plain")?;
    let (block, vec) = (kernels.tile(&kernel)?.block_m.max(1), shape.vec());
    let capacity = call.pages.map_or(shape.seqlen_k, |pages| pages.columns * pages.size);
    let bit = |is_set: bool, flag: i32| if is_set { flag } else { 0 };
    let mut bits =
        bit(call.lengths != 0, flags.has_seqused_k) | bit(shape.options.lines != 0, flags.has_cache_batch_idx);
    bits |= bit(shape.is_packed(), flags.has_cu_seqlens_q) | bit(call.starts != 0, flags.has_cu_seqlens_k);
    // Without rotary embedding the kernel reads no query and no table.
    let nothing = Rotary {
        cos: call.k_new.address,
        sin: call.k_new.address,
        places: 0,
        half: 0,
        is_interleaved: false,
        offsets: 0,
        q: call.k_new,
        turned: call.k_new,
    };
    let rotary = call.rotary.unwrap_or(nothing);
    let q_rows = if call.rotary.is_some() { shape.seqlen_q * shape.heads } else { 0 };
    let sees_a_part = shape.window_left.is_some() || shape.window_right.is_some() || shape.options.chunk != 0;
    bits |= bit(rotary.is_interleaved, flags.rotary_interleaved)
        | bit(rotary.offsets != 0, flags.has_rotary_seqlens)
        | bit(call.rotary.is_some() && sees_a_part, flags.rotary_moves);
    let (k_blocks, q_blocks) = ((call.seqlen_new * shape.heads_k).div_ceil(block), q_rows.div_ceil(block));
    let mut values = Values::new();
    let tensors = [
        (Name::k_new, [Name::stride_nb, Name::stride_nm, Name::stride_nh], &call.k_new),
        (Name::v_new, [Name::stride_wb, Name::stride_wm, Name::stride_wh], &call.v_new),
        (Name::k, [Name::stride_kb, Name::stride_kn, Name::stride_kh], &call.k),
        (Name::v, [Name::stride_vb, Name::stride_vn, Name::stride_vh], &call.v),
        (Name::q, [Name::stride_qb, Name::stride_qm, Name::stride_qh], &rotary.q),
        (Name::q_turned, [Name::stride_rb, Name::stride_rm, Name::stride_rh], &rotary.turned),
    ];
    for (name, strides, operand) in tensors {
        values.operand(name, strides, operand, vec)?;
    }
    let (table, table_stride, page_size) =
        call.pages.map_or((0, 0, 0), |pages| (pages.table, pages.stride, pages.size));
    set!(values.pointers:
        cos = rotary.cos, sin = rotary.sin, cu_seqlens_q = shape.cu_seqlens_q, cu_seqlens_k = call.starts,
        seqused_k = call.lengths, block_table = table, cache_batch_idx = shape.options.lines,
        rotary_seqlens = rotary.offsets
    );
    set!(values.sizes:
        stride_cm = rotary.half, stride_tb = table_stride, page_size = page_size, nheads = shape.heads,
        nheads_k = shape.heads_k, seqlen_q = shape.seqlen_q,
        seqlen_k = (shape.seqlen_k - call.seqlen_new).min(capacity), seqlen_new = call.seqlen_new, capacity = capacity,
        head_dim = shape.head_dim / vec, head_dim_v = shape.head_dim_v / vec, rotary_half = rotary.half,
        places = rotary.places, k_blocks = k_blocks, q_blocks = q_blocks
    )?;
    set!(values.ints: flags = bits);
    let width = shape.head_dim.max(shape.head_dim_v);
    let grid = [((k_blocks + q_blocks) * shape.batch) as u32, width.div_ceil(planning.columns("append")?) as u32, 1];
    Ok(vec![Launch::filled(kernels, kernel, grid, &values)?])
}
