from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fake_parts import store

from rocm_wheels.compile.asm import package as asm_package
from rocm_wheels.compile.ck import sources as ck_sources
from rocm_wheels.matrix import versions
from rocm_wheels.wheel import sbom

REQUIRES = ("torch==2.5.*", "einops")
LICENSE = "BSD-3-Clause AND MIT"


def _fault(text: str) -> object:
    """What is wrong with a bill; None if nothing is."""
    # The checker of addresses that this imports compiles its grammars for seconds, in each process that collects tests.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


def subject(version: str, **fields: Any) -> sbom.Subject:
    return sbom.Subject(version=version, license=LICENSE, requires=REQUIRES, **fields)


def files(directory: Path) -> dict[str, Path]:
    launcher = directory / "launcher.so"
    launcher.write_bytes(b"launcher")
    stores = {f"flash_attn/_kernels/{target}.zip": store(directory, target) for target in ("gfx942", "gfx90a")}
    return {"flash_attn/_launcher.abi3.so": launcher, **stores}


def test_the_bill_is_valid_cyclonedx_and_names_what_is_in_the_wheel(tmp_path: Path) -> None:
    path = sbom.write(tmp_path, subject("2.8.3+rocm62torch2.5triton"), files(tmp_path))
    text = path.read_text(encoding="utf-8")
    assert path.name == "flash_attn.cdx.json"
    assert _fault(text) is None
    bill = json.loads(text)
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/flash-attn@2.8.3%2Brocm62torch2.5triton"
    assert bill["metadata"]["tools"]["components"] == [
        {"type": "application", "name": name, "version": version, "licenses": [{"expression": "MIT"}]}
        for name, version in versions.load().compilers.items()
    ], "zig compiles the launcher"
    assert {"triton", "ziglang"} == set(versions.load().compilers)
    assert bill["metadata"]["component"]["licenses"] == [{"expression": LICENSE}]
    assert "supplier" not in bill["metadata"], "nobody knows whose build it is"
    parts = {part["name"]: part for part in bill["components"]}
    assert set(parts) == {*files(tmp_path), "torch", "einops"}
    launcher = parts["flash_attn/_launcher.abi3.so"]
    assert launcher["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"launcher").hexdigest()}]
    assert {"name": "target", "value": "gfx942"} in parts["flash_attn/_kernels/gfx942.zip"]["properties"]
    assert parts["torch"]["properties"] == [{"name": "requirement", "value": "torch==2.5.*"}]


def test_composable_kernel_and_each_of_its_compilers_are_components(tmp_path: Path) -> None:
    planner = tmp_path / "planner.so"
    planner.write_bytes(b"planner")
    kernels = store(tmp_path, "gfx942", name="ziglang", compiler="0.15.2, clang-tidy 20.1.0, triton 3.7.1")
    parts = {"flash_attn/_ck_planner.so": planner, "flash_attn/_kernels/gfx942.zip": kernels}
    text = sbom.write(tmp_path, subject("2.8.3+rocm62torch2.5"), parts).read_text(encoding="utf-8")
    assert _fault(text) is None
    bill = json.loads(text)
    result = {(tool["name"], tool["version"]) for tool in bill["metadata"]["tools"]["components"]}
    assert result == {("ziglang", "0.15.2"), ("clang-tidy", "20.1.0"), ("triton", "3.7.1")}
    (source,) = (part for part in bill["components"] if part["name"] == "composable_kernel")
    locked = ck_sources.load()
    assert source["version"] == locked.revision
    assert source["hashes"] == [{"alg": "SHA-256", "content": locked.sha256}]
    assert source["licenses"] == [{"license": {"id": "MIT"}}]
    rocm = store(tmp_path, "gfx90a", name="ROCm", compiler="clang 18.0.0git")
    bill = sbom.document(subject("2.8.3"), {"flash_attn/_kernels/gfx90a.zip": rocm})
    (tool,) = bill["metadata"]["tools"]["components"]
    assert (tool["name"], tool["version"]) == ("ROCm clang", "18.0.0git")


def test_assembly_kernels_are_a_component_where_a_store_has_one(tmp_path: Path) -> None:
    kernels = store(tmp_path, "gfx942", kernel_name="asm-fwd-bf16-d128-plain")
    text = sbom.write(tmp_path, subject("2.8.3"), {"flash_attn/_kernels/gfx942.zip": kernels}).read_text("utf-8")
    assert _fault(text) is None
    (result,) = (part for part in json.loads(text)["components"] if part["name"] == "amd-aiter")
    assert result["purl"] == f"pkg:pypi/amd-aiter@{asm_package.load().version}"
    assert result["licenses"] == [{"license": {"id": "MIT"}}]
    assert result["hashes"] == [{"alg": "SHA-256", "content": asm_package.load().sha256}]


def test_a_wheel_without_compiled_parts_has_one_too(tmp_path: Path) -> None:
    text = sbom.write(tmp_path, subject("2.8.3"), {}).read_text(encoding="utf-8")
    assert _fault(text) is None


def test_the_same_contents_have_the_same_bill(tmp_path: Path) -> None:
    bills = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        bills.append(sbom.document(subject("2.8.3"), files(tmp_path / name)))
    assert bills[0] == bills[1]
    (tmp_path / "two/launcher.so").write_bytes(b"other")
    assert sbom.document(subject("2.8.3"), files(tmp_path / "one") | {"x": tmp_path / "two/launcher.so"}) != bills[0]


def test_the_bill_says_who_built_it_when_and_from_which_commit(tmp_path: Path) -> None:
    commit, repository = "c0ffee" + 34 * "0", "https://github.com/owner/name"
    about = subject("2.8.3", commit=commit, repository=repository, epoch=1700000000)
    text = sbom.write(tmp_path, about, files(tmp_path)).read_text(encoding="utf-8")
    assert _fault(text) is None
    metadata = json.loads(text)["metadata"]
    assert metadata["timestamp"] == "2023-11-14T22:13:20Z"
    assert metadata["supplier"] == {"name": "owner", "url": [repository]}
    assert metadata["component"]["properties"] == [{"name": "commit", "value": commit}]
    without = sbom.document(subject("2.8.3"), {})["metadata"]
    assert without["timestamp"] == "1980-01-01T00:00:00Z"
    assert "properties" not in without["component"]
