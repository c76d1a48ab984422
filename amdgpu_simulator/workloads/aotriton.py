"""AOTriton's Triton kernels, compiled by the Triton of a Python interpreter, on calls without dropout and bias.

A causal forward of AOTriton is persistent: its work groups take tiles by an atomic counter. Here each work group has
one tile, because the simulator knows no atomic that returns a value. AOTriton's kernel that prepares a backward is not
counted. Both simplifications favour AOTriton.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import torch

from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import arguments, assembly, machine, targets
from amdgpu_simulator.isa.assembly import Array
from amdgpu_simulator.peers import aotriton, compile_kernel
from amdgpu_simulator.peers.aotriton import DKDV, DQ, FORWARD, Checkout, Tile
from amdgpu_simulator.workloads import Workload, every_tile
from rocm_wheels.compile import codeobject
from rocm_wheels.compile.check import stage
from rocm_wheels.errors import CompileFailed

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Matrix products per tile, each over the columns of a head.
_PRODUCTS = {FORWARD: 2, DQ: 3, DKDV: 4}
_TENSORS = {"q", "k", "v", "out", "do", "dk", "dv", "dq"}
_LISTS = {"cu_seqlens_q", "cu_seqlens_k", "seq_strides_q", "seq_strides_k"}
_ABSENT = {"b", "a", "db", "encoded_softmax"}
_DROPOUT = {
    *("dropout_p", "philox_seed_ptr", "philox_offset1", "philox_offset2"),
    *("philox_seed_output", "philox_offset_output"),
}
_SCALES = {"q_descale", "k_descale", "p_scale", "p_descale", "v_descale"}
_OFF = {"enable_dropout", "return_encoded_softmax", "bias_type", "use_alibi", "int8", "int8_kv", "use_p_scale"}
_COUNTS = {"num_head_q", "num_head_k", "num_seqlens", "max_seqlen_q", "max_seqlen_k", "num_cu", "batch"}


def workload(
    checkout: Checkout,
    target: str,
    kernel: str,
    dtype: str,
    head_dim: int,
    tile: Tile,
    *,
    causal: bool = False,
    python: str = sys.executable,
) -> Workload:
    """A kernel with a tile. python: the interpreter whose Triton compiles. Raises CompileFailed, ValueError."""
    names = checkout.arguments(kernel)
    constants, types, divisors = _specialise(kernel, names, target, dtype, head_dim, tile, causal)
    request = {
        "directory": str(checkout.kernels),
        "module": checkout.module(kernel),
        "function": kernel,
        "target": target,
        "wave": targets.get(target).wave,
        "signature": {name: types.get(name, "constexpr") for name in names},
        "constants": constants,
        "divisors": divisors,
        "options": {"num_warps": tile.warps, "num_stages": tile.stages, "waves_per_eu": tile.waves_per_eu},
    }
    where = f"AOTriton's {kernel} for {target}"
    compiled = _compile(request, python, where)
    # The same check as for every kernel of this project: the simulator refuses code with hazards.
    text, _ = stage.checked(compiled["assembly"], target, where)
    program = assembly.parse(text)
    rows = tile.block_n if kernel == DKDV else tile.block_m
    threads = tile.warps * targets.get(target).wave

    def run(length: int) -> Record:
        record = Record(program)
        values = _values(kernel, rows, length, dtype, head_dim)
        content, ranges = arguments.pack(program, [values[name.lower()] for name in names if name in types])
        machine.launch(machine.Program(program, record), (1, 1, 1), threads, content, ranges, shared=compiled["shared"])
        return record

    return Workload(
        target=target,
        rows=rows,
        entry={
            "threads": threads,
            "shared": compiled["shared"],
            "resources": codeobject.read(b64decode(compiled["image"])).resources(),
            "triton": compiled["triton"],
        },
        run=run,
        programs=every_tile(rows),
        operations=2 * _PRODUCTS[kernel] * head_dim,
    )


def _compile(request: dict[str, Any], python: str, where: str) -> dict[str, Any]:
    """Runs `compile_kernel` under an interpreter. Raises CompileFailed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "AMDGCN_"))}
    command = [python, "-I", str(Path(compile_kernel.__file__))]
    try:
        done = subprocess.run(command, input=json.dumps(request), env=kept, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"{python} does not run: {error}") from error
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise CompileFailed(f"{where}: the Triton of {python} cannot compile it: {reason}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _specialise(
    kernel: str, names: list[str], target: str, dtype: str, head_dim: int, tile: Tile, causal: bool
) -> tuple[dict[str, Any], dict[str, str], dict[str, int]]:
    """Constants, types of the other arguments, and their divisors, as AOTriton's build chooses them.

    Raises ValueError for an argument that is unknown here.
    """
    size = aotriton.padded(head_dim)
    is_padded = size != head_dim
    fixed = {
        "block_dmodel": size,
        "padded_head": is_padded,
        "causal_type": aotriton.WINDOWED if causal else 0,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "pre_load_v": tile.preload,
        "num_xcds": 8 if target in ("gfx942", "gfx950") else 1,
        "persistent_type": 0,
        "persistent_atomic_counter": 0,
        "grid_cu_multip": 2,
        **({} if is_padded else {"hdim_qk": size, "hdim_vo": size}),
        **({} if causal else {"window_left": 0, "window_right": 0}),
        **dict.fromkeys(_ABSENT | _DROPOUT | _SCALES, 0),
        **dict.fromkeys(_OFF, False),
    }
    constants: dict[str, Any] = {}
    types: dict[str, str] = {}
    divisors: dict[str, int] = {}
    for name, following in zip(names, [*names[1:], ""], strict=True):
        lower = name.lower()
        if lower in fixed:
            constants[name] = fixed[lower]
        elif lower.startswith("stride_"):
            stem = lower.removeprefix("stride_")[:-1]
            is_last = not following.lower().startswith(f"stride_{stem}")
            if stem in _ABSENT or is_last:
                constants[name] = 0 if stem in _ABSENT else 1
            else:
                types[name], divisors[name] = "u64", 8
        elif lower in _TENSORS | _LISTS | {"l", "d"}:
            types[name] = f"*{dtype}" if lower in _TENSORS else "*i32" if lower in _LISTS else "*fp32"
            divisors[name] = 16
        elif lower in _COUNTS | {"hdim_qk", "hdim_vo", "window_left", "window_right"}:
            types[name] = "i32"
        elif lower == "sm_scale":
            types[name] = "fp32"
        else:
            raise ValueError(f"argument {name} of {kernel} is unknown: this version of AOTriton is not supported")
    return constants, types, divisors


