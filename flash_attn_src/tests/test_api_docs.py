"""docs/api.md is up to date: its table is generated again and compared, and names that it calls absent are absent."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
_SCRIPT = _DOCS / "generate_api.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script runs kernels in Triton's interpreter")
def test_the_api_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, _SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _spelled_out(name: str) -> list[str]:
    """`a_{,b_}c` as a_c and a_b_c."""
    start, opened, rest = name.partition("{")
    middle, _, end = rest.partition("}")
    return [each for part in middle.split(",") for each in _spelled_out(start + part + end)] if opened else [name]


def test_names_on_the_api_page_exist() -> None:
    (table,) = re.findall(r"\| module \| what \|\n\|-\|-\|\n(.*?)\n\n", (_DOCS / "api.md").read_text(), re.DOTALL)
    count = 0
    for row in table.splitlines():
        _, homes, what, _ = row.split("|")
        modules = [importlib.import_module(name) for name in re.findall("`(.*?)`", homes)]
        for name in (each for listed in re.findall("`(.*?)`", what) for each in _spelled_out(listed)):
            if name.endswith("*"):  # `_wrapped_*`
                assert any(other.startswith(name[:-1]) for module in modules for other in dir(module)), row
                continue
            submodules = [importlib.util.find_spec(f"{module.__name__}.{name}") for module in modules
                          if hasattr(module, "__path__")]  # fmt: skip
            assert any(hasattr(module, name) for module in modules) or any(submodules), (homes, name)
            count += 1
    assert count > 70


def test_absent_names_on_the_page_raise_an_import_error() -> None:
    (listed,) = re.findall(r"raises ImportError: upstream's (.*?)\.\n\n", (_DOCS / "api.md").read_text(), re.DOTALL)
    names = []
    for name in re.findall("`(.*?)`", listed):
        start, _, ends = name.partition("{")
        names += [start + end for end in ends.rstrip("}").split(",")]
    assert len(names) >= 20
    for name in names:
        home, _, last = f"flash_attn.{name}".rpartition(".")
        with pytest.raises(ImportError):
            exec(f"from {home} import {last}")
