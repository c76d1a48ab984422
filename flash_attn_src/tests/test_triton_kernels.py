"""Which kernels a call gets, in how many splits and blocks."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_attn.attention.backends.triton import grid
from flash_attn.attention.backends.triton import kernels as triton_kernels
from flash_attn.call.calls import attention_call
from flash_attn.core import device
from flash_attn.kernels import flags, launches, targets, value_dims, variants
from flash_attn.kernels.operation import FORWARD_KINDS, launch_letter
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.tuning import cdna, decode, nvidia, rdna2, rdna3, rdna4


def test_how_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest splits that give enough programs; one split for little work.

    A number of splits must divide the group and leave each program two query heads.
    """
    monkeypatch.setattr(device, "of", lambda _: SimpleNamespace(compute_units=100))
    result = [grid.splits_of(8, programs, 512, 9, 0) for programs in (0, 1, 74, 75, 149, 150, 299, 300)]
    assert result == [1, 4, 4, 4, 4, 2, 2, 1]
    assert grid.splits_of(8, 75, 511, 9, 0) == 1
    assert [grid.splits_of(8, 75, 512, most, 0) for most in range(5)] == [1, 1, 2, 2, 4]
    groups = (1, 2, 3, 4, 6, 7, 9)
    assert [grid.splits_of(group, 101, 4096, 9, 0) for group in groups] == [1, 1, 1, 2, 3, 1, 3]


def test_blocks_of_a_grid() -> None:
    """Each sequence has the blocks of the longest one, at least one block.

    If the blocks of all packed rows are fewer by a third, these are used.
    """
    assert grid.grid_of(64, 100, 3, 5, 300) == (2, 15, 0)
    assert grid.grid_of(64, 640, 3, 5, 3 * 640) == (10, 15, 0)
    assert grid.grid_of(64, 640, 4, 5, 900) == (18, 5, flags.PACKED_BLOCKS)
    assert grid.grid_of(64, 0, 4, 5, 900) == (1, 20, 0)
    assert grid.grid_of(64, 0, 4, 5, 0) == (0, 20, 0)
    assert grid.grid_of(64, 100, 0, 5, 900) == (2, 0, 0)


# Call -> the kind of kernel that serves it, in a 16-bit type and in fp32.
KINDS = {
    "nothing": ({}, "plain", "plain"),
    "alibi": ({"alibi_slopes": torch.ones(1)}, "alibi", "any"),
    "dropout": ({"dropout_p": 0.1}, "dropout", "any"),
    "softcap": ({"softcap": 2.0}, "softcap", "any"),
    "two things": ({"alibi_slopes": torch.ones(1), "dropout_p": 0.1}, "any", "any"),
    "negative scale": ({"softmax_scale": -0.5}, "any", "any"),
    "dropout, scale 0": ({"softmax_scale": 0.0, "dropout_p": 0.1}, "any", "any"),
    "sinks": ({"s_aux": torch.ones(1)}, "sink", "any"),
    "sinks and softcap": ({"s_aux": torch.ones(1), "softcap": 2.0}, "any", "any"),
    "bias": ({"attn_bias": torch.ones(1, 1, 1, 1)}, "bias", "bias"),
    "bias, softcap, sinks": (
        {"attn_bias": torch.ones(1, 1, 1, 1), "softcap": 2.0, "s_aux": torch.ones(1)},
        "bias",
        "bias",
    ),
}


@pytest.mark.parametrize("call", KINDS)
def test_a_call_gets_the_smallest_kernel_for_its_options(call: str) -> None:
    options, half, single = KINDS[call]
    q = torch.empty(1, 1, 1, 8)
    attention = attention_call(q, q, q, **{"softmax_scale": 0.5, **options})
    kind = triton_kernels.forward_kind(attention)
    assert variants.serving("fwd", "bf16", kind, 128) == half
    assert variants.serving("fwd", "bf16", kind, 512) == single
    assert variants.serving("fwd", "fp32", kind, 128) == single
    assert variants.serving("append", "bf16", kind, 64) == "plain"
    # The backward knows no sinks: softmax_lse holds them.
    kind = triton_kernels.score_kind(attention)
    without = {("sinks", "bf16"): "plain", ("sinks", "fp32"): "plain", ("sinks and softcap", "bf16"): "softcap"}
    assert variants.serving("bwd-dq", "bf16", kind, 128) == without.get((call, "bf16"), half)
    assert variants.serving("bwd-dq", "fp32", kind, 128) == without.get((call, "fp32"), single)


