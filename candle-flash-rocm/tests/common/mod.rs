//! Attention by its definition in f64, random tensors, and the number of random cases of a property
//! test.

#![allow(dead_code)] // each test file uses a part of it

#[cfg(target_os = "linux")]
pub mod limits;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use candle_core::{DType, Device, Result, Tensor};
use candle_flash_rocm::launch::internals::{Choice, Planning, Signature};
use proptest::test_runner::{Config, RngSeed};
use serde::Deserialize as _;

/// The table of kernel providers for mock stores. AMD's kernels come first.
pub fn choice() -> &'static Choice {
    static CHOICE: LazyLock<Choice> = LazyLock::new(|| {
        let text = r#"{"max_head_dim": 256, "rows": [], "default": ["asm", "ck", "triton"], "larger": ["triton"],
            "serves": {"ck-fwd": ["softcap", "alibi_slopes"], "ck-bwd": ["alibi_slopes"]}}"#;
        serde_json::from_str(text).expect("a choice")
    });
    &CHOICE
}

/// What record_launches.py wrote.
pub fn recorded() -> &'static serde_json::Value {
    static RECORDED: LazyLock<serde_json::Value> =
        LazyLock::new(|| serde_json::from_str(include_str!("../data/launches.json")).expect("the recorded launches"));
    &RECORDED
}

/// The numbers of planning, for mock stores of gfx942.
pub fn planning() -> &'static Planning {
    static PLANNING: LazyLock<Planning> =
        LazyLock::new(|| Planning::deserialize(&recorded()["planning"][0]).expect("the numbers of planning"));
    &PLANNING
}

/// The names of a kernel's arguments, for mock stores: of the recorded kernel, or of another kernel of its operation.
pub fn signature(kernel: &str) -> &'static Signature {
    static SIGNATURES: LazyLock<BTreeMap<String, Signature>> = LazyLock::new(|| {
        let recorded = recorded();
        let parse = |place: &serde_json::Value| {
            let names = &recorded["signatures"][place.as_u64().expect("a place") as usize];
            Signature::parse(names.as_str().expect("names"))
        };
        let tiles = recorded["targets"]["gfx942"]["tiles"].as_object().expect("tiles");
        tiles.iter().map(|(name, tile)| (name.clone(), parse(&tile[3]))).collect()
    });
    let operation =
        |name: &str| ["-fp16-", "-bf16-", "-fp32-"].iter().find_map(|dtype| Some(name.split_once(dtype)?.0.to_owned()));
    let alike = || SIGNATURES.iter().find(|(name, _)| operation(name) == operation(kernel)).map(|(_, names)| names);
    SIGNATURES.get(kernel).or_else(alike).unwrap_or_else(|| panic!("no kernel like {kernel} was recorded"))
}

/// A configuration with this number of random cases. Each run uses the same cases, so that a new
/// failure comes from a change. `PROPTEST_RNG_SEED` selects other cases.
pub fn cases(cases: u32) -> Config {
    let config = Config::default();
    let rng_seed = if config.rng_seed == RngSeed::Random { RngSeed::Fixed(0) } else { config.rng_seed };
    Config { cases, rng_seed, failure_persistence: None, ..config }
}

/// The options of a call, for the reference implementation.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    pub scale: f64,
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub slopes: Option<Vec<f64>>,
    pub softcap: f64,
    pub prefixes: Vec<(i64, i64)>,
}

/// Rows of one sequence and head, as vectors of f64.
pub type Rows = Vec<Vec<f64>>;

/// A small generator of numbers near the normal distribution, the same on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() - 6.0
    }

    pub fn tensor(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.normal() as f32).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
    }
}

