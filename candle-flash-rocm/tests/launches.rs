//! Every launch that the crate plans against what flash_attn's Python backend launches for the same call, byte for byte.
//!
//! tests/record_launches.py wrote data/launches.json, and says which calls there are.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_flash_rocm::launch::internals::{
    plan_backward, plan_forward, Argument, Call, Catalogue, Choice, Device, Launch, Name, Planner, Planning, Signature,
    Source, Sources, Step, Tile,
};
use candle_flash_rocm::launch::{Backward, Dtype, Forward, Memory, Operand, Pages, Shape};
use candle_flash_rocm::{Error, Result};
use serde::Deserialize;

/// As in record_launches.py.
const APART: u64 = 1 << 32;
const OTHERS: u64 = 100;
/// `_HOST` of flash_attn/attention/backends/split_kv.py.
const HOST_COST_OF_PYTHON: f64 = 6.0;
const NAMES: [&str; 14] = [
    "q",
    "k",
    "v",
    "out",
    "lse",
    "dout",
    "dq",
    "dk",
    "dv",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "alibi",
    "table",
    "lengths",
];

/// A kernel, its grid, and its arguments in hexadecimal.
type Launched = (String, [u32; 3], String);

#[derive(Deserialize)]
struct Recorded {
    cases: Vec<Case>,
    /// What each case asks Composable Kernel's planner for: a call and its bytes in hexadecimal.
    composable: Vec<Vec<(String, String)>>,
    /// The numbers of planning, and by target what they say of assembly.
    planning: (serde_json::Value, BTreeMap<String, serde_json::Value>),
    /// The names of the arguments of all kernels.
    signatures: Vec<String>,
    /// The kernel providers that Python's table gives each case.
    sources: Vec<Expected>,
    targets: BTreeMap<String, Target>,
}

#[derive(Deserialize)]
struct Expected {
    target: String,
    choice: Choice,
    compute_units: usize,
    /// The sources of forward and backward, and the launch of AMD's assembly for the forward.
    calls: Vec<(String, String, Option<Launched>)>,
}

#[derive(Deserialize)]
struct Target {
    choice: Choice,
    compute_units: usize,
    /// Rows and keys of a tile, dies, and the place in `Recorded::signatures`.
    tiles: BTreeMap<String, [usize; 4]>,
    launches: Vec<Vec<Launched>>,
    #[serde(skip)]
    signatures: Vec<Signature>,
    #[serde(skip)]
    planning: Option<Planning>,
}

#[derive(Debug, Deserialize)]
struct Case {
    dtype: String,
    batch: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    heads: usize,
    heads_k: usize,
    head_dim: usize,
    scale: f32,
    softcap: f32,
    window: [i64; 2],
    alibi: bool,
    lengths_q: Vec<usize>,
    lengths_k: Vec<usize>,
    page_size: usize,
    columns: usize,
    used: bool,
    backward: bool,
    shares_starts: bool,
}

impl Catalogue for Target {
    fn tile(&self, kernel: &str) -> Result<Tile> {
        match self.tiles.get(kernel) {
            Some(&[block_m, block_n, num_xcds, _]) => Ok(Tile { block_m, block_n, num_xcds }),
            None => Err(Error::Unsupported(format!("Python's backend never asked for {kernel}"))),
        }
    }

    fn signature(&self, kernel: &str) -> Result<&Signature> {
        match self.tiles.get(kernel) {
            Some(&[.., signature]) => Ok(&self.signatures[signature]),
            None => Err(Error::Unsupported(format!("Python's backend never asked for {kernel}"))),
        }
    }

    fn has(&self, kernel: &str) -> bool {
        kernel.starts_with("asm-") || self.tiles.contains_key(kernel)
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn planning(&self) -> &Planning {
        self.planning.as_ref().expect("the numbers of planning")
    }
}

/// Gives addresses that no tensor has.
struct Fresh(u64);

impl Memory for Fresh {
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let address = self.0;
        self.0 += (bytes as u64).next_multiple_of(256) + 256;
        Ok(address)
    }
}

fn address(name: &str) -> u64 {
    let index = NAMES.iter().position(|&one| one == name).expect("a known name");
    APART * (1 + index as u64)
}

impl Case {
    fn is_packed(&self) -> bool {
        !self.lengths_q.is_empty()
    }