def test_the_types_of_arguments() -> None:
    for (name, op, dtype), (type_, letter) in {
        ("q", "fwd", "bf16"): ("*bf16", "P"),
        ("lse", "fwd", "bf16"): ("*fp32", "P"),
        ("rng_state", "fwd", "bf16"): ("*i64", "P"),
        ("scale", "fwd", "fp16"): ("fp32", "f"),
        ("stride_qb", "fwd", "fp16"): ("i32", "i"),
        ("k", "decode", "fp8e4b8"): ("*fp8e4b8", "P"),
        ("residual", "norm-fwd", "fp16"): ("*fp16", "P"),
        ("residual", "norm-fwd-w32", "bf16"): ("*bf16", "P"),
        ("weight", "norm-fwd-w32", "bf16"): ("*fp32", "P"),
        ("residual", "norm-fwd-r32", "bf16"): ("*fp32", "P"),
    }.items():
        assert OPERATIONS[op].argument_type(name, dtype) == type_
        assert launch_letter(type_) == letter


def test_the_bucket_of_a_head_dim() -> None:
    sizes = (8, 32, 33, 64, 65, 128, 129, 192, 193, 256, 257, 512)
    assert [variants.bucket(size) for size in sizes] == [32, 32, 64, 64, 96, 128, 192, 192, 256, 256, 512, 512]
    assert [variants.bucket(size, "decode") for size in sizes] == [*[64] * 4, *[128] * 2, *[256] * 4, *[512] * 2]
    assert [variants.bucket(size, op) for size in sizes for op in ("append", "combine")] == [64, 128] * len(sizes)
    with pytest.raises(ValueError, match="head_dim 513 is larger than 512, the largest supported"):
        variants.bucket(513)


@pytest.mark.parametrize(
    ("pair", "served"),
    [
        ((64, 64), (64, 64)), ((192, 128), (192, 128)), ((160, 96), (160, 128)), ((136, 8), (136, 128)),
        ((128, 64), (128, 64)), ((72, 40), (72, 64)), ((64, 40), (64, 64)), ((128, 72), (128, 128)),
        ((200, 128), (200, 200)), ((24, 40), (40, 40)), ((64, 512), (512, 512)),
    ],
)  # fmt: skip
def test_the_kernel_of_a_pair_of_head_dims(pair: tuple[int, int], served: tuple[int, int]) -> None:
    """The first compiled pair that holds both head dims, else the kernel for the larger of the two."""
    assert value_dims.served_pair(*pair) == served
    if served[0] != served[1]:
        size = variants.bucket(served[0], "fwd-v")
        assert OPERATIONS["fwd-v"].value_dims[size] == served[1]


