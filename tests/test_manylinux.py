"""build --cibuildwheel: the real cibuildwheel, with a stand-in for docker."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import fake_docker
import fake_parts
import pytest
from wheelhouse import CELL

from rocm_wheels import cli
from rocm_wheels.errors import AssembleFailed, DataError, MissingTool
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.plan import Plan, make_universal_plan
from rocm_wheels.wheel import assemble, manylinux, repair

DATA = versions.load()


@pytest.fixture
def plan() -> Plan:
    env = {"PYTORCH_ROCM_ARCH": "gfx942;gfx1100"}
    return make_universal_plan(DATA, flash_attn="2.8.3", env=env, machine=Machine(cores=1, available_mib=4096))


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of the stand-in."""
    for name, value in fake_docker.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "docker"


@pytest.fixture
def parts(tmp_path: Path) -> tuple[dict[str, Path], Path, Path]:
    launcher = fake_parts.library(tmp_path / "_launcher.abi3.so", "int PyInit__launcher(void) { return 1; }")
    planner = fake_parts.library(tmp_path / "_ck_planner.so", "int plan(void) { return 1; }")
    return {name: fake_parts.store(tmp_path / "stores", name) for name in ("gfx942", "gfx1100")}, launcher, planner


@pytest.mark.long
def test_the_wheel_is_the_same_as_without_the_image(
    plan: Plan, docker: Path, parts: tuple[dict[str, Path], Path, Path], tmp_path: Path,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Byte for byte, after this machine's zlib has packed it."""
    monkeypatch.setenv("FLASH_ATTN_VERSION", "2.6.3")  # of another wheel
    stores, launcher, planner = parts
    (tmp_path / "image").mkdir()
    made = manylinux.assemble(plan, stores, launcher, tmp_path / "image", planner=planner)
    log = capfd.readouterr().out
    assert ".manylinux_2_17_x86_64.whl" in made.name
    assert "quay.io/pypa/manylinux_2_28_x86_64@sha256:" in (docker / "created").read_text()
    assert re.search(r"^flash_attn +2\.8\.3\+rocm in /tmp/\S+/venv/", log, re.MULTILINE), log
    plain = assemble.assemble(plan, stores, launcher, tmp_path / "plain", planner=planner)
    first, second = (repair.repair(wheel, tmp_path / f"{wheel.parent.name}-repaired") for wheel in (made, plain))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(made) as archive, zipfile.ZipFile(second) as other:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }


def test_requirements_are_checked_before_anything_is_compiled(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=r"--cibuildwheel builds the universal wheel, .*-cp311-.* is for one Python"):
        manylinux.check(fake_parts.plan("gfx942"))
    assert cli.main(["check", *CELL, "--cibuildwheel"]) == DataError.exit_code
    assert "Leave --cibuildwheel out, or name the version of flash-attn alone." in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["check", "2.8.3", "--cibuildwheel"]) == MissingTool.exit_code
    assert "--cibuildwheel: there is no docker on PATH" in capsys.readouterr().err
    (tmp_path / "docker").symlink_to("/bin/true")
    monkeypatch.setattr("rocm_wheels.packages.metadata.version", _missing)
    with pytest.raises(MissingTool, match=r"Run \./build_rocm\.sh --setup cibuildwheel, then"):
        manylinux.check(plan)


def _missing(name: str) -> str:
    raise ModuleNotFoundError(name=name)


@pytest.mark.long
@pytest.mark.usefixtures("docker")
def test_a_wheel_that_fails_its_tests_in_the_image_is_none(
    plan: Plan, parts: tuple[dict[str, Path], Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CIBW_TEST_COMMAND", "false")
    stores, launcher, planner = parts
    with pytest.raises(AssembleFailed, match="cibuildwheel ended with 1: its log is above"):
        manylinux.assemble(plan, stores, launcher, tmp_path, planner=planner)


def test_one_image_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["check", "2.8.3", "--cibuildwheel", "--docker"])
    assert "--docker: not allowed with argument --cibuildwheel" in capsys.readouterr().err
