"""Calls of the crate through AMD's HIP runtime, whose GPU is a simulator: kernels of a target run for real.

    python -m amdgpu_simulator.hip.process 6.4 gfx942 candle-flash-rocm/tests/simulated_calls.py LIBRARY gfx942
    python -m amdgpu_simulator.hip.process 6.4 gfx942 candle-flash-rocm/tests/simulated_calls.py LIBRARY gfx942 amd
    python -m amdgpu_simulator.hip.process 6.4 gfx942 candle-flash-rocm/tests/simulated_calls.py LIBRARY gfx942 amd-all

LIBRARY is the example `simulated` of the crate. The second line takes AMD's kernels for a forward by Composable Kernel
and one by assembly, the third for Composable Kernel's backward too, whose kernels take minutes to compile.
Rust reads the store, plans, loads and launches. This process executes what arrives in the queues of the pretended GPU,
and compares results and gradients with attention in fp32.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("", "flash_attn_src")]

import torch  # noqa: E402 - after the path
from flash_attn.attention.backends import triton as triton_backend  # noqa: E402
from flash_attn.attention.backends.ck import ComposableKernel  # noqa: E402
from flash_attn.core import ck_planner, device  # noqa: E402
from flash_attn.kernels import targets  # noqa: E402
from flash_attn.kernels.variants import Variant  # noqa: E402
from record_launches import Gpu, compute  # noqa: E402

from amdgpu_simulator import gpu, through_hip  # noqa: E402
from amdgpu_simulator.hip import packets  # noqa: E402
from amdgpu_simulator.isa import assembly, disassembly, machine  # noqa: E402
from rocm_wheels.compile import store  # noqa: E402
from rocm_wheels.compile.asm.units import AssemblyKernels  # noqa: E402
from rocm_wheels.compile.ck import compiler as ck_compiler  # noqa: E402
from rocm_wheels.compile.ck import instances as ck_instances  # noqa: E402
from rocm_wheels.compile.ck import planner  # noqa: E402
from rocm_wheels.compile.compiler import Compiled  # noqa: E402

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WORKSPACE = 1 << 20
SLOPES = torch.tensor([0.5, 0.25])


class Case(NamedTuple):
    """Sizes of a call; lengths make it one of packed sequences. launches: of kernels, in all."""

    dtype: str
    batch: int
    seqlen: int
    heads: int
    heads_k: int
    head_dim: int
    causal: bool
    lengths: tuple[int, ...] = ()
    alibi: bool = False
    launches: int = 3


# A forward with ALiBi slopes goes to Composable Kernel, one of 130 queries to assembly.
AMD_CASES = (
    Case("bf16", 1, 70, 2, 1, 32, True, alibi=True, launches=1),
    Case("bf16", 1, 130, 2, 1, 128, True, launches=1),
)
# The backward goes there too, of packed sequences as well.
AMD_BACKWARD_CASES = (
    Case("bf16", 1, 70, 2, 2, 32, True, alibi=True, launches=4),
    Case("bf16", 2, 40, 2, 2, 32, True, (40, 17), alibi=True, launches=4),
)
CASES = (
    Case("bf16", 1, 70, 2, 1, 32, True),
    Case("fp16", 2, 33, 2, 2, 24, False),
    Case("bf16", 2, 40, 2, 2, 32, True, (40, 17)),
)


class Loaded(NamedTuple):
    """A kernel of the store: its instructions as bytes, and as the simulator takes them."""

    name: str
    threads: int
    code: bytes
    program: machine.Program


def has_norms(target: str, dtype: str) -> bool:
    """Whether a backward launches one kernel more, which finds the range of its inputs."""
    return dtype == "fp16" and targets.get(target).flushes_subnormals


def stored(target: str, directory: Path, cases: Sequence[Case], more: Sequence[Variant] = ()) -> list[Loaded]:
    """Compiles the kernels that the cases need, and `more`, and writes their store."""
    result, objects = [], {}
    variants = list(more)
    for dtype in sorted({case.dtype for case in cases}):
        variants += [Variant(operation, dtype, 32, "plain") for operation in ("fwd", "bwd-dq", "bwd-dkdv")]
        if has_norms(target, dtype):
            variants.append(Variant("bwd-norms", dtype, 64, "plain"))
    for variant in variants:
        image, entry, text = gpu.compiled(target, variant)
        entry = {**entry, "sha256": hashlib.sha256(image).hexdigest()}
        objects[variant.name] = (store.group_of("triton", variant.name), Compiled(image, {variant.name: entry}))
        code = through_hip.code_of(image, entry["symbol"])
        result.append(Loaded(variant.name, entry["threads"], code, machine.Program(assembly.parse(text))))
    (directory / f"{target}.zip").write_bytes(store.archive(target, ("triton", "simulated"), objects))
    return result


def names_of(case: Case, target: str) -> list[str]:
    """The kernels of Composable Kernel that Python launches for a case."""
    recorded = Gpu(target, composable=True)
    asked = {
        "dtype": case.dtype, "batch": case.batch, "seqlen_q": case.seqlen, "seqlen_k": case.seqlen, "heads": case.heads,
        "heads_k": case.heads_k, "head_dim": case.head_dim, "scale": 1.0, "softcap": 0.0, "alibi": case.alibi,
        "window": [-1, 0 if case.causal else -1], "lengths_q": list(case.lengths), "lengths_k": list(case.lengths),
        "page_size": 0, "used": False, "backward": case.launches > 1, "shares_starts": False,
    }  # fmt: skip
    with device.using(recorded):
        compute(asked, ComposableKernel(triton_backend))
    return [launch.kernel for launch in recorded.planned]


def composable(target: str, name: str) -> Compiled:
    """A kernel of Composable Kernel, from assembly that is kept from run to run."""

    text, _ = gpu.composable(target, name)

    def kept(_target: str, _name: str, _instances: object, scratch: Path, **_more: object) -> str:
        (scratch / "unit.s").write_text(text, encoding="utf-8")
        return text

    (instance,) = (one for _, unit in ck_instances.units(name) for one in unit if one.name == name)
    with mock.patch.object(ck_compiler, "translate", kept):
        return ck_compiler.compile_unit(target, name, [instance], cache=gpu.CACHE, toolchain="pypi")


def amd_stored(target: str, directory: Path, cases: Sequence[Case]) -> list[Loaded]:
    """As `stored`, AMD's kernels; writes the planner too."""
    ck_planner.PATH = planner.build(directory, cache=gpu.CACHE)
    compiled = {name: composable(target, name) for case in cases for name in names_of(case, target)}
    (unit,) = AssemblyKernels().units(target, only="asm-fwd-bf16-d128-causal")
    compiled["asm-fwd-bf16-d128-causal"] = AssemblyKernels().compile(unit, gpu.CACHE)
    result, objects = [], {}
    for name, (image, entries) in compiled.items():
        entry = {**entries[name], "sha256": hashlib.sha256(image).hexdigest()}
        objects[name] = (store.group_of("ck", name), Compiled(image, {name: entry}))
        code = through_hip.code_of(image, entry["symbol"])
        program = machine.Program(disassembly.kernel(image, entry["symbol"], target=target))
        result.append(Loaded(name, entry["threads"], code, program))
    (directory / f"{target}.zip").write_bytes(store.archive(target, ("ck", "simulated"), objects))
    return result