def test_the_list_of_ahead_of_time_kernels() -> None:
    small = ("fp16", "bf16")
    expected = dict.fromkeys(OPERATIONS, (*small, "fp32"))
    expected |= dict.fromkeys(("sparse-lists", "block-lists", "narrow-ids", "probe"), ("fp16",))
    of_a_cache = ("decode", "decode-paged", "extend", "extend-paged", "append")
    expected |= dict.fromkeys(
        [op for op in expected if op.endswith(("-t32", "-w32", "-r32", "-whole", "-whole-v"))], small
    )
    expected |= dict.fromkeys([op for op in expected if op.startswith(("fp8-", "int8-"))], ()) | {
        "bwd-norms": ("fp16",)
    }
    assert {op: row.dtypes_for(targets.get("gfx90a")) for op, row in OPERATIONS.items()} == expected
    latent = [op for op in expected if op.startswith("latent")]
    expected |= dict.fromkeys((*of_a_cache, *latent, "fp8-cast-v"), (*small, "fp32", "fp8e4nv"))
    expected |= dict.fromkeys(("fp8-amax", "fp8-cast"), (*small, "fp32")) | {"fp8-fwd": ("fp8e4nv",), "bwd-norms": ()}
    expected |= dict.fromkeys([op for op in expected if op.startswith("int8-")], small)
    assert {op: row.dtypes_for(targets.get("gfx1201")) for op, row in OPERATIONS.items()} == expected

    some = {op: [] for op in ("fwd", "fwd-paged", "bwd-dq-v", "norm-bwd", "combine", "probabilities")}
    for variant in variants.table("gfx942"):
        if variant.op in some and variant.dtype == "bf16":
            some[variant.op].append(variant.name.removeprefix(f"{variant.op}-bf16-"))
    assert some["fwd"][:7] == ["d32", *(f"d32-{kind}" for kind in FORWARD_KINDS[1:])]
    kinds = dict.fromkeys((32, 64, 96, 128, 192, 256), ("", "-sink", "-any")) | {512: ("", "-any")}
    assert some["fwd-paged"] == [f"d{dim}{kind}" for dim in kinds for kind in kinds[dim]]
    assert some["bwd-dq-v"] == ["d128", "d128-any", "d192", "d192-any"]
    assert some["norm-bwd"] == [
        *("d64", "d128", "d256", "d512", "d1024", "d1024-uneven", "d2048", "d4096", "d4096-uneven", "d8192", "d16384")
    ]
    assert some["combine"] == ["d128", "d128-wide"]
    assert some["probabilities"] == ["d32", "d64", "d128", "d256", "d512"]


@pytest.mark.parametrize("target", ["gfx90a", "gfx950", "gfx1030", "gfx1201", "sm_90"])
def test_a_launch_gives_each_kernel_the_constants_that_it_takes(target: str) -> None:
    for variant in variants.table(target):
        specification = launches.specification(variant, target)
        module = importlib.import_module(f"flash_attn.kernels.{specification.module}")
        parameters = inspect.signature(getattr(module, specification.symbol).fn).parameters.values()
        taken = {parameter.name for parameter in parameters if parameter.annotation == "tl.constexpr"}
        assert set(specification.constants) == taken, variant.name


def _specified(target: str, name: str) -> launches.Specification:
    variant = next(variant for variant in variants.table(target) if variant.name == name)
    return launches.specification(variant, target)


