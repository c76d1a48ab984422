"""What simulated calls of the crate and of the C library have in common: cases, compiled kernels, exact results.

`libflash_attn_rocm/tests/simulated.py` and `resident_calls.py` run them through AMD's HIP runtime, whose GPU is a
simulator: Rust reads the store, plans, loads and launches.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple
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
    digest = hashlib.sha256(ck_planner.PATH.read_bytes()).hexdigest()
    (directory / f"{target}.zip").write_bytes(store.archive(target, ("ck", "simulated"), objects, planner=digest))
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