def wanted(tensors: dict[str, torch.Tensor], case: Case) -> list[torch.Tensor]:
    """out, dq, dk and dv in fp32, by the definition."""
    q, k, v = (tensors[name].float().requires_grad_() for name in "qkv")
    length = case.lengths or (case.seqlen,) * case.batch
    rows = [slice(*pair) for pair in pairwise([0, *accumulate(length)])]
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    parts = []
    for row in rows:
        one_q, one_k, one_v = (x[row].transpose(0, 1) for x in flat)
        one_k, one_v = (x.repeat_interleave(case.heads // case.heads_k, 0) for x in (one_k, one_v))
        scores = one_q @ one_k.transpose(1, 2) * case.head_dim**-0.5
        if case.alibi:
            places = torch.arange(len(one_q[0])).float()
            scores = scores - SLOPES[: case.heads, None, None] * (places[:, None] - places).abs()
        if case.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
        parts.append((scores.softmax(-1) @ one_v).transpose(0, 1))
    out = torch.cat(parts).reshape(q.shape)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors["dout"].float())]


def is_of(packet: packets.Packet, code: bytes) -> bool:
    """Whether a packet's kernel is this code. Reads no further than both agree: code may be the last in memory."""
    return all(packet.code(end) == code[:end] for end in (*range(64, len(code), 64), len(code)))


