//! The CPU kernels against attention by its definition in f64: every option, forward and backward.

mod common;

use std::sync::LazyLock;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_flash_rocm::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap, flash_attn_varlen,
    flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed, flash_attn_varlen_alibi_windowed_softcap,
    flash_attn_varlen_paged_windowed, flash_attn_varlen_windowed, flash_attn_windowed, FlashAttn,
};
use common::{assert_close, attention, gradients, rows, Random, Rows, Wanted};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Sizes of a dense call.
#[derive(Clone, Copy, Debug)]
struct Size {
    batch: usize,
    q: usize,
    k: usize,
    heads: usize,
    heads_k: usize,
    dim: usize,
}

/// Sizes that are not multiples of any tile, more queries than keys and fewer, and one query.
const SIZES: [Size; 6] = [
    Size { batch: 2, q: 37, k: 37, heads: 2, heads_k: 2, dim: 32 },
    Size { batch: 1, q: 130, k: 201, heads: 4, heads_k: 2, dim: 64 },
    Size { batch: 1, q: 97, k: 33, heads: 2, heads_k: 1, dim: 40 },
    Size { batch: 2, q: 1, k: 150, heads: 8, heads_k: 2, dim: 128 },
    Size { batch: 1, q: 5, k: 70, heads: 6, heads_k: 2, dim: 13 },
    Size { batch: 1, q: 20, k: 75, heads: 1, heads_k: 1, dim: 256 },
];

fn slopes(heads: usize) -> Result<(Tensor, Vec<f64>)> {
    let values: Vec<f32> = (0..heads).map(|head| 0.5 / (head + 1) as f32).collect();
    let exact = values.iter().map(|&value| f64::from(value)).collect();
    Ok((Tensor::from_vec(values, heads, &Device::Cpu)?, exact))
}

/// The gradients of a result. Of one thread and of many, which get them by different kernels; both agree.
fn gradients_of(out: &Tensor, dout: &Tensor, inputs: [&Var; 3]) -> Result<(Tensor, Tensor, Tensor)> {
    static POOLS: LazyLock<[ThreadPool; 2]> = LazyLock::new(|| {
        [1, 16].map(|threads| ThreadPoolBuilder::new().num_threads(threads).build().expect("threads"))
    });
    let loss = (out * dout)?.sum_all()?;
    let [by_heads, by_blocks] = POOLS.each_ref().map(|pool| pool.install(|| loss.backward()));
    let (by_heads, by_blocks) = (by_heads?, by_blocks?);
    let mut found = Vec::new();
    for input in inputs {
        let (one, other) = (by_heads.get(input).expect("a gradient"), by_blocks.get(input).expect("a gradient"));
        let apart = (one - other)?.abs()?.to_dtype(DType::F32)?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        assert!(apart < 2e-2, "kernels by heads and by blocks are {apart} apart");
        found.push(one.clone());
    }
    let [dq, dk, dv] = <[Tensor; 3]>::try_from(found).expect("three");
    Ok((dq, dk, dv))
}

