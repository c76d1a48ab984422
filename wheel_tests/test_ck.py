"""A wheel with Composable Kernel, without a GPU: whole calls are planned, and every launch has its kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flash_attn
import pytest
import torch
from flash_attn.core.store import Store

CK_TARGETS = ("gfx90a", "gfx942", "gfx950")
pytestmark = pytest.mark.filterwarnings("ignore:the CK backend cannot do:RuntimeWarning")


@pytest.fixture(autouse=True)
def _only_ck(build_info: dict[str, Any]) -> None:
    if build_info["backend"] != "ck" or not set(build_info["targets"]) & set(CK_TARGETS):
        pytest.skip("the wheel is without Composable Kernel")


@pytest.fixture
def stores(package: Path, build_info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Target -> its kernels, for the targets of Composable Kernel.

    For other targets the wheel has only Triton kernels.
    """
    found = {}
    for path in sorted((package / "_kernels").glob("*.zip")):
        if path.stem in CK_TARGETS:
            found[path.stem] = Store(path).kernels
    assert set(found) == set(build_info["targets"]) & set(CK_TARGETS)
    return found


@pytest.fixture
def kernels(stores: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The kernels of the target with the most kernels: gfx90a has no fp16 kernels, the others have all."""
    return max(stores.values(), key=len)


def test_every_planned_kernel_is_there_with_its_argument(stores: dict[str, dict[str, Any]]) -> None:
    from flash_attn.core import ck_planner
    from flash_attn.kernels import targets

    every = {name: f"B{size}" for name, size in ck_planner.kernels().items()}
    assert every
    for target, kernels in stores.items():
        row = targets.get(target)
        planned = {name: params for name, params in every.items() if not row.loses_range(name.split("-")[1])}
        held = {name: entry["params"] for name, entry in kernels.items() if entry["params"].startswith("B")}
        assert held == planned, target


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_forward_and_backward(
    kernels: dict[str, Any], dtype: torch.dtype, head_dim: int, causal: bool, dropout_p: float
) -> None:
    from flash_attn.attention.backends import recording

    if not any(name.startswith(f"fwd-{'fp16' if dtype is torch.float16 else 'bf16'}-") for name in kernels):
        pytest.skip(f"all targets of this wheel have Triton kernels for {dtype}")
    q = torch.randn(2, 33, 4, head_dim, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 65, 2, head_dim, dtype=dtype, requires_grad=True) for _ in range(2))
    with recording.record("gfx942") as launches:
        flash_attn.flash_attn_func(q, k, v, dropout_p=dropout_p, causal=causal).sum().backward()
    assert [launch.kernel.split("-")[0] for launch in launches] == ["fwd", "dot", "dqdkdv", "convert"]
    for launch in launches:
        assert kernels[launch.kernel]["params"] == f"B{len(launch.argument)}"
        assert kernels[launch.kernel]["symbol"] == "ck_" + launch.kernel.replace("-", "_")


def test_decoding(kernels: dict[str, Any]) -> None:
    from flash_attn.attention.backends import recording

    q = torch.randn(2, 1, 8, 128, dtype=torch.bfloat16)
    cache = torch.randn(2, 300, 2, 128, dtype=torch.bfloat16)
    new = torch.randn(2, 1, 2, 128, dtype=torch.bfloat16)
    with recording.record("gfx942") as launches:
        flash_attn.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=100)
    assert [launch.kernel.split("-")[0] for launch in launches] == ["appendkv", "splitkv", "combine"]
    assert all(kernels[launch.kernel]["params"] == f"B{len(launch.argument)}" for launch in launches)
