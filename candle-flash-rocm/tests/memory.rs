//! Calls under a small limit of the address space: an error that says what was refused, never a signal.

#![cfg(target_os = "linux")]

mod common;

use candle_core::{CustomOp3, DType, Tensor};
use candle_flash_rocm::{flash_attn, Error, FlashAttn};
use common::limits::{is_child, spawn, sweep, with_bytes};
use common::Random;

/// A call of a window of one key: little work, as much memory as any.
fn operation() -> FlashAttn {
    FlashAttn {
        softmax_scale: 0.125,
        alibi_slopes: None,
        window_size_left: Some(0),
        window_size_right: Some(0),
        softcap: None,
    }
}

fn tensors(rows: usize, heads: usize) -> [Tensor; 3] {
    let mut random = Random(1);
    [(); 3].map(|()| random.tensor(&[1, rows, heads, 64], DType::F32).expect("a tensor"))
}

#[test]
fn forwards_without_memory_are_errors() {
    if !is_child() {
        return spawn("forwards_without_memory_are_errors", 2);
    }
    let [q, k, v] = tensors(8192, 3);
    sweep(0, 16 << 10, || q.apply_op3_no_bwd(&k, &v, &operation()).map(drop));
}

/// candle's own additions to gradients would end the process, so the operation's backward is called without candle.
fn backward(heads: usize) {
    let [q, k, v] = tensors(4096, heads);
    let out = q.apply_op3_no_bwd(&k, &v, &operation()).expect("a result");
    sweep(0, 16 << 10, || operation().bwd(&q, &k, &v, &out, &v).map(drop));
}

#[test]
fn backwards_by_heads_without_memory_are_errors() {
    if !is_child() {
        return spawn("backwards_by_heads_without_memory_are_errors", 2);
    }
    backward(2);
}

#[test]
fn backwards_by_blocks_without_memory_are_errors() {
    if !is_child() {
        return spawn("backwards_by_blocks_without_memory_are_errors", 2);
    }
    backward(3);
}

#[test]
fn threads_that_cannot_start_are_an_error() {
    if !is_child() {
        return spawn("threads_that_cannot_start_are_an_error", 4);
    }
    let [q, k, v] = tensors(16, 1);
    // Fewer bytes than the stack of a thread.
    let error = with_bytes(1 << 20, || flash_attn(&q, &k, &v, 0.125, true)).expect_err("no thread");
    assert!(matches!(Error::in_candle(&error), Some(Error::OutOfMemory { .. })), "{error}");
    assert!(error.to_string().contains("RAYON_NUM_THREADS"), "{error}");
    println!("refused");
}
