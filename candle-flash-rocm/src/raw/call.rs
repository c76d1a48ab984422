//! A call by the addresses of its tensors, and where these addresses are.

use crate::error::{Error, Result};
use crate::launch::{Backward, Bias, Forward, Mask, Operand, Options, Pages, Shape};

/// Alignment of addresses, in bytes: rows, which kernels read in pieces of 16 bytes, and single numbers of 64, 32 and 16
/// bits.
const ROWS: u64 = 16;
const WORDS: u64 = 8;
const NUMBERS: u64 = 4;
const HALVES: u64 = 2;

/// A forward or a backward on memory of the caller's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Call {
    /// A forward. Where its `lse` is 0, the logarithms lie in the scratch memory and are lost.
    Forward(Forward),
    /// A backward.
    Backward(Backward),
}

/// An address of a call: its name, its alignment in bytes, and the field itself.
pub(super) struct Address<'a> {
    pub(super) name: &'static str,
    alignment: u64,
    pub(super) field: &'a mut u64,
}

fn rows<'a>(name: &'static str, operand: &'a mut Operand) -> Address<'a> {
    Address { name, alignment: ROWS, field: &mut operand.address }
}

fn numbers<'a>(name: &'static str, field: &'a mut u64) -> Address<'a> {
    Address { name, alignment: NUMBERS, field }
}

/// The addresses of a shape and its options. A new field has to be named here, or this does not compile.
fn of_shape(shape: &mut Shape) -> impl Iterator<Item = Address<'_>> {
    #[rustfmt::skip]
    let Shape {
        dtype: _, batch: _, heads: _, heads_k: _, head_dim: _, head_dim_v: _, seqlen_q: _, seqlen_k: _, total_q: _,
        total_k: _, softmax_scale: _, softcap: _, window_left: _, window_right: _, alibi_slopes, cu_seqlens_q,
        cu_seqlens_k, options,
    } = shape;
    #[rustfmt::skip]
    let Options {
        host_cost: _, alibi_batch: _, sinks, sinks_are_fp32: _, dropout: _, rng_state, leftpad, chunk: _, lines,
        appended: _, appended_starts, num_splits: _, is_fp8: _, q_is_fp8: _, has_second_query: _,
        descales: [q_descale, k_descale, v_descale], compute: _, k_mean,
        bias: Bias { address: bias, batch: _, head: _, row: _, is_fp32: _ },
        mask: Mask {
            blocks, blocks_strides: _, block_size: _, ranges, ranges_strides: _, ids: [ids_q, ids_k], ids_batch: _,
            hidden, hidden_strides: _,
        },
    } = options;
    [
        numbers("alibi_slopes", alibi_slopes),
        numbers("cu_seqlens_q", cu_seqlens_q),
        numbers("cu_seqlens_k", cu_seqlens_k),
        Address { name: "sinks", alignment: HALVES, field: sinks },
        Address { name: "bias", alignment: HALVES, field: bias },
        Address { name: "rng_state", alignment: WORDS, field: rng_state },
        numbers("leftpad_k", leftpad),
        numbers("cache_lines", lines),
        numbers("appended_starts", appended_starts),
        numbers("q_descale", q_descale),
        numbers("k_descale", k_descale),
        numbers("v_descale", v_descale),
        numbers("k_mean", k_mean),
        Address { name: "mask_blocks", alignment: 1, field: blocks },
        numbers("mask_ranges", ranges),
        numbers("mask_ids_q", ids_q),
        numbers("mask_ids_k", ids_k),
        numbers("mask_hidden", hidden),
    ]
    .into_iter()
}

/// The addresses of a call, in an order that depends on the kind of call alone.
pub(super) fn of_call(call: &mut Call) -> Vec<Address<'_>> {
    let mut addresses = Vec::with_capacity(32);
    match call {
        Call::Forward(Forward { shape, q, k, v, out, lse, pages, lengths }) => {
            addresses.extend([rows("q", q), rows("k", k), rows("v", v), rows("out", out)]);
            addresses.push(Address { name: "lse", alignment: ROWS, field: lse });
            addresses.push(numbers("seqlens_k", lengths));
            if let Some(Pages { table, stride: _, columns: _, size: _ }) = pages {
                addresses.push(numbers("block_table", table));
            }
            addresses.extend(of_shape(shape));
        }
        Call::Backward(Backward { shape, dout, q, k, v, out, lse, dq, dk, dv, dsinks, dbias }) => {
            addresses.extend([rows("dout", dout), rows("q", q), rows("k", k), rows("v", v), rows("out", out)]);
            addresses.extend([rows("dq", dq), rows("dk", dk), rows("dv", dv)]);
            addresses.push(Address { name: "lse", alignment: ROWS, field: lse });
            addresses.push(Address { name: "dsinks", alignment: HALVES, field: dsinks });
            addresses.push(Address { name: "dbias", alignment: HALVES, field: dbias });
            addresses.extend(of_shape(shape));
        }
    }
    addresses
}

/// Checks that each address is aligned as kernels read it.
///
/// # Errors
///
/// If one is not, with its name.
pub(super) fn check_addresses(call: &Call) -> Result<()> {
    let mut copy = *call;
    for Address { name, alignment, field } in of_call(&mut copy) {
        if !field.is_multiple_of(alignment) {
            return Err(Error::argument(
                name,
                format!("address {field:#x}"),
                format!("a multiple of {alignment} bytes"),
            ));
        }
    }
    Ok(())
}
