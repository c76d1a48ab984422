//! Each mistake in the arguments is an error that names the argument, and no arguments make a function panic.

mod common;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_flash_rocm::launch::internals::{
    self, Call, Catalogue, Choice, Launch, Planner, Planning, Signature, Sources, Tile,
};
use candle_flash_rocm::launch::{self, Backward, Forward, Memory, Operand, Pages, Shape};
use candle_flash_rocm::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed_softcap, flash_attn_varlen,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_paged_windowed,
};
use proptest::prelude::*;

fn tensor(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).expect("a tensor")
}

fn ints(values: &[u32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).expect("a tensor")
}

#[track_caller]
fn refused(result: Result<Tensor>, words: &[&str]) {
    let message = result.expect_err("an error").to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

#[test]
fn mistakes_of_dense_calls() {
    let q = tensor(&[2, 5, 4, 16]);
    let k = tensor(&[2, 7, 2, 16]);
    refused(flash_attn(&tensor(&[5, 4, 16]), &k, &k, 1.0, false), &["q and k", "[5, 4, 16]", "rank 4"]);
    refused(flash_attn(&q, &tensor(&[3, 7, 2, 16]), &k, 1.0, false), &["k: ", "[3, 7, 2, 16]", "batch size of q, 2"]);
    refused(flash_attn(&q, &tensor(&[2, 7, 2, 8]), &tensor(&[2, 7, 2, 8]), 1.0, false), &["k: ", "head dim of q"]);
    refused(flash_attn(&q, &k, &tensor(&[2, 8, 2, 16]), 1.0, false), &["v: ", "[2, 8, 2, 16]", "[2, 7, 2, 16]"]);
    let three = tensor(&[2, 7, 3, 16]);
    refused(flash_attn(&q, &three, &three, 1.0, false), &["heads of k", "got 3", "divisor", "4"]);
    let none = tensor(&[2, 7, 0, 16]);
    refused(flash_attn(&q, &none, &none, 1.0, false), &["heads of k", "got 0"]);
    let wide = tensor(&[1, 2, 1, 520]);
    refused(flash_attn(&wide, &wide, &wide, 1.0, false), &["head_dim", "520", "512"]);
    refused(flash_attn(&q, &k, &k, f32::NAN, false), &["softmax_scale", "NaN"]);
    let half = k.to_dtype(DType::F16).expect("a tensor");
    refused(flash_attn(&q, &half, &half, 1.0, false), &["F32, F16 and F16", "same"]);
    let double = q.to_dtype(DType::F64).expect("a tensor");
    refused(flash_attn(&double, &double, &double, 1.0, false), &["F64", "F16, BF16 and F32"]);
    for cap in [-1.0, f32::INFINITY, f32::NAN] {
        let result = flash_attn_alibi_windowed_softcap(&q, &k, &k, None, 1.0, None, None, cap);
        refused(result, &["softcap", &cap.to_string()]);
    }
    refused(flash_attn_alibi(&q, &k, &k, &tensor(&[3]), 1.0, false), &["alibi_slopes", "[3]", "[4]"]);
    refused(flash_attn_alibi(&q, &k, &k, &ints(&[1, 2, 3, 4]), 1.0, false), &["alibi_slopes", "U32", "F32"]);
}

#[test]
fn mistakes_of_packed_calls() {
    let q = tensor(&[9, 4, 16]);
    let k = tensor(&[12, 2, 16]);
    let (a, b) = (ints(&[0, 4, 9]), ints(&[0, 5, 12]));
    let call = |q: &Tensor, k: &Tensor, a: &Tensor, b: &Tensor, most_q, most_k| {
        flash_attn_varlen(q, k, k, a, b, most_q, most_k, 1.0, false)
    };
    assert!(call(&q, &k, &a, &b, 5, 7).is_ok());
    refused(call(&tensor(&[1, 9, 4, 16]), &k, &a, &b, 5, 7), &["rank 3"]);
    refused(call(&q, &k, &ints(&[1, 4, 9]), &b, 9, 7), &["seqlens_q", "first element 1"]);
    refused(call(&q, &k, &ints(&[0, 4, 3]), &b, 9, 7), &["seqlens_q", "3 after 4"]);
    refused(call(&q, &k, &ints(&[0, 4, 10]), &b, 9, 7), &["seqlens_q", "last element 10", "rows of its tensor, 9"]);
    refused(call(&q, &k, &a, &ints(&[0, 5, 13]), 9, 9), &["seqlens_k", "13", "12"]);
    refused(call(&q, &k, &a, &b, 4, 7), &["seqlens_q", "5 rows in sequence 1", "4"]);
    refused(call(&q, &k, &a, &b, 5, 6), &["seqlens_k", "7 rows in sequence 1", "6"]);
    refused(call(&q, &k, &a, &ints(&[0, 5]), 5, 7), &["seqlens_k", "2 elements", "3 elements"]);
    refused(call(&q, &k, &ints(&[0]), &b, 5, 7), &["seqlens_q", "batch size + 1"]);
    refused(call(&q, &k, &tensor(&[3]), &b, 5, 7), &["seqlens_q", "F32", "U32"]);
    refused(call(&q, &k, &a, &tensor(&[3, 1]), 5, 7), &["seqlens_k"]);
}

#[test]
fn mistakes_of_paged_calls() {
    let q = tensor(&[9, 4, 16]);
    let k = tensor(&[6, 4, 2, 16]);
    let (a, b) = (ints(&[0, 4, 9]), ints(&[0, 5, 12]));
    let table = ints(&[0, 1, 2, 3]).reshape((2, 2)).expect("a tensor");
    let call = |k: &Tensor, table: &Tensor, ranges: Option<&Tensor>, page| {
        flash_attn_varlen_paged_windowed(&q, k, k, &a, &b, table, ranges, 5, 7, 1.0, None, Some(0), page, None)
    };
    assert!(call(&k, &table, None, 4).is_ok());
    refused(call(&k, &table, None, 8), &["page_block_size", "got 8", "4"]);
    refused(call(&tensor(&[12, 2, 16]), &table, None, 4), &["k: ", "rank 4"]);
    let outside = ints(&[0, 1, 2, 6]).reshape((2, 2)).expect("a tensor");
    refused(call(&k, &outside, None, 4), &["block_table", "got 6"]);
    let narrow = ints(&[0, 1]).reshape((2, 1)).expect("a tensor");
    refused(call(&k, &narrow, None, 4), &["block_table", "1 pages", "2 for the 5 keys of sequence 0"]);
    refused(call(&k, &ints(&[0, 1, 2, 3]), None, 4), &["block_table", "(2, pages of a sequence)"]);
    refused(call(&k, &tensor(&[2, 2]), None, 4), &["block_table", "F32"]);
    let ranges = Tensor::zeros((2, 1, 3), DType::I32, &Device::Cpu).expect("a tensor");
    refused(call(&k, &table, Some(&ranges), 4), &["mm_prefix_ranges", "(2, ranges of a sequence, 2)"]);
    let ranges = Tensor::zeros((2, 1, 2), DType::U32, &Device::Cpu).expect("a tensor");
    refused(call(&k, &table, Some(&ranges), 4), &["mm_prefix_ranges", "U32", "I32"]);
}

#[test]
fn a_paged_cache_has_no_backward() -> Result<()> {
    let q = Var::from_tensor(&tensor(&[4, 2, 16]))?;
    let k = tensor(&[2, 4, 2, 16]);
    let starts = ints(&[0, 4]);
    let table = ints(&[1]).reshape((1, 1))?;
    let out =
        flash_attn_varlen_paged_windowed(&q, &k, &k, &starts, &starts, &table, None, 4, 4, 1.0, None, None, 4, None)?;
    let message = out.sum_all()?.backward().expect_err("an error").to_string();
    assert!(message.contains("block_table") && message.contains("flash_attn_varlen"), "{message}");
    Ok(())
}

fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        4 => (0..3usize, 0..9usize, 0..5usize, 0..20usize).prop_map(|(a, b, c, d)| vec![a, b, c, d]),
        2 => (0..12usize, 0..5usize, 0..20usize).prop_map(|(a, b, c)| vec![a, b, c]),
        1 => prop::collection::vec(0..4usize, 0..6),
    ]
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![
        4 => Just(DType::F32), 2 => Just(DType::F16), 2 => Just(DType::BF16), 1 => Just(DType::F64), 1 => Just(DType::U32),
    ]
}

