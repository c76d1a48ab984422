"""Attention with INT8 queries and keys: the kernels against PyTorch, and the function of sageattention."""

from __future__ import annotations

import pytest
import torch
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends import triton as triton_backend
from flash_attn.attention.backends.torch.int8 import round_trip
from flash_attn.call.calls import attention_call
from flash_attn.core import device
from flash_attn.int8 import flash_attn_int8_func
from flash_attn.kernels import targets, tuning, variants
from flash_attn.kernels.int8_rows import KEY_ROWS, QUERY_ROWS
from flash_attn.kernels.operation import INT8_FAMILIES
from sageattention import sageattn

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if GPU and targets.get(device.of(0).target).family not in INT8_FAMILIES:
    pytest.skip("needs a GPU with INT8 kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreter_multiplies_bf16")


@pytest.fixture(autouse=True)
def _kernels(fresh_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    if GPU:
        return
    real = tuning.config

    def config(target: str, variant: variants.Variant) -> tuning.Config:
        return tuning.Config(64, 32, 4, 1) if variant.op == "int8-fwd" else real(target, variant)

    monkeypatch.setattr(tuning, "config", config)
    monkeypatch.setattr("flash_attn.attention.backends.triton.int8._check_target", lambda _target: None)


def _draw(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _inputs(sq: int, sk: int, dim: int, dtype: torch.dtype, heads: tuple[int, int] = (2, 1)) -> list[torch.Tensor]:
    """Keys have a large common part, as those of image models have."""
    q, k, v = (_draw(2, n, h, dim, seed=n) for n, h in ((sq, heads[0]), (sk, heads[1]), (sk + 1, heads[1])))
    return [q.to(dtype), (k + 4 * _draw(1, 1, heads[1], dim, seed=7)).to(dtype), v[:, 1:].to(dtype)]


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS error relative to the RMS of what was wanted."""
    difference = (got.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


@pytest.mark.parametrize(("op", "block"), [("int8-cast-q", QUERY_ROWS), ("int8-cast-k", KEY_ROWS)])
@pytest.mark.parametrize("smooth", [False, True])
def test_casts_equal_pytorchs_casts(op: str, block: int, smooth: bool) -> None:
    """One scale for a block of rows. A number between two integers may round to either of them."""
    x = _draw(2, 200, 2, 48)
    x[:, 70:, 1] *= 30.0
    x[1, :, 0] = 0.0
    mean = x.mean(1, dtype=torch.float32) if smooth else None
    y, scales = triton_backend.int8._cast(op, x, mean)
    assert scales.shape == (2, 2, -(-200 // block))
    steps = scales.repeat_interleave(block, -1)[..., :200, None]  # [batch, heads, seqlen, 1]
    expected = round_trip(x, block, mean).transpose(1, 2)
    got = y.float() * steps
    assert ((got - expected).abs() <= 1.01 * steps).all()
    assert ((got - expected).abs() < 0.01 * steps).float().mean() > 0.999
    assert int(y.abs().max()) == 127


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk", "dim"), [(70, 90, 64), (150, 200, 128), (130, 40, 40)])
def test_the_kernels_do_what_pytorch_does(sq: int, sk: int, dim: int, causal: bool, dtype: torch.dtype) -> None:
    """More queries than keys under a causal mask leave rows without a key: 0 and +inf."""
    inputs = _inputs(sq, sk, dim, dtype)
    actual: list[tuple[torch.Tensor, torch.Tensor]] = []
    for backend in (triton_backend, torch_backend):
        with backends.using(backend):
            result = flash_attn_int8_func(*inputs, causal=causal, return_lse=True)
        assert isinstance(result, tuple)
        actual.append(result)
    (out, lse), (expected, wanted_lse) = actual
    assert out.dtype is dtype
    # Interpreted bf16 is cut off where a GPU rounds.
    assert _error(out, expected) < {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert torch.equal(lse.isinf(), wanted_lse.isinf())
    seen = ~wanted_lse.isinf()
    assert (lse[seen] - wanted_lse[seen]).abs().max() < 5e-3


@pytest.mark.parametrize("causal", [False, True])
def test_the_error_is_that_of_8_bits(causal: bool) -> None:
    """A quarter of FP8's at most. Without the mean subtracted, keys with a large common part lose their small part."""
    q, k, v = (x.float() for x in _inputs(200, 300, 128, torch.bfloat16))
    exact, exact_lse = torch_backend.forward(attention_call(q, k, v, softmax_scale=128**-0.5, causal=causal))[:2]
    small = [x.to(torch.bfloat16) for x in (q, k, v)]
    out, lse = flash_attn_int8_func(*small, causal=causal, return_lse=True)
    assert _error(out, exact) < 0.015
    assert (lse - exact_lse).abs().max() < 0.1
    plain, plain_lse = flash_attn_int8_func(*small, causal=causal, smooth_k=False, return_lse=True)
    assert 2 * _error(out, exact) < _error(plain, exact) < 0.1
    assert (plain_lse - exact_lse).abs().max() < 0.3


def test_sageattn_has_both_layouts() -> None:
    q, k, v = _inputs(50, 50, 64, torch.float16)
    expected, lse = flash_attn_int8_func(q, k, v, 0.2, True, return_lse=True)
    assert torch.equal(sageattn(q, k, v, "NHD", True, 0.2), expected)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out, result = sageattn(*turned, is_causal=True, sm_scale=0.2, return_lse=True)
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(result, lse)


def test_unsupported_int8_calls_are_refused() -> None:
    q, k, v = _inputs(20, 30, 64, torch.float16)
    with pytest.raises(ValueError, match="tensor_layout: got 'HDN', wanted one of HND, NHD"):
        sageattn(q, k, v, "HDN")
    with pytest.raises(ValueError, match="is_causal: got 20 queries and 30 keys"):
        sageattn(q, k, v, "NHD", is_causal=True)
    with pytest.raises(TypeError, match=r"q: got torch\.float32, wanted float16 or bfloat16"):
        flash_attn_int8_func(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match=r"head_dim: got 256 and 256 for v, .*: call flash_attn_func"):
        flash_attn_int8_func(*_inputs(20, 30, 256, torch.float16))
    with pytest.raises(ValueError, match=r"softmax_scale: got -0\.5, wanted a positive number"):
        flash_attn_int8_func(q, k, v, softmax_scale=-0.5)
    with pytest.raises(RuntimeError, match=r"has no gradient: call it under torch\.no_grad"):
        flash_attn_int8_func(q.requires_grad_(), k, v)


def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(NotImplementedError, match=r"no kernels for gfx942, only for gfx1100, .*: call flash_attn_func"):
        triton_backend.int8._check_target("gfx942")
    for name in ("gfx1103", "gfx1201", "gfx12-generic", "sm_90"):
        triton_backend.int8._check_target(name)