@pytest.mark.parametrize(
    ("target", "name", "constants"),
    [
        ("gfx942", "append-bf16-d64", {"VEC": 8, "BLOCK_M": 16, "BLOCK_D": 64}),
        ("gfx942", "append-fp8e4b8-d64", {"VEC": 16}),
        ("gfx942", "sum-fp32-d128", {"BLOCK_M": 16, "BLOCK_D": 128}),
        ("gfx942", "combine-fp32-d128", {"BLOCK_N": 8, "BLOCK_D": 128}),
        ("gfx942", "combine-fp16-d128-wide", {"BLOCK_N": 32, "BLOCK_D": 128}),
        ("gfx942", "fp8-amax-fp32-d64", {"VEC": 4, "BLOCK_M": 128, "BLOCK_D": 64}),
        ("gfx942", "fp8-cast-v-bf16-d64", {"BLOCK_M": 128, "BLOCK_N": 256, "USE_FNUZ": True, "USE_TRANSPOSE": True}),
        ("gfx950", "fp8-cast-bf16-d64", {"BLOCK_M": 128, "BLOCK_N": 256, "USE_FNUZ": False, "HAS_CAST": False}),
        ("gfx12-generic", "fp8-fwd-fp8e4nv-d128", {"BLOCK_N": 64, "HAS_CAST": True}),
        (
            "gfx942",
            "fp8-fwd-fp8e4b8-d128",
            {"VEC": 16, "HAS_SCORE_MOD": False, "NUM_XCDS": 8, "DROPOUT_BITS_SHARED": 0b11011},
        ),
        ("sm_90", "fp8-fwd-fp8e4nv-d128-any", {"HAS_SCORE_MOD": True, "NUM_XCDS": 1, "DROPOUT_BITS_SHARED": 0b111000}),
        (
            "gfx1030",
            "decode-fp32-d128",
            {"VEC": 4, "PAGE_MODE": 2, "HAS_SCORE_MOD": False, "BLOCK_K": 16, "ROUND_HALF_UP": True},
        ),
        (
            "gfx950",
            "decode-paged-fp16-d128-any",
            {"PAGE_MODE": 1, "HAS_SCORE_MOD": True, "BLOCK_K": 128, "ROUND_HALF_UP": False},
        ),
        ("sm_90", "extend-bf16-d64", {"PAGE_MODE": 2, "ROUND_HALF_UP": False}),
        ("gfx1201", "extend-paged-bf16-d256", {"PAGE_MODE": 1, "BLOCK_K": 16}),
        (
            "gfx950",
            "fwd-bf16-d96",
            {"BLOCK_D": 64, "BLOCK_D_TAIL": 32, "BLOCK_K": 96, "NUM_XCDS": 8, "PAGE_MODE": 0, "ROUND_HALF_UP": False},
        ),
        (
            "gfx1201",
            "fwd-paged-fp16-d192-any",
            {
                "VEC": 8,
                "BLOCK_D": 128,
                "BLOCK_D_TAIL": 64,
                "PAGE_MODE": 1,
                "NUM_XCDS": 1,
                "DROPOUT_BITS_SHARED": 0b10111,
            },
        ),
        ("gfx942", "bwd-dq-v-bf16-d192", {"BLOCK_D": 128, "BLOCK_D_TAIL": 64, "VALUE_DIM": 128}),
        ("gfx942", "bwd-dkdv-bf16-d64-bias", {"USE_ANCHOR_DOT": True, "BLOCK_M": 16, "BLOCK_N": 64}),
        ("gfx942", "fwd-fp32-d64-bias", {"USE_ANCHOR_DOT": False}),
        ("gfx942", "fwd-bf16-d64-any", {"USE_ANCHOR_DOT": False}),
        ("gfx1030", "fwd-bf16-d64-bias", {"USE_ANCHOR_DOT": False}),
        ("sm_90", "fwd-bf16-d64-bias", {"USE_ANCHOR_DOT": False}),
        ("gfx942", "fwd-fp16-d128-sink", {"NUM_PARTIAL_SUMS": 4}),
        ("gfx942", "fwd-bf16-d64-alibi", {"NUM_PARTIAL_SUMS": 1}),
        ("gfx942", "fwd-paged-bf16-d64", {"NUM_PARTIAL_SUMS": 1}),
        ("gfx942", "fwd-v-bf16-d128", {"NUM_PARTIAL_SUMS": 1}),
        ("gfx942", "fwd-fp32-d64", {"NUM_PARTIAL_SUMS": 1}),
        ("gfx950", "fwd-bf16-d64", {"NUM_PARTIAL_SUMS": 4}),
        ("gfx950", "fwd-bf16-d128", {"NUM_PARTIAL_SUMS": 1}),
        ("sm_90", "fwd-bf16-d512", {"BREAK_DOT_CHAIN": True}),
        ("sm_90", "fwd-bf16-d512-any", {"BREAK_DOT_CHAIN": False}),
        ("sm_90", "fwd-bf16-d256", {"BREAK_DOT_CHAIN": False}),
        ("gfx942", "fwd-bf16-d512", {"BREAK_DOT_CHAIN": False}),
        ("gfx942", "fwd-paged-v-fp32-d128-any", {"BLOCK_D": 128, "BLOCK_D_TAIL": 0, "VALUE_DIM": 64, "PAGE_MODE": 1}),
        (
            "gfx1100",
            "fwd-paged-whole-bf16-d64",
            {"BLOCK_D": 64, "BLOCK_D_TAIL": 0, "BLOCK_K": 64, "PAGE_MODE": 2, "DROPOUT_BITS_SHARED": 0b11110},
        ),
        (
            "gfx1030",
            "bwd-dq-bf16-d64-softcap",
            {"SCORE_MOD": "softcap", "BLOCK_K": 16, "DROPOUT_BITS_SHARED": 0b1111, "ROUND_HALF_UP": True},
        ),
        ("gfx90a", "probabilities-fp32-d32", {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16, "BLOCK_D": 32}),
    ],
)
def test_the_constants_of_a_kernel(target: str, name: str, constants: dict[str, Any]) -> None:
    result = _specified(target, name).constants
    assert {key: result[key] for key in constants} == constants


