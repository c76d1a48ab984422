"""docs/api.md says what the code does: its table is made anew and compared, what it calls absent is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
_SCRIPT = _DOCS / "generate_api.py"
# What the page lists by its name alone; the rest are modules below flash_attn.
_WHOLE = {
    "ParallelMHA": "modules.mha.ParallelMHA",
    "ParallelMLP": "modules.mlp.ParallelMLP",
    "ParallelGatedMlp": "modules.mlp.ParallelGatedMlp",
    "dropout_add_rms_norm_subset": "ops.rms_norm.dropout_add_rms_norm_subset",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script runs kernels in Triton's interpreter")
def test_the_page_is_what_the_code_does() -> None:
    done = subprocess.run([sys.executable, _SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_the_page_calls_absent_raises_an_import_error() -> None:
    (listed,) = re.findall(r"raises ImportError: upstream's (.*?)\.\n\n", (_DOCS / "api.md").read_text(), re.DOTALL)
    names = []
    for name in re.findall("`(.*?)`", listed):
        start, _, ends = name.partition("{")
        names += [start + end for end in ends.rstrip("}").split(",")]
    assert len(names) > 20
    for name in names:
        home, _, last = f"flash_attn.{_WHOLE.get(name, name)}".rpartition(".")
        with pytest.raises(ImportError):
            exec(f"from {home} import {last}")