fn number() -> impl Strategy<Value = f32> {
    prop_oneof![4 => -3.0f32..3.0, 1 => any::<f32>(), 1 => Just(0.0)]
}

fn window() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![Just(None), (0..9usize).prop_map(Some), any::<usize>().prop_map(Some), Just(Some(usize::MAX))]
}

fn lengths() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![
        3 => prop::collection::vec(0..5u32, 0..4).prop_map(|each| {
            let mut sum = 0;
            std::iter::once(0).chain(each.into_iter().map(|one| { sum += one; sum })).collect()
        }),
        1 => prop::collection::vec(any::<u32>(), 0..4),
    ]
}

fn filled(shape: &[usize], dtype: DType) -> Tensor {
    common::Random(1).tensor(shape, dtype).expect("a tensor")
}

/// Checks that a result has the shape of q and that an error has a message.
fn sound(q: &Tensor, result: Result<Tensor>) {
    match result {
        Ok(out) => assert_eq!(out.dims(), q.dims()),
        Err(error) => assert!(error.to_string().len() > 10),
    }
}

proptest! {
    #![proptest_config(common::cases(600))]

    #[test]
    fn dense_calls_never_panic(
        (q, k, v) in (shape(), shape(), shape()), alike in any::<bool>(), same_v in any::<bool>(), dtypes in (dtype(), dtype()),
        scale in number(), left in window(), right in window(), softcap in number(), slopes in prop::option::of(0..5usize),
    ) {
        let k = if alike && q.len() == 4 { vec![q[0], q[1] + 1, 1, q[3]] } else { k };
        let v = if same_v { k.clone() } else { v };
        let other = if alike { dtypes.0 } else { dtypes.1 };
        let q = filled(&q, dtypes.0);
        let (k, v) = (filled(&k, other), filled(&v, other));
        let slopes = slopes.map(|count| filled(&[count], DType::F32));
        let result = flash_attn_alibi_windowed_softcap(&q, &k, &v, slopes.as_ref(), scale, left, right, softcap);
        sound(&q, result);
    }

    #[test]
    fn packed_calls_never_panic(
        rows in (0..12usize, 0..12usize), heads in (0..4usize, 0..3usize), dim in 0..20usize, index in dtype(),
        starts in (lengths(), lengths()), most in (any::<usize>(), 0..9usize), right in window(), softcap in number(),
    ) {
        let q = filled(&[rows.0, heads.0, dim], DType::F32);
        let k = filled(&[rows.1, heads.1, dim], DType::F32);
        let index = if matches!(index, DType::F16 | DType::F64) { index } else { DType::U32 };
        let a = Tensor::from_vec(starts.0.clone(), starts.0.len(), &Device::Cpu).unwrap().to_dtype(index).unwrap();
        let b = Tensor::from_vec(starts.1.clone(), starts.1.len(), &Device::Cpu).unwrap();
        let result = flash_attn_varlen_alibi_windowed_softcap(
            &q, &k, &k, None, &a, &b, most.0, most.1, 0.5, None, right, softcap,
        );
        sound(&q, result);
    }

    #[test]
    fn paged_calls_never_panic(
        cache in (0..5usize, 0..5usize), starts in (lengths(), lengths()), table in prop::collection::vec(0..6i32, 0..12),
        wide in 0..4usize, ranges in prop::collection::vec(any::<i32>(), 12), left in window(), right in window(),
        page in prop::option::of(any::<usize>()),
    ) {
        let q = filled(&[9, 2, 8], DType::F32);
        let k = filled(&[cache.0, cache.1, 1, 8], DType::F32);
        let a = Tensor::from_vec(starts.0.clone(), starts.0.len(), &Device::Cpu).unwrap();
        let b = Tensor::from_vec(starts.1.clone(), starts.1.len(), &Device::Cpu).unwrap();
        let batch = starts.0.len().saturating_sub(1);
        let table: Vec<i32> = table.into_iter().cycle().take(batch * wide).collect();
        prop_assume!(table.len() == batch * wide);
        let table = Tensor::from_vec(table, (batch, wide), &Device::Cpu).unwrap();
        let ranges: Vec<i32> = ranges.into_iter().take(batch * 4).collect();
        let ranges = (ranges.len() == batch * 4).then(|| Tensor::from_vec(ranges, (batch, 2, 2), &Device::Cpu).unwrap());
        let result = flash_attn_varlen_paged_windowed(
            &q, &k, &k, &a, &b, &table, ranges.as_ref(), 9, 9, 0.5, left, right, page.unwrap_or(cache.1), None,
        );
        sound(&q, result);
    }
}

