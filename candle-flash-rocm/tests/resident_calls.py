"""Tensors on candle's ROCm device, through the crate and AMD's HIP runtime, whose GPU is a simulator.

    python -m amdgpu_simulator.hip.process 6.4 gfx942 candle-flash-rocm/tests/resident_calls.py LIBRARY gfx942

LIBRARY is the library of rocm_candle/make.py: the crate with CANDLE_FLASH_ROCM_DEVICE=1, and a candle with a stand-in
for a ROCm device. candle's autograd asks for the gradients.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import tempfile
from pathlib import Path

import torch
from simulated_calls import DTYPES, Case, Loaded, is_of, stored, wanted

from amdgpu_simulator.hip import packets
from amdgpu_simulator.isa import machine

# The head dim of the second case is padded by the crate.
CASES = (Case("bf16", 1, 70, 2, 1, 32, True), Case("fp16", 2, 33, 2, 2, 20, False))
CAPACITY = 1 << 22


def mapped(content: bytes) -> list[tuple[int, int]]:
    """The mappings of this process that addresses among a kernel's arguments lie in."""
    words = struct.unpack(f"<{len(content) // 8}Q", content[: len(content) // 8 * 8])
    result = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        start, end = (int(place, 16) for place in line.split()[0].split("-"))
        if line.split()[1].startswith("rw") and any(start <= word < end for word in words):
            result.append((start, end - start))
    return result


def call(library: ctypes.CDLL, kernels: list[Loaded], case: Case) -> list[str]:
    """Forwards with and without a backward, compared; the names of the kernels that ran."""
    torch.manual_seed(0)
    heads = {"q": case.heads, "k": case.heads_k, "v": case.heads_k, "dout": case.heads}
    shapes = {name: (case.batch, case.seqlen, count, case.head_dim) for name, count in heads.items()}
    tensors = {name: torch.randn(*shape).to(DTYPES[case.dtype]) for name, shape in shapes.items()}
    request = {
        "shapes": list(shapes.values()), "elements": [x.float().flatten().tolist() for x in tensors.values()],
        "dtype": case.dtype, "scale": case.head_dim**-0.5, "causal": case.causal,
    }  # fmt: skip
    ran: list[str] = []

    def run(packet: packets.Packet) -> None:
        (kernel,) = (kernel for kernel in kernels if is_of(packet, kernel.code))
        ran.append(kernel.name)
        content = packet.content()
        machine.launch(
            kernel.program,
            packet.blocks,
            packet.block[0],
            content,
            mapped(content),
            shared=packet.shared,
            complete=True,
        )

    answer = ctypes.create_string_buffer(CAPACITY)
    with packets.runtime().serving(run, 4):  # two forwards, and two kernels of the backward
        status = library.rocm_candle_run(json.dumps(request).encode(), answer, ctypes.c_size_t(CAPACITY))
        if status:
            raise RuntimeError(f"{case}: {answer.value.decode()}")
    result = json.loads(answer.value)
    for name, values, exact in zip(
        ("out", "dq", "dk", "dv"), (result["out"], *result["gradients"]), wanted(tensors, case), strict=True
    ):
        error = float((torch.tensor(values).view(exact.shape) - exact).abs().max() / exact.abs().max())
        if not error < 2e-2:
            raise AssertionError(f"{case}: {name} is off by {error}")
    return ran


def main() -> None:
    library, target = ctypes.CDLL(sys.argv[1]), sys.argv[2]
    os.environ["CANDLE_FLASH_ROCM_HIP"] = os.environ["AMDGPU_HIP"]
    with tempfile.TemporaryDirectory() as scratch:
        kernels = stored(target, Path(scratch), CASES)
        os.environ["CANDLE_FLASH_ROCM_STORE"] = scratch
        for case in CASES:
            print(target, *case, *call(library, kernels, case), flush=True)
    print(f"{len(CASES)} calls on {target}", flush=True)
    os._exit(0)  # the threads of the pretended GPU do not end


if __name__ == "__main__":
    main()
