"""The distribution sageattention: it owns the module sageattention, which runs on the flash_attn here."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch


@pytest.fixture(scope="module")
def interface() -> metadata.Distribution:
    """Skips without this project's wheel. thu-ml's package has the same name and does not require flash-attn."""
    try:
        found = metadata.distribution("sageattention")
    except metadata.PackageNotFoundError:
        pytest.skip("sageattention is not installed")
    if not any(requirement.startswith("flash-attn") for requirement in found.requires or ()):
        pytest.skip("sageattention is another project's")
    return found


def test_it_owns_its_module_alone(interface: metadata.Distribution, dist: metadata.Distribution) -> None:
    files = [str(file) for file in interface.files or () if ".dist-info" not in str(file) and file.suffix != ".pyc"]
    assert sorted(files) == ["sageattention/__init__.py", "sageattention/core.py"]
    assert not {*files} & {*map(str, dist.files or ())}


def test_it_requires_flash_attn_with_the_same_label(
    interface: metadata.Distribution, dist: metadata.Distribution
) -> None:
    assert interface.requires == [f"flash-attn=={dist.version}"]
    assert interface.version.partition("+")[2] == dist.version.partition("+")[2]


@pytest.mark.usefixtures("interface")
def test_it_is_near_attention_in_fp32() -> None:
    from sageattention import sageattn

    q, k, v = torch.randn(3, 2, 4, 90, 64)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = sageattn(q.half(), k.half(), v.half(), tensor_layout="HND", is_causal=True)
    error = (out.float() - wanted).square().mean() / wanted.square().mean()
    assert float(error) ** 0.5 < 0.02
