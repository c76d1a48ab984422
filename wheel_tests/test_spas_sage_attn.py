"""The distribution spas_sage_attn: it owns the module spas_sage_attn, which runs on the flash_attn here."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch


@pytest.fixture(scope="module")
def interface() -> metadata.Distribution:
    """Skips without this project's wheel. thu-ml's package has the same name and does not require flash-attn."""
    try:
        found = metadata.distribution("spas_sage_attn")
    except metadata.PackageNotFoundError:
        pytest.skip("spas_sage_attn is not installed")
    if not any(requirement.startswith("flash-attn") for requirement in found.requires or ()):
        pytest.skip("spas_sage_attn is another project's")
    return found


def test_it_owns_its_module_alone(interface: metadata.Distribution, dist: metadata.Distribution) -> None:
    files = [str(file) for file in interface.files or () if ".dist-info" not in str(file) and file.suffix != ".pyc"]
    assert sorted(files) == ["spas_sage_attn/__init__.py", "spas_sage_attn/autotune.py", "spas_sage_attn/core.py"]
    assert not {*files} & {*map(str, dist.files or ())}


def test_it_requires_flash_attn_with_the_same_label(
    interface: metadata.Distribution, dist: metadata.Distribution
) -> None:
    assert interface.requires == [f"flash-attn=={dist.version}"]
    assert interface.version.partition("+")[2] == dist.version.partition("+")[2]


@pytest.mark.usefixtures("interface")
def test_it_is_near_attention_over_every_block() -> None:
    from spas_sage_attn import spas_sage2_attn_meansim_topk_cuda

    q, k, v = torch.randn(3, 2, 4, 200, 64)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = spas_sage2_attn_meansim_topk_cuda(q, k, v, topk=1.0, is_causal=True)
    error = (out.float() - wanted).square().mean() / wanted.square().mean()
    assert float(error) ** 0.5 < 0.02
