"""python -m flash_attn.doctor as it is run: without torch, with another torch, into a closed pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_SOURCE = Path(__file__).resolve().parent.parent


def test_who_reads_its_first_lines_sees_no_traceback() -> None:
    text = "from flash_attn.diagnosis import doctor, survey; survey.run_probe = lambda: ({}, ''); doctor.main([])"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", text], stdout=writer, stderr=subprocess.PIPE, cwd=_SOURCE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "looking; the first import of torch may take a while\n")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of an installed wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    labelled = {"FLASH_ATTN_LOCAL_VERSION": "rocm62torch2.5triton", "FLASH_ATTN_TORCH": "2.5", "FLASH_ATTN_ROCM": "6.2"}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--skip-dependency-check",
            "--outdir",
            directory,
            _SOURCE,
        ],
        env={**os.environ, **labelled, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"},
        check=True,
        capture_output=True,
    )
    (built,) = directory.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def run(python: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("FLASH_ATT", "PYTHON"))}
    return subprocess.run(
        [python, *arguments],
        env={**variables, "PYTHONPATH": str(where), "OMP_NUM_THREADS": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_runs_without_torch(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    done = run(python, wheel, "-m", "flash_attn.doctor")
    assert done.returncode == 1, done.stderr
    assert "No torch: torch is not installed" in done.stdout
    assert 'pip install "torch==2.5.1+rocm6.2" --index-url https://download.pytorch.org/whl/rocm6.2`' in done.stdout
    assert "2.8.3+rocm62torch2.5triton" in done.stdout
    done = run(python, wheel, "-c", "import flash_attn")
    assert "ImportError: flash_attn 2.8.3 needs torch 2.5 for ROCm 6.2" in done.stderr
    assert "`python -m flash_attn.doctor` tells how" in done.stderr


def test_it_runs_with_another_torch(wheel: Path, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_bytes(b"caf\xe9: no such locale\nninja: fatal: Killed\n")
    done = run(Path(sys.executable), wheel, "-m", "flash_attn.doctor", "--json", "--log", str(log))
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    keys = [finding["key"] for finding in result["findings"]]
    assert keys[0] in ("torch-cpu", "torch-cuda")
    assert "build-memory" in keys
    assert "torch-minor" not in keys  # the remedy of the first one replaces torch anyway
    assert result["location"] == str(wheel / "flash_attn")
    assert result["probe"]["call"]["forward_error"] <= result["probe"]["call"]["limit"]
    assert result["probe"]["call"]["unwritten"] == []
    assert result["probe"]["attention"]["error"] <= result["probe"]["attention"]["limit"]
    done = run(Path(sys.executable), wheel, "-m", "flash_attn.doctor", "--log", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "No such file" in done.stderr


def test_a_character_that_the_console_lacks_is_escaped() -> None:
    text = "from flash_attn.diagnosis import doctor, survey; survey.run_probe = lambda: ({}, ''); doctor.main([])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "FLASH_ATTENTION_PLACE": "J\xf6rg"}
    done = subprocess.run([sys.executable, "-c", text], cwd=_SOURCE, env=environment, capture_output=True, check=False)
    assert b"FLASH_ATTENTION_PLACE=J\\xf6rg" in done.stdout
    assert b"Traceback" not in done.stderr