    fn rows(&self) -> (usize, usize) {
        if self.is_packed() {
            (self.lengths_q.iter().sum::<usize>() + 5, self.lengths_k.iter().sum::<usize>() + 5)
        } else {
            (self.batch * self.seqlen_q, self.batch * self.seqlen_k)
        }
    }

    fn shape(&self) -> Shape {
        let dtype = match self.dtype.as_str() {
            "fp16" => Dtype::F16,
            "bf16" => Dtype::Bf16,
            _ => Dtype::F32,
        };
        let longest = |lengths: &[usize], dense| lengths.iter().copied().max().unwrap_or(dense);
        let seqlens = (longest(&self.lengths_q, self.seqlen_q), longest(&self.lengths_k, self.seqlen_k));
        let mut shape = Shape::dense(dtype, self.batch, seqlens, (self.heads, self.heads_k), self.head_dim, self.scale);
        shape.softcap = self.softcap;
        shape.options.host_cost = HOST_COST_OF_PYTHON;
        shape.window_left = usize::try_from(self.window[0]).ok();
        shape.window_right = usize::try_from(self.window[1]).ok();
        if self.alibi {
            shape.alibi_slopes = address("alibi");
        }
        if self.is_packed() {
            (shape.total_q, shape.total_k) = self.rows();
            let starts_q = if self.shares_starts { "cu_seqlens_k" } else { "cu_seqlens_q" };
            (shape.cu_seqlens_q, shape.cu_seqlens_k) = (address(starts_q), address("cu_seqlens_k"));
        }
        shape
    }

    /// A dense tensor by its name. torch gives tensors without elements the address 0.
    fn operand(&self, name: &str) -> Operand {
        let of_keys = matches!(name, "k" | "v" | "dk" | "dv");
        let (heads, rows, length) = if of_keys {
            (self.heads_k, self.rows().1, self.seqlen_k)
        } else {
            (self.heads, self.rows().0, self.seqlen_q)
        };
        if of_keys && self.page_size > 0 {
            return Operand::dense(address(name), self.page_size, heads, self.head_dim);
        }
        let place = if rows == 0 { 0 } else { address(name) };
        if self.is_packed() {
            Operand::packed(place, heads, self.head_dim)
        } else {
            Operand::dense(place, length, heads, self.head_dim)
        }
    }

    /// The forward, and the addresses that are free after it.
    fn forward(&self) -> (Forward, Fresh) {
        let shape = self.shape();
        let memory = Fresh(APART * 1000);
        let pages = (self.page_size > 0).then(|| Pages {
            table: address("table"),
            stride: self.columns,
            columns: self.columns,
            size: self.page_size,
        });
        let lengths = if self.used { address("lengths") } else { 0 };
        let lse = if shape.lse_elements() == 0 { 0 } else { address("lse") };
        let (q, k, v, out) = (self.operand("q"), self.operand("k"), self.operand("v"), self.operand("out"));
        (Forward { shape, q, k, v, out, lse, pages, lengths }, memory)
    }

    fn backward(&self) -> Backward {
        let (Forward { shape, q, k, v, out, lse, .. }, _) = self.forward();
        let [dout, dq, dk, dv] = ["dout", "dq", "dk", "dv"].map(|name| self.operand(name));
        Backward { shape, dout, q, k, v, out, lse, dq, dk, dv, dsinks: 0, dbias: 0 }
    }
}

/// The launches with addresses that are no tensor's as numbers in the order of their first appearance.
fn launched(steps: &[Step]) -> Vec<Launched> {
    let mut known: BTreeMap<u64, u64> = NAMES.iter().map(|name| (address(name), address(name))).collect();
    known.insert(0, 0);
    let first = known.len();
    let mut found = Vec::new();
    for step in steps {
        let Step::Launch(launch) = step else { continue };
        let mut launch = launch.clone();
        for argument in &mut launch.arguments {
            if let Argument::Pointer(address) = argument {
                let next = APART * (OTHERS + (known.len() - first) as u64);
                *address = *known.entry(*address).or_insert(next);
            }
        }
        let hex = launch.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        found.push((launch.kernel, launch.grid, hex));
    }
    found
}

