"""Which kernels a call gets, in how many parts and blocks."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from flash_attn.backends import triton_kernels
from flash_attn.kernels import flags, launches
from flash_attn.runtime import launch, variants


def test_how_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as there are programs enough with, of those that divide the group and leave each two query heads; one
    where there is little to do."""
    monkeypatch.setattr(launch, "compute_units", lambda _: 100)
    found = [triton_kernels.parts_of(8, programs, 512, 9, 0) for programs in (0, 1, 74, 75, 149, 150, 299, 300)]
    assert found == [1, 4, 4, 4, 4, 2, 2, 1]
    assert triton_kernels.parts_of(8, 75, 511, 9, 0) == 1
    assert [triton_kernels.parts_of(8, 75, 512, most, 0) for most in range(5)] == [1, 1, 2, 2, 4]
    assert [triton_kernels.parts_of(group, 101, 4096, 9, 0) for group in (1, 2, 3, 4, 6, 7, 9)] == [1, 1, 1, 2, 3, 1, 3]


@pytest.mark.parametrize("count", range(2, 10))
def test_parts_are_added_up(count: int) -> None:
    parts = torch.randn(5, 3, count, 8)
    result = torch.empty(5, 3, 9, dtype=torch.bfloat16)[..., 1:]
    wanted = parts.double().sum(-2)
    triton_kernels.add_parts(parts, result)
    torch.testing.assert_close(result, wanted.bfloat16(), rtol=2**-8, atol=1e-6)


def test_blocks_of_a_grid() -> None:
    """As many for each sequence as the longest has, or those of all rows where these are fewer by a third."""
    assert triton_kernels.grid_of(64, 100, 3, 5, 300) == (2, 15, 0)
    assert triton_kernels.grid_of(64, 640, 3, 5, 3 * 640) == (10, 15, 0)
    assert triton_kernels.grid_of(64, 640, 4, 5, 900) == (18, 5, flags.PACKED_BLOCKS)
    assert triton_kernels.grid_of(64, 0, 4, 5, 900) == (0, 20, 0)
    assert triton_kernels.grid_of(64, 100, 0, 5, 900) == (2, 0, 0)


# Call -> the kind of kernel that serves it, in a 16-bit type and in fp32.
KINDS = {
    "nothing": ((0.0, None, 0.0, 0.5), "plain", "plain"),
    "alibi": ((0.0, torch.ones(1), 0.0, 0.5), "alibi", "any"),
    "dropout": ((0.0, None, 0.1, 0.5), "dropout", "any"),
    "softcap": ((2.0, None, 0.0, 0.5), "softcap", "any"),
    "two things": ((0.0, torch.ones(1), 0.1, 0.5), "any", "any"),
    "negative scale": ((0.0, None, 0.0, -0.5), "any", "any"),
    "dropout, scale 0": ((0.0, None, 0.1, 0.0), "any", "any"),
}


@pytest.mark.parametrize("call", KINDS)
def test_a_call_gets_the_kernel_that_does_what_it_asks_for_and_no_more(call: str) -> None:
    arguments, half, single = KINDS[call]
    kind = triton_kernels.score_kind(*arguments)
    assert variants.serving("fwd", "bf16", kind) == half
    assert variants.serving("bwd-dq", "fp32", kind) == single
    assert variants.serving("append", "bf16", kind) == "plain"


@pytest.mark.parametrize("target", ["gfx90a", "gfx950", "gfx1030", "gfx1201", "sm_90"])
def test_a_launch_gives_each_kernel_the_constants_that_it_takes(target: str) -> None:
    for variant in variants.table(target):
        specification = launches.specification(variant, target)
        module = importlib.import_module(f"flash_attn.kernels.{specification.module}")
        parameters = inspect.signature(getattr(module, specification.symbol).fn).parameters.values()
        taken = {parameter.name for parameter in parameters if parameter.annotation == "tl.constexpr"}
        assert set(specification.constants) == taken, variant.name
