"""Records what flash_attn's backends launch for a list of calls, for tests/launches.rs to compare with.

    python candle-flash-rocm/tests/record_launches.py           writes tests/data/launches.json
    python candle-flash-rocm/tests/record_launches.py --check   fails where the file is not what it would write

Tensors are on the CPU and nothing runs: a stand-in for a GPU keeps names, grids and arguments. The addresses of a
call's own tensors become fixed numbers by name, others numbers in the order of their first appearance.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from flash_attn.attention.backends import triton as triton_backend
from flash_attn.attention.backends.asm.arguments import LAYOUTS
from flash_attn.attention.backends.ck import ComposableKernel
from flash_attn.attention.backends.sources import Sources
from flash_attn.call.calls import AttentionCall, GradientCall, attention_call
from flash_attn.core import ck_planner, device
from flash_attn.core.arguments import Arguments
from flash_attn.kernels import assembly, launches, planning, providers, signatures
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.variants import Variant, table

OUTPUT = Path(__file__).resolve().parent / "data" / "launches.json"

# Compute units of a GPU of each target.
TARGETS = {"gfx942": 304, "gfx1100": 96, "sm_90": 132}
# The names of the arguments of all kernels, as in the stores of these targets and of one with `bwd-norms`.
SIGNATURES = sorted({text for target in (*TARGETS, "gfx90a") for text in signatures.signatures(target)})
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# Where a call's own tensors are said to be, 4 GiB apart; other addresses start at OTHERS.
NAMES = (
    *("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"),
    *("cu_seqlens_q", "cu_seqlens_k", "alibi", "table", "lengths"),
)
APART = 1 << 32
OTHERS = 100

# Kernels that the crate plans and no case needs: their arguments' names are recorded.
UNREACHED = [op for op in OPERATIONS if op.startswith(("bwd-db", "bwd-dd", "bwd-ds", "int8-", "fp8-"))]

Case = dict[str, Any]


def cases() -> Iterator[Case]:
    """Sizes are chosen so that every branch of the backend is taken: grids, splits of the keys, parts of dk and dv."""
    base: Case = {
        "dtype": "bf16", "batch": 2, "seqlen_q": 300, "seqlen_k": 300, "heads": 4, "heads_k": 2, "head_dim": 64,
        "scale": 0.125, "softcap": 0.0, "window": [-1, -1], "alibi": False, "lengths_q": [], "lengths_k": [],
        "page_size": 0, "columns": 0, "used": False, "backward": True, "shares_starts": False,
    }  # fmt: skip
    for dtype, head_dim in product(DTYPES, (32, 64, 96, 128, 192, 256, 40)):
        yield base | {"dtype": dtype, "head_dim": head_dim, "window": [-1, 0]}
    for dtype, head_dim, score in product(DTYPES, (512, 264), ({}, {"alibi": True})):
        yield base | {"dtype": dtype, "head_dim": head_dim, "window": [-1, 0], "seqlen_q": 90, "seqlen_k": 90} | score
    for dtype, page_size in product(DTYPES, (0, 16)):
        keys = {"lengths_q": [1, 1], "lengths_k": [9000, 70], "page_size": page_size, "columns": 563, "used": True}
        cached = keys if page_size else {"seqlen_q": 1, "seqlen_k": 9000}
        yield base | {"dtype": dtype, "head_dim": 512, "heads_k": 1, "backward": False} | cached
    scores = ({"alibi": True}, {"softcap": 30.0}, {"alibi": True, "softcap": 30.0}, {"scale": -0.5}, {})
    windows = ([-1, -1], [-1, 0], [100, 0], [7, 50], [64, -1])
    for score, window in product(scores, windows):
        yield base | score | {"window": window}
    # More queries than keys, one query, none, none of the keys; many heads that share a key head.
    for seqlen_q, seqlen_k in ((513, 77), (1, 129), (0, 5), (5, 0)):
        yield base | {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for batch, heads, seqlen in ((1, 8, 2048), (1, 32, 1024), (4, 12, 700), (1, 32, 8192)):
        yield base | {"batch": batch, "heads": heads, "heads_k": 1, "seqlen_q": seqlen, "seqlen_k": seqlen}
    # Decoding: keys are split among programs, joined plainly or many at a time.
    shapes = (
        (1, 1, 8192, 32, 4),
        (8, 1, 4096, 32, 8),
        (1, 1, 131072, 8, 1),
        (64, 1, 600, 32, 32),
        (2, 40, 9000, 16, 2),
    )
    for (batch, seqlen_q, seqlen_k, heads, heads_k), head_dim in product(shapes, (64, 128, 256)):
        sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": heads, "heads_k": heads_k}
        yield base | sizes | {"head_dim": head_dim, "backward": False, "window": [-1, 0]}
    decoding = base | {"batch": 1, "seqlen_q": 1, "seqlen_k": 30000, "heads": 8, "heads_k": 2, "backward": False}
    for score in ({"alibi": True}, {"softcap": 5.0}, {"window": [4000, 0]}, {"dtype": "fp32"}, {"dtype": "fp16"}):
        yield decoding | score
    # Packed sequences; blocks by sequence and by packed rows; rows outside of every sequence.
    for lengths_q, lengths_k in (
        ([100, 200, 3], [120, 200, 50]),
        ([4096] + [16] * 60, [4096] + [16] * 60),
        ([0, 5], [7, 0]),
        ([1] * 20, [900] * 20),
    ):
        for window, score in product(([-1, -1], [-1, 0], [9, 9]), ({}, {"alibi": True}, {"softcap": 3.0})):
            packed = {"lengths_q": lengths_q, "lengths_k": lengths_k, "batch": len(lengths_q), "window": window}
            yield base | packed | score
    # Heads that share nothing, of which Composable Kernel does the backward.
    for lengths, dtype, head_dim in product(([], [100, 200, 3]), ("fp16", "bf16"), (32, 64, 128, 256)):
        sizes = {"heads_k": 4, "lengths_q": lengths, "lengths_k": lengths, "batch": len(lengths) or 2}
        yield base | sizes | {"dtype": dtype, "head_dim": head_dim, "alibi": head_dim == 64, "window": [-1, 0]}
    # AMD's assembly: tiles by heads and not, sequences of as many keys as queries.
    wide = base | {"head_dim": 128}
    for heads, lengths, window in product((4, 8), ([], [300, 140]), ([-1, -1], [-1, 0], [50, 0])):
        sizes = {"heads": heads, "lengths_q": lengths, "lengths_k": lengths, "shares_starts": bool(lengths)}
        yield wide | sizes | {"window": window}
    for more in (
        {"dtype": "fp16"},
        {"seqlen_q": 100},
        {"seqlen_q": 129},
        {"heads": 8, "seqlen_q": 20000},
        {"scale": 0.0},
    ):
        yield wide | {"window": [-1, 0], "seqlen_k": 20000, "backward": False} | more
    grouped = {"lengths_q": [3000, 2500], "lengths_k": [3000, 2500], "heads": 16, "heads_k": 1}
    yield base | grouped
    # Pages that are multiples of a block and others; few queries over many keys.
    for page_size, dtype, lengths in product((16, 48, 256), DTYPES, (([5, 70], [300, 90]), ([1] * 3, [20000, 5, 700]))):
        columns = -(-max(lengths[1]) // page_size)
        packed = {"lengths_q": lengths[0], "lengths_k": lengths[1], "batch": len(lengths[0]), "backward": False}
        pages = {"page_size": page_size, "columns": columns, "used": True}
        yield base | packed | pages | {"dtype": dtype, "window": [-1, 0]}
    # A part of the keys: dense ones below and above the length from which keys are split, and packed ones.
    used = base | {"used": True, "backward": False, "heads": 8, "head_dim": 128}
    for seqlen_k, dtype in product((64, 300, 511, 9000, 40000), DTYPES):
        yield used | {"seqlen_q": 1, "seqlen_k": seqlen_k, "dtype": dtype}
    for lengths, window in product(([1, 1], [300, 7]), ([-1, -1], [-1, 0], [200, 0])):
        yield used | {"lengths_q": lengths, "lengths_k": [20000, 9000], "window": window}


class Kernel:
    """A kernel that keeps its launches."""

    arguments: Arguments

    def __init__(self, variant: Variant, constants: dict[str, Any], kept: list[tuple[Any, ...]]) -> None:
        self.name = variant.name
        self.block_m = constants.get("BLOCK_M", 0)
        self.block_n = constants.get("BLOCK_N", 0)
        self.num_xcds = constants.get("NUM_XCDS", 1)
        self._kept = kept

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[int | float],
    ) -> None:
        if 0 not in grid:  # which launches nothing
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            # The tensors too: memory that is used again would have the number of what was there before.
            self._kept.append((self.name, grid, addresses, tuple(numbers), tensors))


class Gpu:
    """A GPU of a target that launches nothing."""

    def __init__(self, target: str, *, composable: bool = False, compute_units: int = 0) -> None:
        self.target = target
        self.composable = composable
        self.compute_units = compute_units or TARGETS[target]
        self.tiles: dict[str, list[int]] = {}
        self.kept: list[tuple[Any, ...]] = []
        self.planned: list[Any] = []

    def kernel(self, variant: Variant) -> Kernel:
        kernel = Kernel(variant, launches.specification(variant, self.target).constants, self.kept)
        kernel.arguments = Arguments.of(variant, self.target)
        signature = SIGNATURES.index(" ".join(signatures.names(variant, self.target)))
        self.tiles[variant.name] = [kernel.block_m, kernel.block_n, kernel.num_xcds, signature]
        return kernel

    def has_composable_kernel(self) -> bool:
        return self.composable

    def has_stored(self, name: str) -> bool:
        return any((kernel.name, kernel.target) == (name, self.target) for kernel in assembly.KERNELS)

    def submit(self) -> bool:
        return True

    def run(self, planned: Sequence[Any], _tensors: Sequence[torch.Tensor | None]) -> None:
        """Keeps planned launches. What Composable Kernel's planner was asked for: see `asked_of_the_planner`."""
        self.planned.extend(planned)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    """The tensors of a case by their names, uninitialized."""
    dtype, heads, heads_k, dim = DTYPES[case["dtype"]], case["heads"], case["heads_k"], case["head_dim"]
    result: dict[str, torch.Tensor] = {}
    if case["lengths_q"]:
        shape_q = (sum(case["lengths_q"]) + 5, heads, dim)
        shape_k = (sum(case["lengths_k"]) + 5, heads_k, dim)
        result["cu_seqlens_q"] = starts(case["lengths_q"])
        result["cu_seqlens_k"] = result["cu_seqlens_q"] if case["shares_starts"] else starts(case["lengths_k"])
    else:
        shape_q = (case["batch"], case["seqlen_q"], heads, dim)
        shape_k = (case["batch"], case["seqlen_k"], heads_k, dim)
    if case["page_size"]:
        shape_k = (case["batch"] * case["columns"], case["page_size"], heads_k, dim)
        result["table"] = torch.zeros(case["batch"], case["columns"], dtype=torch.int32)
    for name in ("q", "dout", "dq"):
        result[name] = torch.empty(shape_q, dtype=dtype)
    for name in ("k", "v", "dk", "dv"):
        result[name] = torch.empty(shape_k, dtype=dtype)
    if case["alibi"]:
        result["alibi"] = torch.zeros(heads)
    if case["used"]:
        result["lengths"] = torch.zeros(len(case["lengths_q"]) or case["batch"], dtype=torch.int32)
    return result


