"""What lies in the wheel: its tag, its digests, its code objects; nothing that belongs to torch or ROCm."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgpack
import pytest
from elftools.elf.elffile import ELFFile
from flash_attn.core.store import Store
from packaging.tags import parse_tag, sys_tags

EM_CUDA, EM_AMDGPU = 190, 224
NT_AMDGPU_METADATA = 32
ABI_VERSION_5, ABI_VERSION_6 = 3, 4
LAUNCHER = "flash_attn/_launcher.abi3.so"
PLANNER = "flash_attn/_ck_planner.so"
C_LIBRARIES = {
    "libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2",
}  # fmt: skip


@pytest.fixture(scope="module")
def stores(package: Path, build_info: dict[str, Any]) -> dict[str, Path]:
    """Target -> its zip."""
    found = {path.stem: path for path in sorted((package / "_kernels").glob("*.zip"))}
    assert sorted(found) == sorted(build_info["targets"])
    assert found, "the wheel has no kernels"
    return found


def test_tag_fits_this_interpreter(dist: metadata.Distribution) -> None:
    lines = (dist.read_text("WHEEL") or "").splitlines()
    tags = {tag for line in lines if line.startswith("Tag: ") for tag in parse_tag(line.removeprefix("Tag: "))}
    assert tags & set(sys_tags()), f"{sorted(map(str, tags))} do not fit this Python"
    assert "Root-Is-Purelib: false" in lines


def test_record_is_true(dist: metadata.Distribution) -> None:
    files = dist.files
    assert files
    for file in files:
        if file.hash is None:
            assert file.suffix == ".pyc" or file.name == "RECORD", f"{file} has no digest"
            continue
        data = file.read_binary()
        digest = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, data).digest()).rstrip(b"=").decode()
        assert digest == file.hash.value, f"{file} has another digest"
        assert len(data) == file.size, f"{file} has another size"


def test_every_file_is_recorded(dist: metadata.Distribution, package: Path) -> None:
    recorded = {Path(str(dist.locate_file(file))).resolve() for file in dist.files or ()}
    there = {path.resolve() for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {path for path in there if path.parent != package.resolve() / "cute"} <= recorded  # cute: flash-attn-4's


def test_no_foreign_library_and_no_loose_code_object(dist: metadata.Distribution) -> None:
    elf = [str(file) for file in dist.files or () if file.suffix != ".pyc" and file.read_binary()[:4] == b"\x7fELF"]
    assert elf == sorted(_libraries(dist))
    assert not [str(file) for file in dist.files or () if ".libs/" in str(file) or ".so." in file.name]


def test_libraries_need_only_libc(dist: metadata.Distribution) -> None:
    for library in _libraries(dist):
        with Path(str(dist.locate_file(library))).open("rb") as file:
            dynamic = ELFFile(file).get_section_by_name(".dynamic")
            tags = [(tag.entry.d_tag, getattr(tag, "needed", None)) for tag in dynamic.iter_tags()]
        assert {needed for name, needed in tags if name == "DT_NEEDED"} <= C_LIBRARIES, library
        assert not [name for name, _ in tags if name in ("DT_RPATH", "DT_RUNPATH")], library


def _libraries(dist: metadata.Distribution) -> list[str]:
    """The launcher, and in a wheel with Composable Kernel its planner."""
    build = json.loads(Path(str(dist.locate_file("flash_attn/_build_info.json"))).read_text(encoding="utf-8"))
    return [*([PLANNER] if build["backend"] == "ck" else []), LAUNCHER]


def test_sizes(stores: dict[str, Path], record_property: Callable[[str, object], None]) -> None:
    sizes = {target: path.stat().st_size for target, path in stores.items()}
    record_property("bytes", sizes)
    assert all(sizes.values())


def test_manifests(stores: dict[str, Path], build_info: dict[str, Any]) -> None:
    for target, path in stores.items():
        manifest = Store(path).manifest
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
        assert manifest["target"] == target
        assert f"{manifest['compiler']['name']} {manifest['compiler']['version']}" == build_info["compiler"]
        assert names == {"manifest.json", *(entry["group"] for entry in manifest["kernels"].values())}


def test_the_planner_is_the_one_that_stores_and_build_name(
    stores: dict[str, Path], build_info: dict[str, Any], package: Path
) -> None:
    named = {Store(path).manifest.get("planner") for path in stores.values()} - {None}
    found = package / "_ck_planner.so"
    digests = {hashlib.sha256(found.read_bytes()).hexdigest()} if found.exists() else set()
    assert named == digests == {build_info["planner"]} - {""}


def test_every_target_has_the_same_kernels(stores: dict[str, Path]) -> None:
    """All but three kinds: FP8 kernels, which only targets with matrix units for FP8 have, each in its own format;
    Composable Kernel's, which test_ck.py tests; AMD's assembly kernels, which only some Instinct GPUs have."""
    kernels = {}
    for target, path in stores.items():
        store = Store(path)
        entries = store.kernels.items()
        names = sorted(
            name for name, entry in entries if not (entry["params"].startswith("B") or name.startswith("asm-"))
        )
        kernels[target] = [name for name in names if "fp8" not in name]
        assert (len(kernels[target]) < len(names)) == (store.manifest["facts"]["fp8"] is not None), target
    first = next(iter(kernels.values()))
    assert first
    assert all(each == first for each in kernels.values())


def test_code_objects_are_for_their_target(
    stores: dict[str, Path], record_property: Callable[[str, object], None]
) -> None:
    counts = {}
    for target, path in stores.items():
        store = Store(path)
        undefined: set[str] = set()
        for name, image in store.images():
            kernel = store.kernels[name]
            assert hashlib.sha256(image).hexdigest() == kernel["sha256"], f"{target} {name}"
            if target.startswith("sm_"):
                _check_cuda(image, target, kernel, name)
            else:
                _check_amd(image, target, store.manifest["facts"]["elf_machine"], kernel, name)
                undefined |= {f"{name}: {symbol}" for symbol in _undefined(image)}
        assert not undefined, target
        counts[target] = len(store.kernels)
    record_property("code objects", counts)


def _check_cuda(image: bytes, target: str, kernel: dict[str, Any], name: str) -> None:
    elf = ELFFile(io.BytesIO(image))
    number = int(target.removeprefix("sm_"))
    assert elf["e_machine"] in (EM_CUDA, "EM_CUDA"), name
    # The architecture is the low byte of e_flags, from CUDA 13 on the second one.
    assert number in (elf["e_flags"] & 0xFF, elf["e_flags"] >> 8 & 0xFF), f"{name} is not for {target}"
    assert kernel["symbol"] in _symbols(image, ".symtab"), name


def _check_amd(image: bytes, target: str, elf_machine: int, kernel: dict[str, Any], name: str) -> None:
    # The header by hand: e_machine is the half-word at 18, e_flags the word at 48.
    (machine,), (flags,) = struct.unpack_from("<H", image, 18), struct.unpack_from("<I", image, 48)
    assert image[:4] == b"\x7fELF", f"{name} is no ELF file"
    assert machine == EM_AMDGPU, name
    assert flags & 0xFF == elf_machine, f"{name} is for machine {flags & 0xFF:#x}, not {target}, {elf_machine:#x}"
    # EI_ABIVERSION is the byte at 8. ROCm 6.1 loads code objects up to version 5, and generic targets need version 6.
    assert image[8] == (ABI_VERSION_6 if "generic" in target else ABI_VERSION_5), f"{name} has version {image[8] + 2}"
    # ROCm's loader takes the kernel from .symtab, and ends the process where there is none.
    assert {kernel["symbol"], f"{kernel['symbol']}.kd"} <= set(_symbols(image, ".symtab")), name
    described = _amd_metadata(image)
    # AMD's assembly kernels do not name their target.
    named = described.get("amdhsa.target", f"--{target}" if kernel["params"].startswith("K") else "")
    assert named.partition(":")[0].endswith(f"--{target}"), name
    (described_kernel,) = (each for each in described["amdhsa.kernels"] if each[".name"] == kernel["symbol"])
    assert kernel["threads"] <= described_kernel[".max_flat_workgroup_size"], name
    sizes = {"P": 8, "0": 8, "i": 4, "I": 8, "f": 4, "d": 8}
    if (params := kernel["params"]).startswith("K"):
        assert int(params[1:]) == described_kernel[".kernarg_segment_size"], name
    elif params.startswith("B"):
        explicit = [each for each in described_kernel[".args"] if not each[".value_kind"].startswith("hidden_")]
        assert [each[".size"] for each in explicit] == [int(params[1:])], name
    else:
        assert sum(sizes[letter] for letter in params) <= described_kernel[".kernarg_segment_size"], name


def _undefined(image: bytes) -> list[str]:
    """Symbols that a code object takes from elsewhere: nothing links it, so it must have none."""
    return [name for name, symbol in _symbols(image, ".dynsym").items() if name and symbol["st_shndx"] == "SHN_UNDEF"]


def _symbols(image: bytes, section: str) -> dict[str, Any]:
    found = ELFFile(io.BytesIO(image)).get_section_by_name(section)
    return {} if found is None else {symbol.name: symbol for symbol in found.iter_symbols()}


def _amd_metadata(image: bytes) -> dict[str, Any]:
    """The msgpack note that the HIP runtime reads: name "AMDGPU", type 32."""
    note = ELFFile(io.BytesIO(image)).get_section_by_name(".note").data()
    name_size, size, kind = struct.unpack_from("<III", note)
    start = 12 + -(-name_size // 4) * 4
    assert (note[12 : 12 + name_size], kind) == (b"AMDGPU\0", NT_AMDGPU_METADATA)
    described: dict[str, Any] = msgpack.unpackb(note[start : start + size])
    return described
