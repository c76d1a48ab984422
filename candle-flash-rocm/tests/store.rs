//! The store reader: what it finds, what it refuses, and that no damage makes it panic.

mod common;

use std::fs;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};

use candle_flash_rocm::launch::internals::Catalogue;
use candle_flash_rocm::store::{Parameter, Store, Stores};
use proptest::prelude::*;
use zip::write::{SimpleFileOptions, ZipWriter};
use zip::CompressionMethod;

/// A store that Python's zipfile wrote: two kernels in one group, compressed by LZMA.
fn sample() -> Vec<u8> {
    let text: String = include_str!("data/gfx942.zip.hex").split_whitespace().collect();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal")).collect()
}

fn read(bytes: Vec<u8>) -> candle_flash_rocm::Result<Store> {
    Store::read(PathBuf::from("gfx942.zip"), "gfx942", bytes)
}

/// A directory of this test's own, removed with it.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("candle-flash-rocm-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A zip archive of members, deflated.
fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
    for (name, content) in members {
        writer.start_file(*name, options).expect("a member");
        writer.write_all(content).expect("its content");
    }
    writer.finish().expect("an archive").into_inner()
}

#[track_caller]
fn refused<T>(result: candle_flash_rocm::Result<T>, words: &[&str]) {
    let message = result.err().expect("an error").to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

#[test]
fn a_store_gives_its_kernels() {
    let store = read(sample()).expect("a store");
    assert_eq!(store.target(), "gfx942");
    assert_eq!(store.names().collect::<Vec<_>>(), ["fwd-bf16-d64", "fwd-fp16-d64"]);
    let kernel = store.kernel("fwd-bf16-d64").expect("a kernel");
    assert_eq!((kernel.symbol.as_str(), kernel.threads, kernel.shared), ("attn_fwd", 256, 16384));
    assert_eq!((kernel.block_m, kernel.block_n, kernel.num_xcds), (128, 64, 8));
    use Parameter::{Null, Pointer, F32, I32};
    assert_eq!(kernel.parameters, [Pointer, Pointer, F32, I32, Null, Null]);
    let names: Vec<_> = store.signature("fwd-bf16-d64").expect("names").names().collect();
    assert_eq!(names, ["q", "k", "scale", "seqlen_q"]);
    refused(store.signature("fwd-fp16-d64"), &["kernel fwd-fp16-d64 has no names of its arguments"]);
    assert_eq!(store.get("fwd-fp16-d64").expect("a kernel").parameters, [Parameter::Structure(200)]);
    assert_eq!(store.image("fwd-bf16-d64").expect("an image"), b"one code object ".repeat(20));
    assert_eq!(store.image("fwd-fp16-d64").expect("an image"), b"another code object ".repeat(30));
    refused(store.image("fwd-bf16-d512"), &["no kernel fwd-bf16-d512 for gfx942", "./build_rocm.sh --store gfx942"]);
}

#[test]
fn stores_are_found_in_files_directories_and_wheels() {
    let directory = Directory::new("found");
    let path = directory.0.join("gfx942.zip");
    fs::write(&path, sample()).expect("a file");
    fs::write(directory.0.join("notes.txt"), "").expect("a file");
    fs::write(directory.0.join("other.zip"), "").expect("a file");
    let wheel = directory.0.join("flash_attn-2.8.3-cp310-abi3-linux_x86_64.whl");
    let members: [(&str, &[u8]); 3] = [
        ("flash_attn/__init__.py", b""),
        ("flash_attn/_kernels/gfx942.zip", &sample()),
        ("flash_attn/_kernels/sm_90.zip", b"damaged"),
    ];
    fs::write(&wheel, archive(&members)).expect("a file");
    for (path, targets) in [(&path, 1), (&directory.0, 1), (&wheel, 2)] {
        let stores = Stores::open(path).expect("stores");
        assert_eq!(stores.targets().count(), targets, "{}", path.display());
        let store = stores.store("gfx942").expect("a store");
        assert_eq!(store.image("fwd-bf16-d64").expect("an image").len(), 320);
        refused(stores.store("gfx1100"), &["no kernels for gfx1100", "gfx942", "./build_rocm.sh --store gfx1100"]);
    }
    assert_eq!(Stores::open(&path).expect("stores").for_gpu("gfx942", None).expect("a store").target(), "gfx942");
    refused(Stores::open(&wheel).expect("stores").store("sm_90"), &["sm_90.zip", "zip archive"]);
}

/// A manifest's facts about its target.
fn facts(gpus: &[&str]) -> serde_json::Value {
    let min_hip = gpus.contains(&"gfx1103").then_some([6, 4]);
    serde_json::json!({"gpus": gpus, "min_hip": min_hip})
}

/// A manifest's table of sources.
fn choice() -> serde_json::Value {
    serde_json::json!({
        "max_head_dim": 256, "rows": [], "default": ["ck", "triton"], "larger": ["triton"], "serves": {}
    })
}

/// A manifest's numbers of planning.
fn planning() -> &'static serde_json::Value {
    &common::recorded()["planning"][0]
}

