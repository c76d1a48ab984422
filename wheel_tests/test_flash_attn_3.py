"""The distribution flash-attn-3: it owns the modules that clients look for, which run on the flash_attn here."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch


@pytest.fixture(scope="module")
def interface() -> metadata.Distribution:
    try:
        return metadata.distribution("flash-attn-3")
    except metadata.PackageNotFoundError:
        pytest.skip("flash-attn-3 is not installed")


def test_no_other_wheel_has_its_modules(interface: metadata.Distribution, dist: metadata.Distribution) -> None:
    assert metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]
    files = [str(file) for file in interface.files or () if ".dist-info" not in str(file) and file.suffix != ".pyc"]
    package = ["flash_attn_3/__init__.py", "flash_attn_3/flash_attn_interface.py"]
    assert sorted(files) == [*package, "flash_attn_interface.py"]
    assert not {*files} & {*map(str, dist.files or ())}


def test_it_requires_flash_attn_with_the_same_label(
    interface: metadata.Distribution, dist: metadata.Distribution
) -> None:
    assert interface.requires == [f"flash-attn=={dist.version}"]
    assert interface.version.partition("+")[2] == dist.version.partition("+")[2]


@pytest.mark.usefixtures("interface")
def test_it_computes_what_flash_attn_computes() -> None:
    import flash_attn
    import flash_attn_interface
    from flash_attn_3 import flash_attn_interface as within

    assert within is flash_attn_interface
    q, k, v = torch.randn(3, 2, 9, 4, 16)
    out, lse = flash_attn_interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, v, causal=True))
    assert lse.shape == (2, 4, 9)
    cached = flash_attn_interface.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, causal=True)
    assert torch.allclose(cached, out, atol=1e-6)
