"""The last line of a build installs the wheel: the printed command is run, in real environments."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import wheelhouse
from fake_parts import plan as cell_plan

from rocm_wheels import packages
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.plan import Plan, make_universal_plan
from rocm_wheels.wheel import closing, interpreters

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


TORCH = 'install "torch==2.14.1+rocm7.2" --index-url https://download.pytorch.org/whl/rocm7.2'


def universal(platform: str = "linux") -> Plan:
    machine = Machine(cores=1, available_mib=4096)
    return make_universal_plan(versions.load(), flash_attn="2.8.3", env={}, machine=machine, platform=platform)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """In a directory whose name a shell would split."""
    claim = Universal(flash_attn="2.8.3", python="3.10", backend="ck")
    return wheelhouse.write(tmp_path / "my dist", claim)


def environment(directory: Path, *options: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", *options, directory], check=True)
    return directory


@pytest.fixture(scope="module")
def active(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("user") / "an env")


def last(plan: Plan, wheel: Path, **env: str) -> tuple[str, str]:
    """What the build says, and its last line."""
    *said, command = closing.installation(plan, wheel, {"PATH": os.environ["PATH"], **env})
    return " ".join(said), command.strip()


def run(command: str, cwd: Path, python: Path) -> str:
    """Types a command. Returns the label of the flash_attn that it installed."""
    env = {
        **os.environ,
        "PIP_NO_DEPS": "1",
        "UV_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    steps = [step for step in command.split(" && ") if "--index-url" not in step]  # without torch: several GB
    typed = " && ".join(steps).replace("uv pip install", f"{packages.uv()} pip install --no-deps")
    subprocess.run(["bash", "-euc", typed], cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL)
    shown = [str(python), "-c", "import flash_attn; print(flash_attn.label)"]
    return subprocess.check_output(shown, cwd=cwd, text=True).strip()


def test_in_the_active_environment(tmp_path: Path, wheel: Path, active: Path) -> None:
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        said, command = last(universal(), wheel, **{variable: str(active)})
        assert said == f"Install it here, with Python {HERE}:"
        assert command == f"'{active}/bin/python' -m pip {TORCH} && '{active}/bin/python' -m pip install '{wheel}'"
    assert run(command, tmp_path, active / "bin/python") == "2.8.3+rocm"


def test_with_uv_in_an_environment_without_pip(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active = environment(tmp_path / "env", "--without-pip")
    monkeypatch.setattr("shutil.which", lambda name, **_: "/somewhere/uv" if name == "uv" else None)
    _, command = last(universal(), wheel, VIRTUAL_ENV=str(active))
    uv = f"uv pip install --python {active}/bin/python"
    assert command == f"{uv} {TORCH.removeprefix('install ')} && {uv} '{wheel}'"
    assert run(command, tmp_path, active / "bin/python") == "2.8.3+rocm"


def test_in_a_new_environment_where_the_system_forbids_pip(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def managed(python: Path) -> closing.Environment:
        return closing.Environment(python=str(python), version=HERE, managed=True, pip=True)

    monkeypatch.setattr(closing, "_probe", managed)
    said, command = last(universal(), wheel)
    assert said == "Install it here, in a new environment:"
    assert shlex.split(command)[0] == os.path.realpath(sys.executable)
    assert f"&& {closing.NEW_ENVIRONMENT}/bin/python -m pip {TORCH} &&" in command
    assert run(command, tmp_path, tmp_path / closing.NEW_ENVIRONMENT / "bin/python") == "2.8.3+rocm"


def test_a_python_on_the_path_takes_it_where_none_is_active(wheel: Path, active: Path) -> None:
    _, command = last(universal(), wheel, PATH=f"{active}/bin")
    assert command == f"'{active}/bin/python' -m pip {TORCH} && '{active}/bin/python' -m pip install '{wheel}'"


@pytest.mark.parametrize(
    ("version", "universal_too"), [("3.9", False), ("3.10", True), ("3.12", True), ("3.13t", False)]
)
def test_an_environment_of_another_python_is_left_alone(version: str, universal_too: bool) -> None:
    result = closing.Environment(python="/env/bin/python", version=version, managed=False, pip=True)
    assert result.serves(universal()) is universal_too
    assert not result.serves(cell_plan("gfx942"))  # is for 3.11


@pytest.mark.parametrize(
    ("torch", "kept"),
    [("2.5.1+rocm6.2", True), ("2.5.0+rocm6.1", True), ("2.5.1", False), ("2.6.0+rocm6.2", False), ("", False)],
)
def test_a_combination_brings_its_torch_into_an_environment_without_it(torch: str, kept: bool) -> None:
    """pip would install PyPI's, which is for CUDA."""
    result = closing.Environment(python="/env/bin/python", version="3.11", managed=False, pip=True, torch=torch)
    pip = "/env/bin/python -m pip install"
    first = "torch==2.5.1+rocm6.2 --index-url https://download.pytorch.org/whl/rocm6.2"
    assert result.install(cell_plan("gfx942"), "a.whl") == (f"{pip} a.whl" if kept else f"{pip} {first} && {pip} a.whl")
    has_rocm = "+rocm" in torch
    expected = f"{pip} a.whl" if has_rocm else f"/env/bin/python -m pip {TORCH} && {pip} a.whl"
    assert result.install(universal(), "a.whl") == expected


