//! AMD's assembly kernels: which one serves a forward, and its arguments (`flash_attn/attention/backends/asm` of the
//! repository).
//!
//! Their backward needs sums before and after it that no kernel of a store computes, so Triton's
//! kernels compute every backward.

use super::plan::{Catalogue, Device, Fill, Launch, Step};
use super::planning::{Assembly, AssemblyKernel, MaskKind, Operation};
use super::{Argument, Forward, Operand, Shape};
use crate::error::Result;

/// Bytes of an element.
const BYTES: usize = 2;

/// All arguments of a kernel; each has 16 bytes.
#[derive(Default)]
struct Block(Vec<u8>);

impl Block {
    fn slot(&mut self, content: &[u8]) {
        self.0.extend(content);
        self.0.resize(self.0.len().next_multiple_of(16), 0);
    }

    fn addresses(&mut self, addresses: &[u64]) {
        for address in addresses {
            self.slot(&address.to_le_bytes());
        }
    }

    fn numbers(&mut self, numbers: &[usize]) {
        for &number in numbers {
            self.slot(&(number as u32).to_le_bytes());
        }
    }
}

/// The kernel of a forward; None where there is none, or where it would leave something to do after it.
fn kernel<'a>(call: &Forward, kernels: &'a dyn Catalogue, device: Device) -> Option<&'a AssemblyKernel> {
    let (shape, assembly) = (&call.shape, &kernels.planning().assembly);
    let mask = MaskKind::of(shape);
    let is_paged = call.pages.is_some() || call.lengths != 0;
    // For rows that see no key, a causal kernel stores -inf as lse, and a plain kernel stores NaN.
    let every_row_has_a_key = if shape.is_packed() {
        shape.cu_seqlens_q == shape.cu_seqlens_k
    } else {
        mask == MaskKind::Plain || shape.seqlen_q <= shape.seqlen_k
    };
    if !kernels.choice().serves("asm-fwd", shape, is_paged)
        || !every_row_has_a_key
        || shape.options.needs_cache()
        || shape.softmax_scale < 0.0
        || [("q", call.q), ("k", call.k), ("v", call.v), ("q", call.out)]
            .iter()
            .any(|(name, operand)| is_too_large(name, operand, shape, assembly))
    {
        return None;
    }
    let value_dim = if shape.head_dim_v == shape.head_dim { 0 } else { shape.head_dim_v };
    let serves = |row: &&AssemblyKernel| {
        row.op == Operation::Forward
            && row.dtype == shape.dtype.name()
            && (row.mask, row.packed, row.value_dim) == (mask, shape.is_packed(), value_dim)
            && (row.least_dim..=row.head_dim).contains(&shape.head_dim)
            && kernels.has(&row.name)
    };
    // Programs of an MI308X go to four dies in turn instead of eight.
    let is_mi308 = assembly.mi308_units.contains(&device.compute_units);
    assembly.kernels.iter().filter(serves).min_by_key(|row| row.name.ends_with("-mi308") != is_mi308)
}

/// Whether a tensor reaches over more bytes than the kernels can address, with a head to spare.
fn is_too_large(name: &str, operand: &Operand, shape: &Shape, assembly: &Assembly) -> bool {
    let (rows, heads) = match (name, shape.is_packed()) {
        ("q", true) => (shape.total_q, shape.heads),
        ("q", false) => (shape.seqlen_q, shape.heads),
        (_, true) => (shape.total_k, shape.heads_k),
        (_, false) => (shape.seqlen_k, shape.heads_k),
    };
    let reach = [(shape.batch, operand.batch), (rows, operand.row), (heads + 1, operand.head)];
    let last = reach
        .iter()
        .fold(0usize, |sum, (count, stride)| sum.saturating_add(count.saturating_sub(1).saturating_mul(*stride)));
    operand.row.saturating_mul(BYTES) >= assembly.max_row_bytes || last >= assembly.max_bytes / BYTES
}

/// The plan of a forward by AMD's assembly; None where it has no kernel.
///
/// # Errors
///
/// If sizes, addresses or strides do not fit.
pub(super) fn plan_forward(call: &Forward, kernels: &dyn Catalogue, device: Device) -> Result<Option<Vec<Step>>> {
    let shape = &call.shape;
    let planning = kernels.planning();
    shape.check(planning)?;
    for (name, operand) in [("q", call.q), ("k", call.k), ("v", call.v), ("out", call.out)] {
        operand.check(name, shape.vec(), planning)?;
    }
    let Some(kernel) = kernel(call, kernels, device) else { return Ok(None) };
    let is_empty = [shape.batch, shape.seqlen_q, shape.seqlen_k, shape.rows_q()].contains(&0);
    let mut steps = Vec::new();
    if shape.is_packed() || is_empty {
        // Rows outside of every sequence, or without a key.
        let count = shape.rows_q() * shape.heads * shape.head_dim * BYTES / 4;
        steps.push(Step::Fill(Fill { address: call.out.address, pattern: 0, count }));
        let pattern = f32::INFINITY.to_bits();
        steps.push(Step::Fill(Fill { address: call.lse, pattern, count: shape.lse_elements() }));
    }
    if is_empty {
        return Ok(Some(steps));
    }
    let tiles = shape.seqlen_q.div_ceil(kernel.rows);
    // A program of a causal kernel computes two tiles, one near the start and one near the end.
    let tiles = if kernel.mask == MaskKind::Causal { tiles.div_ceil(2) } else { tiles } as u32;
    let (heads, batch) = (shape.heads as u32, shape.batch as u32);
    let grid = if shape.is_packed() { [heads, batch, tiles] } else { [tiles, heads, batch] };
    let arguments = vec![Argument::Structure(arguments(call, kernel, &planning.assembly))];
    steps.push(Step::Launch(Launch { kernel: kernel.name.clone(), grid, arguments }));
    Ok(Some(steps))
}

fn arguments(call: &Forward, kernel: &AssemblyKernel, assembly: &Assembly) -> Vec<u8> {
    let Forward { shape, q, k, v, out, lse, .. } = call;
    // An axis of one element may have any stride. The kernels multiply it by 0.
    let bytes = |operand: &Operand| [operand.row, operand.head, operand.batch].map(|stride| stride.wrapping_mul(BYTES));
    let ([q_row, q_head, q_batch], [k_row, k_head, k_batch]) = (bytes(q), bytes(k));
    // The order of the tiles: by heads where every die gets equally many of them, else and for long sequences by tiles.
    let is_short = shape.seqlen_q <= assembly.max_queries_by_heads;
    let by_heads = kernel.mask == MaskKind::Plain || (shape.heads.is_multiple_of(8) && is_short);
    let stores_lse = 1;
    let mut block = Block::default();
    block.addresses(&[out.address, q.address, k.address, v.address, *lse]);
    block.slot(&shape.softmax_scale.to_le_bytes());
    block.numbers(&[
        shape.seqlen_q,
        q_row,
        kernel.rows * q_row,
        q_head,
        q_batch,
        shape.group(),
        k_row,
        k_head,
        k_batch,
    ]);
    block.numbers(&[
        if by_heads { 5 } else { 3 },
        stores_lse,
        shape.seqlen_k,
        shape.head_dim,
        shape.head_dim_v,
        shape.heads,
    ]);
    block.numbers(&bytes(v));
    block.numbers(&bytes(out));
    block.addresses(&[shape.cu_seqlens_q, shape.cu_seqlens_k]);
    block.numbers(&[4 * shape.lse_strides().1]);
    block.addresses(&[shape.cu_seqlens_q, shape.cu_seqlens_k]);
    block.0
}