def call(library: ctypes.CDLL, target: str, loaded: list[Loaded], directory: Path, case: Case) -> list[str]:
    """One forward and backward of the crate, compared; the names of the kernels that ran."""
    torch.manual_seed(0)
    total = sum(case.lengths) or case.batch * case.seqlen
    first = (total,) if case.lengths else (case.batch, case.seqlen)
    shapes = {
        **dict.fromkeys(("q", "out", "dout", "dq"), case.heads),
        **dict.fromkeys(("k", "v", "dk", "dv"), case.heads_k),
    }
    tensors = {name: torch.randn(*first, heads, case.head_dim).to(DTYPES[case.dtype]) for name, heads in shapes.items()}
    tensors["lse"] = torch.full((case.heads * total,), float("nan"))
    for name in ("out", "dq", "dk", "dv"):
        tensors[name].fill_(float("nan"))
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8)
    starts = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32)
    names = ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv")
    at = starts.data_ptr() if case.lengths else 0
    request: dict[str, Any] = {
        "store": str(directory), "dtype": case.dtype, "batch": case.batch, "seqlen_q": case.seqlen,
        "seqlen_k": case.seqlen, "heads": case.heads, "heads_k": case.heads_k, "head_dim": case.head_dim,
        "total_q": total if case.lengths else 0, "total_k": total if case.lengths else 0,
        "scale": case.head_dim**-0.5, "causal": case.causal,
        "alibi": SLOPES.data_ptr() if case.alibi else 0, "cu_seqlens_q": at, "cu_seqlens_k": at,
        "tensors": [tensors[name].data_ptr() for name in names], "workspace": [workspace.data_ptr(), WORKSPACE],
    }  # fmt: skip
    if case.launches == 1:
        request["tensors"][names.index("dout")] = 0  # no backward
    memory = gpu.ranges([*tensors.values(), workspace, starts, SLOPES])
    ran: list[str] = []

    def run(packet: packets.Packet) -> None:
        (kernel,) = (one for one in loaded if is_of(packet, one.code))
        ran.append(kernel.name)
        machine.launch(
            kernel.program,
            packet.blocks,
            packet.block[0],
            packet.content(512 if kernel.name.startswith("asm-") else 0),
            memory,
            shared=packet.shared,
            complete=True,
        )

    message = ctypes.create_string_buffer(1024)
    expected = case.launches + (case.launches > 1 and has_norms(target, case.dtype))
    with packets.runtime().serving(run, expected):
        launches = library.candle_flash_rocm_run(json.dumps(request).encode(), message, ctypes.c_size_t(len(message)))
        if launches != expected:
            raise RuntimeError(f"{case}: {launches} launches, {message.value.decode()}")
    compared = ("out", "dq", "dk", "dv") if case.launches > 1 else ("out",)
    for name, exact in zip(compared, wanted(tensors, case), strict=False):
        error = float((tensors[name].float() - exact).abs().max() / exact.abs().max())
        if not error < 2e-2:
            raise AssertionError(f"{case}: {name} is off by {error}")
    return ran


def main() -> None:
    library, target, kind = ctypes.CDLL(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
    cases = {"": CASES, "amd": AMD_CASES, "amd-all": AMD_CASES + AMD_BACKWARD_CASES}[kind]
    os.environ["CANDLE_FLASH_ROCM_HIP"] = os.environ["AMDGPU_HIP"]
    with tempfile.TemporaryDirectory() as scratch:
        loaded = amd_stored(target, Path(scratch), cases) if kind else stored(target, Path(scratch), cases)
        for case in cases:
            print(target, *case, *call(library, target, loaded, Path(scratch), case), flush=True)
    print(f"{len(cases)} calls on {target}", flush=True)
    os._exit(0)  # the threads of the pretended GPU do not end


if __name__ == "__main__":
    main()