def _values(kernel: str, rows: int, length: int, dtype: str, head_dim: int) -> dict[str, Array | int | float]:
    """The arguments of one work group, by their names in lower case. A causal mask hides half of its last tile."""
    queries, keys = (length, rows) if kernel == DKDV else (rows, length)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, 1, n, head_dim, generator=generator).to(_TYPES[dtype]) for n in (queries, keys, keys, queries)
    )
    scale = 1 / math.sqrt(head_dim)
    scores = q.float() @ k.float().mT * scale
    lse = scores.logsumexp(-1)
    delta = (do.float() * ((scores - lse[..., None]).exp() @ v.float())).sum(-1)
    shaped = {
        "q": q, "k": k, "v": v, "do": do, "out": torch.zeros_like(q), "dq": torch.zeros_like(q),
        "dk": torch.zeros_like(k), "dv": torch.zeros_like(v),
    }  # fmt: skip
    values: dict[str, Array | int | float] = {name: x.view(torch.int16).numpy() for name, x in shaped.items()}
    for name, x in shaped.items():
        stem = {"out": "o"}.get(name, name)
        values |= {
            f"stride_{stem}{axis}": step for axes in ("zhmk", "zhnk", "zhkn", "zhmn")
            for axis, step in zip(axes[:3], x.stride(), strict=False)
        }  # fmt: skip
    return values | dict.fromkeys(_LISTS, torch.zeros(0, dtype=torch.int32).numpy()) | {
        "l": lse.numpy(), "d": delta.numpy(), "sm_scale": scale,
        "num_head_q": 1, "num_head_k": 1, "num_seqlens": 0, "max_seqlen_q": queries, "max_seqlen_k": keys,
        "num_cu": 1, "batch": 1, "hdim_qk": head_dim, "hdim_vo": head_dim,
        "window_left": queries + keys, "window_right": max(keys - queries, 0),
    }  # fmt: skip
