//! A GPU that is a stub: errors that can be matched, copies whose wait fails, scopes, and planners that must not be loaded.

mod common;

use std::ffi::{c_int, c_void};
use std::fs;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::{DType, Device, Tensor, Var};
use candle_flash_rocm::driver::{Driver, Gpu, Platform};
use candle_flash_rocm::launch::internals::{
    plan_backward, plan_forward, Argument, Catalogue, Choice, Device as Units, Planning, Signature, Step, Tile,
};
use candle_flash_rocm::launch::{Backward, Dtype, Forward, Memory, Operand, Shape};
use candle_flash_rocm::store::Stores;
use candle_flash_rocm::{flash_attn, Error, FlashAttn, Result, RocmContext};
use sha2::{Digest, Sha256};
use zip::write::{SimpleFileOptions, ZipWriter};

const SHAPE: (usize, usize, usize, usize) = (1, 16, 2, 64);

/// Compiles a shared library of C. A compiler is part of every Rust that links.
fn compile(source: &Path, library: &Path) {
    let done = Command::new("cc")
        .args(["-shared", "-fPIC", "-std=c11", "-O1", "-Wall", "-Werror", "-o"])
        .arg(library)
        .arg(source)
        .output();
    let done = done.expect("a C compiler: install gcc or clang");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// A fresh directory for this test process.
fn directory(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("candle-flash-rocm-driver-{}-{name}", std::process::id()));
    fs::create_dir_all(&path).expect("a directory");
    path
}

struct Stub(libloading::Library);

impl Stub {
    fn set_wait_code(&self, code: c_int) {
        // SAFETY: the stub's variable, which one test at a time uses.
        unsafe { **self.0.get::<*mut c_int>(b"stub_wait_code").expect("a variable") = code }
    }

    fn last_target(&self) -> usize {
        // SAFETY: as above.
        unsafe { **self.0.get::<*const *const c_void>(b"stub_last_target").expect("a variable") as usize }
    }

    /// How many modules were loaded, and how many of them are loaded still.
    fn modules(&self) -> (c_int, c_int) {
        // SAFETY: as above.
        let count = |name: &[u8]| unsafe { **self.0.get::<*const c_int>(name).expect("a variable") };
        let loads = count(b"stub_loads");
        (loads, loads - count(b"stub_unloads"))
    }
}

/// The stub, which is this process's HIP runtime. Tests take turns, because scopes and the stub belong to the process.
fn stub() -> MutexGuard<'static, Stub> {
    static STUB: OnceLock<Mutex<Stub>> = OnceLock::new();
    let made = STUB.get_or_init(|| {
        let library = directory("stub").join("libstub_hip.so");
        compile(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stub_hip.c"), &library);
        std::env::set_var("CANDLE_FLASH_ROCM_HIP", &library);
        // SAFETY: the stub has no initializers.
        Mutex::new(Stub(unsafe { libloading::Library::new(&library) }.expect("the stub")))
    });
    made.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gpu() -> Arc<Gpu> {
    Gpu::open(Driver::open(Platform::Hip).expect("the stub"), 0).expect("its first GPU")
}

/// Kernels of every name, all with one tile.
struct Every;

impl Catalogue for Every {
    fn tile(&self, _: &str) -> Result<Tile> {
        Ok(Tile { block_m: 64, block_n: 64, num_xcds: 1 })
    }

    fn signature(&self, kernel: &str) -> Result<&Signature> {
        Ok(common::signature(kernel))
    }

    fn has(&self, _: &str) -> bool {
        true
    }

    fn choice(&self) -> &Choice {
        common::choice()
    }

    fn planning(&self) -> &Planning {
        common::planning()
    }
}

struct Fresh(u64);

impl Memory for Fresh {
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        self.0 += (bytes as u64).next_multiple_of(256) + 256;
        Ok(self.0)
    }
}