/// A store of one kernel, `head tail`, whose bytes `code` are in another store.
fn without_code(offset: usize, at: usize) -> Vec<u8> {
    let digest = "ea0b02ab1f1a7d9b65b068a1b9398621a64f3ebdd751f293f6fa64748f87fb3e";
    let entry = serde_json::json!({
        "group": "g", "offset": 0, "size": 8, "sha256": digest, "symbol": "s", "threads": 64, "shared": 0,
        "params": "P", "code": {"at": at, "offset": offset, "size": 4},
    });
    let manifest = serde_json::json!({"format": 6, "signatures": [], "facts": facts(&["gfx1103"]), "choice": choice(), "planning": planning(), "base": "gfx1100", "kernels": {"k": entry}}).to_string();
    archive(&[("manifest.json", manifest.as_bytes()), ("g", b"headtail")])
}

#[test]
fn a_generic_store_serves_the_gpus_that_its_manifest_names() {
    let directory = Directory::new("generic");
    let manifest = |facts| {
        serde_json::json!({"format": 6, "signatures": [], "facts": facts, "choice": choice(), "planning": planning(), "kernels": {}})
            .to_string()
    };
    let path = directory.0.join("gfx11-generic.zip");
    fs::write(&path, archive(&[("manifest.json", manifest(facts(&["gfx1103", "gfx1300"])).as_bytes())]))
        .expect("a file");
    let stores = Stores::open(&path).expect("stores");
    for gpu in ["gfx1103", "gfx1300"] {
        for hip in [(6, 4), (7, 2), (10, 0)] {
            assert_eq!(stores.for_gpu(gpu, Some(hip)).expect("a store").target(), "gfx11-generic");
        }
        for hip in [None, Some((6, 3))] {
            refused(stores.for_gpu(gpu, hip), &["no kernels for gfx1", "gfx1103, gfx1300 with HIP from 6.4 on"]);
        }
    }
    // The name of a GPU says nothing: the manifest lacks this one.
    refused(stores.for_gpu("gfx1100", Some((7, 2))), &["no kernels for gfx1100", "is for gfx1103, gfx1300"]);
}

#[test]
fn a_manifest_without_facts_or_with_unknown_providers_is_refused() {
    for (name, part, words) in [
        ("facts", serde_json::json!({"min_hip": null}), "manifest.json cannot be read: missing field `gpus`"),
        ("planning", serde_json::json!({"flags": {}}), "field `HAS_CU_SEQLENS_Q`"),
        ("choice", serde_json::json!(null), "manifest.json cannot be read: invalid type: null"),
        ("choice", serde_json::json!({"max_head_dim": 256, "rows": [], "default": ["mlir"], "larger": []}), "`mlir`"),
        ("choice", serde_json::json!({"max_head_dim": 256, "rows": [], "default": [], "larger": []}), "field `serves`"),
    ] {
        let mut manifest = serde_json::json!({"format": 6, "signatures": ["q"], "facts": facts(&["gfx942"]), "choice": choice(), "planning": planning(), "kernels": {}});
        manifest[name] = part;
        refused(read(archive(&[("manifest.json", manifest.to_string().as_bytes())])), &[words]);
    }
}

