"""Attention in FP8: the kernels against the same casts in PyTorch, the functions against attention in fp32."""

from __future__ import annotations

from typing import Any

import flash_attn
import pytest
import reference
import torch
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends import triton as triton_backend
from flash_attn.attention.backends.torch import fp8 as oracle
from flash_attn.attention.backends.triton import fp8 as backend
from flash_attn.call.calls import attention_call, cache_call, replace
from flash_attn.core import device, jit
from flash_attn.kernels import targets, tuning, variants
from op_arguments import op_arguments
from small_calls import in_one_graph

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if GPU and targets.fp8_format(device.of(0).target) is None:
    pytest.skip("needs a GPU with matrix units for FP8", allow_module_level=True)


@pytest.fixture(autouse=True)
def _oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "FORMAT", _format())


@pytest.fixture(autouse=True)
def _small_tiles(fresh_kernels: None, fp8_rounding: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    if GPU:
        return
    real = tuning.config

    def config(target: str, variant: variants.Variant) -> tuning.Config:
        small = tuning.Config(64, 64, 4, 1)
        return small if variant.op == "fp8-fwd" else real(target, variant)

    monkeypatch.setattr(tuning, "config", config)


def _format() -> torch.dtype:
    """The FP8 dtype of the GPU or of the simulated GPU."""
    return backend.fp8_format(torch.empty(0, device=DEVICE))


def _draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS error relative to the RMS of what was wanted."""
    got, expected = got.detach(), expected.detach()
    difference = (got.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [None, [150, 0, 40], [300, 0, 40, 1, 3]], ids=["dense", "packed", "unequal"])
def test_casts_equal_pytorchs_casts(lengths: list[int] | None, dtype: torch.dtype, transposed: bool) -> None:
    """Bit for bit, one scale a sequence and head; transposed sequences start on 128 columns, zeros behind them."""
    varlen = lengths is not None
    lengths = lengths or [150]
    cu = _offsets(*lengths) if varlen else None
    x = _draw(sum(lengths), 2, 80, dtype=dtype) if varlen else _draw(2, 150, 2, 80, dtype=dtype)
    x[..., 1, :] *= 30.0
    y, descale = backend.cast(x, _format(), None, cu, transposed)
    assert torch.allclose(descale, oracle.descale_of(x, _format(), cu))
    factor = descale[:, None, :, None] if cu is None else descale[oracle.sequence_of_rows(x, cu)][..., None]
    expected = (x.float() * (1.0 / factor)).to(_format()).float()
    if not transposed:
        got = y.float()
    elif not varlen:
        assert not y[..., 150:].float().any()
        got = y[..., :150].float().permute(0, 3, 1, 2)
    else:
        starts = [(int(start) + 128 * i) // 128 * 128 for i, start in enumerate(cu[:-1])]
        got = torch.cat([y[..., s : s + n].float() for s, n in zip(starts, lengths, strict=True)], -1).permute(2, 0, 1)
    near = (got - expected).abs() <= expected.abs() / 8 + 2.0**-9
    assert near.all()
    assert (got == expected).float().mean() > 0.999  # a product may round otherwise than a quotient


CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (30, 5)},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": True},
    "negative scale": {"softmax_scale": -0.2},
}


def _both(
    tensors: tuple[torch.Tensor, ...],
    call: dict[str, Any],
    cu: tuple[torch.Tensor, ...] | None,
    longest: tuple[int, int],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    options = {"softmax_scale": tensors[0].shape[-1] ** -0.5, **call}
    if options.get("alibi_slopes"):
        options["alibi_slopes"] = torch.rand(tensors[0].shape[-2], device=DEVICE)
    cu_seqlens_q, cu_seqlens_k = cu or (None, None)
    attention = attention_call(
        *tensors, **options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=longest[0],
        max_seqlen_k=longest[1], descales=(None, None, None),
    )  # fmt: skip
    return backend.fp8_forward(attention), oracle.fp8_forward(attention)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("sq", "sk", "dim"), [(70, 90, 64), (33, 150, 48)])
def test_forward(sq: int, sk: int, dim: int, name: str) -> None:
    """The error is within the rounding of probabilities to FP8; the oracle keeps them in fp32."""
    tensors = _draw(1, sq, 4, dim), _draw(1, sk, 2, dim, seed=1), _draw(1, sk, 2, dim, seed=2)
    (out, lse, _, descales), (expected, wanted_lse, _, wanted_descales) = _both(tensors, CALLS[name], None, (sq, sk))
    assert _error(out, expected) < 0.04
    assert torch.allclose(lse, wanted_lse, atol=2e-3)
    assert all(map(torch.allclose, descales, wanted_descales))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([37, 0, 5, 60], [140, 9, 0, 61]), ([200, 1, 0, 9, 5, 3], [7, 300, 9, 0, 1, 64])],
    ids=["alike", "unequal"],
)
def test_varlen(lengths_q: list[int], lengths_k: list[int], causal: bool) -> None:
    tensors = (
        _draw(sum(lengths_q), 4, 64), _draw(sum(lengths_k), 2, 64, seed=1), _draw(sum(lengths_k), 2, 64, seed=2)
    )  # fmt: skip
    cu = _offsets(*lengths_q), _offsets(*lengths_k)
    longest = max(lengths_q), max(lengths_k)
    (out, lse, *_), (expected, wanted_lse, *_) = _both(tensors, {"causal": causal}, cu, longest)
    assert _error(out, expected) < 0.04
    assert torch.allclose(lse, wanted_lse, atol=2e-3)


def test_one_tensor_for_q_k_and_v() -> None:
    """v is laid out otherwise for the kernel, k and q are not, whether they are the same tensor or not."""
    q, k = _draw(1, 70, 2, 64), _draw(1, 70, 2, 64, seed=1)
    for shared, apart in (((q, k, k), (q, k, k.clone())), ((q, q, q), (q, q.clone(), q.clone()))):
        (out, lse, *_), (expected, wanted_lse, *_) = (
            backend.fp8_forward(attention_call(*each, softmax_scale=0.125, causal=True, descales=(None, None, None)))
            for each in (shared, apart)
        )
        assert torch.equal(out, expected)
        assert torch.equal(lse, wanted_lse)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.skipif(GPU, reason="pretends that a GPU's tensors are on the CPU")
@pytest.mark.parametrize("varlen", [False, True])
def test_the_kernels_in_one_compiled_graph(varlen: bool) -> None:
    """Nothing of the backend is traced: it would read addresses of tensors that have none."""
    leaves = [_draw(2, 40, 2, 64, seed=seed).requires_grad_() for seed in range(3)]
    if varlen:
        leaves = [x.detach().flatten(0, 1).requires_grad_() for x in leaves]
    cu = _offsets(30, 50)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if varlen:
            return flash_attn.flash_attn_varlen_fp8_func(q, k, v, cu, cu, 50, 50, causal=True).cos()
        return flash_attn.flash_attn_fp8_func(q, k, v, causal=True).cos()

    result = []
    for function in (block, in_one_graph(block)):
        with backends.using(triton_backend):
            out = function(*leaves)
            result.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for expected, got in zip(*result, strict=True):
        assert _error(got, expected) < 1e-6


def test_opcheck() -> None:
    q, k, v = (_draw(1, 20, 2, 16, seed=seed) for seed in range(3))
    descale = torch.rand(1, 2, device=DEVICE) + 0.5
    options = {
        "softmax_scale": 0.25,
        "causal": True,
        "dropout_p": 0.5,
        "rng_state": torch.tensor([3, 4], device=DEVICE),
    }
    op = torch.ops.flash_attn._fp8_forward
    checks = ("test_schema", "test_faketensor")
    arguments = op_arguments(op, q=q, k=k, v=v, descale_k=descale, max_seqlen_q=20, max_seqlen_k=20, **options)
    torch.library.opcheck(op.default, tuple(arguments), test_utils=checks)
    round_trip = torch.ops.flash_attn._fp8_there_and_back.default
    torch.library.opcheck(round_trip, (q, descale, None), test_utils=checks)
    rows = {name: x.flatten(0, 1) for name, x in (("q", q), ("k", k), ("v", v))}
    cu = _offsets(5, 15)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 15, "max_seqlen_k": 15}
    arguments = op_arguments(op, **rows, descale_k=descale.expand(2, 2), **lengths, **options)
    torch.library.opcheck(op.default, tuple(arguments), test_utils=checks)


def test_ops_return_contiguous_tensors() -> None:
    """As their fakes say, of which opcheck asks the shapes alone."""
    q, k = _draw(2, 5, 4, 16), _draw(2, 5, 1, 16, seed=1).expand(2, 5, 2, 16)
    descale = torch.rand(2, 2, device=DEVICE).t() + 0.5
    op = torch.ops.flash_attn._fp8_forward
    results = op(*op_arguments(op, q=q, k=k, v=k, descale_k=descale, softmax_scale=0.25, causal=True))
    again = torch.ops.flash_attn._fp8_there_and_back(k, descale, None)
    assert all(x.is_contiguous() for x in (*results, again))


def test_precomputed_scales_and_fp8_inputs_give_the_same_result() -> None:
    tensors = _draw(2, 40, 2, 64), _draw(2, 50, 1, 64, seed=1), _draw(2, 50, 1, 64, seed=2)
    call = attention_call(*tensors, softmax_scale=0.125, causal=True, descales=(None, None, None))
    out, lse, _, descales = backend.fp8_forward(call)
    again, again_lse, *_ = backend.fp8_forward(replace(call, descales=descales))
    assert _error(again, out) < 2e-3
    small = [backend.cast(x, _format(), None, None, False)[0] for x in tensors]
    moved, moved_lse, *_ = backend.fp8_forward(
        attention_call(*small, softmax_scale=0.125, causal=True, descales=descales)
    )
    assert ((moved.float() - out).abs() <= out.abs() / 128).all()  # as it is rounded to bf16
    assert torch.equal(moved_lse, lse)
    assert torch.allclose(again_lse, lse, atol=1e-3)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(5, 0), (0, 5), (0, 0)])
def test_no_rows_at_all(sq: int, sk: int, varlen: bool) -> None:
    """No query sees a key: 0, whatever the memory of scales held that nothing computes."""
    tensors = _draw(1, sq, 2, 16), _draw(1, sk, 2, 16), _draw(1, sk, 2, 16)
    cu = (_offsets(sq), _offsets(sk)) if varlen else None
    torch.use_deterministic_algorithms(True, warn_only=True)  # what nothing writes to is NaN
    try:
        both = _both(tuple(x[0] for x in tensors) if varlen else tensors, {}, cu, (sq, sk))
    finally:
        torch.use_deterministic_algorithms(False)
    for out, lse, _, _ in both:
        assert out.shape == tensors[0].shape[varlen:]
        assert not out.any()
        assert lse.isposinf().all()


def test_huge_and_tiny_and_zero_heads() -> None:
    """Scales follow each head: 1e30, 1e-30 and nothing at all come out right."""
    q, k, v = _draw(1, 40, 3, 64), _draw(1, 40, 3, 64, seed=1), _draw(1, 40, 3, 64, seed=2)
    factors = torch.tensor([1e30, 1e-30, 0.0], device=DEVICE)[:, None]
    (out, *_), (expected, *_) = _both((q, k, v * factors), {}, None, (40, 40))
    for head in range(2):
        assert _error(out[..., head, :], expected[..., head, :]) < 0.04
    assert not out[..., 2, :].any()


def _functions() -> dict[str, Any]:
    cu = _offsets(40, 24)
    return {
        "dense": (lambda q, k, v, **o: flash_attn.flash_attn_fp8_func(q, k, v, **o), False),
        "packed": (lambda *x, **o: flash_attn.flash_attn_qkvpacked_fp8_func(torch.stack(x, 2), **o), False),
        "varlen": (lambda *x, **o: flash_attn.flash_attn_varlen_fp8_func(*x, cu, cu, 40, 40, **o), True),
        "varlen packed": (
            lambda *x, **o: flash_attn.flash_attn_varlen_qkvpacked_fp8_func(torch.stack(x, 1), cu, 40, **o),
            True,
        ),
    }


@pytest.mark.parametrize("name", ["dense", "packed", "varlen", "varlen packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_public_functions_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Near fp32 attention, forward and backward; head_dim 40 is padded."""
    function, varlen = _functions()[name]
    shape = (64, 2, 40) if varlen else (2, 64, 2, 40)
    leaves = [_draw(*shape, dtype=dtype, seed=i).requires_grad_() for i in range(3)]
    out, lse, dmask = function(*leaves, causal=True, return_attn_probs=True)
    dout = _draw(*shape, dtype=dtype, seed=9)
    gradients = torch.autograd.grad(out, leaves, dout)
    exact = [x.detach().float().requires_grad_() for x in leaves]
    parts = [[x[None, :40], x[None, 40:]] if varlen else [x] for x in exact]
    expected = [reference.attention(*part, causal=True)[0] for part in zip(*parts, strict=True)]
    whole = torch.cat(expected, 1)[0] if varlen else expected[0]
    assert out.dtype is dtype
    assert dmask.numel() == 0
    assert lse.shape == ((2, 64) if varlen else (2, 2, 64))
    assert _error(out, whole) < 0.08
    for gradient, best in zip(gradients, torch.autograd.grad(whole, exact, dout.float()), strict=True):
        assert gradient.dtype is dtype
        assert _error(gradient, best) < 0.1


def test_dropout_has_gradients() -> None:
    leaves = [_draw(1, 64, 2, 64, seed=i).requires_grad_() for i in range(3)]
    out = flash_attn.flash_attn_fp8_func(*leaves, dropout_p=0.3)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), leaves))