fn check(
    size: Size,
    dtype: DType,
    wanted: &Wanted,
    backward: bool,
    call: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<()> {
    let Size { batch, q: len_q, k: len_k, heads, heads_k, dim } = size;
    let mut random = Random(7);
    let q = Var::from_tensor(&random.tensor(&[batch, len_q, heads, dim], dtype)?)?;
    let k = Var::from_tensor(&random.tensor(&[batch, len_k, heads_k, dim], dtype)?)?;
    let v = Var::from_tensor(&random.tensor(&[batch, len_k, heads_k, dim], dtype)?)?;
    let dout = random.tensor(&[batch, len_q, heads, dim], dtype)?;
    let out = call(&q, &k, &v)?;
    assert_eq!(out.dims(), q.dims());
    assert_eq!(out.dtype(), dtype);
    let what = format!("{size:?} {dtype:?} {wanted:?}");
    let entry = |x: &Tensor, head: usize, index: usize| -> Result<Rows> {
        let x = x.get(index)?;
        rows(&x, 0, x.dims()[0], head)
    };
    for index in 0..batch {
        let all: Result<Vec<Rows>> = (0..heads)
            .map(|head| {
                let head_k = head / (heads / heads_k);
                let (k, v) = (entry(&k, head_k, index)?, entry(&v, head_k, index)?);
                Ok(attention(&entry(&q, head, index)?, &k, &v, head, wanted))
            })
            .collect();
        assert_close(&format!("out of {what}"), &out.get(index)?, &all?)?;
    }
    if !backward {
        return Ok(());
    }
    let (dq, dk, dv) = gradients_of(&out, &dout, [&q, &k, &v])?;
    for index in 0..batch {
        let mut all_q = Vec::new();
        let mut all_k = vec![vec![vec![0.0; dim]; len_k]; heads_k];
        let mut all_v = all_k.clone();
        for head in 0..heads {
            let head_k = head / (heads / heads_k);
            let (k, v) = (entry(&k, head_k, index)?, entry(&v, head_k, index)?);
            let (one_q, one_k, one_v) =
                gradients(&entry(&q, head, index)?, &k, &v, &entry(&dout, head, index)?, head, wanted);
            all_q.push(one_q);
            for (sums, one) in [(&mut all_k[head_k], one_k), (&mut all_v[head_k], one_v)] {
                for (sum, one) in sums.iter_mut().zip(one) {
                    sum.iter_mut().zip(one).for_each(|(sum, one)| *sum += one);
                }
            }
        }
        assert_close(&format!("dq of {what}"), &dq.get(index)?, &all_q)?;
        assert_close(&format!("dk of {what}"), &dk.get(index)?, &all_k)?;
        assert_close(&format!("dv of {what}"), &dv.get(index)?, &all_v)?;
    }
    Ok(())
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn full_and_causal() -> Result<()> {
    for size in SIZES {
        for dtype in DTYPES {
            for causal in [false, true] {
                let wanted = Wanted { scale: 0.25, right: causal.then_some(0), ..Wanted::default() };
                check(size, dtype, &wanted, true, |q, k, v| flash_attn(q, k, v, 0.25, causal))?;
            }
        }
    }
    Ok(())
}

#[test]
fn windows_of_more_queries_than_keys() -> Result<()> {
    let size = Size { batch: 1, q: 37, k: 5, heads: 2, heads_k: 1, dim: 16 };
    for right in [0, 3, 5, 6, 17, 35, 36, 40] {
        for left in [None, Some(0), Some(4), Some(6)] {
            let wanted = Wanted { scale: 0.25, left, right: Some(right), ..Wanted::default() };
            check(size, DType::F32, &wanted, true, |q, k, v| flash_attn_windowed(q, k, v, 0.25, left, Some(right)))?;
        }
    }
    Ok(())
}

#[test]
fn windows() -> Result<()> {
    for size in SIZES {
        for (left, right) in
            [(Some(5), Some(3)), (Some(20), Some(0)), (None, Some(7)), (Some(0), Some(0)), (Some(9), None)]
        {
            let wanted = Wanted { scale: 0.125, left, right, ..Wanted::default() };
            check(size, DType::F32, &wanted, true, |q, k, v| flash_attn_windowed(q, k, v, 0.125, left, right))?;
        }
    }
    Ok(())
}

#[test]
fn alibi() -> Result<()> {
    for size in SIZES {
        let (slopes, exact) = slopes(size.heads)?;
        let plain = Wanted { scale: 0.2, slopes: Some(exact), ..Wanted::default() };
        let causal = Wanted { right: Some(0), ..plain.clone() };
        check(size, DType::F32, &plain, true, |q, k, v| flash_attn_alibi(q, k, v, &slopes, 0.2, false))?;
        check(size, DType::F16, &causal, true, |q, k, v| flash_attn_alibi(q, k, v, &slopes, 0.2, true))?;
        let window = Wanted { left: Some(11), right: Some(2), ..plain };
        check(size, DType::F32, &window, true, |q, k, v| {
            flash_attn_alibi_windowed(q, k, v, &slopes, 0.2, Some(11), Some(2))
        })?;
    }
    Ok(())
}

#[test]
fn softcap() -> Result<()> {
    for size in SIZES {
        let (slopes, exact) = slopes(size.heads)?;
        for slopes in [None, Some(&slopes)] {
            let given = slopes.map(|_| exact.clone());
            let wanted = Wanted { scale: 0.5, softcap: 3.0, slopes: given, right: Some(0), ..Wanted::default() };
            check(size, DType::F32, &wanted, true, |q, k, v| {
                flash_attn_alibi_windowed_softcap(q, k, v, slopes, 0.5, None, Some(0), 3.0)
            })?;
        }
    }
    Ok(())
}

#[test]
fn negative_scale_and_large_head_dim() -> Result<()> {
    let size = Size { batch: 1, q: 9, k: 17, heads: 2, heads_k: 1, dim: 512 };
    let wanted = Wanted { scale: -0.05, ..Wanted::default() };
    check(size, DType::F32, &wanted, true, |q, k, v| flash_attn(q, k, v, -0.05, false))
}

#[test]
fn the_operation_itself_computes_the_same() -> Result<()> {
    let operation = || FlashAttn {
        softmax_scale: 0.25,
        alibi_slopes: None,
        window_size_left: None,
        window_size_right: Some(0),
        softcap: None,
    };
    let wanted = Wanted { scale: 0.25, right: Some(0), ..Wanted::default() };
    check(SIZES[1], DType::F32, &wanted, true, |q, k, v| q.apply_op3(k, v, operation()))
}

#[test]
fn strided_tensors() -> Result<()> {
    let wanted = Wanted { scale: 0.25, right: Some(0), ..Wanted::default() };
    // (batch, heads, seqlen, dim) in memory, as models have it, and an axis of dim that is not dense.
    check(SIZES[1], DType::F16, &wanted, true, |q, k, v| {
        let turned = |x: &Tensor| x.transpose(1, 2)?.contiguous()?.transpose(1, 2);
        flash_attn(&turned(q)?, &turned(k)?, &turned(v)?, 0.25, true)
    })?;
    check(SIZES[1], DType::F32, &wanted, true, |q, k, v| {
        let turned = |x: &Tensor| x.transpose(1, 3)?.contiguous()?.transpose(1, 3);
        flash_attn(&turned(q)?, &turned(k)?, &turned(v)?, 0.25, true)
    })
}

#[test]
fn no_queries_and_no_keys() -> Result<()> {
    let tensor = |len| Tensor::ones((2, len, 2, 16), DType::F32, &Device::Cpu);
    let out = flash_attn(&tensor(0)?, &tensor(3)?, &tensor(3)?, 1.0, false)?;
    assert_eq!(out.dims(), [2, 0, 2, 16]);
    let q = Var::from_tensor(&tensor(3)?)?;
    let k = Var::from_tensor(&tensor(0)?)?;
    let out = flash_attn(&q, &k, &k, 1.0, false)?;
    assert_eq!(out.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    let grads = out.sum_all()?.backward()?;
    assert_eq!(grads.get(&q).expect("dq").abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    assert_eq!(grads.get(&k).expect("dk").dims(), [2, 0, 2, 16]);
    Ok(())
}

#[test]
fn calls_do_not_share_gradients() -> Result<()> {
    // Two calls share a query: each backward takes the sums of its own forward.
    let mut random = Random(3);
    let q = Var::from_tensor(&random.tensor(&[1, 6, 1, 16], DType::F32)?)?;
    let k = random.tensor(&[1, 6, 1, 16], DType::F32)?;
    let both = (flash_attn(&q, &k, &k, 0.3, false)? + flash_attn(&q, &k, &k, 0.7, true)?)?;
    let together = both.sum_all()?.backward()?.get(&q).cloned().expect("dq");
    let one = flash_attn(&q, &k, &k, 0.3, false)?.sum_all()?.backward()?.get(&q).cloned().expect("dq");
    let other = flash_attn(&q, &k, &k, 0.7, true)?.sum_all()?.backward()?.get(&q).cloned().expect("dq");
    let error = (together - (one + other)?)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    assert!(error < 1e-5, "{error}");
    Ok(())
}

/// Lengths of the packed sequences: of queries and of keys.
const LENGTHS: [(usize, usize); 5] = [(70, 70), (0, 4), (1, 90), (33, 12), (5, 0)];

fn starts(lengths: impl Iterator<Item = usize>) -> Result<Tensor> {
    let mut found = vec![0u32];
    for length in lengths {
        found.push(found[found.len() - 1] + length as u32);
    }
    Tensor::new(found, &Device::Cpu)
}

type Packed<'a> = (&'a Tensor, &'a Tensor, &'a Tensor, &'a Tensor, &'a Tensor);

fn check_varlen(wanted: &Wanted, dtype: DType, call: impl Fn(Packed<'_>) -> Result<Tensor>) -> Result<()> {
    let (heads, heads_k, dim) = (4, 2, 48);
    let starts_q = starts(LENGTHS.iter().map(|pair| pair.0))?;
    let starts_k = starts(LENGTHS.iter().map(|pair| pair.1))?;
    // Three rows more than the sequences have.
    let (rows_q, rows_k) = LENGTHS.iter().fold((3, 3), |(q, k), pair| (q + pair.0, k + pair.1));
    let mut random = Random(11);
    let q = Var::from_tensor(&random.tensor(&[rows_q, heads, dim], dtype)?)?;
    let k = Var::from_tensor(&random.tensor(&[rows_k, heads_k, dim], dtype)?)?;
    let v = Var::from_tensor(&random.tensor(&[rows_k, heads_k, dim], dtype)?)?;
    let dout = random.tensor(&[rows_q, heads, dim], dtype)?;
    let out = call((&q, &k, &v, &starts_q, &starts_k))?;
    let (dq, dk, dv) = gradients_of(&out, &dout, [&q, &k, &v])?;
    let (mut at_q, mut at_k) = (0, 0);
    for (len_q, len_k) in LENGTHS {
        let mut exact = (Vec::new(), Vec::new());
        let mut all_k = vec![vec![vec![0.0; dim]; len_k]; heads_k];
        let mut all_v = all_k.clone();
        for head in 0..heads {
            let head_k = head / (heads / heads_k);
            let (k, v) = (rows(&k, at_k, len_k, head_k)?, rows(&v, at_k, len_k, head_k)?);
            let (q, dout) = (rows(&q, at_q, len_q, head)?, rows(&dout, at_q, len_q, head)?);
            exact.0.push(attention(&q, &k, &v, head, wanted));
            let (one_q, one_k, one_v) = gradients(&q, &k, &v, &dout, head, wanted);
            exact.1.push(one_q);
            for (sums, one) in [(&mut all_k[head_k], one_k), (&mut all_v[head_k], one_v)] {
                for (sum, one) in sums.iter_mut().zip(one) {
                    sum.iter_mut().zip(one).for_each(|(sum, one)| *sum += one);
                }
            }
        }
        let what = format!("{len_q} queries, {len_k} keys, {wanted:?}");
        assert_close(&format!("out of {what}"), &out.narrow(0, at_q, len_q)?, &exact.0)?;
        assert_close(&format!("dq of {what}"), &dq.narrow(0, at_q, len_q)?, &exact.1)?;
        assert_close(&format!("dk of {what}"), &dk.narrow(0, at_k, len_k)?, &all_k)?;
        assert_close(&format!("dv of {what}"), &dv.narrow(0, at_k, len_k)?, &all_v)?;
        at_q += len_q;
        at_k += len_k;
    }
    for (x, rows) in [(&out, at_q), (&dq, at_q), (&dk, at_k), (&dv, at_k)] {
        let rest = x.narrow(0, rows, 3)?.abs()?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
        assert_eq!(rest, 0.0, "rows outside of every sequence");
    }
    Ok(())
}

#[test]
fn packed_sequences() -> Result<()> {
    let plain = Wanted { scale: 0.25, ..Wanted::default() };
    for dtype in DTYPES {
        check_varlen(&plain, dtype, |(q, k, v, a, b)| flash_attn_varlen(q, k, v, a, b, 70, 90, 0.25, false))?;
        let causal = Wanted { right: Some(0), ..plain.clone() };
        check_varlen(&causal, dtype, |(q, k, v, a, b)| flash_attn_varlen(q, k, v, a, b, 70, 90, 0.25, true))?;
    }
    let window = Wanted { left: Some(4), right: Some(6), ..plain };
    check_varlen(&window, DType::F32, |(q, k, v, a, b)| {
        flash_attn_varlen_windowed(q, k, v, a, b, 70, 90, 0.25, Some(4), Some(6))
    })
}

#[test]
fn packed_sequences_with_alibi_and_softcap() -> Result<()> {
    let (slopes, exact) = slopes(4)?;
    let plain = Wanted { scale: 0.25, slopes: Some(exact), ..Wanted::default() };
    let causal = Wanted { right: Some(0), ..plain.clone() };
    check_varlen(&causal, DType::F32, |(q, k, v, a, b)| {
        flash_attn_varlen_alibi(q, k, v, &slopes, a, b, 70, 90, 0.25, true)
    })?;
    let window = Wanted { left: Some(13), right: Some(1), ..plain };
    check_varlen(&window, DType::F32, |(q, k, v, a, b)| {
        flash_attn_varlen_alibi_windowed(q, k, v, &slopes, a, b, 70, 90, 0.25, Some(13), Some(1))
    })?;
    let capped = Wanted { softcap: 2.0, ..window };
    check_varlen(&capped, DType::F32, |(q, k, v, a, b)| {
        flash_attn_varlen_alibi_windowed_softcap(q, k, v, Some(&slopes), a, b, 70, 90, 0.25, Some(13), Some(1), 2.0)
    })
}

#[test]
fn pages() -> Result<()> {
    let (heads, heads_k, dim, page) = (4, 2, 48, 16);
    let device = Device::Cpu;
    let mut random = Random(5);
    let starts_q = starts(LENGTHS.iter().map(|pair| pair.0))?;
    let starts_k = starts(LENGTHS.iter().map(|pair| pair.1))?;
    let rows_q: usize = LENGTHS.iter().map(|pair| pair.0).sum();
    let wide = 6;
    let pages = wide * LENGTHS.len();
    // Pages in an order that is not the sequences'; the last ones of a sequence are of no page and not read.
    let table: Vec<u32> = (0..pages).map(|i| ((i * 7 + 3) % pages) as u32).collect();
    let q = random.tensor(&[rows_q, heads, dim], DType::F32)?;
    let k = random.tensor(&[pages, page, heads_k, dim], DType::F32)?;
    let v = random.tensor(&[pages, page, heads_k, dim], DType::F32)?;
    let mut unread = table.clone();
    unread[wide + 1] = 1_000_000;
    let block_table = Tensor::from_vec(unread, (LENGTHS.len(), wide), &device)?;
    let ranges: Vec<i32> = vec![3, 30, 60, 65, 0, 2, 0, 0, 80, 90, 0, 0, 2, 9, 5, 1, 0, 3, 0, 3];
    let ranges = Tensor::from_vec(ranges, (LENGTHS.len(), 2, 2), &device)?;
    let each = ranges.to_vec3::<i32>()?;
    for (prefixes, softcap) in [(None, None), (Some(&ranges), None), (Some(&ranges), Some(4.0f32))] {
        let out = flash_attn_varlen_paged_windowed(
            &q,
            &k,
            &v,
            &starts_q,
            &starts_k,
            &block_table,
            prefixes,
            70,
            90,
            0.2,
            Some(8),
            Some(0),
            page,
            softcap,
        )?;
        let mut at = 0;
        for (index, (len_q, len_k)) in LENGTHS.into_iter().enumerate() {
            let own: Vec<u32> = table[index * wide..(index + 1) * wide].to_vec();
            let own = Tensor::new(own, &device)?;
            let gather = |x: &Tensor| x.index_select(&own, 0)?.flatten(0, 1);
            let (k, v) = (gather(&k)?, gather(&v)?);
            let prefixes = prefixes.map_or(Vec::new(), |_| {
                each[index].iter().map(|pair| (i64::from(pair[0]), i64::from(pair[1]))).collect()
            });
            let softcap = f64::from(softcap.unwrap_or(0.0));
            let wanted = Wanted {
                scale: f64::from(0.2f32),
                left: Some(8),
                right: Some(0),
                softcap,
                prefixes,
                ..Wanted::default()
            };
            let exact: Result<Vec<Rows>> = (0..heads)
                .map(|head| {
                    let head_k = head / (heads / heads_k);
                    let (k, v) = (rows(&k, 0, len_k, head_k)?, rows(&v, 0, len_k, head_k)?);
                    Ok(attention(&rows(&q, at, len_q, head)?, &k, &v, head, &wanted))
                })
                .collect();
            assert_close(&format!("sequence {index}, {wanted:?}"), &out.narrow(0, at, len_q)?, &exact?)?;
            at += len_q;
        }
    }
    Ok(())
}