#[test]
fn code_comes_from_the_store_beside_it() {
    let directory = Directory::new("beside");
    let (path, base) = (directory.0.join("gfx11-generic.zip"), directory.0.join("gfx1100.zip"));
    fs::write(&path, without_code(2, 4)).expect("a file");
    refused(Store::open(&path), &["gfx1100.zip", "cannot be read"]);
    let other = archive(&[("g", b"..code..")]);
    fs::write(&base, &other).expect("a file");
    let image = Store::open(&path).expect("a store").image("k").expect("an image");
    assert_eq!(image, b"headcodetail");
    let wheel = directory.0.join("flash_attn-2.8.3-cp310-abi3-linux_x86_64.whl");
    let there = ["flash_attn/_kernels/gfx11-generic.zip", "flash_attn/_kernels/gfx1100.zip"];
    fs::write(&wheel, archive(&[(there[0], &without_code(2, 4)), (there[1], &other)])).expect("a file");
    let store = Stores::open(&wheel).expect("stores").for_gpu("gfx1103", Some((7, 2))).expect("a store");
    assert_eq!(store.image("k").expect("an image"), image);
    fs::write(&wheel, archive(&[(there[0], &without_code(2, 4))])).expect("a file");
    refused(Stores::open(&wheel).expect("stores").store("gfx11-generic"), &["gfx1100.zip cannot be read"]);
    for (offset, at, words) in [(5, 4, "ends before k"), (2, 9, "ends before k"), (1, 4, "corrupt")] {
        fs::write(&path, without_code(offset, at)).expect("a file");
        refused(Store::open(&path).expect("a store").image("k"), &[words]);
    }
    refused(
        read(without_code(2, 4)).expect("a store").image("k"),
        &["the store of gfx1100, which is not in the same directory"],
    );
}