/// A catalogue that has every kernel, all with the same tile.
struct Every;

impl Catalogue for Every {
    fn tile(&self, _kernel: &str) -> candle_flash_rocm::Result<Tile> {
        Ok(Tile { block_m: 128, block_n: 64, num_xcds: 8 })
    }

    fn signature(&self, kernel: &str) -> candle_flash_rocm::Result<&Signature> {
        Ok(common::signature(kernel))
    }

    fn has(&self, _kernel: &str) -> bool {
        true
    }

    fn choice(&self) -> &Choice {
        common::choice()
    }

    fn planning(&self) -> &Planning {
        common::planning()
    }
}

/// Memory without end, and a planner that has a launch for everything.
struct Endless;

impl Memory for Endless {
    fn allocate(&mut self, _bytes: usize) -> candle_flash_rocm::Result<u64> {
        Ok(1 << 40)
    }
}

impl Planner for Endless {
    fn plan(
        &self,
        _call: Call,
        _parameters: &[u8],
    ) -> candle_flash_rocm::Result<std::result::Result<Vec<Launch>, String>> {
        Ok(Ok(Vec::new()))
    }

    fn backward_workspace(&self, parameters: &[u8]) -> usize {
        parameters.len()
    }
}

/// Mostly sizes that calls have, sometimes any number.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        8 => 0..300usize,
        2 => (0..40usize).prop_map(|n| n * 8),
        1 => (0..64u32).prop_map(|bits| 1 << bits),
        1 => any::<usize>(),
    ]
}