@pytest.mark.parametrize(
    ("gpu", "line"),
    [
        ("gfx1201", TORCH),
        ("gfx1031", 'install "torch[device-gfx1031]" --index-url https://repo.amd.com/rocm/whl-multi-arch/'),
        ("gfx1103", TORCH.replace("rocm7.2", "rocm7.14")),
    ],
)
def test_the_torch_of_a_wheel_for_one_gpu_is_the_advisers(gpu: str, line: str) -> None:
    machine = Machine(cores=1, available_mib=4096)
    plan = make_universal_plan(versions.load(), flash_attn="2.8.3", env={"PYTORCH_ROCM_ARCH": gpu}, machine=machine)
    result = closing.Environment(python="/env/bin/python", version="3.11", managed=False, pip=True)
    assert result.install(plan, "a.whl") == f"/env/bin/python -m pip {line} && /env/bin/python -m pip install a.whl"


def test_the_torch_of_an_environment_is_seen(tmp_path: Path) -> None:
    active = environment(tmp_path / "env", "--without-pip")
    (site,) = active.glob("lib/python*/site-packages")
    (site / "torch-2.5.1+rocm6.2.dist-info").mkdir()
    (site / "torch-2.5.1+rocm6.2.dist-info/METADATA").write_text("Name: torch\nVersion: 2.5.1+rocm6.2\n")
    result = closing._probe(active / "bin/python")
    assert result is not None
    assert (result.torch, result.pip, result.managed) == ("2.5.1+rocm6.2", False, False)


def test_a_combination_brings_its_torch_into_a_new_environment(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "_environments", lambda _: [])
    monkeypatch.setattr(interpreters, "found", lambda _: Path("/opt/python3.11"))
    _, command = last(cell_plan("gfx942"), wheel)
    pip = f"{closing.NEW_ENVIRONMENT}/bin/python -m pip install"
    torch = "torch==2.5.1+rocm6.2 --index-url https://download.pytorch.org/whl/rocm6.2"
    made = f"/opt/python3.11 -m venv {closing.NEW_ENVIRONMENT}"
    assert command == f"{made} && {pip} {torch} && {pip} '{wheel}'"
    monkeypatch.setattr(interpreters, "found", lambda _: None)
    said, command = last(cell_plan("gfx942"), wheel)
    assert said == "It installs with Python 3.11, which was not found on this machine. Where it is, type:"
    assert command == f"python3.11 -m pip install '{wheel}'"


def test_a_wheel_of_another_system_says_where_it_installs(wheel: Path) -> None:
    windows = wheel.with_name("flash_attn-2.8.3+rocm-cp310-abi3-win_amd64.whl")
    said, command = last(universal("windows"), windows)
    assert said.startswith(f"{windows.name} installs on Windows alone. Copy it there;")
    assert re.fullmatch(r'python -m pip install "([^"]+)"', command)[1] == windows.name  # type: ignore[index]


def test_the_wheel_that_a_container_built(tmp_path: Path) -> None:
    plan = cell_plan("gfx942")
    assert closing.built(plan, tmp_path) is None
    wheelhouse.write(tmp_path, Universal(flash_attn="2.8.3", python="3.10", backend="ck"))
    wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2", backend="ck"))
    wheel = wheelhouse.write(tmp_path, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"))
    assert closing.built(plan, tmp_path) == wheel