def call_of(case: Case, tensors: dict[str, torch.Tensor]) -> AttentionCall:
    left, right = case["window"]
    causal = (left, right) == (-1, 0)
    return attention_call(
        tensors["q"], tensors["k"], tensors["v"], softmax_scale=case["scale"], causal=causal,
        window_size=(-1, -1) if causal else (left, right), softcap=case["softcap"], alibi_slopes=tensors.get("alibi"),
        cu_seqlens_q=tensors.get("cu_seqlens_q"), cu_seqlens_k=tensors.get("cu_seqlens_k"),
        max_seqlen_q=max(case["lengths_q"], default=0), max_seqlen_k=max(case["lengths_k"], default=0),
        block_table=tensors.get("table"), seqused_k=tensors.get("lengths"),
    )  # fmt: skip


def compute(case: Case, backend: Any) -> dict[str, torch.Tensor]:
    """Lets a backend serve a case; its tensors by their names."""
    tensors = tensors_of(case)
    call = call_of(case, tensors)
    result = backend.forward(call)
    tensors |= {"out": result.out, "lse": result.softmax_lse}
    if case["backward"]:
        gradients = tensors["dq"], tensors["dk"], tensors["dv"]
        backend.backward(GradientCall(call, tensors["dout"], result.out, result.softmax_lse, *gradients))
    return tensors