fn operand() -> impl Strategy<Value = Operand> {
    let stride = || prop_oneof![4 => (0..1000usize).prop_map(|n| n * 8), 1 => size()];
    (any::<u32>(), stride(), stride(), stride()).prop_map(|(address, batch, row, head)| Operand {
        address: u64::from(address) * 16,
        batch,
        row,
        head,
    })
}

/// A dimension of 0 does not hide that the product of the other dimensions overflows.
#[test]
fn huge_sizes_beside_zeros_are_refused() {
    let planner: Option<&dyn Planner> = Some(&Endless);
    let sources = Sources { kernels: &Every, planner, device: internals::Device { compute_units: 304 } };
    let huge = 1 << 62;
    let sizes =
        [(0, 1 << 20, 0, huge, 8), (0, 0, 1 << 20, huge, huge), (1 << 20, 0, 0, huge, 1), (1 << 20, 1, 1, 0, huge)];
    for (batch, seqlen_q, seqlen_k, heads, heads_k) in sizes {
        let shape = Shape::dense(launch::Dtype::F16, batch, (seqlen_q, seqlen_k), (heads, heads_k), 64, 1.0);
        let [q, k, v, out] = [Operand::packed(1 << 40, 1, 64); 4];
        let forward = Forward { shape, q, k, v, out, lse: 1 << 41, pages: None, lengths: 0 };
        let message = sources.forward(&forward, &mut Endless).expect_err("an error").to_string();
        assert!(message.contains("elements: pass fewer rows"), "{message}");
    }
}

