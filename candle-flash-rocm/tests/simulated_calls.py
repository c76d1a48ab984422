"""Calls of the crate through AMD's HIP runtime, whose GPU is a simulator: kernels of a target run for real.

    python -m amdgpu_simulator.hip.process 6.4 gfx942 candle-flash-rocm/tests/simulated_calls.py LIBRARY gfx942

LIBRARY is the example `simulated` of the crate. Rust reads the store, plans, loads and launches; this process executes
what arrives in the queues of the pretended GPU, and compares results and gradients with attention in fp32.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import tempfile
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("", "flash_attn_src")]

import torch  # noqa: E402 - after the path
from flash_attn.kernels.variants import Variant  # noqa: E402

from amdgpu_simulator import gpu  # noqa: E402
from amdgpu_simulator.hip import packets, through_hip  # noqa: E402
from amdgpu_simulator.isa import assembly, machine  # noqa: E402
from rocm_wheels.compile import store  # noqa: E402
from rocm_wheels.compile.compiler import Compiled  # noqa: E402

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WORKSPACE = 1 << 20


class Case(NamedTuple):
    """Sizes of a call; lengths make it one of packed sequences."""

    dtype: str
    batch: int
    seqlen: int
    heads: int
    heads_k: int
    head_dim: int
    causal: bool
    lengths: tuple[int, ...] = ()


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


def stored(target: str, directory: Path) -> list[Loaded]:
    """Compiles the kernels that the cases need, and writes their store."""
    found, objects = [], {}
    for dtype in sorted({case.dtype for case in CASES}):
        for operation in ("fwd", "bwd-dq", "bwd-dkdv"):
            variant = Variant(operation, dtype, 32, "plain")
            image, entry, text = gpu.compiled(target, variant)
            entry = {**entry, "sha256": hashlib.sha256(image).hexdigest()}
            objects[variant.name] = (store.group_of("triton", variant.name), Compiled(image, {variant.name: entry}))
            code = through_hip.code_of(image, entry["symbol"])
            found.append(Loaded(variant.name, entry["threads"], code, machine.Program(assembly.parse(text))))
    (directory / f"{target}.zip").write_bytes(store.archive(target, ("triton", "simulated"), objects))
    return found


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
        if case.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
        parts.append((scores.softmax(-1) @ one_v).transpose(0, 1))
    out = torch.cat(parts).reshape(q.shape)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors["dout"].float())]


def is_of(packet: packets.Packet, code: bytes) -> bool:
    """Whether a packet's kernel is this code. Reads no further than both agree: code may be the last in memory."""
    return all(packet.code(end) == code[:end] for end in (*range(64, len(code), 64), len(code)))


def call(library: ctypes.CDLL, kernels: list[Loaded], directory: Path, case: Case) -> list[str]:
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
        "scale": case.head_dim**-0.5, "causal": case.causal, "alibi": 0, "cu_seqlens_q": at, "cu_seqlens_k": at,
        "tensors": [tensors[name].data_ptr() for name in names], "workspace": [workspace.data_ptr(), WORKSPACE],
    }  # fmt: skip
    memory = gpu.ranges([*tensors.values(), workspace, starts])
    ran: list[str] = []

    def run(packet: packets.Packet) -> None:
        (kernel,) = (one for one in kernels if is_of(packet, one.code))
        ran.append(kernel.name)
        machine.launch(
            kernel.program,
            packet.blocks,
            packet.block[0],
            packet.content(),
            memory,
            shared=packet.shared,
            complete=True,
        )

    message = ctypes.create_string_buffer(1024)
    with packets.runtime().serving(run, 3):
        launches = library.candle_flash_rocm_run(json.dumps(request).encode(), message, ctypes.c_size_t(len(message)))
        if launches != 3:
            raise RuntimeError(f"{case}: {launches} launches, {message.value.decode()}")
    for name, exact in zip(("out", "dq", "dk", "dv"), wanted(tensors, case), strict=True):
        error = float((tensors[name].float() - exact).abs().max() / exact.abs().max())
        if not error < 2e-2:
            raise AssertionError(f"{case}: {name} is off by {error}")
    return ran


def main() -> None:
    library, target = ctypes.CDLL(sys.argv[1]), sys.argv[2]
    os.environ["CANDLE_FLASH_ROCM_HIP"] = os.environ["AMDGPU_HIP"]
    with tempfile.TemporaryDirectory() as scratch:
        kernels = stored(target, Path(scratch))
        for case in CASES:
            print(target, *case, *call(library, kernels, Path(scratch), case), flush=True)
    print(f"{len(CASES)} calls on {target}", flush=True)
    os._exit(0)  # the threads of the pretended GPU do not end


if __name__ == "__main__":
    main()