fn recorded() -> Recorded {
    let mut recorded: Recorded =
        serde_json::from_str(include_str!("data/launches.json")).expect("the recorded launches");
    for target in recorded.targets.values_mut() {
        target.signatures = recorded.signatures.iter().map(|names| Signature::parse(names)).collect();
        target.planning = Some(Planning::deserialize(&recorded.planning.0).expect("the numbers of planning"));
    }
    recorded
}

impl Recorded {
    fn planning_of(&self, target: &str) -> Planning {
        let mut planning = self.planning.0.clone();
        planning["assembly"].clone_from(&self.planning.1[target]);
        Planning::deserialize(&planning).expect("the numbers of planning")
    }
}

#[test]
fn every_launch_is_that_of_python() {
    let recorded = recorded();
    let mut compared = 0;
    for (name, target) in &recorded.targets {
        assert_eq!(target.launches.len(), recorded.cases.len());
        let device = Device { compute_units: target.compute_units };
        for (case, wanted) in recorded.cases.iter().zip(&target.launches) {
            let (forward, mut memory) = case.forward();
            let planned = plan_forward(&forward, target, device, &mut memory).and_then(|mut steps| {
                if case.backward {
                    steps.extend(plan_backward(&case.backward(), target, device, &mut memory)?);
                }
                Ok(steps)
            });
            let planned = launched(&planned.unwrap_or_else(|error| panic!("{name}, {case:?}: {error}")));
            assert_eq!(&planned, wanted, "{name}, {case:?}");
            compared += planned.len();
        }
    }
    println!("{compared} launches of {} calls on {} targets", recorded.cases.len(), recorded.targets.len());
    assert!(compared > 900, "{compared}");
}

/// Memory that keeps what it gave: address and bytes.
#[derive(Default)]
struct Kept(Vec<(u64, u64)>);

impl Memory for Kept {
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let address = APART * (1000 + self.0.len() as u64);
        self.0.push((address, bytes as u64));
        Ok(address)
    }
}

impl Kept {
    /// Fails unless `bytes` bytes from an address lie in one piece of memory.
    #[track_caller]
    fn assert_holds(&self, address: u64, bytes: usize) {
        let piece = self.0.iter().find(|(start, size)| (*start..start + size.max(&1)).contains(&address));
        let (start, size) = piece.expect("an address of this memory");
        assert!(address + bytes as u64 <= start + size, "{bytes} bytes from {} of {size}", address - start);
    }
}

/// The value of an argument of a launch.
fn value(launch: &Launch, signature: &Signature, name: &str) -> u64 {
    match launch.arguments[signature.position(name).unwrap_or_else(|| panic!("{} has no {name}", launch.kernel))] {
        Argument::Pointer(address) => address,
        Argument::I32(number) => number as u64,
        _ => panic!("{name} of {} is no address and no integer", launch.kernel),
    }
}

/// (partial, partial_lse, splits, rows, head_dim) of a launch that joins splits, see `combine.attn_combine`.
fn joined(launch: &Launch, target: &Target) -> Option<(u64, u64, usize, usize, usize)> {
    if !launch.kernel.starts_with("combine-") {
        return None;
    }
    let signature = target.signature(&launch.kernel).expect("a signature");
    let of = |name| value(launch, signature, name);
    let [splits, rows, dim] = ["num_splits", "stride_rs", "head_dim"].map(|name| of(name) as usize);
    Some((of("partial"), of("partial_lse"), splits, rows, dim))
}

