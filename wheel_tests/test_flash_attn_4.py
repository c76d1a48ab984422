"""The distribution flash-attn-4: it owns the module flash_attn.cute, which runs on the flash_attn here."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch


@pytest.fixture(scope="module")
def interface() -> metadata.Distribution:
    try:
        return metadata.distribution("flash-attn-4")
    except metadata.PackageNotFoundError:
        pytest.skip("flash-attn-4 is not installed")


def test_no_other_wheel_has_its_modules(interface: metadata.Distribution, dist: metadata.Distribution) -> None:
    assert "flash-attn-4" in metadata.packages_distributions()["flash_attn"]
    files = [str(file) for file in interface.files or () if ".dist-info" not in str(file) and file.suffix != ".pyc"]
    assert sorted(files) == [f"flash_attn/cute/{name}.py" for name in ("__init__", "block_sparsity", "interface")]
    assert not {*files} & {*map(str, dist.files or ())}


def test_it_requires_flash_attn_with_the_same_label(
    interface: metadata.Distribution, dist: metadata.Distribution
) -> None:
    assert interface.requires == [f"flash-attn=={dist.version}"]
    assert interface.version.partition("+")[2] == dist.version.partition("+")[2]


@pytest.mark.usefixtures("interface")
def test_it_computes_what_flash_attn_computes() -> None:
    import flash_attn
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    q, k, v = torch.randn(3, 2, 9, 4, 16)
    sink = torch.randn(4)
    out, lse = flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    assert lse is not None
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, v, causal=True, s_aux=sink))
    assert lse.shape == (2, 4, 9)
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    again, _ = flash_attn_varlen_func(
        *packed, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=9, max_seqlen_k=9, causal=True, learnable_sink=sink
    )
    assert torch.allclose(again, out.flatten(0, 1), atol=1e-6)
    with pytest.raises(NotImplementedError, match="score_mod: flash_attn for ROCm has none, use softcap"):
        flash_attn_func(q, k, v, score_mod=lambda *_: None)