/// The rows of a tensor `(row, head, dim)` for a head.
pub fn rows(x: &Tensor, start: usize, count: usize, head: usize) -> Result<Rows> {
    let part = x.narrow(0, start, count)?.narrow(1, head, 1)?.squeeze(1)?;
    part.to_dtype(DType::F64)?.to_vec2()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Probabilities and slopes of the cap, `[query][key]`.
pub fn probabilities(q: &Rows, k: &Rows, head: usize, wanted: &Wanted) -> (Rows, Rows) {
    let shift = k.len() as i64 - q.len() as i64;
    let mut all = Vec::new();
    let mut caps = Vec::new();
    for (i, query) in q.iter().enumerate() {
        let at = i as i64 + shift;
        let mut cap = vec![1.0; k.len()];
        let scores: Vec<f64> = k
            .iter()
            .enumerate()
            .map(|(j, key)| {
                let mut score = dot(query, key) * wanted.scale;
                if wanted.softcap > 0.0 {
                    let tanh = (score / wanted.softcap).tanh();
                    score = wanted.softcap * tanh;
                    cap[j] = 1.0 - tanh * tanh;
                }
                let j = j as i64;
                if let Some(slopes) = &wanted.slopes {
                    score -= slopes[head] * (at - j).abs() as f64;
                }
                let inside = wanted.left.is_none_or(|left| j >= at - left as i64)
                    && wanted.right.is_none_or(|right| j <= at + right as i64);
                let prefixed = wanted.prefixes.iter().any(|&(a, b)| (a..b).contains(&at) && (a..b).contains(&j));
                if inside || prefixed {
                    score
                } else {
                    f64::NEG_INFINITY
                }
            })
            .collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let powers: Vec<f64> =
            scores.iter().map(|s| if *s == f64::NEG_INFINITY { 0.0 } else { (s - most).exp() }).collect();
        let total: f64 = powers.iter().sum();
        all.push(powers.iter().map(|p| if total == 0.0 { 0.0 } else { p / total }).collect());
        caps.push(cap);
    }
    (all, caps)
}

/// The result of one sequence and head.
pub fn attention(q: &Rows, k: &Rows, v: &Rows, head: usize, wanted: &Wanted) -> Rows {
    let (p, _) = probabilities(q, k, head, wanted);
    let dim = q.first().map_or(0, Vec::len);
    p.iter().map(|p| (0..dim).map(|d| p.iter().zip(v).map(|(p, v)| p * v[d]).sum()).collect()).collect()
}

/// The gradients (dq, dk, dv) of one sequence and query head.
pub fn gradients(q: &Rows, k: &Rows, v: &Rows, dout: &Rows, head: usize, wanted: &Wanted) -> (Rows, Rows, Rows) {
    let (p, caps) = probabilities(q, k, head, wanted);
    let dim = q.first().map_or(0, Vec::len);
    let mut dq = vec![vec![0.0; dim]; q.len()];
    let mut dk = vec![vec![0.0; dim]; k.len()];
    let mut dv = vec![vec![0.0; dim]; k.len()];
    for i in 0..q.len() {
        let dp: Vec<f64> = v.iter().map(|v| dot(&dout[i], v)).collect();
        let delta = dot(&p[i], &dp);
        for j in 0..k.len() {
            let ds = p[i][j] * (dp[j] - delta) * caps[i][j] * wanted.scale;
            for d in 0..dim {
                dq[i][d] += ds * k[j][d];
                dk[j][d] += ds * q[i][d];
                dv[j][d] += p[i][j] * dout[i][d];
            }
        }
    }
    (dq, dk, dv)
}

/// Fails unless `got (rows, heads, dim)` is near `wanted`, given as `[head][row][dim]`.
pub fn assert_close(what: &str, got: &Tensor, wanted: &[Rows]) -> Result<()> {
    let limit = match got.dtype() {
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        _ => 2e-5,
    };
    let largest = wanted.iter().flatten().flatten().fold(0.0f64, |a, b| a.max(b.abs())).max(0.1);
    let got = got.to_dtype(DType::F64)?.to_vec3::<f64>()?;
    for (row, heads) in got.iter().enumerate() {
        for (head, values) in heads.iter().enumerate() {
            for (d, value) in values.iter().enumerate() {
                let exact = wanted[head][row][d];
                let error = (value - exact).abs();
                assert!(error <= limit * largest, "{what}: [{row}, {head}, {d}] is {value}, wanted {exact}");
            }
        }
    }
    Ok(())
}
