"""This project's Triton kernels, with any tile."""

from __future__ import annotations

import math
from typing import Any

import torch
from flash_attn import flash_attn_func
from flash_attn.kernels import tuning
from flash_attn.kernels.operation import HEAD_DIMS, KINDS
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant
from flash_attn.runtime.store import Store

from amdgpu_simulator import gpu
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import assembly, disassembly, machine
from amdgpu_simulator.workloads import Workload, every_tile

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Products of matrices for a tile: over the columns of q and k, and over the columns of v.
_PRODUCTS = {"fwd": (1, 1), "bwd-dq": (2, 1), "bwd-dkdv": (2, 2)}
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi_slopes": torch.ones(1)},
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 20.0},
}


def parse_kernel(name: str) -> Variant:
    """The variant of a name. Raises ValueError for one that no call here runs."""
    for op in (*_PRODUCTS, *(f"{op}-v" for op in _PRODUCTS)):
        for dtype in DTYPES:
            for head_dim in HEAD_DIMS:
                for kind in KINDS[:-1]:
                    if (variant := Variant(op, dtype, head_dim, kind)).name == name:
                        return variant
    raise ValueError(
        f"{name}: want fwd, bwd-dq or bwd-dkdv, with -v or without, a type, head dim and kind: bwd-dq-fp16-d64-softcap"
    )


def parse_tile(text: str) -> Config:
    """128,64,4,2,0,waves_per_eu=2 as a launch configuration. Raises ValueError for something else."""
    numbers = [part for part in text.split(",") if "=" not in part]
    options = [part.split("=") for part in text.split(",") if "=" in part]
    if len(numbers) == 4:
        numbers.append("0")
    try:
        block_m, block_n, warps, stages, depth = map(int, numbers)
        chosen = tuple((name, int(value) if value.isdecimal() else value.replace("+", ",")) for name, value in options)
    except ValueError:
        raise ValueError(f"{text}: want block_m,block_n,warps,stages[,depth][,option=value...]") from None
    return Config(block_m, block_n, warps, stages, depth, chosen)


def write_tile(tile: Config) -> str:
    """A launch configuration as `parse_tile` reads it."""
    return ",".join([*map(str, tile[:5]), *(f"{name}={value}".replace(",", "+") for name, value in tile.options)])


def tiles(target: str, variant: Variant, *, near: bool = False) -> list[Config]:
    """The tile of the tuning table, with near the tiles next to it too. Raises ValueError for an unknown target."""
    own = tuning.config(target, variant)
    return [own, *(tuning.neighbours(target, own) if near else [])]


def workload(target: str, variant: Variant, tile: Config, *, causal: bool = False) -> Workload:
    """A kernel with a tile. Raises CompileFailed."""
    _, entry, _ = gpu.compiled(target, variant, tile)
    return _workload(target, variant, {variant.op: tile}, entry, gpu.compiled_code, causal)


def stored(store: Store, variant: Variant, *, causal: bool = False) -> Workload:
    """A kernel of a kernel store. Raises KernelError, `debian.UnavailableError` without a disassembler."""
    if variant.name not in store.kernels:
        raise ValueError(f"{store.path} has no kernel {variant.name}; see `rocm_wheels inspect`")
    entry, image = store.kernels[variant.name], store.image(variant.name)
    found = image, entry, disassembly.kernel(image, entry["symbol"])

    def code(target: str, asked: Variant, config: Config | None) -> gpu.Found:
        return found if asked == variant else gpu.compiled_code(target, asked, config)

    return _workload(store.target, variant, {}, entry, code, causal)


def _workload(
    target: str, variant: Variant, configs: dict[str, Config], entry: dict[str, Any], code: gpu.Code, causal: bool
) -> Workload:
    op = variant.op.removesuffix("-v")
    of_keys, of_values = _PRODUCTS[op]
    columns = of_keys * variant.block_d + of_values * _value_dim(variant)
    tile_rows = entry["constants"]["BLOCK_N" if op == "bwd-dkdv" else "BLOCK_M"]
    rows = math.lcm(128, tile_rows)

    def run(length: int) -> Record:
        records: dict[str, Record] = {}

        def program(kernel: assembly.Kernel) -> machine.Program:
            return machine.Program(kernel, records.setdefault(kernel.symbol, Record(kernel)))

        with gpu.pretend(target, configs=configs, program=program, code=code) as launched:
            _call(variant, rows, length, causal)
        assert variant.name in launched
        return records[variant.operation.function]

    return Workload(
        target=target, rows=tile_rows, entry=entry, run=run,
        programs=every_tile(tile_rows), operations=2 * columns,
    )  # fmt: skip


def _value_dim(variant: Variant) -> int:
    return variant.operation.value_dims.get(variant.block_d, variant.block_d)


def _call(variant: Variant, rows: int, length: int, causal: bool) -> None:
    lengths = (length, rows, rows) if variant.op.startswith("bwd-dkdv") else (rows, length, length)
    widths = (variant.block_d, variant.block_d, _value_dim(variant))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, 1, width, generator=generator).to(DTYPES[variant.dtype]).requires_grad_()
        for n, width in zip(lengths, widths, strict=True)
    )
    out = flash_attn_func(q, k, v, causal=causal, **_OPTIONS[variant.kind])
    assert isinstance(out, torch.Tensor)
    if variant.op.startswith("bwd"):
        torch.autograd.backward(out.sum())
