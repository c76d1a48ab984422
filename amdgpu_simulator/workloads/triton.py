"""This project's Triton kernels, with any tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.attention.backends.triton.inputs import FP8_TYPES
from flash_attn.core.store import Store
from flash_attn.fp8 import flash_attn_fp8_func
from flash_attn.int8 import flash_attn_int8_func
from flash_attn.kernels import tuning
from flash_attn.kernels.operation import SPARSE_BLOCK
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.value_dims import LATENT_DIM
from flash_attn.kernels.variants import Variant
from flash_attn.ranges import flash_attn_ranges_func
from flash_attn.sparse import BlockMask

from amdgpu_simulator import gpu
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import assembly, disassembly, machine
from amdgpu_simulator.workloads import Workload, every_tile

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Over a cache in FP8 the queries are bf16.
_FP8 = {name: dtype for dtype, name in FP8_TYPES.items()}
# Matrix products per tile: over the columns of q and k, and over the columns of v.
_PRODUCTS = {
    **dict.fromkeys(("fwd", "fp8-fwd", "int8-fwd", "bwd-dbias"), (1, 1)),
    "bwd-dq": (2, 1),
    "bwd-dkdv": (2, 2),
}
# Kernels that read a KV cache: one query whose heads, one per row, share the keys.
_CACHES = {"decode": (1, 1), "extend": (1, 1), "latent": (1, 1), "latent-extend": (1, 1)}
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"s_aux": torch.zeros(1)},
    "bias": {"attn_bias": torch.zeros(1, 1, 1, 1)},
    "alibi": {"alibi_slopes": torch.ones(1)},
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 20.0},
    "blocks": {},
}


def parse_kernel(name: str) -> Variant:
    """The kernel variant with this name. Raises ValueError if this module has no call that runs it."""
    ops = (*_PRODUCTS, *(f"{op}-v" for op in _PRODUCTS), *(f"sparse-{op}" for op in _PRODUCTS), *_CACHES)
    for row in (OPERATIONS[op] for op in ops if op in OPERATIONS):
        for dtype in (*DTYPES, *FP8_TYPES.values()):
            for kind in row.kinds_of(dtype):
                for head_dim in row.sizes_for(kind) if kind in _OPTIONS or row.has_mask else ():
                    if (variant := Variant(row.name, dtype, head_dim, kind)).name == name:
                        return variant
    raise ValueError(
        f"{name}: want fwd, bwd-dq or bwd-dkdv, with -v or without, bwd-dbias, decode or latent, a type, head dim and "
        "kind: bwd-dq-fp16-d64-softcap"
    )


def parse_tile(text: str) -> Config:
    """Parses a launch configuration such as 128,64,4,2,0,waves_per_eu=2. Raises ValueError for text of another form."""
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
    """A launch configuration as text that `parse_tile` accepts."""
    return ",".join([*map(str, tile[:5]), *(f"{name}={value}".replace(",", "+") for name, value in tile.options)])


def tiles(target: str, variant: Variant, *, near: bool = False) -> list[Config]:
    """The tile of the tuning table; with near, the adjacent tiles too. Raises ValueError for an unknown target."""
    own = tuning.config(target, variant)
    return [own, *(tuning.neighbours(target, own) if near else [])]


def workload(
    target: str,
    variant: Variant,
    tile: Config,
    *,
    causal: bool = False,
    head_dim: int | None = None,
    has_values: bool = False,
) -> Workload:
    """A kernel with a tile.

    head_dim: head dim of the calls (default: the largest that the kernel serves). has_values: whether the values of a
    KV cache lie in memory of their own (default: they are the keys, so the kernel finds them in the first-level cache).
    Raises CompileFailed.
    """
    _, entry, _ = gpu.compiled(target, variant, tile)
    return _workload(target, variant, {variant.op: tile}, entry, gpu.compiled_code, causal, head_dim, has_values)


def stored(store: Store, variant: Variant, *, causal: bool = False) -> Workload:
    """A kernel of a kernel store. Raises KernelError, `debian.UnavailableError` without a disassembler."""
    if variant.name not in store.kernels:
        raise ValueError(f"{store.path} has no kernel {variant.name}; see `rocm_wheels inspect`")
    entry, image = store.kernels[variant.name], store.image(variant.name)
    stored_code = image, entry, disassembly.kernel(image, entry["symbol"], target=store.target)

    def code(target: str, asked: Variant, config: Config | None) -> gpu.Found:
        return stored_code if asked == variant else gpu.compiled_code(target, asked, config)

    return _workload(store.target, variant, {}, entry, code, causal)


def _workload(
    target: str,
    variant: Variant,
    configs: dict[str, Config],
    entry: dict[str, Any],
    code: gpu.Code,
    causal: bool,
    head_dim: int | None = None,
    has_values: bool = False,
) -> Workload:
    op = variant.op.removesuffix("-v").removeprefix("sparse-")
    of_keys, of_values = (_PRODUCTS | _CACHES)[op]
    columns = of_keys * _key_dim(variant) + of_values * _value_dim(variant)
    tile_rows = entry["constants"]["BLOCK_N" if op == "bwd-dkdv" else "BLOCK_M"]
    rows = math.lcm(128, tile_rows)

    def run(length: int) -> Record:
        records: dict[int, Record] = {}
        measured: list[assembly.Kernel] = []  # other kernels with this symbol may be loaded and not launched

        def noted(target: str, asked: Variant, config: Config | None) -> gpu.Found:
            result = code(target, asked, config)
            if asked == variant:
                measured.append(result[2])
            return result

        def program(kernel: assembly.Kernel) -> machine.Program:
            return machine.Program(kernel, records.setdefault(id(kernel), Record(kernel)))

        with gpu.pretend(target, configs=configs, program=program, code=noted) as launched:
            if op in _CACHES:
                _cached(variant, rows if op.endswith("extend") else tile_rows, length, has_values)
            elif op == "bwd-dbias":
                _shared_bias(variant, rows, length // entry["constants"]["BLOCK_N"], entry["constants"]["BLOCK_N"])
            else:
                _call(variant, rows, length, causal, head_dim)
        assert variant.name in launched
        return records[id(measured[-1])]

    return Workload(
        target=target, rows=tile_rows, entry=entry, run=run,
        programs=every_tile(tile_rows), operations=2 * columns,
    )  # fmt: skip


def _key_dim(variant: Variant) -> int:
    return variant.block_d + (LATENT_DIM if variant.op.startswith("latent") else 0)


def _value_dim(variant: Variant) -> int:
    return variant.operation.value_dims.get(variant.block_d, variant.block_d)


def _call(variant: Variant, rows: int, length: int, causal: bool, head_dim: int | None) -> None:
    is_backward = variant.op.removeprefix("sparse-").startswith("bwd")
    lengths = (length, rows, rows) if "bwd-dkdv" in variant.op else (rows, length, length)
    widths = (head_dim or variant.block_d, head_dim or variant.block_d, head_dim or _value_dim(variant))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, 1, width, generator=generator)
        .to(DTYPES.get(variant.dtype, torch.bfloat16))
        .requires_grad_(is_backward)
        for n, width in zip(lengths, widths, strict=True)
    )
    options = dict(_OPTIONS.get(variant.kind, _OPTIONS["softcap"]))
    if variant.kind == "bias":
        options["attn_bias"] = options["attn_bias"].to(q.dtype).expand(1, 1, q.shape[1], k.shape[1])
    # All queries of a long call see the first keys. A causal mask of flash_attn would align the last query and key.
    window = (-1, max(q.shape[1] - k.shape[1], 0) if causal else -1)
    if variant.op == "int8-fwd":
        flash_attn_int8_func(q, k, v, causal=causal)
        return
    if variant.operation.has_mask:  # all of them are visible
        seen = torch.ones(1, 1, -(-q.shape[1] // SPARSE_BLOCK), -(-k.shape[1] // SPARSE_BLOCK), dtype=torch.bool)
        options["block_mask"] = BlockMask(seen, (SPARSE_BLOCK, SPARSE_BLOCK))
    function: Callable[..., Any] = flash_attn_func
    if variant.operation.has_mask or variant.op == "fp8-fwd":
        function = flash_attn_ranges_func if variant.operation.has_mask else flash_attn_fp8_func
    out = function(q, k, v, window_size=window, **options)
    assert isinstance(out, torch.Tensor)
    if is_backward:
        torch.autograd.backward(out.sum())


def _shared_bias(variant: Variant, rows: int, batch: int, keys: int) -> None:
    """A tile of the gradient of a bias that the whole batch shares: it sums over a tile of each sequence."""
    dtype = DTYPES[variant.dtype]
    q, k, v = (torch.ones(batch, n, 1, variant.block_d, dtype=dtype) for n in (rows, keys, keys))
    bias = torch.zeros(1, 1, rows, keys, dtype=dtype, requires_grad=True)
    out = flash_attn_func(q, k, v, attn_bias=bias)
    assert isinstance(out, torch.Tensor)
    torch.autograd.backward(out.sum())


def _cached(variant: Variant, rows: int, length: int, has_values: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    small = _FP8.get(variant.dtype)
    q, cache = (
        torch.randn(1, n, heads, _key_dim(variant), generator=generator).to(dtype)
        for n, heads, dtype in (
            (1, rows, DTYPES.get(variant.dtype, torch.bfloat16)),
            (length, 1, small or DTYPES[variant.dtype]),
        )
    )
    descale = None if small is None else torch.ones(1, 1)
    sinks = torch.zeros(rows) if variant.kind == "sink" else None
    values = cache.clone() if has_values else cache[..., : variant.block_d]
    flash_attn_with_kvcache(q, cache, values, cache_seqlens=length, num_splits=1, s_aux=sinks, k_descale=descale)