/// A launch has no sizes of memory, so a workspace that is too small, or two that overlap, changes no launch.
#[test]
fn workspaces_hold_what_kernels_write() {
    let recorded = recorded();
    let (mut joins, mut infinite, mut sums) = (0, 0, 0);
    for (name, target) in &recorded.targets {
        let device = Device { compute_units: target.compute_units };
        for case in &recorded.cases {
            let mut memory = Kept::default();
            let (forward, _) = case.forward();
            let mut steps = plan_forward(&forward, target, device, &mut memory).expect("a plan");
            let (mut results, mut lse) = (Vec::new(), vec![forward.lse]);
            for step in &steps {
                let Step::Launch(launch) = step else { continue };
                let Some((partial, partial_lse, splits, rows, dim)) = joined(launch, target) else { continue };
                memory.assert_holds(partial, 4 * splits * rows * dim);
                memory.assert_holds(partial_lse, 4 * splits * rows);
                lse.push(partial_lse);
                joins += 1;
            }
            // Rows outside of every sequence: 0, and +inf as the logarithm of their sums.
            for step in &steps {
                let Step::Fill(fill) = step else { continue };
                if fill.count == 0 {
                    continue;
                }
                let is_lse = lse.contains(&fill.address);
                assert_eq!(fill.pattern == f32::INFINITY.to_bits(), is_lse, "{name}, {case:?}");
                assert_eq!(fill.pattern == 0, !is_lse, "{name}, {case:?}");
                infinite += usize::from(is_lse);
            }
            if case.backward {
                let backward = plan_backward(&case.backward(), target, device, &mut memory).expect("a plan");
                // Packed rows outside of every sequence get 0: delta, and dk and dv of all parts.
                let fills =
                    backward.iter().filter_map(|step| if let Step::Fill(fill) = step { Some(fill) } else { None });
                let filled: usize = fills.filter(|fill| fill.address >= APART * 1000).map(|fill| fill.count).sum();
                let shape = case.shape();
                let mut wanted = if case.is_packed() { shape.lse_elements() } else { 0 };
                for step in &backward {
                    let Step::Launch(launch) = step else { continue };
                    if !launch.kernel.starts_with("sum-") {
                        continue;
                    }
                    let signature = target.signature(&launch.kernel).expect("a signature");
                    let [partial, rows, parts] =
                        ["partial", "rows", "parts"].map(|name| value(launch, signature, name));
                    let elements = (rows * parts) as usize * case.head_dim;
                    memory.assert_holds(partial, 4 * elements);
                    results.push(partial..partial + 4 * elements as u64);
                    wanted += if case.is_packed() { elements } else { 0 };
                    sums += 1;
                }
                assert_eq!(filled, wanted, "{name}, {case:?}");
                steps.extend(backward);
            }
            for step in &steps {
                let Step::Fill(fill) = step else { continue };
                if fill.address >= APART * 1000 {
                    memory.assert_holds(fill.address, 4 * fill.count);
                }
            }
            for (index, one) in results.iter().enumerate() {
                assert!(
                    results[..index].iter().all(|other| one.end <= other.start || other.end <= one.start),
                    "{name}"
                );
            }
        }
    }
    println!("{joins} joins, {infinite} fills of lse, {sums} sums");
    assert!(joins > 20 && infinite > 5 && sums > 5, "{joins} {infinite} {sums}");
}

/// The (batch, row, head) strides of tensors of a launch, by their letters and the letter of their rows.
fn strides(launch: &Launch, target: &Target, letters: &[(&str, char)]) -> Vec<[i32; 3]> {
    let signature = target.signature(&launch.kernel).expect("a signature");
    let of = |tensor: &str, axis: char| value(launch, signature, &format!("stride_{tensor}{axis}")) as i32;
    letters.iter().map(|&(tensor, row)| [of(tensor, 'b'), of(tensor, row), of(tensor, 'h')]).collect()
}

/// Every name that a call gives a value to is an argument of a kernel.
#[test]
fn a_call_names_arguments_that_kernels_have() {
    let recorded = recorded();
    for (name, _) in Name::ALL {
        assert!(recorded.signatures.iter().any(|names| names.split(' ').any(|one| one == *name)), "{name}");
    }
}

