"""The import with nothing set, and the public API."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_attn
import pytest
import torch
from helpers import fresh

TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
# Function -> (arguments without a default, the others with theirs), as upstream's 2.6 to 2.8.
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "flash_attn_func": (["q", "k", "v"], TAIL),
    "flash_attn_kvpacked_func": (["q", "kv"], TAIL),
    "flash_attn_qkvpacked_func": (["qkv"], TAIL),
    "flash_attn_varlen_func": (
        ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
        {**TAIL, "block_table": None},
    ),
    "flash_attn_varlen_kvpacked_func": (
        ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
        TAIL,
    ),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], TAIL),
    "flash_attn_with_kvcache": (
        ["q", "k_cache", "v_cache"],
        {
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
}
_IMPORT = """
import json, sys, time, warnings
import torch
warnings.simplefilter("error")
before, started = set(sys.modules), time.perf_counter()
import flash_attn
seconds = time.perf_counter() - started
print(json.dumps({"file": flash_attn.__file__, "seconds": seconds, "new": sorted(set(sys.modules) - before)}))
"""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    every = inspect.signature(getattr(flash_attn, name)).parameters
    # What upstream does not have comes by keyword alone.
    own = [key for key, each in every.items() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(every[key].default is None for key in own)
    parameters = {key: each for key, each in every.items() if key not in own}
    required = [key for key, each in parameters.items() if each.default is inspect.Parameter.empty]
    defaults = {key: each.default for key, each in parameters.items() if key not in required}
    assert (required, defaults) == SIGNATURES[name]
    assert list(parameters) == [*required, *defaults]


def test_import_needs_nothing(package: Path, record_property: Callable[[str, object], None]) -> None:
    done = fresh(_IMPORT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["file"]).parent == package, "another flash_attn shadows the installed one"
    assert not [name for name in found["new"] if name.partition(".")[0] == "triton"]
    record_property("import seconds", round(found["seconds"], 3))


def test_the_extension_module_of_upstream() -> None:
    """TransformerEngine and text-generation-inference import it by name."""
    extension = importlib.import_module("flash_attn_2_cuda")
    assert all(callable(getattr(extension, name)) for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"))


def test_backend_info(build_info: dict[str, Any]) -> None:
    info = flash_attn.backend_info()
    assert info["backend"] == build_info["backend"]
    assert list(info["targets"]) == build_info["targets"]
    json.dumps(info)


def test_the_doctor_finds_the_wheel_whole(package: Path) -> None:
    """The doctor may report this machine's torch, but neither the wheel nor a call."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("FLASH_ATT", "PYTHONPATH"))}
    command = [sys.executable, "-m", "flash_attn.doctor", "--json"]
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert Path(found["location"]) == package.resolve()
    assert found["probe"]["call"]["forward_error"] <= found["probe"]["call"]["limit"]
    assert not {"wheel-incomplete", "shadowed", "call-failed"} & {finding["key"] for finding in found["findings"]}


@pytest.mark.skipif(not torch.version.hip, reason="this torch is no ROCm build")
def test_one_hip_runtime_is_loaded() -> None:
    done = fresh("import torch, flash_attn; print(open('/proc/self/maps').read())")
    mapped = {line.split()[-1] for line in done.stdout.splitlines() if "libamdhip64" in line}
    assert len({Path(path).resolve() for path in mapped}) == 1, sorted(mapped)
