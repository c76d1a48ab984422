"""What a wheel says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import flash_attn
import torch
from flash_attn.runtime import build_info, info

torch.set_num_threads(2)


def test_backend_info() -> None:
    told = flash_attn.backend_info()
    assert told["version"] == flash_attn.__version__ == "2.8.3"
    assert told["torch"]["running"] == torch.__version__
    assert set(told) == {*("backend", "version", "label", "torch", "targets", "device_targets", "launcher", "problems")}


def test_build_info_of_a_wheel(tmp_path: Path) -> None:
    path = tmp_path / "_build_info.json"
    assert build_info.read(path) == build_info.BuildInfo()
    path.write_text(
        json.dumps(
            {
                "version": "2.7.4",
                "label": "rocm62torch2.5triton",
                "torch": "2.5",
                "rocm": "6.2",
                "backend": "triton",
                "targets": ["gfx90a", "gfx942"],
                "compiler": None,
                "of a later build": 1,
            }
        )
    )
    read = build_info.read(path)
    assert (read.version, read.targets, read.torch_minor, read.compiler) == (
        *("2.7.4", ("gfx90a", "gfx942"), "2.5", ""),
    )
    assert info.torch_problems(read, "2.5.1+rocm6.2", "6.2.41133") == []
    minor, kind = info.torch_problems(read, "2.6.0+cpu", None)
    assert "built for torch 2.5, torch 2.6.0+cpu is running" in minor
    assert "torch2.6" in minor
    assert "built for ROCm 6.2" in kind


def test_import_without_torch_says_which() -> None:
    root = Path(flash_attn.__file__).parents[1]
    script = f"import sys; sys.path.insert(0, {str(root)!r}); sys.modules['torch'] = None; import flash_attn"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ImportError: flash_attn 2.8.3 needs torch 2.5 or newer" in result.stderr
