"""The least that an installed wheel must do; also run where uv installed it."""

from __future__ import annotations

from typing import Any

import flash_attn
import pytest
import torch
from helpers import check, fresh, inputs

_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from flash_attn import flash_attn_func
q, k, v = (torch.randn(1, 33, 2, 32, requires_grad=True) for _ in range(3))
out = flash_attn_func(q, k, v, causal=True)
out.sum().backward()
flipped = [x.transpose(1, 2) for x in (q, k, v)]
wanted = torch.nn.functional.scaled_dot_product_attention(*flipped, is_causal=True)
assert torch.allclose(out, wanted.transpose(1, 2), atol=1e-5)
assert all(x.grad.isfinite().all() for x in (q, k, v))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_on_cpu(dtype: torch.dtype) -> None:
    q, k, v, dout = inputs(2, 33, 65, 4, 2, 64, dtype)
    check(flash_attn.flash_attn_func(q, k, v, causal=True), q, k, v, dout, causal=True)


def test_works_without_triton() -> None:
    done = fresh(_WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr


def test_knows_its_build(build_info: dict[str, Any]) -> None:
    assert flash_attn.__version__ == build_info["version"]
    assert list(flash_attn.backend_info()["targets"]) == build_info["targets"]
