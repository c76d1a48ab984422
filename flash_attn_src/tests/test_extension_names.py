"""flash_attn_2_cuda: upstream's positional functions return the same as the public functions."""

from __future__ import annotations

import flash_attn
import flash_attn_2_cuda as extension
import pytest
import torch
from flash_attn.modules import mha

TAIL = (0.25, True, 5, -1, 3.0)  # softmax_scale, causal, window left and right, softcap


def _inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, n, h, 16) for n, h in ((6, 4), (9, 2), (9, 2), (6, 4)))


def _wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn.flash_attn_func(
        *leaves, softmax_scale=0.25, causal=True, window_size=(5, -1), softcap=3.0, return_attn_probs=True
    )
    return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


def test_forward_and_backward_positionally() -> None:
    q, k, v, dout = _inputs()
    out, lse, *gradients = _wanted(q, k, v, dout)
    given = torch.empty_like(q)
    got, got_lse, dmask, state = extension.fwd(q, k, v, given, None, 0.0, *TAIL, False, None)
    assert got is given
    assert torch.equal(got, out)
    assert torch.equal(got_lse, lse)
    assert dmask.numel() == 0
    dq = torch.empty_like(q)
    results = extension.bwd(dout, q, k, v, out, lse, dq, None, None, None, 0.0, *TAIL, False, None, state)
    assert results[0] is dq
    assert all(map(torch.equal, results[:3], gradients))
    assert results[3].shape == lse.shape


def test_varlen_positionally() -> None:
    q, k, v, dout = _inputs()
    out, _, *gradients = _wanted(q, k, v, dout)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (6, 9))
    got, got_lse, _, state = extension.varlen_fwd(
        *packed, None, cu_q, cu_k, None, None, None, None, 6, 9, 0.0, 0.25, False, True, 5, -1, 3.0, False, None
    )
    assert torch.allclose(got, out.flatten(0, 1), atol=1e-6)
    results = extension.varlen_bwd(
        dout.flatten(0, 1), *packed, got, got_lse, None, None, None, cu_q, cu_k, None, 6, 9, 0.0, 0.25, False, True,
        5, -1, 3.0, False, None, state,
    )  # fmt: skip
    for value, expected in zip(results, gradients, strict=False):
        assert torch.allclose(value, expected.flatten(0, 1), atol=1e-6)


def test_kvcache_positionally() -> None:
    q, k, v, _ = _inputs()
    new = q[:, :2, :2].contiguous()
    ours, theirs = [k.clone(), v.clone()], [k.clone(), v.clone()]
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    expected, wanted_lse = flash_attn.flash_attn_with_kvcache(
        q, *ours, new, new, cache_seqlens=lengths, softmax_scale=0.25, causal=True, softcap=3.0, return_softmax_lse=True
    )
    given = torch.empty_like(q)
    out, lse = extension.fwd_kvcache(
        q, *theirs, new, new, lengths, None, None, None, None, None, None, given, 0.25, True, -1, -1, 3.0, False, 0
    )
    assert out is given
    assert all(map(torch.equal, (out, lse, *theirs), (expected, wanted_lse, *ours)))


def test_a_generator_is_drawn_from() -> None:
    q, k, v, dout = _inputs()
    args = (0.3, 0.25, False, -1, -1, 0.0)

    def state(seed: int) -> torch.Tensor:
        return extension.fwd(q, k, v, None, None, *args, True, torch.Generator().manual_seed(seed))[3]

    before = torch.get_rng_state()
    assert torch.equal(state(1), state(1))
    assert not torch.equal(state(1), state(2))
    assert torch.equal(before, torch.get_rng_state())
    out, lse, *_ = extension.fwd(q, k, v, None, None, *args, False, None)
    with pytest.raises(ValueError, match="rng_state: got None"):
        extension.bwd(dout, q, k, v, out, lse, None, None, None, None, *args, False)


@pytest.mark.parametrize("place", range(3), ids=["q", "k", "v"])
def test_a_result_in_the_memory_of_an_input(place: int) -> None:
    """The whole of it, or a part that begins a row later."""
    q, k, v = torch.randn(3, 12, 2, 8)
    cu = torch.tensor([0, 4, 12], dtype=torch.int32)
    more = (0.0, 0.3, True, -1, -1, 0.0, False)
    packed = (cu, cu, None, None, None, None, 8, 8, 0.0, 0.3, False, True, -1, -1, 0.0, False)
    for shift in (0, 1):
        for shape, function, rest in (((12, 2, 8), extension.varlen_fwd, packed),
                                      ((1, 12, 2, 8), extension.fwd, (None, *more))):  # fmt: skip
            expected = function(*(x.view(shape) for x in (q, k, v)), None, *rest)[0]
            buffer = torch.zeros(13, 2, 8)
            inputs = [x.clone().view(shape) for x in (q, k, v)]
            inputs[place] = buffer[:12].copy_((q, k, v)[place]).view(shape)
            out = buffer[shift : shift + 12].view(shape)
            assert function(*inputs, out, *rest)[0] is out
            assert torch.equal(out, expected)
    caches = [torch.randn(2, 9, 2, 8) for _ in range(2)]
    queries = torch.randn(2, 3, 2, 8)
    tail = (*(None,) * 8, 0.3, True, -1, -1, 0.0, True, 0)
    expected = extension.fwd_kvcache(queries, *caches, None, None, *tail[:7], None, *tail[8:])[0]
    buffer = queries.clone()
    extension.fwd_kvcache(buffer, *caches, None, None, *tail[:7], buffer, *tail[8:])
    assert torch.equal(buffer, expected)
    with pytest.raises(ValueError, match="out: got memory of k_cache or v_cache"):
        extension.fwd_kvcache(queries, *caches, None, None, *tail[:7], caches[0][:, :3], *tail[8:])


def test_wrong_arguments_are_refused() -> None:
    q, k, v, dout = _inputs()
    odd = [x[..., :12].contiguous() for x in (q, k, v)]
    with pytest.raises(ValueError, match="head_dim 12, wanted a multiple of 8"):
        extension.fwd(*odd, None, None, 0.0, *TAIL, False, None)
    with pytest.raises(ValueError, match=r"dk: got torch.float32 \(2, 6, 4, 16\) on cpu, wanted"):
        extension.bwd(dout, q, k, v, q, q[..., 0], None, q, None, None, 0.0, *TAIL, False)


def test_before_2_7_the_forward_returns_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_RETURNS_INPUTS", True)
    q, k, v, _ = _inputs()
    results = extension.fwd(q, k, v, None, None, 0.0, *TAIL, False, None)
    assert len(results) == 8
    assert results[0] is results[4]


def test_names_that_other_packages_import() -> None:
    """nanotron takes the functions through mha, xtuner the helper."""
    for name in (
        "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
    ):  # fmt: skip
        assert getattr(mha, name) is getattr(flash_attn, name)
    assert [flash_attn.flash_attn_interface.round_multiple(x, 128) for x in (0, 1, 128, 129)] == [0, 128, 128, 256]