def test_invalid_fp8_arguments_are_refused() -> None:
    q = _draw(2, 8, 2, 64)
    small = q.to(_format())
    function = flash_attn.flash_attn_fp8_func
    ones = torch.ones(2, 2, device=DEVICE)
    with pytest.raises(ValueError, match=r"descale_q: got None, wanted fp32 \(2, 2\), as q is FP8"):
        function(small, small, small)
    with pytest.raises(TypeError, match="wanted FP8 for all or for none"):
        function(small, q.bfloat16(), q.bfloat16())
    with pytest.raises(ValueError, match=r"descale_k: got \(2, 1\)"):
        function(q, q, q, descale_k=ones[:, :1])
    with pytest.raises(TypeError, match=r"descale_v: got torch\.float64"):
        function(q, q, q, descale_v=ones.double())
    with pytest.raises(NotImplementedError, match="descale_do"):
        function(q, q, q, descale_do=ones)
    with pytest.raises(NotImplementedError, match="S_dmask"):
        function(q, q, q, dropout_p=0.1, return_attn_probs=True)
    cu = _offsets(8)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_attn.flash_attn_varlen_fp8_func(q[0], q[0], q[0], cu, cu, 8, 8, block_table=table)


def test_targets_without_fp8_have_no_fp8_kernels() -> None:
    for target in ("gfx90a", "gfx1030", "gfx1100"):
        assert targets.fp8_format(target) is None
        assert not [variant for variant in variants.table(target) if "fp8" in variant.name]
    formats = {target: targets.fp8_format(target) for target in ("gfx942", "gfx950", "gfx1201", "sm_90")}
    assert formats == {"gfx942": "fp8e4b8", "gfx950": "fp8e4nv", "gfx1201": "fp8e4nv", "sm_90": "fp8e4nv"}
    names = [variant.name for variant in variants.table("gfx942")]
    assert "fp8-fwd-fp8e4b8-d128" in names
    assert "fp8-cast-v-bf16-d64" in names


