"""The repository for Hugging Face's `kernels`. flash_attn_src/tests/test_clients.py loads a repository with that
package.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import fake_parts
import pytest

from rocm_wheels import cli
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.plan import make_universal_plan
from rocm_wheels.paths import FLASH_ATTN_SRC
from rocm_wheels.wheel import assemble, hub

TARGETS = ("gfx942", "gfx1100", "gfx11-generic")
# Loads variants as `kernels` does, several in one process and with an installed flash_attn.
LOAD = """
import importlib, importlib.util, json, sys, torch
from pathlib import Path

loaded = []
for variant in map(Path, sys.argv[2:]):
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    importlib.import_module(f"{name}.diagnosis.selftest.attention")
    loaded.append(module)
assert not [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
sys.path.insert(0, sys.argv[1])
loaded.append(importlib.import_module("flash_attn"))
q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
for module in loaded:
    compiled = torch.compile(module.flash_attn_func, backend="eager", fullgraph=True)
    for function in (module.flash_attn_func, compiled):
        torch.testing.assert_close(function(q, k, v, causal=True), exact.transpose(1, 2))
print([f"{module._build.backend} {len(module._build.targets)}" for module in loaded])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    plan = make_universal_plan(
        versions.load(), flash_attn="2.8.3", env={"PYTORCH_ROCM_ARCH": ";".join(TARGETS)},
        machine=Machine(cores=1, available_mib=4096),
    )  # fmt: skip
    launcher = fake_parts.library(directory / "launcher.so", "int PyInit__launcher(void) { return 1; }")
    stores = {target: fake_parts.store(directory, target) for target in TARGETS}
    return assemble.assemble(plan, stores, launcher, directory / "dist")


@pytest.fixture(scope="module")
def variants(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return hub.write(wheel, tmp_path_factory.mktemp("hub") / "repository")


def test_variants_for_rocm_and_for_cpus_exist(wheel: Path, variants: list[Path]) -> None:
    rocm, cpu = variants
    assert [path.name for path in variants] == ["torch-rocm", "torch-cpu"]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("flash_attn/") and not name.endswith((".py", "_build_info.json")):
                inside = name.removeprefix("flash_attn/")
                assert (rocm / inside).read_bytes() == archive.read(name)
                assert (cpu / inside).exists() == inside.endswith("py.typed")
        assert json.loads((rocm / "_build_info.json").read_text()) == json.loads(
            archive.read("flash_attn/_build_info.json")
        )
    card = (rocm.parents[1] / "README.md").read_text()
    assert all(target in card for target in TARGETS)


def test_metadata(variants: list[Path]) -> None:
    result = [json.loads((path / "metadata.json").read_text()) for path in variants]
    for path, metadata in zip(variants, result, strict=True):
        assert metadata["license"] == "BSD-3-Clause AND MIT"
        files = {each.relative_to(path).as_posix(): each for each in path.rglob("*") if each.is_file()}
        del files["metadata.json"]
        assert metadata["digest"]["files"] == {
            name: base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode() for name, file in files.items()
        }
    assert result[0]["id"] != result[1]["id"]
    rocm, cpu = (metadata["backend"] for metadata in result)
    assert {"gfx942", "gfx1100", "gfx1103", "gfx1151"} <= set(rocm["archs"])
    assert not {"gfx1030", "gfx1201", "gfx11-generic"} & set(rocm["archs"])
    assert (rocm["type"], cpu) == ("rocm", {"type": "cpu", "archs": []})


def test_no_module_imports_an_installed_flash_attn(variants: list[Path]) -> None:
    for path in variants:
        modules = list(path.rglob("*.py"))
        assert len(modules) > 100
        for module in modules:
            for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not [name for name in names if name.partition(".")[0] == "flash_attn"], module


@pytest.mark.long
def test_variants_and_an_installed_flash_attn_run_in_one_process(variants: list[Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD, FLASH_ATTN_SRC, *variants], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "['ck 3', 'triton 0', 'triton 0']\n"), done.stderr


def test_the_verb_says_where_the_variants_are(
    wheel: Path, variants: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["hub", str(wheel), "--output", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/new/build/torch-rocm\n{tmp_path}/new/build/torch-cpu\n"
    again = (tmp_path / "new/build/torch-rocm/metadata.json").read_bytes()
    assert again == (variants[0] / "metadata.json").read_bytes()
    assert cli.main(["hub", str(wheel), "--output", str(tmp_path)]) == DataError.exit_code
    assert f"{tmp_path} is not empty\nName a new directory." in capsys.readouterr().err
    (tmp_path / "no.whl").write_text("no wheel")
    with pytest.raises(DataError, match=r"no\.whl is not a wheel"):
        hub.write(tmp_path / "no.whl", tmp_path / "other")


def test_a_wheel_for_windows_is_refused(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "flash_attn-2.8.3+rocm-cp310-abi3-win_amd64.whl"
    other.write_bytes(wheel.read_bytes())
    assert cli.main(["hub", str(other), "--output", str(tmp_path / "new")]) == DataError.exit_code
    message = f"{other.name} is for Windows; `hub` writes variants for Linux\nGive a manylinux wheel."
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["flash_attn/../../../beside.py", "/flash_attn/beside.py"])
def test_a_wheel_writes_nothing_outside_of_the_repository(name: str, wheel: Path, tmp_path: Path) -> None:
    hostile = tmp_path / wheel.name
    hostile.write_bytes(wheel.read_bytes())
    with zipfile.ZipFile(hostile, "a") as archive:
        archive.writestr(name, "")
    with pytest.raises(DataError, match=f"has a member outside of itself: {name}"):
        hub.write(hostile, tmp_path / "hub" / "repository")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [hostile]