class Addresses:
    """The fixed numbers of a case's addresses."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._known = {tensors[name].data_ptr(): APART * (1 + i) for i, name in enumerate(NAMES) if name in tensors}
        self._known[0] = 0  # absent, or without an element
        self._first = len(self._known)

    def __call__(self, address: int) -> int:
        return self._known.setdefault(address, APART * (OTHERS + len(self._known) - self._first))


def launched(case: Case, gpu: Gpu) -> list[list[Any]]:
    """What a case launches: name, grid, and the arguments' bytes in hexadecimal."""
    gpu.kept.clear()
    addresses = Addresses(compute(case, triton_backend))
    result = []
    for name, grid, given, numbers, _ in gpu.kept:
        fixed = [addresses(address) for address in given]
        letters = "".join("f" if isinstance(number, float) else "i" for number in numbers)
        content = struct.pack(f"<{len(fixed)}Q{letters}", *fixed, *numbers)
        result.append([name, list(grid), content.hex()])
    return result


# Where the structures of the planner's calls have addresses: of the shape, of the tensors, of what follows them.
_SHAPE_BYTES, _TENSOR_BYTES = 104, 32
_OF_SHAPE = (72, 80, 88, 96)
_STRUCTURES = {"forward": (4, (0, 8, 16)), "backward": (8, (0, 8, 16))}


