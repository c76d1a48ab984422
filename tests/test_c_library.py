"""libflash_attn_rocm: exports, header, errors, examples, recipes, and calls on the simulator."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tools
import yaml
from elftools.elf.elffile import ELFFile
from flash_attn.kernels.variants import Variant
from interface import HEADER, Library

from amdgpu_simulator import gpu
from amdgpu_simulator.debian import UnavailableError
from amdgpu_simulator.hip import process as hip
from rocm_wheels.compile import store
from rocm_wheels.compile.compiler import Compiled
from rocm_wheels.paths import ROOT

PACKAGE = ROOT / "libflash_attn_rocm"

MEMORY = 1 << 20  # an address of GPU memory that nothing reads: the stub's kernels do nothing
# Kernels of the store for the stub, which computes nothing, and the head dims that each one is in the store for.
KERNELS = {
    **{Variant(operation, "bf16", 32, "plain"): (32, 64, 128) for operation in ("fwd", "bwd-dq", "bwd-dkdv", "decode")},
    Variant("combine", "bf16", 128, "wide"): (128,),
}


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **more)


@pytest.fixture(scope="session")
def path() -> Path:
    """`libflash_attn_rocm.so` and the examples, made by make."""
    if shutil.which("cargo") is None:
        tools.missing("no cargo on PATH: install Rust from https://rustup.rs")
    done = run("make", "--silent", "-C", PACKAGE, "all", "examples")
    assert done.returncode == 0, done.stderr
    return PACKAGE / "build/libflash_attn_rocm.so"


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HIP runtime whose GPU is a gfx942 that computes nothing."""
    library = tmp_path_factory.mktemp("stub") / "libstub_hip.so"
    source = ROOT / "candle-flash-rocm/tests/stub_hip.c"
    done = run("cc", "-shared", "-fPIC", "-o", library, source)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store of gfx942. It has the kernels of head dim 32 under the names of others too."""
    directory = tmp_path_factory.mktemp("stores")
    objects = {}
    for variant, dims in KERNELS.items():
        image, entry, _ = gpu.compiled("gfx942", variant)
        for dim in dims:
            name = variant._replace(block_d=dim).name
            named = {**entry, "sha256": hashlib.sha256(image).hexdigest()}
            objects[name] = (store.group_of("triton", name), Compiled(image, {name: named}))
    (directory / "gfx942.zip").write_bytes(store.archive("gfx942", ("triton", "stub"), objects))
    return directory


@pytest.fixture(scope="module")
def library(path: Path, stub: Path) -> Iterator[Library]:
    os.environ["CANDLE_FLASH_ROCM_HIP"] = str(stub)
    yield Library(path)
    del os.environ["CANDLE_FLASH_ROCM_HIP"]


@pytest.fixture(scope="module")
def opened(library: Library, stores: Path) -> Any:
    return library.open(stores)


def tensor(heads: int, rows: int = 64, dim: int = 32) -> dict[str, int]:
    strides = {"batch_stride": rows * heads * dim, "row_stride": heads * dim, "head_stride": dim}
    return {"data": MEMORY, **strides}


def fields(kind: str) -> dict[str, Any]:
    """A valid call: 2 sequences of 64 rows, 4 heads over 2, head dim 32."""
    shape = {
        "dtype": 1, "causal": 1, "batch": 2, "heads": 4, "heads_k": 2, "head_dim": 32, "seqlen_q": 64, "seqlen_k": 64,
        "softmax_scale": 0.2, "window_left": -1, "window_right": -1,
    }  # fmt: skip
    queries = ("q", "out") if kind == "forward" else ("q", "out", "dout", "dq")
    keys = ("k", "v") if kind == "forward" else ("k", "v", "dk", "dv")
    operands = {**{name: tensor(4) for name in queries}, **{name: tensor(2) for name in keys}}
    return {"shape": shape, "lse": MEMORY, **operands}


def test_the_library_exports_the_functions_of_the_header(path: Path) -> None:
    """It exports each function under a version and no other symbol. It links to libc alone."""
    declared = set(re.findall(r"\b(flash_attn_rocm_\w+)\(", HEADER.read_text(encoding="utf-8").split("#include")[-1]))
    with path.open("rb") as file:
        elf: Any = ELFFile(file)
        dynamic, versions = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
        symbols = {
            symbol.name: versions.get_symbol(index)["ndx"]
            for index, symbol in enumerate(dynamic.iter_symbols())
            if symbol["st_shndx"] not in ("SHN_UNDEF", "SHN_ABS")
        }
        needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        names = [next(entry[1]).name for entry in elf.get_section_by_name(".gnu.version_d").iter_versions()]
    assert set(symbols) == declared
    assert set(symbols.values()) == {2}, "a symbol without the version"
    assert names[-1] == "FLASH_ATTN_ROCM_1"
    allowed = r"(libc|libgcc_s|libm|libdl|libpthread|ld-linux-x86-64)\.so\.\d"
    assert all(re.fullmatch(allowed, name) for name in needed), needed


@pytest.mark.parametrize(("compiler", "standard"), [("cc", "c99"), ("cc", "c17"), ("c++", "c++11"), ("c++", "c++20")])
def test_the_header_compiles_alone(compiler: str, standard: str, tmp_path: Path) -> None:
    source = tmp_path / ("main.c" if compiler == "cc" else "main.cc")
    source.write_text('#include "flash_attn_rocm.h"\nint main(void) { return FLASH_ATTN_ROCM_OK; }\n')
    flags = [f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]
    done = run(compiler, *flags, "-I", HEADER.parent, source)
    assert done.returncode == 0, done.stderr


def test_a_call_launches_and_scratch_memory_is_what_the_plan_takes(library: Library, opened: Any) -> None:
    assert library.ffi.string(library.functions.flash_attn_rocm_target(opened)) == b"gfx942"
    forward, backward = (library.call(kind, fields(kind)) for kind in ("forward", "backward"))
    assert library.scratch_bytes(opened, "forward", forward) == 0
    library.launch(opened, "forward", forward)
    size = library.scratch_bytes(opened, "backward", backward)
    assert size >= 4 * 2 * 4 * 64, "delta, fp32 for each row and head"
    library.launch(opened, "backward", backward, MEMORY, size)
    with pytest.raises(RuntimeError, match=r"^1: scratch: got \d+ bytes.*wanted as many bytes as"):
        library.launch(opened, "backward", backward, MEMORY, size - 256)


def test_logarithms_that_nobody_keeps_take_scratch_memory(library: Library, opened: Any) -> None:
    call = library.call("forward", {**fields("forward"), "lse": 0})
    assert library.scratch_bytes(opened, "forward", call) == 4 * 2 * 4 * 64


def test_decoding_takes_scratch_memory(library: Library, opened: Any) -> None:
    call = fields("forward")
    call["shape"] |= {"batch": 1, "seqlen_q": 1, "seqlen_k": 100_000}
    assert library.scratch_bytes(opened, "forward", library.call("forward", call)) > 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"struct_size": 8}, r"struct_size: got 8, wanted sizeof\(flash_attn_rocm_forward_call\)"),
    ({"shape": {"dtype": 3}}, "dtype: got 3, wanted FLASH_ATTN_ROCM_FP16, _BF16 or _FP32"),
    ({"shape": {"causal": 2}}, "causal: got 2, wanted 0 or 1"),
    ({"shape": {"batch": -1}}, "batch: got -1, wanted 0 or more"),
    ({"shape": {"heads": -4}}, "heads: got -4, wanted 0 or more"),
    ({"shape": {"heads_k": 3}}, "heads_k: got 3, wanted a divisor of heads, 4"),
    ({"shape": {"head_dim": 20}}, "head_dim: got 20, wanted a multiple of 8"),
    ({"shape": {"head_dim": 1024}}, "head_dim: got 1024, wanted at most 512"),
    ({"shape": {"seqlen_q": -1}}, "seqlen_q: got -1"),
    ({"shape": {"seqlen_k": 1 << 40}}, "seqlen_q and seqlen_k: got 64 and 1099511627776, wanted less than"),
    ({"shape": {"total_q": 7}}, "total_q: got 7, wanted 0 without cu_seqlens"),
    ({"shape": {"total_k": 7}}, "total_k: got 7, wanted 0 without cu_seqlens"),
    ({"shape": {"softmax_scale": float("nan")}}, "softmax_scale: got NaN, wanted a finite number"),
    ({"shape": {"softcap": -1.0}}, "softcap: got -1, wanted 0 for none"),
    ({"shape": {"window_left": -2}}, "window_left: got -2, wanted -1 for all keys"),
    ({"shape": {"window_right": 5}}, "window_right: got 5, wanted -1 or 0, because causal is 1"),
    ({"shape": {"cu_seqlens_q": MEMORY}}, "cu_seqlens_q and cu_seqlens_k: got one of them, wanted both or none"),
    ({"q": {"data": 0}}, "q: got NULL, wanted the address of a tensor in GPU memory"),
    ({"k": {"data": MEMORY + 2}}, "k: got address 0x100002, wanted a multiple of 16 bytes"),
    ({"v": {"row_stride": 65}}, "v: got strides .*row: 65.*, wanted multiples of 8 elements"),
    ({"out": {"head_stride": -32}}, "out: got -32, wanted 0 or more"),
    ({"page_size": 16}, "page_size: got 16, wanted 0 without a block_table"),
    ({"block_table": MEMORY, "page_size": -16}, "page_size: got -16"),
    ({"block_table": MEMORY, "page_size": 16}, "block_table: pages need cu_seqlens_q and cu_seqlens_k"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:28] for _, message in WRONG])
def test_a_wrong_field_is_named(library: Library, opened: Any, change: dict[str, Any], message: str) -> None:
    call = fields("forward")
    for name, value in change.items():
        call[name] = {**call[name], **value} if isinstance(value, dict) else value
    struct = library.call("forward", call)
    with pytest.raises(RuntimeError, match=message):
        library.launch(opened, "forward", struct)
    with pytest.raises(RuntimeError, match=message):
        library.scratch_bytes(opened, "forward", struct)


def test_addresses_that_are_null(library: Library, opened: Any) -> None:
    call, null = library.call("forward", fields("forward")), library.ffi.NULL
    forward, scratch = library.functions.flash_attn_rocm_forward, library.functions.flash_attn_rocm_forward_scratch
    for status, name in [
        (forward(null, call, null, 0, null), "opened"),
        (forward(opened, null, null, 0, null), "call"),
        (forward(opened, call, null, 256, null), "scratch"),
        (forward(opened, call, library.ffi.cast("void *", 8), 256, null), "scratch"),
        (scratch(opened, call, null), "bytes"),
        (library.functions.flash_attn_rocm_open(null, 0, null), "opened"),
    ]:
        assert status == 1, name
    library.functions.flash_attn_rocm_close(null)
    with pytest.raises(RuntimeError, match="lse: got NULL, wanted the address of the forward's logarithms"):
        library.launch(opened, "backward", library.call("backward", {**fields("backward"), "lse": 0}))


def test_what_open_refuses(library: Library, stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CANDLE_FLASH_ROCM_STORE", raising=False)
    for path, device, message in [
        (None, 0, "4: CANDLE_FLASH_ROCM_STORE is not set"),
        (tmp_path, 0, "4: .* contains no store"),
        (tmp_path / "gfx942.zip", 0, "4: .*cannot be read"),
        (stores, -1, "1: device: got -1, wanted a GPU's number"),
        (stores, 2, "6: no GPU number 2: .* has 2, numbered from 0"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            library.open(path, device)
    library.open(stores)
    assert library.error() == "", "the message of an earlier error"


def test_a_kernel_that_the_store_lacks(library: Library, opened: Any) -> None:
    call = fields("forward")
    call["shape"]["softcap"] = 5.0
    with pytest.raises(RuntimeError, match=r"3: .*no kernel fwd-bf16-d32-softcap for gfx942\. Build a store"):
        library.launch(opened, "forward", library.call("forward", call))


def test_each_thread_has_its_own_message(library: Library, opened: Any) -> None:
    messages: dict[int, str] = {}

    def wrong(heads: int) -> None:
        call = fields("forward")
        call["shape"]["heads"] = -heads
        for _ in range(200):
            with pytest.raises(RuntimeError):
                library.launch(opened, "forward", library.call("forward", call))
            messages[heads] = library.error()

    threads = [threading.Thread(target=wrong, args=(heads,)) for heads in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert messages == {heads: f"heads: got -{heads}, wanted 0 or more" for heads in (3, 5, 7)}


def test_examples(path: Path, stub: Path, stores: Path) -> None:
    """Both run to their comparison. The stub computes nothing, so the first one must find its results wrong."""
    environment = {**os.environ, "CANDLE_FLASH_ROCM_HIP": str(stub)}
    attention, decode = (path.parent / name for name in ("attention", "decode"))
    assert run(attention).returncode == 2
    done = run(attention, stores, env=environment)
    assert (done.returncode, done.stdout.count("error")) == (1, 4), done.stderr
    done = run(decode, stores, env=environment)
    assert "gfx942: 8 tokens after a prompt of 4000" in done.stdout, done.stderr
    done = run(attention, stores / "gfx1.zip", env=environment)
    assert done.returncode == 1
    assert "flash_attn_rocm_open: error 4" in done.stderr


def test_recipes_have_the_librarys_version(library: Library) -> None:
    manifest = (PACKAGE / "Cargo.toml").read_text(encoding="utf-8")
    version = re.findall(r'^version = "(.*)"', manifest, re.MULTILINE)[0]
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text(encoding="utf-8"))
    assert library.version() == version
    assert recipe["context"]["version"] == version
    assert f'version = "{version}";' in (PACKAGE / "package.nix").read_text(encoding="utf-8")
    assert f"({version})" in (PACKAGE / "debian/changelog").read_text(encoding="utf-8").splitlines()[0]


def test_make_install(path: Path, tmp_path: Path) -> None:
    """What a program finds by pkg-config."""
    done = run("make", "--silent", "-C", path.parents[1], "install", f"DESTDIR={tmp_path}", "PREFIX=/usr")
    assert done.returncode == 0, done.stderr
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if not file.is_dir()}
    library = {"usr/lib/libflash_attn_rocm.so", "usr/lib/libflash_attn_rocm.so.0"}
    assert files == library | {"usr/include/flash_attn_rocm.h", "usr/lib/pkgconfig/flash_attn_rocm.pc"}
    description = (tmp_path / "usr/lib/pkgconfig/flash_attn_rocm.pc").read_text(encoding="utf-8")
    assert "Libs: -L/usr/lib -lflash_attn_rocm" in description


def test_calls_from_c_to_the_packets(path: Path, tmp_path: Path) -> None:
    """Forward and backward through AMD's runtime; the simulator executes them."""
    try:
        hip.fetch("6.4")
    except UnavailableError as problem:
        tools.missing(str(problem))
    command, environment = hip.command("6.4", "gfx942", [str(PACKAGE / "tests/simulated.py"), str(path), "gfx942"])
    output = tmp_path / "output"
    with output.open("w") as file:  # a child that outlives the process would keep a pipe open
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=600, check=False)
    text = output.read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, text
    assert "2 calls on gfx942" in text
