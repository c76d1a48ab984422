"""The distribution block_sparse_attn: it owns the module block_sparse_attn, which runs on the flash_attn here."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch


@pytest.fixture(scope="module")
def interface() -> metadata.Distribution:
    """Skips without this project's wheel. mit-han-lab's package has the same name and does not require flash-attn."""
    try:
        found = metadata.distribution("block_sparse_attn")
    except metadata.PackageNotFoundError:
        pytest.skip("block_sparse_attn is not installed")
    if not any(requirement.startswith("flash-attn") for requirement in found.requires or ()):
        pytest.skip("block_sparse_attn is another project's")
    return found


def test_it_owns_its_module_alone(interface: metadata.Distribution, dist: metadata.Distribution) -> None:
    files = [str(file) for file in interface.files or () if ".dist-info" not in str(file) and file.suffix != ".pyc"]
    assert sorted(files) == [
        f"block_sparse_attn/{name}.py" for name in ("__init__", "bert_padding", "block_sparse_attn_interface")
    ]
    assert not {*files} & {*map(str, dist.files or ())}


def test_it_requires_flash_attn_with_the_same_label(
    interface: metadata.Distribution, dist: metadata.Distribution
) -> None:
    assert interface.requires == [f"flash-attn=={dist.version}"]
    assert interface.version.partition("+")[2] == dist.version.partition("+")[2]


@pytest.mark.usefixtures("interface")
def test_a_mask_of_every_block_is_dense_attention() -> None:
    from block_sparse_attn import block_sparse_attn_func

    q, k, v = torch.randn(3, 200, 2, 64)
    ends, types = torch.tensor([0, 200], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    mask = torch.ones(1, 2, 2, 2, dtype=torch.bool)
    out = block_sparse_attn_func(q, k, v, ends, ends, types, None, mask, 200, 200, 0.0, is_causal=True)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    assert float((out - expected).abs().max()) < 1e-5
