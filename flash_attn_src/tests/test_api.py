"""Every release's API, as contract.toml has it: signatures, private names, numbers of results."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
from flash_attn.core import api

_TESTS = Path(__file__).resolve().parent
_CONTRACT = tomllib.loads((_TESTS / "contract.toml").read_text())
VERSIONS = list(_CONTRACT["extension"])
# A name of the extension each; the job of the long tests asks the others too.
BY_NAME = [VERSIONS[0], *(pytest.param(each, marks=pytest.mark.long) for each in VERSIONS[1:-1]), VERSIONS[-1]]


def install(version: str, directory: Path) -> Path:
    """Copies the package, as in a wheel of that version, to a new directory."""
    source = _TESTS.parent
    shutil.copytree(source / "flash_attn", directory / "flash_attn", ignore=shutil.ignore_patterns("__pycache__"))
    for module in source.glob("flash_*.py"):
        shutil.copyfile(module, directory / module.name)
    return of_release(version, directory)


def of_release(version: str, directory: Path) -> Path:
    """Makes the package of a directory that of another release."""
    (directory / "flash_attn" / "_build_info.json").write_text(json.dumps({"version": version}))
    return directory


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with that package first on its path, warnings being errors."""
    environment = {**os.environ, "PYTHONPATH": str(directory), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)


# Names of a release whose numbers are not the release's: their functions must be the same.
OTHER_NAMES = {"2.7.3": "2.7.4", "2.8.0.post2": "2.8.3"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for a release after another: Python compiles its modules once."""
    return install(VERSIONS[0], tmp_path_factory.mktemp("release"))


@functools.cache
def reports(installed: Path, versions: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """By version; one process imports torch for all of them."""
    asked = [f"{version}={OTHER_NAMES.get(version, version)}" for version in versions]
    done = run(installed, str(_TESTS / "contract_report.py"), *asked)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(Path(report["file"]).parent.parent == installed for report in made)
    return {report["version"]: report for report in made}


@pytest.fixture(
    scope="module", params=[*VERSIONS, *(pytest.param(each, marks=pytest.mark.long) for each in OTHER_NAMES)]
)
def report(request: pytest.FixtureRequest, installed: Path) -> dict[str, Any]:
    version = request.param
    versions = tuple(OTHER_NAMES) if version in OTHER_NAMES else tuple(VERSIONS)
    return {**reports(installed, versions)[version], "release": OTHER_NAMES.get(version, version)}


# The options that upstream lacks; they come last and by keyword alone (test_signatures.py).
_OWN = re.compile(r"(, s_aux=None)?(, attn_bias=None)?(, k_descale=None, v_descale=None)?$")


def test_signatures(report: dict[str, Any]) -> None:
    assert report["missing"] == []
    offered = {
        module: {
            name: _OWN.sub("", text) if name.endswith(("_func", "_with_kvcache")) else text
            for name, text in names.items()
        }
        for module, names in report["offered"].items()
    }
    assert offered == report["wanted"]


def test_private_functions_return_the_same_as_upstream(report: dict[str, Any]) -> None:
    counts = {name: number for name, (number, _) in report["results"].items()}
    assert counts == _CONTRACT["returns"][report["release"]]
    assert all(right for _, right in report["results"].values()), report["results"]


def test_nothing_needs_triton(report: dict[str, Any]) -> None:
    assert not report["has triton"]


@pytest.mark.skipif(
    not (_TESTS.parent / "flash_attn_2_cuda.py").is_file(), reason="flash_attn_2_cuda.py is not in the tree yet"
)
@pytest.mark.parametrize("version", BY_NAME)
def test_extension_attribute(version: str, installed: Path) -> None:
    name = _CONTRACT["extension"][version]
    other = {"flash_attn_cuda": "flash_attn_gpu", "flash_attn_gpu": "flash_attn_cuda"}[name]
    code = f"""
from flash_attn.flash_attn_interface import {name} as m
import flash_attn_2_cuda as extension
assert m.fwd is extension.fwd
print(m.__name__)
from flash_attn.flash_attn_triton_amd import interface_fa as v1, interface_v2 as v2
assert v1.fwd is v2.fwd
from flash_attn.flash_attn_interface import {other}
"""
    done = run(of_release(version, installed), "-c", code)
    assert done.stdout.strip() == "flash_attn.flash_attn_triton_amd.interface_v2"
    assert re.search(rf"^ImportError: cannot import name '{other}'", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize(("selected", "module"), [("", "flash_attn_2_cuda"), ("TRUE", "interface_v2")])
def test_the_extension_attribute_tells_the_backend_of_a_wheel_with_both(
    selected: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(VERSIONS[-1], tmp_path)
    info = tmp_path / "flash_attn/_build_info.json"
    info.write_text(json.dumps({"version": VERSIONS[-1], "backend": "ck"}))
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", selected)
    code = "from flash_attn.flash_attn_interface import USE_TRITON_ROCM, flash_attn_gpu as m\n"
    code += "import flash_attn; info = flash_attn.backend_info(); print(info['backend'], info['gpu_backend'])\n"
    code += "print(m.__name__, USE_TRITON_ROCM)\n"
    code += (
        "from flash_attn.flash_attn_triton_amd.utils import *\nprint(USE_TRITON_ROCM, is_hip(), is_rdna(), is_cdna())"
    )
    done = run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    told, name, answers = done.stdout.splitlines()
    assert told == ("ck triton" if selected == "TRUE" else "ck ck")
    assert name.endswith(f"{module} {selected == 'TRUE'}")
    # This torch is built for no AMD GPU.
    assert answers == f"{selected == 'TRUE'} False False False"


def test_additions_of_2_8_4(installed: Path) -> None:
    done = run(of_release("2.8.4", installed), str(_TESTS / "since_2_8_4.py"))
    assert done.returncode == 0, done.stderr


def _function(x: int, added: int = 2, removed: int = 3, last: int = 4) -> tuple[int, int, int, int]:
    return x, added, removed, last


def test_parameters_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"since": {"added": "2.7"}, "until": {"removed": "2.8"}}
    monkeypatch.setattr(api, "RELEASE", (2, 6))
    older = api.parameters(**changes)(_function)
    assert older(1, 30, 40) == (1, 2, 30, 40)
    assert older(1, last=5) == (1, 2, 3, 5)
    with pytest.raises(TypeError, match=r"_function\(\) of flash_attn .*'added'"):
        older(1, added=2)
    monkeypatch.setattr(api, "RELEASE", (2, 7))
    assert api.parameters(**changes)(_function) is _function
    monkeypatch.setattr(api, "RELEASE", (2, 8))
    assert api.parameters(**changes)(_function)(1, 20, 40) == (1, 20, 3, 40)