/// Tensors of one shape with strides of their own, and parts of dk and dv where queries outnumber keys.
#[test]
fn a_backward_gives_each_tensor_its_own_strides() {
    let recorded = recorded();
    let target = &recorded.targets["gfx942"];
    let (batch, rows_q, rows_k, heads, dim) = (2, 8192, 512, 8, 64);
    let shape = Shape::dense(Dtype::Bf16, batch, (rows_q, rows_k), (heads, 1), dim, 0.125);
    let operand = |name: &str, rows: usize, heads: usize| {
        let padding = 8 * NAMES.iter().position(|&one| one == name).expect("a known name");
        let row = heads * dim + padding;
        Operand { address: address(name), batch: rows * row + padding, row, head: dim }
    };
    let of_queries = |name| operand(name, rows_q, heads);
    let [q, out, dout, dq] = ["q", "out", "dout", "dq"].map(of_queries);
    let [k, v] = ["k", "v"].map(|name| operand(name, rows_k, 1));
    let [dk, dv] = ["dk", "dv"].map(|name| Operand::dense(address(name), rows_k, 1, dim));
    let backward = Backward { shape, dout, q, k, v, out, lse: address("lse"), dq, dk, dv, dsinks: 0, dbias: 0 };
    let mut memory = Kept::default();
    let device = Device { compute_units: target.compute_units };
    let steps = plan_backward(&backward, target, device, &mut memory).expect("a plan");
    let launches: Vec<&Launch> =
        steps.iter().filter_map(|step| if let Step::Launch(launch) = step { Some(launch) } else { None }).collect();
    let [of_dq, of_dkdv, of_dk, of_dv] = launches[..] else { panic!("{} launches", launches.len()) };
    let parts = value(of_dk, target.signature(&of_dk.kernel).expect("a signature"), "parts") as usize;
    assert!(parts > 1 && of_dv.kernel == "sum-bf16-d128");
    let in_parts = Operand::dense(0, rows_k, parts, dim);
    let units = |operands: &[Operand]| -> Vec<[i32; 3]> {
        operands.iter().map(|one| [one.batch, one.row, one.head].map(|stride| (stride / 8) as i32)).collect()
    };
    let (keys, values) = (("k", 'n'), ("v", 'n'));
    let letters = [("q", 'm'), keys, values, ("o", 'm'), ("g", 'm'), ("dq", 'm')];
    assert_eq!(strides(of_dq, target, &letters), units(&[q, k, v, out, dout, dq]));
    let letters = [("q", 'm'), keys, values, ("g", 'm'), ("dk", 'n'), ("dv", 'n')];
    assert_eq!(strides(of_dkdv, target, &letters), units(&[q, k, v, dout, in_parts, in_parts]));
}

/// Keeps what it is asked for, and plans nothing.
#[derive(Default)]
struct Asked(RefCell<Vec<(Call, Vec<u8>)>>);

impl Planner for Asked {
    fn plan(&self, call: Call, parameters: &[u8]) -> Result<Result<Vec<Launch>, String>> {
        self.0.borrow_mut().push((call, parameters.to_vec()));
        Ok(Ok(Vec::new()))
    }

    fn backward_workspace(&self, _parameters: &[u8]) -> usize {
        4096
    }
}

