"""The ComfyUI node: the cases of support/comfy_cases.py, on a stand-in of ComfyUI and on ComfyUI's own code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rocm_wheels import tables

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"
CHECKOUT = "FLASH_ATTN_COMFYUI"


def _run_cases(comfyui: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "comfy_cases.py"), comfyui]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_stand_in() -> None:
    assert len(_run_cases(str(SUPPORT / "comfy_stand_in"))) >= 11


@pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"{CHECKOUT} names no checkout of ComfyUI with its requirements")
def test_comfyui() -> None:
    assert "real_case_flux" in _run_cases(os.environ[CHECKOUT])


def test_absent_wheel_names_the_command(tmp_path: Path) -> None:
    """Loading the node needs no flash_attn; using it names the command that installs it."""
    (tmp_path / "flash_attn").mkdir()
    program = (
        "import sys; sys.path[:0] = [{root!r}]\n"
        "import comfyui\n"
        "try:\n    comfyui.NODE_CLASS_MAPPINGS['FlashAttentionROCm']().patch(None)\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    for package in (None, "__version__ = '2.8.3'\n"):
        if package is not None:
            (tmp_path / "flash_attn" / "__init__.py").write_text(package)
            program = "import sys; sys.path[:0] = [{other!r}]\n" + program
        code = program.format(root=str(ROOT), other=str(tmp_path))
        blocked = "" if package else "import importlib.util as u; u.find_spec = lambda name: None\n"
        out = subprocess.run(
            [sys.executable, "-c", code.replace("import comfyui\n", f"import comfyui\n{blocked}")],
            capture_output=True, text=True, check=True, cwd=tmp_path,
        ).stdout  # fmt: skip
        assert f'"{sys.executable}" -m pip install --no-deps' in out
        assert ("is not the one for AMD GPUs" in out) == (package is not None)


def test_registry_metadata() -> None:
    """What the registry asks for, and no dependency: it could replace ComfyUI's torch."""
    data: Any = tables.parse((ROOT / "comfyui" / "pyproject.toml").read_text(), "pyproject.toml")
    assert data["project"]["dependencies"] == []
    assert not (ROOT / "comfyui" / "requirements.txt").exists()
    assert "comfyui" not in data["project"]["name"]
    assert set(data["tool"]["comfy"]) == {"PublisherId", "DisplayName", "requires-comfyui"}
    assert (ROOT / "comfyui" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