#[test]
fn files_that_are_no_store_are_refused() {
    let directory = Directory::new("refused");
    refused(Stores::open(directory.0.join("absent")), &["absent", "cannot be read", "./build_rocm.sh --store"]);
    refused(Stores::open(&directory.0), &["it contains no store", "./build_rocm.sh --store"]);
    refused(Store::open(Path::new("/nonexistent/gfx942.zip")), &["/nonexistent/gfx942.zip", "cannot be read"]);
    refused(read(b"PK".to_vec()), &["gfx942.zip", "no zip archive"]);
    refused(read(archive(&[("other", b"")])), &["manifest.json"]);
    refused(read(archive(&[("manifest.json", b"\"x\"")])), &["manifest.json cannot be read"]);
    refused(read(archive(&[("manifest.json", br#"{"format": 2, "kernels": {}}"#)])), &["format 2", "reads 6"]);
    refused(
        read(archive(&[("manifest.json", br#"{"format": 6, "kernels": [1]}"#)])),
        &["manifest.json cannot be read"],
    );
}

/// A store of one kernel whose entry has another value of a field.
fn with(field: &str, value: &str) -> Vec<u8> {
    let mut entry = serde_json::json!({
        "group": "g", "offset": 0, "size": 4, "sha256": "", "symbol": "s", "threads": 64, "shared": 0, "params": "P",
        "signature": 0,
    });
    entry[field] = serde_json::from_str(value).expect("JSON");
    let manifest =
        serde_json::json!({"format": 6, "signatures": ["q"], "facts": facts(&["gfx942"]), "choice": choice(), "planning": planning(), "kernels": {"k": entry}})
            .to_string();
    archive(&[("manifest.json", manifest.as_bytes()), ("g", b"code")])
}

#[test]
fn damaged_entries_are_refused() {
    for (field, value, words) in [
        ("threads", "0", "threads is 0, wanted 1 to 1024"),
        ("threads", "-1", "manifest.json"),
        ("params", "\"Pz\"", "letter 'z'"),
        ("params", "\"0P\"", "they come last"),
        ("params", "\"B0\"", "B wants a number of bytes"),
        ("signature", "1", "kernel k takes 1 arguments, its signature 1 names 0"),
        ("params", "\"PP\"", "kernel k takes 2 arguments, its signature 0 names 1"),
        ("symbol", "\"\"", "is empty"),
        ("symbol", "\"a\\u0000b\"", "null character"),
    ] {
        refused(read(with(field, value)), &[words]);
    }
    for (field, value, words) in [
        ("group", "\"absent\"", "absent cannot be read"),
        ("offset", "1", "ends before k"),
        ("offset", "18446744073709551615", "ends before k"),
        ("size", "5", "ends before k"),
        ("sha256", "\"00\"", "corrupt"),
        ("sha256", "\"é\"", "corrupt"),
    ] {
        refused(read(with(field, value)).expect("a store").image("k"), &[words]);
    }
}

/// An archive whose member is `count` times a byte.
fn inflating(name: &str, byte: u8, count: usize) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
    writer.start_file(name, options).expect("a member");
    let block = vec![byte; 1 << 20];
    for _ in 0..count >> 20 {
        writer.write_all(&block).expect("its content");
    }
    writer.finish().expect("an archive").into_inner()
}

#[test]
fn archives_that_unpack_to_more_than_a_store_has_are_refused() {
    let bomb = inflating("manifest.json", b' ', 64 << 20);
    assert!(bomb.len() < 100_000, "{}", bomb.len());
    refused(read(bomb), &["manifest.json", "more than 16777216 bytes"]);
    refused(read(with("size", "1000000000")).expect("a store").image("k"), &["1000000000 bytes", "at most 268435456"]);
    // The group of the sample is LZMA: after the local header come two bytes of version, two of size, and the properties.
    let mut large = sample();
    let name = b"triton-fwd-d64";
    let at = large.windows(name.len()).position(|window| window == name).expect("the group") + name.len();
    assert_eq!(&large[at + 2..at + 4], [5, 0], "the size of LZMA's properties");
    large[at + 5..at + 9].copy_from_slice(&u32::MAX.to_le_bytes());
    refused(read(large).expect("a store").image("fwd-bf16-d64"), &["its dictionary has 4294967295 bytes", "at most"]);
}

#[cfg(unix)]
#[test]
fn only_regular_files_are_opened() {
    let directory = Directory::new("pipe");
    let pipe = directory.0.join("gfx942.zip");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    refused(Store::open(&pipe), &["gfx942.zip", "is no regular file"]);
    refused(Stores::open(&directory.0).expect("a listing").store("gfx942"), &["is no regular file"]);
    refused(Store::open(Path::new("/dev/null")), &["/dev/null", "is no regular file"]);
}

#[test]
fn errors_of_stores_can_be_matched() {
    use candle_flash_rocm::Error;
    let missing = read(sample()).expect("a store").image("fwd-bf16-d512").expect_err("no such kernel");
    assert!(matches!(&missing, Error::MissingKernel { kernel, .. } if kernel == "fwd-bf16-d512"), "{missing:?}");
    let absent = Store::open("/nonexistent/gfx942.zip").expect_err("no such file");
    let source = std::error::Error::source(&absent).expect("a cause");
    let cause = source.downcast_ref::<std::io::Error>().expect("an error of the file system");
    assert_eq!(cause.kind(), std::io::ErrorKind::NotFound);
}

/// Reads everything that there is in a store.
fn exhaust(bytes: Vec<u8>) {
    if let Ok(store) = read(bytes) {
        let names: Vec<String> = store.names().map(str::to_owned).collect();
        for name in names {
            if let Ok(image) = store.image(&name) {
                // What passes the digest is what was packed.
                assert!(image == b"one code object ".repeat(20) || image == b"another code object ".repeat(30));
            }
        }
    }
}

proptest! {
    #![proptest_config(common::cases(2000))]

    #[test]
    fn mutated_stores_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = sample();
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        exhaust(bytes);
    }

    #[test]
    fn mutated_manifests_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut manifest = br#"{"format": 6, "signatures": ["q k scale group"], "facts": {"gpus": ["gfx942"], "min_hip": null},
            "choice": {"max_head_dim": 256, "default": ["ck", "triton"], "larger": ["triton"], "serves": {}, "rows": [{"op": "fwd",
            "dtypes": ["bf16"], "dims": [1, 64], "masks": ["plain"], "least_q": 1, "sources": ["asm"], "value_dim": 0}]},
            "kernels": {"k": {"group": "g", "offset": 0, "size": 4, "sha256": "", "symbol": "s",
            "threads": 64, "shared": 0, "params": "PPif00", "signature": 0, "constants": {"BLOCK_M": 128, "NUM_XCDS": 8}}, "b": {"group": "g",
            "offset": 1, "size": 2, "sha256": "", "symbol": "b", "threads": 9, "shared": 0, "params": "B200"}, "a": {"group":
            "g", "offset": 0, "size": 4, "sha256": "", "symbol": "a", "threads": 512, "shared": 0, "params": "K512"}},
            "planning": "#
            .to_vec();
        manifest.extend(planning().to_string().into_bytes());
        manifest.push(b'}');
        for (place, value) in changes {
            let place = place.index(manifest.len());
            manifest[place] = value;
        }
        exhaust(archive(&[("manifest.json", &manifest), ("g", b"code")]));
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        exhaust(bytes);
    }
}