def asked_of_the_planner(case: Case) -> list[list[str]]:
    """What a case asks Composable Kernel's planner for: a call and its bytes in hexadecimal.

    Left out is what the crate leaves to this project's kernels: pages, split keys, padded or shared heads.
    """
    asked: list[tuple[str, bytes]] = []

    def plan(what: str, packed: bytes) -> list[Any]:
        asked.append((what, packed))
        return []

    patches = {"plan": plan, "backward_workspace": lambda _packed: 4096}
    with mock.patch.multiple(ck_planner, **patches):
        tensors = compute(case, ComposableKernel(triton_backend))
    addresses = Addresses(tensors)
    result = []
    for what, packed in asked:
        shared = case["heads"] != case["heads_k"] or case["head_dim"] not in (32, 64, 128, 256)
        if what not in _STRUCTURES or (what == "backward" and shared):
            continue
        tensors_there, rest = _STRUCTURES[what]
        content = bytearray(packed)
        after = _SHAPE_BYTES + tensors_there * _TENSOR_BYTES
        of_tensors = (_SHAPE_BYTES + index * _TENSOR_BYTES for index in range(tensors_there))
        for place in (*_OF_SHAPE, *of_tensors, *(after + offset for offset in rest)):
            (address,) = struct.unpack_from("<Q", content, place)
            struct.pack_into("<Q", content, place, addresses(address))
        result.append([what, content.hex()])
    return result


