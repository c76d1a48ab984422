"""build_rocm.sh: the environment that it creates, the Python that it selects, the errors that it reports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from wheelhouse import CELL

from rocm_wheels import packages

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "build_rocm.sh"

pytestmark = pytest.mark.usefixtures("clean_environment")


def script(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_script_prints_the_plan_from_any_directory(tmp_path: Path) -> None:
    done = script(*CELL, "--plan", cwd=tmp_path, GPU_ARCHS="gfx942", PYTHONPATH="/nowhere", PYTHONHOME="/nowhere")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert planned["targets"] == ["gfx942"]
    counted = {"kernels", "cached", "minutes", "disk_mib", "torch_mib", "downloads", "shorter", "why"}
    assert planned["work"].keys() == counted


def test_script_finds_its_repository_through_links_and_despite_cdpath(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(SCRIPT)
    for name in (str(tmp_path / "link"), f"{ROOT.name}/{SCRIPT.name}"):
        done = subprocess.run(
            ["bash", name, *CELL, "--plan"], cwd=ROOT.parent, env={**os.environ, "CDPATH": str(ROOT.parent)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["label"] == "rocm62torch2.5"


def _copy_planning(to: Path) -> None:
    """Copies the files that a plan needs: the pipeline, and flash_attn's parser of environment variables."""
    for folder in ("rocm_wheels", "flash_attn_src/flash_attn/core"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))


