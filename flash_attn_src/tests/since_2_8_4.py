"""What 2.8.4 does beyond 2.8.3: num_splits of packed sequences, block tables that are checked. Run as a program."""

from __future__ import annotations

import flash_attn
import flash_attn_2_cuda as extension
import pytest
import torch
from flash_attn import flash_attn_interface as interface

PAGE = 4


def check_num_splits() -> None:
    """num_splits changes no result, and the op still has a gradient."""
    q, k, v = (torch.randn(8, 2, 16, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = (ends, ends, 5, 5, 0.0, 0.25, True)
    out, lse, *_ = interface._flash_attn_varlen_forward(q, k, v, *packed, num_splits=3)
    plain, plain_lse, *_ = interface._flash_attn_varlen_forward(q, k, v, *packed)
    assert torch.equal(out, plain)
    assert torch.equal(lse, plain_lse)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(map(torch.equal, gradients, torch.autograd.grad(plain, (q, k, v), torch.ones_like(plain))))
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in (q, k, v, *packed)]  # the op's fake
    fake, fake_lse, *_ = interface._flash_attn_varlen_forward(*on_meta, num_splits=1)
    assert (fake.shape, fake_lse.shape) == (out.shape, lse.shape)

    pages, table = torch.randn(3, PAGE, 2, 16), torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    lengths = {"seqused_k": torch.tensor([5, 2], dtype=torch.int32), "block_table": table}
    result = interface._flash_attn_varlen_forward(q, pages, pages, ends, ends, 5, 8, 0.0, 0.25, True, **lengths)[0]
    arguments = (None, ends, ends, lengths["seqused_k"], None, table, None, 5, 8, 0.0, 0.25, False, True, -1, -1, 0.0)
    again = extension.varlen_fwd(q, pages, pages, *arguments, False, None, 0)[0]
    assert torch.equal(result, again)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported with block_table"):
        interface._flash_attn_varlen_forward(
            q, pages, pages, ends, ends, 5, 8, 0.0, 0.25, True, **lengths, num_splits=2
        )
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported with block_table"):
        extension.varlen_fwd(q, pages, pages, *arguments, False, None, 2)
    with pytest.raises(RuntimeError, match="generator` argument is no longer supported"):
        extension.varlen_fwd(q, pages, pages, *arguments, False, torch.Generator(), 0)


def check_block_tables() -> None:
    """Lengths that the table has no room for, and pages that the cache lacks, are refused; unused entries are not."""
    pages, q = torch.randn(3, PAGE, 2, 16), torch.randn(2, 1, 2, 16)
    table = torch.tensor([[2, 0], [1, 99]], dtype=torch.int32)

    def attend(lengths: list[int] | int | None, **given: torch.Tensor) -> torch.Tensor:
        seqlens = torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths
        cache = pages.clone()
        return flash_attn.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=seqlens, **{"block_table": table, **given}
        )

    assert attend([8, PAGE]).isfinite().all()
    with pytest.raises(RuntimeError, match=r"block_table: got room for 8 keys .*wanted 9 or more"):
        attend([9, 1])
    with pytest.raises(RuntimeError, match=r"block_table: .*cache_seqlens has 8, k appends 1"):
        attend([8, 1], k=q, v=q)
    with pytest.raises(RuntimeError, match="block_table: got room for 8"):
        attend(9)
    with pytest.raises(RuntimeError, match=r"block_table: got page 99 at \(1, 1\), wanted 0 to 2"):
        attend([8, PAGE], k=q, v=q, block_table=torch.tensor([[2, 0, 1], [1, 99, 0]], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="block_table: got page 99"):
        attend(None)
    with pytest.raises(RuntimeError, match="block_table: got room for 8"):
        extension.fwd_kvcache(
            q, pages, pages, None, None, torch.tensor([9, 1], dtype=torch.int32), None, None, None, None, table,
            None, None, 0.25, False, -1, -1, 0.0, True, 0,
        )  # fmt: skip


if __name__ == "__main__":
    assert flash_attn.__version__ == "2.8.4"
    torch.manual_seed(0)
    check_num_splits()
    check_block_tables()