/// An axis of one element may have any stride, because it is multiplied by 0: no plan's product of it overflows.
#[test]
fn any_stride_of_an_axis_of_one_element_is_planned() {
    let planner: Option<&dyn Planner> = Some(&Endless);
    let sources = Sources { kernels: &Every, planner, device: internals::Device { compute_units: 304 } };
    let any = usize::MAX & !7;
    let shape = Shape::dense(launch::Dtype::Bf16, 1, (200, 4096), (1, 1), 128, 1.0);
    let [q, k, v, out] = [Operand { address: 1 << 40, batch: any, row: 128, head: 128 }; 4];
    let forward = Forward { shape, q, k, v, out, lse: 1 << 41, pages: None, lengths: 0 };
    let steps = sources.forward(&forward, &mut Endless).expect("a plan");
    assert!(format!("{steps:?}").contains("asm-fwd-bf16-d128-plain"), "{steps:?}");
}

fn address_or_none() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0), 1 => any::<u64>()]
}

prop_compose! {
    /// Options that are mostly not used, and else have any value.
    fn options()(
        numbers in (number(), prop_oneof![3 => Just(0.0), 1 => number()]),
        sizes in prop::array::uniform7(prop_oneof![3 => Just(0), 1 => size()]),
        addresses in prop::array::uniform8(address_or_none()), flags in any::<[bool; 5]>(),
        compute in prop_oneof![
            3 => Just(launch::Compute::AsStored), 1 => Just(launch::Compute::Int8), 1 => Just(launch::Compute::Fp8)
        ],
    ) -> launch::Options {
        let [alibi_batch, batch, head, row, chunk, appended, num_splits] = sizes;
        let [sinks, bias, rng_state, leftpad, lines, descales @ ..] = addresses;
        launch::Options {
            host_cost: f64::from(numbers.0), alibi_batch, sinks, sinks_are_fp32: flags[0],
            bias: launch::Bias { address: bias, batch, head, row: row as i32, is_fp32: flags[1] },
            dropout: numbers.1, rng_state, leftpad, chunk, lines, appended, num_splits, is_fp8: flags[2], descales,
            q_is_fp8: flags[3], has_second_query: flags[4], appended_starts: lines, compute,
            k_mean: if compute == launch::Compute::Int8 { bias } else { 0 },
            mask: launch::Mask {
                blocks: bias, blocks_strides: [batch, head], block_size: [row, chunk], ranges: sinks,
                ranges_strides: [head, batch], ids: [leftpad, lines], ids_batch: [batch, head], hidden: rng_state,
                hidden_strides: [row, batch],
            },
        }
    }
}