def test_the_warps_of_kernels_whose_tile_is_no_choice() -> None:
    names = ("append-bf16-d64", "combine-fp32-d128", "combine-bf16-d128-wide", "fp8-cast-bf16-d64", "fp8-amax-bf16-d64")
    assert [_specified("gfx942", name).options for name in (*names, "probabilities-bf16-d64")] == [
        {"num_warps": warps, "num_stages": 1} for warps in (4, 1, 4, 4, 4, 4)
    ]


def test_which_row_of_the_tables_serves_a_variant() -> None:
    cached = decode.ROWS
    for target, name, row in (
        ("gfx90a", "bwd-dkdv-bf16-d128-softcap", cdna.ROWS["bwd-dkdv", 16, 128]["softcap"]),
        ("gfx942", "bwd-dkdv-bf16-d256-alibi", cdna.TARGET_ROWS["gfx942"]["bwd-dkdv", 16, 256]["alibi"]),
        ("gfx908", "fwd-bf16-d64-any", cdna.ROWS["fwd", 16, 64]["any"]),
        ("gfx90a", "fwd-bf16-d64-any", cdna.TARGET_ROWS["gfx90a"]["fwd", 16, 64]["any"]),
        ("gfx90a", "fwd-bf16-d192-any", cdna.ROWS["fwd", 16, 192]["any"]),
        ("gfx90a", "fwd-fp32-d96-any", cdna.ROWS["fwd", 32, 128]["any"]),
        ("gfx90a", "fwd-paged-fp32-d96", cdna.ROWS["fwd", 32, 128]["plain"]),
        ("gfx1030", "bwd-dkdv-bf16-d192", rdna2.ROWS["bwd-dkdv", 16, 256]["plain"]),
        ("sm_90", "fwd-paged-bf16-d64-any", nvidia.ROWS["fwd-paged", 16, 64]["any"]),
        ("sm_90", "fwd-paged-whole-bf16-d96-any", nvidia.ROWS["fwd", 16, 96]["any"]),
        ("gfx1201", "fwd-paged-bf16-d96-any", rdna3.ROWS["fwd-paged", 16, 96]["any"]),
        ("gfx1100", "fwd-paged-whole-v-fp16-d192", rdna3.ROWS["fwd", 16, 192]["plain"]),
        ("gfx1201", "fwd-paged-whole-v-fp16-d192", rdna4.ROWS["fwd", 16, 192]["plain"]),
        ("gfx1201", "fwd-paged-v-fp16-d128", rdna3.ROWS["fwd-paged", 16, 128]["plain"]),
        ("gfx1201", "fwd-paged-whole-fp16-d128", rdna3.ROWS["fwd-paged-whole", 16, 128]["plain"]),
        ("gfx1030", "decode-paged-fp32-d128", cached["rdna2"]["decode-paged", 32, 128]["plain"]),
        ("gfx1030", "decode-paged-fp32-d256", cached["rdna2"]["decode", 32, 256]["plain"]),
        ("gfx942", "extend-paged-fp8e4b8-d256-any", cached["cdna"]["extend", 16, 256]["any"]),
        ("gfx942", "fp8-fwd-fp8e4b8-d128", cached["cdna"]["fp8-fwd", 8, 128]["plain"]),
        ("gfx1201", "fp8-fwd-fp8e4nv-d128-any", cached["rdna4"]["fp8-fwd", 8, 128]["any"]),
    ):
        result = _specified(target, name)
        assert (result.constants["BLOCK_M"], result.constants["BLOCK_N"]) == (row.block_m, row.block_n), name
        compiler = {"num_warps": row.num_warps, "num_stages": row.num_stages, **dict(row.options)}
        assert result.options == compiler, name


def test_the_error_for_an_unknown_target_says_where_to_add_it() -> None:
    for op in ("fwd", "decode", "append", "rotary"):
        with pytest.raises(ValueError, match=r"unknown GPU target 'gfx803': add a row to .*/kernels/targets\.py"):
            launches.specification(variants.Variant(op, "bf16", 64, "plain"), "gfx803")
