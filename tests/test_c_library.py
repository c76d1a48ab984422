"""libflash_attn_rocm: exports, header, errors, examples, recipes, and calls on the simulator."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import c_make
import pytest
import recorded
import tools
import yaml
from elftools.elf.elffile import ELFFile
from interface import HEADER, Library

from amdgpu_simulator.debian import UnavailableError
from amdgpu_simulator.hip import process as hip
from rocm_wheels.paths import ROOT

PACKAGE = ROOT / "libflash_attn_rocm"

MEMORY = 1 << 20  # an address of GPU memory that nothing reads: the stub's kernels do nothing
LACKING = "fwd-bf16-d32-softcap"  # in the store


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **more)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store of gfx942, whose kernels compute nothing."""
    directory = tmp_path_factory.mktemp("stores")
    recorded.write_store(directory, {LACKING})
    return directory


@pytest.fixture(scope="module")
def library(c_library: Path, stub_hip: Path) -> Iterator[Library]:
    os.environ["CANDLE_FLASH_ROCM_HIP"] = str(stub_hip)
    yield Library(c_library)
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


@pytest.mark.parametrize("profile", ["dev", pytest.param("release", marks=pytest.mark.long)])
def test_the_library_exports_the_functions_of_the_header(c_library: Path, profile: str, tmp_path: Path) -> None:
    """It exports each function under a version and no other symbol. It links to libc alone."""
    declared = set(re.findall(r"\b(flash_attn_rocm_\w+)\(", HEADER.read_text(encoding="utf-8").split("#include")[-1]))
    library = c_library
    if profile == "release":
        c_make.make(f"BUILD={tmp_path}", dev=False)
        library = tmp_path / library.name
    with library.open("rb") as file:
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
    assert names[-1] == "FLASH_ATTN_ROCM_2"
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
    ({"options": {"struct_size": 12}}, r"struct_size: got 12, wanted sizeof\(flash_attn_rocm_options\)"),
    ({"options": {"host_cost": -1.0}}, "host_cost: got -1, wanted microseconds, or 0 for 2"),
    ({"shape": {"reserved": 1}}, "shape.reserved: got 1, wanted 0"),
    ({"shape": {"head_dim_v": 20}}, "head_dim_v: got 20, wanted a multiple of 8"),
    ({"shape": {"head_dim_v": 1024}}, "head_dim_v: got 1024, wanted at most 512"),
    ({"q": {"reserved": 1}}, "q: got 1, wanted 0"),
    ({"k": {"stored": 6}}, "k: got stored 6, wanted a number FLASH_ATTN_ROCM_STORED_"),
    ({"k": {"stored": 5}}, "k: stored as q8_0, and the call computes in bf16: no kernel takes both"),
    ({"lse": MEMORY + 4}, "lse: got address 0x100004, wanted a multiple of 16 bytes"),
    ({"seqlens_k": MEMORY + 1}, "seqlens_k: got address 0x100001, wanted a multiple of 4 bytes"),
    ({"block_table_columns": 2}, "block_table_columns: got 2, wanted 0 without a block_table"),
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
    ({"options": {"softcap": -1.0}}, "softcap: got -1, wanted 0 for none"),
    ({"shape": {"window_left": -2}}, "window_left: got -2, wanted -1 for all keys"),
    ({"shape": {"window_right": 5}}, "window_right: got 5, wanted -1 or 0, because causal is 1"),
    ({"shape": {"cu_seqlens_q": MEMORY}}, "cu_seqlens_q and cu_seqlens_k: got one of them, wanted both or none"),
    ({"q": {"data": 0}}, "q: got NULL, wanted the address of a tensor in GPU memory"),
    ({"k": {"data": MEMORY + 2}}, "k: got address 0x100002, wanted a multiple of 16 bytes"),
    ({"v": {"row_stride": 65}}, "v: got strides .*row: 65.*, wanted multiples of 8 elements"),
    ({"out": {"head_stride": -32}}, "out: got -32, wanted 0 or more"),
    ({"page_size": 16}, "page_size: got 16, wanted 0 without a block_table"),
    ({"block_table": MEMORY, "page_size": -16}, "page_size: got -16"),
    (
        {"block_table": MEMORY, "page_size": 16, "options": {"cache_lines": MEMORY}},
        "cache_lines: pages have a block_table",
    ),
    ({"options": {"second_query": 2}}, "second_query: got 2, wanted 0 or 1"),
    ({"options": {"second_query": 1}, "shape": {"head_dim": 128}}, "head_dim: got 128, wanted at most 64 with second"),
    ({"options": {"dropout": 1.0, "rng_state": MEMORY}}, "dropout: got 1, wanted 0 for none, or a probability below 1"),
    ({"options": {"dropout": 0.5}}, "rng_state: got 0x0 with dropout 0.5, wanted the address of two numbers"),
    ({"options": {"rng_state": MEMORY}}, "rng_state: got 0x100000 with dropout 0, wanted"),
    ({"options": {"rng_state": MEMORY + 4, "dropout": 0.5}}, "rng_state: got address 0x100004, wanted a multiple of 8"),
    ({"options": {"alibi_batch_stride": 4}}, "alibi_batch_stride: got 4, wanted 0 without alibi_slopes"),
    ({"options": {"sinks": MEMORY, "sinks_stored": 1}}, "sinks: stored as fp16, and kernels take fp32 or .* bf16"),
    ({"options": {"bias_row_stride": 64}}, "bias: got .*row: 64.*, wanted no strides without an address"),
    (
        {"options": {"bias": MEMORY, "bias_row_stride": 1 << 21}},
        "bias: got row stride 2097152, wanted less",
    ),
    ({"options": {"bias": MEMORY, "alibi_slopes": MEMORY}}, "alibi_slopes: a kernel with a bias cannot honour it"),
    ({"options": {"bias": MEMORY}, "seqlens_k": MEMORY}, "bias: not with seqlens_k: let the bias hide keys by -inf"),
    ({"options": {"bias": MEMORY, "num_splits": 2}}, "attn_bias: a kernel with num_splits cannot honour it"),
    ({"options": {"mask_ids_q": MEMORY}}, "mask_ids_q and mask_ids_k: got one of them, wanted both or none"),
    ({"options": {"mask_block_q": 64}}, "mask_blocks: got sizes or strides without an address"),
    ({"options": {"mask_blocks": MEMORY, "mask_block_q": 96}}, r"mask_block_q and mask_block_k: got \[96, 0\], wanted"),
    ({"options": {"mask_ranges": MEMORY, "bias": MEMORY}}, "bias: a kernel with a mask cannot honour it"),
    ({"options": {"mask_ranges": MEMORY, "num_splits": 2}}, "mask: a kernel with num_splits cannot honour it"),
    ({"options": {"mask_ranges": MEMORY}, "seqlens_k": MEMORY}, "mask: not with seqlens_k: let the mask hide keys"),
    ({"options": {"mask_ranges": MEMORY + 2}}, "mask_ranges: got address 0x100002, wanted a multiple of 4 bytes"),
    ({"options": {"appended": 65}}, "appended: got 65, wanted at most seqlen_k, 64"),
    ({"options": {"appended_starts": MEMORY}}, "appended_starts: got an address, wanted 0 without appended rows"),
    ({"options": {"compute": 3}}, "compute: got 3, wanted FLASH_ATTN_ROCM_COMPUTE_INT8, _FP8, or 0"),
    ({"options": {"reserved": 1}}, "options.reserved: got 1, wanted 0"),
    ({"options": {"k_mean": MEMORY}}, "k_mean: got an address, wanted none without compute in INT8"),
    ({"options": {"compute": 1}}, "compute: this store has no kernel int8-fwd-bf16-d64: RDNA 3 and 4 have it"),
    ({"options": {"compute": 1, "softcap": 2.0}}, "softcap: a kernel with queries and keys in INT8 cannot honour it"),
    ({"options": {"compute": 2, "sinks": MEMORY}}, "sinks: a kernel of whole sequences in FP8 cannot honour it"),
    ({"options": {"compute": 2}, "seqlens_k": MEMORY}, "seqlens_k: a kernel of whole sequences in FP8 cannot honour"),
    ({"options": {"q_descale": MEMORY}}, "descales: got .*, wanted addresses for what is stored in FP8, all three"),
    ({"q": {"stored": 4}}, "q: got stored in FP8, wanted k and v in FP8 too"),
    ({"k": {"stored": 4}}, "v: got stored otherwise than k, wanted k and v both in FP8, or none"),
    (
        {"k": {"stored": 4}, "v": {"stored": 4}},
        "descales: got .*, wanted addresses for what is stored in FP8, all three",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:28] for _, message in WRONG])