/// The kernels that a forward and a backward of `SHAPE` launch, with the letters of their arguments.
fn kernels() -> Vec<(String, String)> {
    let (batch, rows, heads, dim) = SHAPE;
    let shape = Shape::dense(Dtype::F32, batch, (rows, rows), (heads, heads), dim, 0.125);
    let at = |number: u64| Operand::dense(number << 20, rows, heads, dim);
    let [q, k, v, out, dout, dq, dk, dv] = [1, 2, 3, 4, 5, 6, 7, 8].map(at);
    let units = Units { compute_units: 304 };
    let forward = Forward { shape, q, k, v, out, lse: 9 << 20, pages: None, lengths: 0 };
    let backward = Backward { shape, dout, q, k, v, out, lse: 9 << 20, dq, dk, dv, dsinks: 0, dbias: 0 };
    let mut steps = plan_forward(&forward, &Every, units, &mut Fresh(1 << 30)).expect("a plan");
    steps.extend(plan_backward(&backward, &Every, units, &mut Fresh(1 << 30)).expect("a plan"));
    let launches = steps.into_iter().filter_map(|step| match step {
        Step::Launch(launch) => Some(launch),
        _ => None,
    });
    let letter = |argument: &Argument| match argument {
        Argument::Pointer(_) => 'P',
        Argument::I32(_) => 'i',
        Argument::F32(_) => 'f',
        Argument::Structure(_) => panic!("a structure"),
    };
    launches.map(|launch| (launch.kernel, launch.arguments.iter().map(letter).collect())).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a store gfx942.zip of kernels that the stub launches, and returns its path.
fn store(directory: &Path, kernels: &[(String, String)], planner: Option<&str>) -> PathBuf {
    let entries: serde_json::Map<String, serde_json::Value> = kernels
        .iter()
        .enumerate()
        .map(|(place, (name, params))| {
            let entry = serde_json::json!({
                "group": "g", "offset": 0, "size": 4, "sha256": sha256(b"code"), "symbol": "s", "threads": 64,
                "shared": 0, "params": params, "signature": place, "constants": {"BLOCK_M": 64, "BLOCK_N": 64, "NUM_XCDS": 1},
            });
            (name.clone(), entry)
        })
        .collect();
    let signatures: Vec<String> =
        kernels.iter().map(|(name, _)| common::signature(name).names().collect::<Vec<_>>().join(" ")).collect();
    let choice = serde_json::json!({"max_head_dim": 256, "rows": [], "default": ["ck", "triton"], "larger": ["triton"], "serves": {}});
    let mut manifest = serde_json::json!({
        "format": candle_flash_rocm::store::FORMAT,
        "facts": {"gpus": ["gfx942"], "min_hip": null},
        "choice": choice,
        "planning": common::recorded()["planning"][0],
        "signatures": signatures,
        "kernels": entries,
    });
    if let Some(planner) = planner {
        manifest["planner"] = planner.into();
    }
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in [("manifest.json", manifest.to_string().as_bytes()), ("g", b"code")] {
        writer.start_file(name, SimpleFileOptions::default()).expect("a member");
        writer.write_all(content).expect("its content");
    }
    let path = directory.join("gfx942.zip");
    fs::write(&path, writer.finish().expect("an archive").into_inner()).expect("a file");
    path
}

fn tensor() -> Tensor {
    Tensor::ones(SHAPE, DType::F32, &Device::Cpu).expect("a tensor")
}

fn message(result: candle_core::Result<Tensor>) -> String {
    result.expect_err("an error").to_string()
}

#[test]
fn errors_of_a_driver_can_be_matched() {
    let _stub = stub();
    let gpu = gpu();
    let error = gpu.allocate(1 << 40).expect_err("no such memory");
    let Error::OutOfMemory { reason, source: Some(source), .. } = &error else { panic!("{error:?}") };
    assert!(reason.contains("allocating 1099511627776 bytes") && reason.contains("fewer sequences"), "{reason}");
    assert_eq!(source.to_string(), "hipErrorOutOfMemory (2)");
    let error = Gpu::open(gpu.driver().clone(), 7).expect_err("no such GPU");
    assert!(matches!(&error, Error::WrongDevice(reason) if reason.contains("no GPU number 7")), "{error:?}");
    let other = Gpu::open(gpu.driver().clone(), 1).expect("the second GPU").allocate(64).expect("memory");
    let error = gpu.stream().expect("a stream").download(&other, 64).expect_err("another GPU");
    assert!(matches!(error, Error::WrongDevice(_)), "{error:?}");
}

#[test]
fn host_memory_of_an_unfinished_copy_is_never_reused() {
    const BYTES: usize = 100_000;
    let stub = stub();
    let gpu = gpu();
    let (stream, buffer) = (gpu.stream().expect("a stream"), gpu.allocate(BYTES).expect("memory"));
    stream.upload(vec![7; BYTES], &buffer).expect("a copy");
    assert_eq!(stream.download(&buffer, BYTES).expect("a copy"), vec![7; BYTES]);
    stub.set_wait_code(719);
    let failed = stream.download(&buffer, BYTES);
    stub.set_wait_code(0);
    let error = failed.expect_err("a failed wait");
    assert!(matches!(&error, Error::Driver { source: Some(code), .. } if code.code == 719), "{error:?}");
    let target = stub.last_target();
    let later: Vec<Vec<u8>> = (0..200).map(|_| vec![0; BYTES]).collect();
    assert!(later.iter().all(|memory| memory.as_ptr() as usize != target), "the target was given back");
}

#[test]
#[cfg(target_os = "linux")]
fn calls_on_a_gpu_without_memory_of_the_host_are_errors() {
    use common::limits::{is_child, spawn, sweep};
    if !is_child() {
        return spawn("calls_on_a_gpu_without_memory_of_the_host_are_errors", 1);
    }
    let _stub = stub();
    let stores = Stores::open(store(&directory("limits"), &kernels(), None)).expect("stores");
    let rocm = RocmContext::with_stores(0, &stores).expect("a context");
    let (_, rows, heads, dim) = SHAPE;
    let large = Tensor::ones((256, rows, heads, dim), DType::F32, &Device::Cpu).expect("a tensor");
    let bytes = large.elem_count() * 4;
    sweep(0, 64 << 10, || rocm.scope(|| flash_attn(&large, &large, &large, 0.125, false)).map(drop));
    let q = Var::from_tensor(&large).expect("a variable");
    let out = rocm.scope(|| flash_attn(&q, &large, &large, 0.125, false)).expect("a call on the GPU");
    // candle's gradient of the result is a tensor of ones. Its own additions take less than the backward.
    sweep(2 * bytes, 128 << 10, || out.backward().map(drop));
}

#[test]
fn dropped_contexts_leave_no_module_loaded() {
    let stub = stub();
    let stores = Stores::open(store(&directory("modules"), &kernels(), None)).expect("stores");
    let open = || RocmContext::with_stores(0, &stores).expect("a context");
    let plain = tensor();
    let forward = |rocm: &RocmContext, q: &Tensor| rocm.scope(|| flash_attn(q, &plain, &plain, 0.125, false));
    let (before, kept) = stub.modules();
    for _ in 0..100 {
        let (rocm, q) = (open(), Var::from_tensor(&plain).expect("a variable"));
        let out = forward(&rocm, &q).expect("a call on the GPU");
        drop(rocm); // the result keeps a clone for its backward
        out.backward().expect("a backward");
    }
    let (loads, loaded) = stub.modules();
    assert_eq!((loads - before, loaded), (100 * kernels().len() as c_int, kept));
    // Contexts load modules of their own: one that is left still launches.
    let (one, another) = (open(), open());
    for rocm in [&one, &another] {
        forward(rocm, &plain).expect("a call on the GPU");
    }
    drop(one);
    forward(&another, &plain).expect("a call on the GPU");
    assert_eq!(stub.modules().1, kept + 1);
    // A stream that may still run a kernel: its code stays.
    stub.set_wait_code(719);
    drop(another);
    stub.set_wait_code(0);
    assert_eq!(stub.modules().1, kept + 1);
}

#[test]
fn calls_within_a_scope_never_run_on_the_cpu() {
    let _stub = stub();
    let directory = directory("scope");
    let stores = Stores::open(store(&directory, &kernels(), None)).expect("stores");
    let rocm = RocmContext::with_stores(0, &stores).expect("a context");
    let (q, plain) = (Var::from_tensor(&tensor()).expect("a variable"), tensor());
    let zeros = |tensor: &Tensor| {
        tensor.flatten_all().and_then(|flat| flat.to_vec1::<f32>()).expect("values").iter().all(|&x| x == 0.0)
    };
    // The stub's kernels write nothing; its memory is not zeroed, and here nothing has been there before.
    let operation = FlashAttn {
        softmax_scale: 0.125,
        alibi_slopes: None,
        window_size_left: None,
        window_size_right: None,
        softcap: None,
    };
    let (wake, woken) = std::sync::mpsc::channel::<()>();
    let (out, on_a_thread, on_the_cpu, of_the_operation, late) = rocm.scope(|| {
        let thread = |calls: fn() -> candle_core::Result<Tensor>| std::thread::spawn(calls).join().expect("a thread");
        (
            flash_attn(&q, &plain, &plain, 0.125, false).expect("a call on the GPU"),
            thread(|| flash_attn(&tensor(), &tensor(), &tensor(), 0.125, false)),
            thread(|| RocmContext::cpu_scope(|| flash_attn(&tensor(), &tensor(), &tensor(), 0.125, false))),
            plain.apply_op3(&plain, &plain, operation.clone()),
            std::thread::spawn(move || {
                woken.recv().expect("a signal");
                flash_attn(&tensor(), &tensor(), &tensor(), 0.125, false)
            }),
        )
    });
    // A thread that was started within the scope and calls after it: its call was meant for the GPU.
    wake.send(()).expect("a thread that waits");
    let refused = message(late.join().expect("a thread"));
    assert!(refused.contains("this thread never had a scope"), "{refused}");
    let refused = message(on_a_thread);
    assert!(
        refused.contains("this thread never had a scope") && refused.contains("RocmContext::cpu_scope"),
        "{refused}"
    );
    assert!(!zeros(&on_the_cpu.expect("a call on the CPU")));
    let refused = message(of_the_operation);
    assert!(refused.contains("FlashAttn") && refused.contains("call flash_attn"), "{refused}");
    // After the scope: the backward of its call goes to the GPU, here on another thread; new calls go to the CPU.
    let loss = out.sum_all().expect("a sum");
    let gradients =
        std::thread::spawn(move || loss.backward().map(|store| store.get(&q).cloned())).join().expect("a thread");
    assert_eq!(gradients.expect("a backward").expect("a gradient").dims(), plain.dims());
    assert!(!zeros(&flash_attn(&plain, &plain, &plain, 0.125, false).expect("a call on the CPU")));
    // Without the backward's kernels the backward is an error: nobody computes it on the CPU.
    let forward_alone: Vec<_> = kernels().into_iter().filter(|(name, _)| name.starts_with("fwd")).collect();
    let stores = Stores::open(store(&directory, &forward_alone, None)).expect("stores");
    let rocm = RocmContext::with_stores(0, &stores).expect("a context");
    let q = Var::from_tensor(&plain).expect("a variable");
    let out = rocm.scope(|| flash_attn(&q, &plain, &plain, 0.125, false)).expect("a call on the GPU");
    let error = out.sum_all().and_then(|sum| sum.backward()).expect_err("no kernels");
    let found = Error::in_candle(&error);
    assert!(matches!(found, Some(Error::MissingKernel { target, .. }) if target == "gfx942"), "{error}");
    assert!(error.to_string().contains("./build_rocm.sh --store gfx942"), "{error}");
}

#[test]
fn only_the_planner_of_the_store_is_loaded() {
    let _stub = stub();
    let directory = directory("planner");
    let (library, ran) = (directory.join("_ck_planner.so"), directory.join("ran"));
    let source = directory.join("planner.c");
    let text =
        "#include <stdio.h>\n__attribute__((constructor)) static void run(void) { fclose(fopen(RAN, \"w\")); }\n";
    fs::write(&source, format!("#define RAN \"{}\"\n{text}", ran.display())).expect("a file");
    compile(&source, &library);
    let open =
        |planner| RocmContext::with_stores(0, &Stores::open(store(&directory, &kernels(), planner)).expect("stores"));
    let another = "0".repeat(64);
    open(None).expect("a context without Composable Kernel");
    assert!(!ran.exists(), "a library was loaded that no store names");
    let error = open(Some(&another)).expect_err("another digest");
    assert!(error.to_string().contains("is not the planner of this store"), "{error}");
    assert!(!ran.exists(), "a library was loaded whose digest is another one");
    let digest = sha256(&fs::read(&library).expect("a file"));
    let error = open(Some(&digest)).expect_err("no planner's functions");
    assert!(error.to_string().contains("flash_attn_ck_version"), "{error}");
    assert!(ran.exists(), "the library that the store names was not loaded");
    // A relative path of a store: the planner is looked for beside it, not on the loader's search path.
    std::env::set_current_dir(&directory).expect("a directory");
    let found = Stores::open("gfx942.zip").expect("stores").planner();
    assert_eq!(found.map(|path| path.canonicalize().expect("a path")), Some(library.canonicalize().expect("a path")));
    assert!(Stores::open("gfx942.zip").expect("stores").planner().expect("a path").is_absolute());
}