/// The bytes of a call with addresses that are no tensor's as numbers in the order of their first appearance.
fn renumbered(call: Call, parameters: &[u8]) -> String {
    const WORKSPACES: std::ops::Range<usize> = 104 + 8 * 32 + 8..104 + 8 * 32 + 24;
    let mut bytes = parameters.to_vec();
    if call == Call::Backward {
        for (index, word) in bytes[WORKSPACES].chunks_exact_mut(8).enumerate() {
            let empty = word.iter().all(|&byte| byte == 0);
            if !empty {
                word.copy_from_slice(&(APART * (OTHERS + index as u64)).to_le_bytes());
            }
        }
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_planner_of_composable_kernel_is_asked_as_by_python() {
    let recorded = recorded();
    let target = &recorded.targets["gfx942"];
    let device = Device { compute_units: target.compute_units };
    let mut compared = 0;
    for (case, wanted) in recorded.cases.iter().zip(&recorded.composable) {
        let asked = Asked::default();
        let (forward, mut memory) = case.forward();
        let by = Source::ComposableKernel;
        let sources = Sources { kernels: target, planner: Some(&asked), device };
        sources.forward_by(by, &forward, &mut memory).expect("a plan");
        if case.backward {
            sources.backward_by(by, &case.backward(), &mut memory).expect("a plan");
        }
        let asked: Vec<(String, String)> = asked
            .0
            .take()
            .into_iter()
            .map(|(call, parameters)| {
                let name = if call == Call::Forward { "forward" } else { "backward" };
                (name.to_owned(), renumbered(call, &parameters))
            })
            .collect();
        assert_eq!(&asked, wanted, "{case:?}");
        compared += asked.len();
    }
    println!("{compared} calls of the planner");
    assert!(compared > 100, "{compared}");
}

/// The kernel provider of a plan, derived from the kernels' names and the planner's calls.
fn source_of(steps: &[Step], asked: &Asked) -> &'static str {
    let is_asm = |step: &Step| matches!(step, Step::Launch(launch) if launch.kernel.starts_with("asm-"));
    match (steps.iter().any(is_asm), asked.0.take().is_empty()) {
        (true, _) => "asm",
        (false, true) => "triton",
        (false, false) => "ck",
    }
}

#[test]
fn python_chooses_the_same_kernel_provider_for_every_call() {
    let mut recorded = recorded();
    let mut target = recorded.targets.remove("gfx942").expect("gfx942");
    let mut by_assembly = 0;
    for expected in &recorded.sources {
        target.choice.clone_from(&expected.choice);
        target.planning = Some(recorded.planning_of(&expected.target));
        let device = Device { compute_units: expected.compute_units };
        for (case, (forward_by, backward_by, launch)) in recorded.cases.iter().zip(&expected.calls) {
            let asked = Asked::default();
            let sources = Sources { kernels: &target, planner: Some(&asked), device };
            let (forward, mut memory) = case.forward();
            let what = format!("{} of {} units, {case:?}", expected.target, expected.compute_units);
            let steps = sources.forward(&forward, &mut memory).expect("a plan");
            let found = source_of(&steps, &asked);
            // Python mends rows without a key after a kernel of assembly. Here other kernels serve calls that may have some.
            let may_lack_keys = if case.is_packed() {
                !case.shares_starts
            } else {
                case.seqlen_q > case.seqlen_k && case.window[1] == 0
            };
            match launch {
                Some(_) if may_lack_keys => assert_ne!(found, "asm", "{what}"),
                Some((kernel, grid, bytes)) => {
                    assert_eq!(found, "asm", "{what}");
                    let planned = launched(&steps);
                    assert_eq!(planned, [(kernel.clone(), *grid, bytes.clone())], "{what}");
                    by_assembly += 1;
                }
                // Composable Kernel has none for pages, fp32 and decoding here, and then Triton's serve the call.
                None if forward_by == "ck" => assert_ne!(found, "asm", "{what}"),
                None => assert_eq!(found, forward_by, "{what}"),
            }
            if case.backward {
                let steps = sources.backward(&case.backward(), &mut memory).expect("a plan");
                let found = source_of(&steps, &asked);
                match backward_by.as_str() {
                    "ck" => assert_ne!(found, "asm", "{what}"),
                    _ => assert_eq!(found, "triton", "{what}"), // assembly has no backward here
                }
            }
        }
    }
    println!("{by_assembly} launches of assembly");
    assert!(by_assembly > 30, "{by_assembly}");
}

/// Calls that a kernel of assembly would compute wrongly in silence.
#[test]
fn assembly_leaves_calls_that_it_computes_wrongly() {
    let mut recorded = recorded();
    let mut target = recorded.targets.remove("gfx942").expect("gfx942");
    let expected = recorded.sources.iter().find(|expected| expected.target == "gfx942").expect("gfx942");
    target.choice.clone_from(&expected.choice);
    let device = Device { compute_units: expected.compute_units };
    let served = |change: &dyn Fn(&mut Forward)| {
        let (heads, dim, length) = (8, 128, 512);
        let shape = Shape::dense(Dtype::Bf16, 1, (length, length), (heads, heads), dim, 0.125);
        let [q, k, v, out] = ["q", "k", "v", "out"].map(|name| Operand::dense(address(name), length, heads, dim));
        let mut call = Forward { shape, q, k, v, out, lse: address("lse"), pages: None, lengths: 0 };
        change(&mut call);
        let asked = Asked::default();
        let sources = Sources { kernels: &target, planner: Some(&asked), device };
        let steps = sources.forward(&call, &mut Kept::default()).expect("a plan");
        source_of(&steps, &asked) == "asm"
    };
    let causal = |call: &mut Forward| call.shape.window_right = Some(0);
    assert!(served(&|_| ()));
    assert!(served(&causal));
    // The first queries see no key: the kernel stores -inf as lse.
    assert!(!served(&|call| {
        causal(call);
        call.shape.seqlen_k = 511;
    }));
    // The kernel takes the maximum before it scales.
    assert!(!served(&|call| call.shape.softmax_scale = -0.125));
    // Offsets wrap at 4 GiB. The kernel reads a head beyond the last.
    let reach = |head: usize| move |call: &mut Forward| (call.q.row, call.q.head) = ((1 << 22) - 8, head);
    assert!(!served(&reach(524_800)));
    assert!(served(&reach(524_792 - 128)));
}