def test_a_wrong_field_is_named(library: Library, opened: Any, change: dict[str, Any], message: str) -> None:
    call = fields("forward")
    for name, value in change.items():
        call[name] = {**call.get(name, {}), **value} if isinstance(value, dict) else value
    struct = library.call("forward", call)
    with pytest.raises(RuntimeError, match=message):
        library.launch(opened, "forward", struct)
    with pytest.raises(RuntimeError, match=message):
        library.scratch_bytes(opened, "forward", struct)


OF_FORWARDS: list[tuple[dict[str, Any], str]] = [
    ({"leftpad_k": MEMORY}, "leftpad_k: a backward cannot honour it: leave it out"),
    ({"cache_lines": MEMORY}, "cache_lines: a backward cannot honour it: leave it out"),
    ({"appended": 1}, "appended: a backward cannot honour it: leave it out"),
    ({"attention_chunk": 16}, "attention_chunk: a backward cannot honour it: leave it out"),
    ({"num_splits": 2}, "num_splits: a backward cannot honour it: leave it out"),
]


@pytest.mark.parametrize(("options", "message"), OF_FORWARDS, ids=[message[:12] for _, message in OF_FORWARDS])
def test_a_backward_refuses_what_is_for_forwards(
    library: Library, opened: Any, options: dict[str, Any], message: str
) -> None:
    call = library.call("backward", {**fields("backward"), "options": options})
    with pytest.raises(RuntimeError, match=message):
        library.scratch_bytes(opened, "backward", call)