def test_script_refuses_before_it_installs_anything(tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    _copy_planning(copy)
    shutil.copy(SCRIPT, copy)
    done = subprocess.run(
        [copy / SCRIPT.name, "2.8.3", "3.11", "2.6", "6.3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr.startswith("error: torch 2.6.0 has no wheels for ROCm 6.3")
    assert not (copy / "build").exists()


def test_script_checks_the_places_it_writes_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = script(*CELL, cwd=tmp_path, ROCM_WHEELS_CACHE=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (10, "")
    assert done.stderr.startswith(f"error: the cache {tmp_path / 'file'} cannot be written: ")
    assert not (tmp_path / "dist").exists()


def test_script_usage(tmp_path: Path) -> None:
    done = script(cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: build_rocm.sh <flash-attn> [<python> <torch> <rocm>]")
    usage = done.stderr
    done = script("--help", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, usage, "")
    assert "PYTORCH_ROCM_ARCH" in usage


def test_the_script_of_the_tests_tells_its_usage_and_runs_nothing() -> None:
    done = subprocess.run([ROOT / "run_tests.sh", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: run_tests.sh [options of pytest]\n")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            CELL[:2],
            "torch, rocm missing: a combination has four versions, such as 2.8.3 3.11 2.5.1 6.2, "
            "the universal wheel one, such as 2.8.3",
        ),
        ((*CELL, "--bogus"), "unrecognized arguments: --bogus"),
        ((*CELL, "--backend"), "argument --backend: expected one argument"),
        ((*CELL, "--pl"), "unrecognized arguments: --pl"),
        ((*CELL, "--cache", ""), "argument --cache: the name of the directory is empty"),
    ],
)
def test_a_wrong_command_line_gets_the_usage_of_the_script(arguments: Sequence[str], what: str, tmp_path: Path) -> None:
    done = script(*arguments, cwd=tmp_path)
    own, *_ = script("--help", cwd=tmp_path).stdout.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{own}\n       build_rocm.sh --help\nbuild_rocm.sh: error: {what}\n"


def _fake_path(directory: Path, **programs: str) -> str:
    """A PATH with these shell scripts and the system's basic tools, but no other Python."""
    directory.mkdir()
    for name in ("bash", "dirname", "cat"):
        result = shutil.which(name)
        assert result
        (directory / name).symlink_to(result)
    for name, body in programs.items():
        path = directory / name
        path.write_text(f"#!{directory}/bash\n{body}\n")
        path.chmod(0o755)
    return str(directory)


def test_script_takes_another_python_where_python3_is_too_old(tmp_path: Path) -> None:
    path = _fake_path(tmp_path / "bin", **{"python3": "exit 1", "python3.12": f'exec {sys.executable} "$@"'})
    done = subprocess.run(
        [tmp_path / "bin/bash", SCRIPT, *CELL, "--plan"], env={"PATH": path, "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["label"] == "rocm62torch2.5"


def test_script_says_which_python_it_needs(tmp_path: Path) -> None:
    path = _fake_path(tmp_path / "bin", python3='[[ $1 == --version ]] && echo "Python 3.8.1"; exit 1')
    done = subprocess.run(
        [tmp_path / "bin/bash", SCRIPT, *CELL],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "error: no Python from 3.10 to 3.14 is on PATH (python3: Python 3.8.1" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


# Creates an environment as `python -m venv` does, with a Python that only logs its calls.
FAKE_PYTHON = r"""
case "$*" in
    "-I -m venv --clear "*)
        [[ -z ${NO_ENSUREPIP:-} || $* == *--without-pip* ]] || exit 1
        venv="${!#}"
        rm -rf "$venv" && mkdir -p "$venv/bin"
        cp "$0" "$venv/bin/python" ;;
    *sysconfig*) dirname "$0" ;;
    *realpath*) realpath "$0" ;;
    *sys.executable*) echo "$0" ;;
    "-I --version") echo "Python 3.11.9" ;;
    *"pip config list") echo "${PIP_SETTING:-global.cert='/x'}" ;;
    *"/uv.txt")
        echo "$*" >>"$LOG"
        printf '#!/bin/sh\necho "uv $*" >>"$LOG"\nexit ${UV_FAILS:-0}\n' >"${0%/*}/uv"
        chmod +x "${0%/*}/uv" ;;
    *"-m pip"* | *"rocm_wheels build"*)
        echo "$*" >>"$LOG"
        [[ -z ${PRINT:-} ]] || echo "$PRINT"
        [[ $* != *"rocm_wheels build"* || -z ${HELD:-} ]] || readlink /proc/$$/fd/* >>"$HELD"
        sleep "${SLOW:-0}"
        [[ -z ${FAIL:-} || $* != *"build.txt"* ]] || exit 1 ;;
    *) exec PYTHON "$@" ;;
esac
"""


@dataclass
class Checkout:
    """A copy of the script and of the files that it reads, with a fake python3 on PATH."""

    root: Path
    env: dict[str, str]
    log: Path

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Builds the combination of the README. Afterwards `calls` has the calls of pip and of the build."""
        self.log.write_text("")
        return subprocess.run(
            [self.root / SCRIPT.name, *CELL],
            cwd=self.root.parent, env={**self.env, **env}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "repository"
    _copy_planning(root)
    shutil.copytree(ROOT / "locks", root / "locks")
    for name in (SCRIPT.name, "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.write_text("#!/usr/bin/env bash\n" + FAKE_PYTHON.replace("PYTHON", sys.executable))
    python.chmod(0o755)
    log = tmp_path / "log"
    path = f"{python.parent}:{os.environ['PATH']}"
    return Checkout(root, {"PATH": path, "LOG": str(log), "HOME": str(tmp_path)}, log)


def test_script_makes_its_environment_once_and_builds(checkout: Checkout) -> None:
    planned = subprocess.run(
        [sys.executable, "-m", "rocm_wheels", "check", *CELL], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    build = f"-I -m rocm_wheels build --planned {planned} --dist {checkout.root}/dist {' '.join(CELL)}"
    locked, venv = "install --quiet --disable-pip-version-check --require-hashes --requirement", "build/env"
    named = f"{checkout.root}/locks/build.txt"
    by_pip = f"-I -m pip {locked} {named} --no-compile"
    made = [
        f"-I -m pip {locked} {checkout.root}/locks/pip.txt",
        f"-I -m pip {locked} {checkout.root}/{venv}/uv.txt",
        f"uv pip install --quiet --python {checkout.root}/{venv}/bin/python --require-hashes -r {named}",
        build,
    ]
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert checkout.calls == made
    assert done.stdout.startswith("environment ")
    assert done.stdout.endswith("s  repository/build/env, made with Python 3.11.9\n")
    assert (checkout.root / "build/env/bin/rocm_wheels.pth").read_text() == "../../../../..\n"

    done = checkout.run()
    assert checkout.calls == [build]
    assert done.stdout.endswith("s  repository/build/env, unchanged\n")

    with (checkout.root / "locks/build.txt").open("a") as lock:
        lock.write("# changed\n")
    checkout.run()
    assert checkout.calls == made
    uv = (checkout.root / venv / "uv.txt").read_text().splitlines()
    assert uv[0] == f"uv=={packages.version_of('uv')} \\"
    assert all("--hash=sha256:" in line for line in uv[1:])

    with (checkout.root / "locks/build.txt").open("a") as file:
        file.write("# uv does not reach the index\n")
    checkout.run(UV_FAILS="2")
    assert checkout.calls == [*made[:3], by_pip, build]
    with (checkout.root / "locks/build.txt").open("a") as file:
        file.write("# pip has settings that uv does not read\n")
    checkout.run(PIP_SETTING="global.index-url='https://mirror.example/simple'")
    assert checkout.calls == [made[0], by_pip, build]


def test_an_activated_environment_of_the_same_python_is_not_recreated(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run()
    activated = tmp_path / "activated/bin"
    activated.mkdir(parents=True)
    (activated / "python3").symlink_to(tmp_path / "bin/python3")
    done = checkout.run(PATH=f"{activated}:{checkout.env['PATH']}")
    assert done.stdout.endswith("s  repository/build/env, unchanged\n")


# Creates real environments, in which pip installs nothing.
PYTHON_WITHOUT_PIP = r"""
case "$*" in
    "-I -m venv --clear "*)
        PYTHON -I -m venv --clear --without-pip "${!#}"
        cd "${!#}"/lib/python*/site-packages
        mkdir pip
        touch pip/__{init,main}__.py ;;
    *sys.executable*) echo "$0" ;;
    *) exec PYTHON "$@" ;;
esac
"""


@pytest.mark.parametrize("group", ["build", "release"])
def test_an_environment_finds_the_tools_whatever_the_path_and_the_locale(
    checkout: Checkout, tmp_path: Path, group: str
) -> None:
    fake = "#!/usr/bin/env bash\n" + PYTHON_WITHOUT_PIP.replace("PYTHON", sys.executable)
    (tmp_path / "bin/python3").write_text(fake)
    root = checkout.root.rename(tmp_path / "dépôt")
    env = {**checkout.env, "LC_ALL": "C"}
    subprocess.run([root / SCRIPT.name, "--setup", group], env=env, capture_output=True, check=True)
    python = root / "build" / ("env" if group == "build" else f"env-{group}") / "bin/python"
    imported = "import rocm_wheels; print(ascii(rocm_wheels.__file__))"
    done = subprocess.run([python, "-I", "-c", imported], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == f"{str(root / 'rocm_wheels/__init__.py')!a}\n", done.stderr


@pytest.mark.parametrize("group", ["relase", "../../x", "--docker"])
def test_script_refuses_an_unknown_dependency_group(checkout: Checkout, group: str) -> None:
    setup = [str(checkout.root / SCRIPT.name), "--setup", group]
    done = subprocess.run(setup, env=checkout.env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith(f"error: --setup: there is no dependency group '{group}'\nKnown: build, ")
    assert not (checkout.root / "build").exists()


def test_script_recreates_a_broken_environment(checkout: Checkout) -> None:
    done = checkout.run(FAIL="1", UV_FAILS="1")
    assert done.returncode == 5
    assert len(checkout.calls) == 4
    checkout.run()
    assert len(checkout.calls) == 4


def test_a_failure_of_pip_gives_one_message_and_a_log(checkout: Checkout) -> None:
    done = checkout.run(FAIL="1", UV_FAILS="1", PRINT="of no use")
    printed = "What it printed is in repository/build/env.log."
    assert done.stderr == f"error: pip could not make the environment repository/build/env\n{printed}\n"
    assert done.stdout.count("\n") == 1
    assert (checkout.root / "build/env.log").read_text() == "of no use\nof no use\n"
    done = checkout.run(FAIL="1", UV_FAILS="1", PRINT="WARNING: Retrying (Retry(total=4)) after connection broken")
    index = "The package index did not answer: see the network, HTTPS_PROXY, PIP_INDEX_URL."
    assert done.stderr.splitlines()[1] == f"{index} {printed}"


def test_scripts_that_start_together_make_one_environment(checkout: Checkout, tmp_path: Path) -> None:
    held = tmp_path / "held"
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: checkout.run(SLOW="0.2", HELD=str(held)), range(3)))
    assert [each.returncode for each in done] == [0, 0, 0], [each.stderr for each in done]
    assert sorted("unchanged" in each.stdout for each in done) == [False, True, True]
    assert sum("locks/build.txt" in call for call in checkout.calls) == 1
    assert "env.lock" not in held.read_text(), "a build keeps the next one waiting"


def test_script_lends_its_pip_to_an_environment_without_one(checkout: Checkout) -> None:
    done = checkout.run(NO_ENSUREPIP="1")
    assert done.returncode == 0, done.stderr
    assert f"--python {checkout.root}/build/env/bin/python install" in checkout.calls[1]
    assert checkout.calls[1].endswith("/locks/pip.txt")