def chosen(case: Case, gpu: Gpu) -> list[Any]:
    """The sources of a case's forward and backward, and the launch of assembly of the forward: name, grid, bytes."""
    backend = Sources(ComposableKernel(triton_backend), triton_backend)
    tensors = tensors_of(case)
    call = call_of(case, tensors)
    sources = [backend.decide(call, op).source for op in ("fwd", "bwd")]
    if sources[0] != "asm":
        return [*sources, None]
    gpu.planned.clear()
    result = backend.forward(call)
    addresses = Addresses(tensors | {"out": result.out, "lse": result.softmax_lse})
    (launch,) = gpu.planned
    content = bytearray(launch.argument)
    fields = LAYOUTS["forward"].offsets
    for name in ("out", "q", "k", "v", "lse", "starts_q", "starts_k", "room_starts_q", "room_starts_k"):
        (address,) = struct.unpack_from("<Q", content, fields[name])
        struct.pack_into("<Q", content, fields[name], addresses(address))
    return [*sources, [launch.kernel, list(launch.grid), content.hex()]]


def _choice(target: str) -> str:
    """The table of providers as the store of a target has it."""
    return json.dumps(providers.choice(target), separators=(",", ":"))


def _planning() -> str:
    """The numbers of planning as gfx942's store has them, and what those of other targets say of assembly."""
    of_assembly = {target: planning.facts(target)["assembly"] for target in ("gfx942", "gfx950", "gfx90a")}
    return json.dumps([planning.facts("gfx942"), of_assembly], separators=(",", ":"))


def record() -> str:
    """The file's content."""
    every = list(cases())
    lines = []
    for target in TARGETS:
        gpu = Gpu(target)
        with device.using(gpu):
            result = [launched(case, gpu) for case in every]
            for name in UNREACHED:
                for variant in [variant for variant in table(target) if variant.op == name][:1]:
                    gpu.kernel(variant)
        tiles = json.dumps(dict(sorted(gpu.tiles.items())))
        calls = ",\n".join(json.dumps(one, separators=(",", ":")) for one in result)
        lines.append(
            f'"{target}": {{"compute_units": {gpu.compute_units},\n"choice": {_choice(target)},\n'
            f'"tiles": {tiles},\n"launches": [\n{calls}\n]}}'
        )
    with device.using(Gpu("gfx942", composable=True)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what goes to the Triton kernels
        planned = [asked_of_the_planner(case) for case in every]
    sources = []
    for target, units in (("gfx942", 304), ("gfx942", 80), ("gfx950", 256), ("gfx90a", 104)):
        gpu = Gpu(target, composable=True, compute_units=units)
        with device.using(gpu):
            result = ",\n".join(json.dumps(chosen(case, gpu), separators=(",", ":")) for case in every)
        head = f'"target": "{target}", "compute_units": {units},\n"choice": {_choice(target)}'
        sources.append(f'{{{head}, "calls": [\n{result}\n]}}')
    composable = ",\n".join(json.dumps(one, separators=(",", ":")) for one in planned)
    every_call = ",\n".join(json.dumps(case, separators=(",", ":")) for case in every)
    head = f'{{"cases": [\n{every_call}\n],\n"composable": [\n{composable}\n],\n'
    head += f'"planning": {_planning()},\n"signatures": {json.dumps(SIGNATURES, indent=0)},\n'
    head += f'"sources": [{", ".join(sources)}],\n"targets": {{\n'
    return head + ",\n".join(lines) + "\n}}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    asked = parser.parse_args()
    content = record()
    if not asked.check:
        OUTPUT.write_text(content, encoding="utf-8")
    elif OUTPUT.read_text(encoding="utf-8") != content:
        sys.exit(f"{OUTPUT} is not what flash_attn launches: run {Path(__file__).name}, and look at what changed")


if __name__ == "__main__":
    main()