proptest! {
    #![proptest_config(common::cases(1000))]

    #[test]
    fn plans_never_panic(
        dtype in prop::sample::select(vec![launch::Dtype::F16, launch::Dtype::Bf16, launch::Dtype::F32]),
        sizes in [size(), size(), size(), size(), size(), size(), size(), size()],
        dim in prop_oneof![3 => prop::sample::select(vec![32usize, 64, 128, 192, 256, 512]), 1 => size()],
        numbers in (number(), number()), windows in (window(), window()),
        addresses in prop::array::uniform3(prop_oneof![any::<u64>(), Just(0)]),
        operands in prop::array::uniform9(operand()), pages in prop::option::of((size(), size(), size())),
        units in 0..400usize, planned in any::<bool>(), gradients in (0..2u64, 0..2u64), dim_v in prop::option::of(size()),
        options in options(),
    ) {
        let [batch, heads, heads_k, seqlen_q, seqlen_k, total_q, total_k, lengths] = sizes;
        let shape = Shape {
            dtype, batch, heads, heads_k, head_dim: dim, head_dim_v: dim_v.unwrap_or(dim), seqlen_q, seqlen_k, total_q, total_k,
            softmax_scale: numbers.0, softcap: numbers.1, window_left: windows.0, window_right: windows.1,
            alibi_slopes: addresses[0], cu_seqlens_q: addresses[1], cu_seqlens_k: addresses[2],
            options,
        };
        let [q, k, v, out, dout, dq, dk, dv, _] = operands;
        let lse = 1 << 41;
        let pages = pages.map(|(stride, columns, size)| Pages { table: 1 << 42, stride, columns, size });
        let forward = Forward { shape, q, k, v, out, lse, pages, lengths: lengths as u64 };
        let backward = Backward { shape, dout, q, k, v, out, lse, dq, dk, dv, dsinks: gradients.0 << 43, dbias: gradients.1 << 44 };
        let planner: Option<&dyn Planner> = if planned { Some(&Endless) } else { None };
        let sources = Sources { kernels: &Every, planner, device: internals::Device { compute_units: units } };
        let plans = [sources.forward(&forward, &mut Endless), sources.backward(&backward, &mut Endless)];
        for plan in plans {
            if let Err(error) = plan {
                assert!(error.to_string().len() > 10);
            }
        }
    }
}

#[test]
fn calls_that_are_too_large_for_memory_are_errors() {
    use candle_flash_rocm::Error;
    // A tensor of one element that candle broadcasts to a large shape.
    let expanded = |shape: &[usize]| tensor(&vec![1; shape.len()]).expand(shape).expect("a view");
    for shape in [[1usize << 40, 16, 4, 64], [1 << 20, 1 << 20, 4, 64], [1 << 45, 1, 1, 1]] {
        let q = expanded(&shape);
        let error = flash_attn(&q, &q, &q, 1.0, true).expect_err("no such memory");
        assert!(matches!(Error::in_candle(&error), Some(Error::OutOfMemory { .. })), "{error}");
        let text = error.to_string();
        assert!(text.contains("the result") && text.contains("pass fewer sequences"), "{text}");
    }
}

#[test]
fn slopes_that_want_a_gradient_are_refused() {
    let q = tensor(&[1, 3, 2, 8]);
    let slopes = Var::from_tensor(&tensor(&[2])).expect("a variable");
    refused(flash_attn_alibi(&q, &q, &q, &slopes, 1.0, true), &["alibi_slopes", "detach()"]);
    let result = slopes.affine(2.0, 0.0).expect("a result");
    refused(flash_attn_alibi(&q, &q, &q, &result, 1.0, true), &["alibi_slopes", "detach()"]);
    flash_attn_alibi(&q, &q, &q, &result.detach(), 1.0, true).expect("a result");
}

#[test]
fn errors_keep_their_kind_within_candles() {
    use candle_core::Context;
    use candle_flash_rocm::Error;
    let wide = tensor(&[1, 2, 1, 520]);
    let error = flash_attn(&wide, &wide, &wide, 1.0, false).expect_err("a head dim");
    // candle adds a backtrace where RUST_BACKTRACE asks for one.
    assert_eq!(error.to_string().lines().next(), Some("head_dim: got 520, wanted 1 to 512"));
    let wrapped = flash_attn(&wide, &wide, &wide, 1.0, false).context("in layer 3").expect_err("a head dim");
    for error in [error, wrapped] {
        assert!(matches!(Error::in_candle(&error), Some(Error::Argument { name: "head_dim", .. })), "{error}");
    }
    assert!(Error::in_candle(&candle_core::Error::msg("another")).is_none());
}