def test_a_backward_names_the_head_dims_that_it_has(library: Library, opened: Any) -> None:
    call = fields("backward")
    call["shape"] |= {"head_dim": 64, "head_dim_v": 32}
    with pytest.raises(RuntimeError, match="head_dim_v: got 32 beside head_dim 64, wanted the same head dim"):
        library.scratch_bytes(opened, "backward", library.call("backward", call))


def appended() -> dict[str, Any]:
    """A valid append of 8 rows, with rotary embedding."""
    call = fields("forward")
    new = {"k_new": tensor(2, 8), "v_new": tensor(2, 8), "q_turned": tensor(4), "seqlen_new": 8}
    tables = {"rotary_cos": MEMORY, "rotary_sin": MEMORY, "rotary_places": 64, "rotary_half": 16}
    return {**{name: call[name] for name in ("shape", "q", "k", "v")}, **new, **tables}


WRONG_APPENDS: list[tuple[dict[str, Any], str]] = [
    ({"seqlen_new": 65}, "seqlen_new: got 65, wanted 1 to seqlen_k, 64"),
    ({"seqlen_new": 0}, "seqlen_new: got 0, wanted 1 to seqlen_k, 64"),
    ({"rotary_sin": 0}, "rotary_cos and rotary_sin: got NULL, wanted addresses of both tables"),
    ({"rotary_half": 17}, "rotary_half: got 17, wanted 1 to half of head_dim, 16"),
    ({"rotary_places": 63}, "rotary_places: got 63, wanted at least seqlen_k, 64"),
    ({"rotary_interleaved": 2}, "rotary_interleaved: got 2, wanted 0 or 1"),
    ({"reserved": 1}, "reserved: got 1, wanted 0"),
    ({"struct_size": 8}, r"struct_size: got 8, wanted sizeof\(flash_attn_rocm_append_call\)"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_APPENDS, ids=[message[:20] for _, message in WRONG_APPENDS])
def test_a_wrong_field_of_an_append_is_named(
    library: Library, opened: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        library.append(opened, library.call("append", appended() | change))


def grown(library: Library, struct: Any, size: int, last: int = 0) -> Any:
    """A struct as a program has it that was compiled with a header in which the struct has `size` bytes."""
    bytes_ = library.ffi.new("char[]", size)
    content = library.ffi.buffer(struct)[:]
    library.ffi.buffer(bytes_)[:] = content[:size].ljust(size, b"\0")
    if last:
        library.ffi.buffer(bytes_)[size - 4 : size] = last.to_bytes(4, "little")
    library.ffi.cast("size_t *", bytes_)[0] = size
    return bytes_


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_struct_grows_at_its_end(library: Library, opened: Any, kind: str) -> None:
    """Older headers have shorter structs, newer ones longer structs. What a struct lacks is no option."""
    ffi, scratch = library.ffi, getattr(library.functions, f"flash_attn_rocm_{kind}_scratch")
    struct = library.call(kind, fields(kind))
    type_, whole = ffi.typeof(struct).item, ffi.sizeof(struct[0])
    optional = {"forward": "lse", "backward": "options"}[kind]
    needed = dict(type_.fields)[optional].offset
    result = ffi.new("size_t *")
    for size in range(0, whole + 40, 4):
        call = grown(library, struct, max(size, 8))
        ffi.cast("size_t *", call)[0] = size
        status = scratch(opened, ffi.cast(type_.cname + " *", call), result)
        assert status == (0 if size >= needed and size % 8 == 0 else 1), (size, library.error())
        assert status == 0 or f"struct_size: got {size}, wanted sizeof(flash_attn_rocm_{kind}_call)" in library.error()
    for size in range(whole + 8, whole + 40, 8):
        call = grown(library, struct, size, last=1)
        assert scratch(opened, ffi.cast(type_.cname + " *", call), result) == 1
        assert f"field at byte {size - 8} of flash_attn_rocm_{kind}_call that is not zero" in library.error()
        assert "install a newer one" in library.error()


def test_options_grow_at_their_end(library: Library, opened: Any) -> None:
    ffi = library.ffi
    owner = library.call("forward", {**fields("forward"), "options": {"softcap": 5.0}})  # its options live as long
    options = owner.options
    whole = ffi.sizeof(options[0])
    for size, last, status in ((8, 0, 0), (16, 0, 3), (whole, 0, 3), (whole + 16, 0, 3), (whole + 16, 1, 1)):
        call, kept = library.call("forward", fields("forward")), grown(library, options, size, last)
        call.options = ffi.cast("flash_attn_rocm_options *", kept)
        result = ffi.new("size_t *")
        assert library.functions.flash_attn_rocm_forward_scratch(opened, call, result) == status, library.error()
    assert f"field at byte {whole + 8} of flash_attn_rocm_options that is not zero" in library.error()


NEWER = """
#include "flash_attn_rocm.h"
#include <stdio.h>
#include <string.h>
int main(int words, char **word) {
    flash_attn_rocm *gpu;
    if (words < 3 || flash_attn_rocm_open(word[1], 0, &gpu)) return 9;
    flash_attn_rocm_forward_call call = {.struct_size = sizeof call, .shape = {.dtype = FLASH_ATTN_ROCM_BF16,
        .batch = 1, .heads = 1, .heads_k = 1, .head_dim = 32, .seqlen_q = 64, .seqlen_k = 64, .softmax_scale = 1,
        .window_left = -1, .window_right = -1}};
    flash_attn_rocm_tensor tensor = {.data = (void *)4096, .batch_stride = 2048, .row_stride = 32, .head_stride = 32};
    call.q = call.k = call.v = call.out = tensor;
    call.FIELD = word[2][0] == '1' ? (void *)4096 : NULL;
    size_t bytes;
    int code = flash_attn_rocm_forward_scratch(gpu, &call, &bytes);
    printf("%d %s", code, flash_attn_rocm_error());
    return code;
}
"""


def test_programs_of_other_headers(c_library: Path, stub_hip: Path, stores: Path, tmp_path: Path) -> None:
    """A program that was compiled before the last field, or after the next one was added, runs with this library."""
    header = HEADER.read_text(encoding="utf-8")
    last = "    const flash_attn_rocm_options *options; /* NULL: none */\n} flash_attn_rocm_forward_call;"
    assert last in header
    end = "} flash_attn_rocm_forward_call;"
    for name, text, field in (
        ("older", header.replace(last, end), "lse"),
        ("newer", header.replace(end, "    void *later;\n" + end), "later"),
    ):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "flash_attn_rocm.h").write_text(text, encoding="utf-8")
        (directory / "main.c").write_text(NEWER, encoding="utf-8")
        program = directory / "main"
        flags: list[str | Path] = ["-I", directory, f"-DFIELD={field}", "-o", program, directory / "main.c"]
        done = run("cc", *flags, "-L", c_library.parent, "-lflash_attn_rocm", f"-Wl,-rpath,{c_library.parent}")
        assert done.returncode == 0, done.stderr
        environment = {**os.environ, "CANDLE_FLASH_ROCM_HIP": str(stub_hip)}
        unused = run(program, stores, "0", env=environment)
        assert unused.stdout == "0 ", unused.stdout
        used = run(program, stores, "1", env=environment)
        assert used.returncode == (1 if field == "later" else 0), used.stdout
        assert ("that is not zero, wanted zeros from byte" in used.stdout) == (field == "later")


def decoding(seqlen_k: int, heads: int = 4) -> dict[str, Any]:
    """A decoding step of a sequence over a cache."""
    call = fields("forward")
    call["shape"] |= {"batch": 1, "seqlen_q": 1, "seqlen_k": seqlen_k, "heads": heads, "heads_k": heads // 2}
    return call


@pytest.mark.parametrize(("heads", "most"), [(4, 3000), (32, 9000)])
def test_scratch_memory_for_every_shorter_cache(library: Library, opened: Any, heads: int, most: int) -> None:
    """The largest number of keys does not take the most memory, so a program asks for all lengths at once."""
    sizes = [
        library.scratch_bytes(opened, "forward", library.call("forward", decoding(keys, heads)))
        for keys in range(1, most + 1)
    ]
    up_to = library.scratch_bytes_up_to(opened, library.call("forward", decoding(most, heads)))
    assert up_to == max(sizes)
    assert up_to > sizes[-1] or heads == 4, "no case in which the question matters"


def test_the_hosts_cost_decides_about_splits(library: Library, opened: Any) -> None:
    def scratch(cost: float) -> int:
        call = library.call("forward", {**decoding(2048), "options": {"host_cost": cost}})
        return library.scratch_bytes(opened, "forward", call)

    assert scratch(0.0) == scratch(2.0) > scratch(1000.0)


def test_a_plan_serves_other_addresses_and_no_other_call(library: Library, opened: Any) -> None:
    for kind in ("forward", "backward"):
        call = library.call(kind, fields(kind))
        plan, size = library.plan(opened, kind, call), library.scratch_bytes(opened, kind, call)
        assert library.functions.flash_attn_rocm_plan_scratch(plan) == size
        moved = fields(kind)
        for name, value in moved.items():
            if name not in ("shape", "lse"):
                moved[name] = {**value, "data": MEMORY + 4096}
        library.launch_plan(plan, kind, library.call(kind, moved), MEMORY if size else 0, size)
        for change, message in (
            ({"shape": {"seqlen_k": 63}}, r"plan: got .*shape\.seqlen_k 63, wanted .*64, as planned"),
            ({"shape": {"softmax_scale": 0.25}}, r"softmax_scale 0\.25, wanted .*0\.2, as planned"),
            ({"k": {"row_stride": 128}}, r"plan: got .*k\.row 128, wanted .*k\.row 64, as planned"),
            (
                {"options": {"alibi_slopes": MEMORY}},
                r"plan: got .*alibi_slopes \d+, wanted .* 0, as planned",
            ),
            ({"q": {"data": MEMORY + 8}}, "q: got address 0x100008, wanted a multiple of 16 bytes"),
        ):
            other = fields(kind)
            for name, value in change.items():
                other[name] = {**other.get(name, {}), **value}
            with pytest.raises(RuntimeError, match=message):
                library.launch_plan(plan, kind, library.call(kind, other), MEMORY, size)
        if size:
            with pytest.raises(RuntimeError, match=rf"scratch: got {size - 256} bytes, wanted {size} bytes"):
                library.launch_plan(plan, kind, call, MEMORY, size - 256)
    with pytest.raises(RuntimeError, match=r"plan: got .*Backward.*wanted .*Forward"):
        library.launch_plan(library.plan(opened, "forward", library.call("forward", fields("forward"))), "backward",
                            library.call("backward", fields("backward")))  # fmt: skip
    library.functions.flash_attn_rocm_plan_free(library.ffi.NULL)
    assert library.functions.flash_attn_rocm_plan_scratch(library.ffi.NULL) == 0


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
    call["options"] = {"softcap": 5.0}
    with pytest.raises(RuntimeError, match=rf"3: .*no kernel {LACKING} for gfx942\. Build a store"):
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


def test_examples(c_library: Path, stub_hip: Path, stores: Path) -> None:
    """Both run to their comparison. The stub computes nothing, so they must find the results wrong."""
    environment = {**os.environ, "CANDLE_FLASH_ROCM_HIP": str(stub_hip)}
    attention, decode = (c_library.parent / name for name in ("attention", "decode"))
    assert run(attention).returncode == 2
    done = run(attention, stores, env=environment)
    assert (done.returncode, done.stdout.count("error")) == (1, 4), done.stderr
    done = run(decode, stores, env=environment)
    assert (done.returncode, "8 tokens after a prompt of 4000" in done.stdout) == (1, True), done.stderr
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


@pytest.mark.usefixtures("c_library")
def test_make_install(tmp_path: Path) -> None:
    """What a program finds by pkg-config."""
    c_make.make("install", f"DESTDIR={tmp_path}", "PREFIX=/usr")
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if not file.is_dir()}
    library = {"usr/lib/libflash_attn_rocm.so", "usr/lib/libflash_attn_rocm.so.1"}
    assert files == library | {"usr/include/flash_attn_rocm.h", "usr/lib/pkgconfig/flash_attn_rocm.pc"}
    description = (tmp_path / "usr/lib/pkgconfig/flash_attn_rocm.pc").read_text(encoding="utf-8")
    assert "Libs: -L/usr/lib -lflash_attn_rocm" in description


@pytest.mark.parametrize(
    "words",
    ["gfx942", *(pytest.param(words, marks=pytest.mark.long) for words in ("gfx90a", "gfx1100", "gfx942 amd"))],
)
def test_calls_from_c_to_the_packets(c_library: Path, words: str, tmp_path: Path) -> None:
    """Forward and backward through AMD's runtime, or forwards by AMD's kernels; the simulator executes them."""
    target, *_ = words.split()
    try:
        hip.fetch("6.4")
    except UnavailableError as problem:
        tools.missing(str(problem))
    script = [str(PACKAGE / "tests/simulated.py"), str(c_library), *words.split()]
    command, environment = hip.command("6.4", target, script)
    output = tmp_path / "output"
    with output.open("w") as file:  # a child that outlives the process would keep a pipe open
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=600, check=False)
    text = output.read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, text
    assert f"2 calls on {target}" in text
    assert "amd" in words or "fwd-bf16-d32-bias" in text