def test_gpus_without_fp8_are_told_which_gpus_have_fp8() -> None:
    class OnGpu:
        is_cuda = True

        def get_device(self) -> int:
            return 0

    with (
        device.using(jit.Interpreter("gfx90a"), 0),
        pytest.raises(
            NotImplementedError, match=r"gfx90a has no matrix units.* gfx942, gfx950, gfx1200, gfx1201, gfx1250, sm_90"
        ),
    ):
        backend.fp8_format(OnGpu())


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_a_cache_in_fp8(seqlen_q: int, paged: bool) -> None:
    """Appending and attention in FP8 with scales equal the same operations on the fp32 numbers."""
    small = [_draw(2, seqlen_q, heads, 64, seed=heads).to(_format()) for heads in (4, 2, 2)]
    caches = [_draw(2, 96, 2, 64, seed=i).to(_format()) for i in (3, 4)]
    descales = tuple(torch.rand(2, 2, device=DEVICE) + 0.5 for _ in range(3))
    table = None
    if paged:
        caches = [cache.view(12, 16, 2, 64) for cache in caches]
        table = torch.arange(12, device=DEVICE).int().view(2, 6)
    lengths = torch.tensor([60, 11], device=DEVICE).int()
    call = cache_call(
        small[0], *caches, softmax_scale=0.125, **dict(zip("kv", small[1:], strict=False)), cache_seqlens=lengths,
        block_table=table, causal=True, num_splits=3, descales=descales,
    )  # fmt: skip
    results = []
    for function in (triton_backend.kvcache, torch_backend.kvcache):
        k_cache, v_cache = (cache.clone() for cache in caches)
        results.append((*function(replace(call, k_cache=k_cache, v_cache=v_cache)), k_cache, v_cache))
    (out, lse, *ours), (expected, wanted_lse, *theirs) = results
    assert out.dtype is expected.dtype is torch.bfloat16
    assert _error(out, expected) < 5e-3
    assert torch.allclose(lse, wanted_lse, atol=1e-4)
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(ours, theirs, strict=True))
