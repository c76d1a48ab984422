from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import fake_parts
import pytest
from packaging.requirements import Requirement

from rocm_wheels import tables
from rocm_wheels.errors import AssembleFailed
from rocm_wheels.matrix import advice_facts, names, versions
from rocm_wheels.matrix.machine import detect_targets
from rocm_wheels.paths import FLASH_ATTN_SRC
from rocm_wheels.wheel import assemble

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = b"\x7fELF pretended launcher"


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    path = tmp_path / "_launcher.abi3.so"
    path.write_bytes(LAUNCHER)
    return path


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("FLASH_ATT", "PYTORCH_ROCM_ARCH", "GPU_ARCHS", "SOURCE_DATE_EPOCH")):
            monkeypatch.delenv(name)


def _stores(directory: Path, *targets: str) -> dict[str, Path]:
    return {target: fake_parts.store(directory / "stores", target) for target in targets}


def _build(source: Path, output: Path, kind: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """The command that `pip install` runs: the build backend alone, without rocm_wheels.wheel."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--skip-dependency-check"]
    return subprocess.run(
        [*command, "--outdir", str(output), str(source)],
        env={**os.environ, **variables},
        cwd=output.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def _metadata(path: Path, name: str) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        (result,) = (each for each in archive.namelist() if each.endswith(f".dist-info/{name}"))
        return archive.read(result).decode().splitlines()


def test_wheel_of_a_cell(tmp_path: Path, launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    monkeypatch.delenv("GITHUB_SERVER_URL", raising=False)
    plan = fake_parts.plan("gfx90a", "gfx942")
    built = assemble.assemble(plan, _stores(tmp_path, "gfx90a", "gfx942"), launcher, tmp_path / "out")
    assert built == tmp_path / "out" / names.wheel_name(plan.cell)
    assert list((tmp_path / "out").iterdir()) == [built]
    metadata = _metadata(built, "METADATA")
    assert "Name: flash_attn" in metadata
    assert "Version: 2.8.3+rocm62torch2.5triton" in metadata
    requires = {line for line in metadata if line.startswith("Requires-Dist")}
    assert requires == {"Requires-Dist: torch==2.5.*", "Requires-Dist: einops"}
    assert "Project-URL: Repository, https://github.com/owner/name" in metadata
    # The terms that an index shows, as in the licence expression.
    terms = next(line.partition(": ")[2] for line in metadata if line.startswith("License-Expression: "))
    assert any(line.startswith(f"License: {terms}.") for line in metadata)
    assert "Tag: cp311-cp311-linux_x86_64" in _metadata(built, "WHEEL")
    assert "Root-Is-Purelib: false" in _metadata(built, "WHEEL")
    with zipfile.ZipFile(built) as archive:
        assert archive.read("flash_attn/_launcher.abi3.so") == LAUNCHER
        assert archive.read("flash_attn/_kernels/gfx942.zip") == (tmp_path / "stores" / "gfx942.zip").read_bytes()
        info = archive.read("flash_attn/_build_info.json").decode()
        tops = {name.partition("/")[0] for name in archive.namelist()}
        modules = [name for name in archive.namelist() if name.endswith("__init__.py")]
    assert "flash_attn/__init__.py" in modules
    own = {"flash_attn", "flash_attn_2_cuda.py", "flash_attention_amd.py"}
    assert tops == own | {"flash_attn-2.8.3+rocm62torch2.5triton.dist-info"}
    assert json.loads(info) == {
        "backend": "triton",
        "commit": assemble.commit(),
        "planner": "",
        "compiler": "triton 3.7.1",
        "label": "rocm62torch2.5triton",
        "python": "3.11",
        "repository": "https://github.com/owner/name",
        "rocm": "6.2",
        "targets": ["gfx90a", "gfx942"],
        "torch": "2.5",
        "advice": advice_facts.facts(versions.load()),
        "version": "2.8.3",
    }
    assert list(json.loads(info)) == sorted(json.loads(info))


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/owner/name.git", "https://github.com/owner/name"),
        ("git@github.com:owner/some.name.git", "https://github.com/owner/some.name"),
        ("ssh://git@github.com/owner/name", "https://github.com/owner/name"),
        ("https://token@github.com/owner/name", ""),
        ("https://git.example.org/owner/name", ""),
        ("/srv/name.git", ""),
        (None, ""),
    ],
)
def test_the_repository_of_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: str | None, address: str
) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    if remote:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    assert assemble.repository(tmp_path) == address
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/of-the-workflow")
    assert assemble.repository(tmp_path) == "https://github.com/owner/of-the-workflow"


def test_cell_of_another_python(tmp_path: Path, launcher: Path) -> None:
    plan = fake_parts.plan("gfx1100", python="3.12", torch="2.6.0")
    built = assemble.assemble(plan, _stores(tmp_path, "gfx1100"), launcher, tmp_path / "out")
    assert built.name == "flash_attn-2.8.3+rocm62torch2.6triton-cp312-cp312-linux_x86_64.whl"


def test_same_input_gives_same_bytes(tmp_path: Path, launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two checkouts with different paths, file times and modes, and stray files in one of them."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    built = []
    for number in (1, 2):
        source = tmp_path / f"checkout{number}" / "flash_attn_src"
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(FLASH_ATTN_SRC, source, ignore=ignore)
        shutil.copytree(ROOT / "rocm_wheels", source.parent / "rocm_wheels", ignore=ignore)
        if number == 2:
            (source / "flash_attn" / "__pycache__").mkdir()
            (source / "flash_attn" / "__pycache__" / "stale.cpython-311.pyc").write_bytes(b"stale")
            (source / "flash_attn" / "_launcher.abi3.so").write_bytes(b"stale")
            (source.parent / ".gitignore").write_text("*.py\n")
            (source / "flash_attn" / "__init__.py").touch()
            (source / "flash_attn" / "__init__.py").chmod(0o600)
        stores = _stores(tmp_path / f"parts{number}", "gfx90a", "gfx942")
        plan = fake_parts.plan("gfx90a", "gfx942")
        built.append(assemble.assemble(plan, stores, launcher, tmp_path / f"out{number}", source=source))
    assert built[0].read_bytes() == built[1].read_bytes()
    with zipfile.ZipFile(built[0]) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2025, 6, 15, 15, 6, 40)}


def test_environment_of_the_caller_does_not_leak(
    tmp_path: Path, launcher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_SKIP_CUDA_BUILD", "TRUE")
    monkeypatch.setenv("FLASH_ATTN_VERSION", "2.6.3")
    built = assemble.assemble(fake_parts.plan("gfx90a"), _stores(tmp_path, "gfx90a"), launcher, tmp_path / "out")
    assert "flash_attn-2.8.3+" in built.name


def test_stores_that_are_not_the_plans(tmp_path: Path, launcher: Path) -> None:
    with pytest.raises(AssembleFailed, match=r"gfx90a, gfx942.*gfx1100"):
        assemble.assemble(fake_parts.plan("gfx90a", "gfx942"), _stores(tmp_path, "gfx1100"), launcher, tmp_path / "out")


def test_missing_launcher(tmp_path: Path) -> None:
    absent = tmp_path / "_launcher.abi3.so"
    with pytest.raises(AssembleFailed, match=r"missing: .*_launcher\.abi3\.so"):
        assemble.assemble(fake_parts.plan("gfx90a"), _stores(tmp_path, "gfx90a"), absent, tmp_path / "out")


def test_a_failing_build_shows_its_log(tmp_path: Path, launcher: Path) -> None:
    stores = {
        "gfx90a": fake_parts.store(tmp_path, "gfx90a"),
        "gfx942": fake_parts.store(tmp_path, "gfx942", compiler="3.6.0"),
    }
    with pytest.raises(AssembleFailed, match=r"several compilers: triton 3\.6\.0, triton 3\.7\.1"):
        assemble.assemble(fake_parts.plan("gfx90a", "gfx942"), stores, launcher, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_the_date_of_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    assert assemble.wheel_date() == 1750000000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert assemble.wheel_date() == 315532800
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert assemble.wheel_date() == 315532800, "never the commit's: the same contents have the same date"


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    assert assemble.commit(tmp_path) == "", "no checkout"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    commit = assemble.commit(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    (tmp_path / "other").write_text("a file of a build")
    assert assemble.commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert assemble.commit(tmp_path) == f"{commit}-dirty"


def test_build_requirements_are_pinned_as_in_the_tool_package() -> None:
    outer, inner = (
        tables.parse((root / "pyproject.toml").read_text(), "pyproject.toml") for root in (ROOT, FLASH_ATTN_SRC)
    )
    group, requires = outer["dependency-groups"]["build"], inner["build-system"]["requires"]  # type: ignore[index]
    pins = {Requirement(each).name: each for each in group}
    assert {Requirement(each).name: each for each in requires}.items() <= pins.items()
    assert {"hatchling", "triton", "ziglang"} <= {Requirement(each).name for each in requires}


def test_both_licenses_are_the_same() -> None:
    for copy in (
        "LICENSE",
        "block_sparse_attn/LICENSE",
        "flash_attn_3/LICENSE",
        "flash_attn_4/LICENSE",
        "sageattention/LICENSE",
        "sglang_flash_rocm/LICENSE",
        "spas_sage_attn/LICENSE",
        "vllm_flash_rocm/LICENSE",
    ):
        assert (ROOT / "LICENSE").read_bytes() == (FLASH_ATTN_SRC / copy).read_bytes()


@pytest.mark.skipif(bool(detect_targets()), reason="this machine has an AMD GPU to build for")
def test_user_without_a_gpu_gets_a_remedy(tmp_path: Path) -> None:
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", {"PATH": os.defpath, "XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode != 0
    assert "no AMD GPU is visible" in done.stdout + done.stderr
    assert "PYTORCH_ROCM_ARCH=" in done.stdout + done.stderr
    assert "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE" in done.stdout + done.stderr
    assert "rocm_wheels.errors" not in done.stdout + done.stderr


def test_user_names_a_target_that_does_not_exist(tmp_path: Path) -> None:
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", {"PYTORCH_ROCM_ARCH": "gfx943"})
    assert done.returncode != 0
    assert "error: no wheel has kernels for gfx943" in done.stdout + done.stderr
    assert "Traceback (most recent call last)" not in done.stderr


def test_user_builds_where_torch_names_targets_without_kernels(tmp_path: Path) -> None:
    """In an image of rocm/pytorch. The compilation that would follow fails at once, without a directory for its
    cache.
    """
    (tmp_path / "file").touch()
    variables = {"PYTORCH_ROCM_ARCH": "gfx900;gfx906;gfx942", "ROCM_WHEELS_CACHE": str(tmp_path / "file/cache")}
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", variables)
    assert done.returncode != 0
    assert "note: PYTORCH_ROCM_ARCH: gfx900, gfx906 left out, for which no backend has kernels" in done.stderr
    assert "no wheel has kernels" not in done.stdout + done.stderr
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", {**variables, "GPU_ARCHS": "gfx1100"})
    assert "note: GPU_ARCHS counts, not PYTORCH_ROCM_ARCH=gfx900;gfx906;gfx942" in done.stderr


@pytest.mark.skipif(bool(detect_targets()), reason="this machine has an AMD GPU of its own")
@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("gfx900 gfx1100", "note: there are no kernels for the gfx900 of this machine\n"),
        (
            "gfx900",
            "error: there are no kernels for the gfx900 of this machine\nname the targets: PYTORCH_ROCM_ARCH=",
        ),
    ],
)
def test_user_builds_where_a_gpu_has_no_kernels(tmp_path: Path, gpus: str, said: str) -> None:
    """A processor's integrated GPU must not prevent kernels for the graphics card; their compilation fails, as
    above.
    """
    (tmp_path / "file").touch()
    tool = tmp_path / "rocm_agent_enumerator"
    tool.write_text("#!/bin/sh\necho " + "; echo ".join(["gfx000", *gpus.split()]) + "\n")
    tool.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ROCM_WHEELS_CACHE": str(tmp_path / "file/cache")}
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", variables)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert ("Not a directory" in done.stdout + done.stderr) == said.startswith("note")
    assert "no wheel has kernels" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("label", "canonical"), [("my-build", "my.build"), ("cu12torch2.5cxx11abiFALSE", "cu12torch2.5cxx11abifalse")]
)
def test_user_gives_a_label_of_their_own(tmp_path: Path, label: str, canonical: str) -> None:
    variables = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "FLASH_ATTN_LOCAL_VERSION": label}
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"flash_attn-2.8.3+{canonical}-py3-none-any.whl"]


def test_user_asks_pip_for_composable_kernel(tmp_path: Path) -> None:
    variables = {"PYTORCH_ROCM_ARCH": "gfx942", "FLASH_ATTENTION_TRITON_AMD_ENABLE": "FALSE"}
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", variables)
    assert done.returncode != 0
    assert "error: the ck backend is not compiled by pip: build its wheel with" in done.stdout + done.stderr


def test_user_names_a_version_that_does_not_exist(tmp_path: Path) -> None:
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", {"FLASH_ATTN_VERSION": "9.9.9"})
    assert done.returncode != 0
    assert (
        "error: FLASH_ATTN_VERSION: flash-attn '9.9.9' is newer than this checkout knows\nNewest known: 2.8.3.post2."
        in done.stdout + done.stderr
    )


def test_user_names_a_label_that_no_version_takes(tmp_path: Path) -> None:
    variables = {"FLASH_ATTN_LOCAL_VERSION": "my build!", "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", variables)
    assert done.returncode != 0
    assert "error: FLASH_ATTN_LOCAL_VERSION=my build! is no label of a version\n" in done.stdout + done.stderr


def test_wheel_without_kernels(tmp_path: Path) -> None:
    done = _build(FLASH_ATTN_SRC, tmp_path / "out", "wheel", {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"})
    assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / "out" / "flash_attn-2.8.3-py3-none-any.whl"
    with zipfile.ZipFile(built) as archive:
        info = json.loads(archive.read("flash_attn/_build_info.json"))
        assert not [name for name in archive.namelist() if name.endswith((".so", ".zip"))]
    assert (info["targets"], info["compiler"], info["torch"]) == ([], None, None)
    requirements = [line for line in _metadata(built, "METADATA") if line.startswith("Requires-Dist: ")]
    assert requirements == ["Requires-Dist: einops"]


def test_sdist_builds_the_same_package(tmp_path: Path) -> None:
    out, skip = tmp_path / "out", {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    assert _build(FLASH_ATTN_SRC, out, "sdist", {}).returncode == 0
    shutil.unpack_archive(out / "flash_attn-2.8.3.tar.gz", tmp_path, filter="data")
    unpacked = tmp_path / "flash_attn-2.8.3"
    assert (unpacked / "csrc" / "launcher" / "module.c").is_file()
    assert (unpacked / "rocm_wheels" / "versions.toml").is_file()
    for source, directory in ((FLASH_ATTN_SRC, out), (unpacked, tmp_path / "from_sdist")):
        done = _build(source, directory, "wheel", skip)
        assert done.returncode == 0, done.stdout + done.stderr
    name = "flash_attn-2.8.3-py3-none-any.whl"
    assert (out / name).read_bytes() == (tmp_path / "from_sdist" / name).read_bytes()
    done = _build(unpacked, tmp_path / "other", "wheel", {**skip, "FLASH_ATTN_TORCH": "2.6"})
    assert done.returncode != 0
    assert "this sdist is 2.8.3 with" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "block_sparse_attn",
            [f"block_sparse_attn/{name}.py" for name in ("__init__", "bert_padding", "block_sparse_attn_interface")],
        ),
        (
            "flash_attn_3",
            ["flash_attn_interface.py", "flash_attn_3/__init__.py", "flash_attn_3/flash_attn_interface.py"],
        ),
        ("flash_attn_4", [f"flash_attn/cute/{name}.py" for name in ("__init__", "block_sparsity", "interface")]),
        ("sageattention", ["sageattention/__init__.py", "sageattention/core.py"]),
        (
            "sglang_flash_rocm",
            [f"sglang_flash_rocm/{name}.py" for name in ("__init__", "backend", "metadata", "refusals")],
        ),
        ("spas_sage_attn", [f"spas_sage_attn/{name}.py" for name in ("__init__", "autotune", "core")]),
        (
            "vllm_flash_rocm",
            [f"vllm_flash_rocm/{name}.py" for name in ("__init__", "backend", "cache", "metadata", "mla")],
        ),
    ],
)
def test_the_interface_wheel_of_a_wheel(
    name: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules by which clients detect it, no platform tag, the flash_attn of its label; the same bytes after another
    commit.
    """
    interface = versions.load().interfaces[name]
    plan = fake_parts.plan("gfx942")
    built = assemble.assemble_interface(interface, plan, tmp_path / "out")
    assert built == tmp_path / "out" / names.interface_wheel_name(interface, plan.cell)
    assert built.name == f"{name}-{interface.version}+rocm62torch2.5triton-py3-none-any.whl"
    metadata = _metadata(built, "METADATA")
    assert "Requires-Dist: flash-attn==2.8.3+rocm62torch2.5triton" in metadata
    assert "Description-Content-Type: text/markdown" in metadata
    assert any(interface.module in line for line in metadata[metadata.index("") :])
    with zipfile.ZipFile(built) as archive:
        modules = [name for name in archive.namelist() if ".dist-info/" not in name]
        (terms,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(terms) == (ROOT / "LICENSE").read_bytes()
    assert modules == expected
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    again = assemble.assemble_interface(interface, fake_parts.plan("gfx942", python="3.12"), tmp_path / "again")
    assert again.read_bytes() == built.read_bytes()
