"""Second derivatives are right, or they raise. They never come out too small.

A gradient penalty finds both ways in which they can be lost: the incoming gradient is constant, and `autograd.grad`
with respect to a weight before the operation prunes what does not lead to that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_attn
import pytest
import reference
import torch
import torch.distributed as dist
from assert_close import assert_close
from flash_attn import cute
from flash_attn import flash_attn_interface as interface
from flash_attn.attention import second_derivative
from flash_attn.ops.triton import add_norm, cross_entropy
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from two_ranks import both

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_ENDS = torch.tensor([0, 16], dtype=torch.int32, device=DEVICE)


def _penalty(function: Callable[[torch.Tensor], Any], shape: tuple[int, ...]) -> torch.Tensor:
    """d/dW of |d(function(tanh(x W)) . w) / dx|^2: a gradient penalty, whose incoming gradient w is constant."""
    torch.manual_seed(1)
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    weight = (torch.randn(shape[-1], shape[-1], device=DEVICE) / shape[-1] ** 0.5).requires_grad_()
    out = function(torch.tanh(x @ weight))
    w = torch.randn(out.shape, device=DEVICE)
    (gradient,) = torch.autograd.grad((out.float() * w).sum(), x, create_graph=True)
    second: torch.Tensor = torch.autograd.grad(gradient.square().sum(), weight)[0]
    return second


@pytest.mark.parametrize(
    "function",
    [
        lambda x: flash_attn.flash_attn_func(x, x, x, dropout_p=0.5),
        lambda x: flash_attn.flash_attn_varlen_func(x[0], x[0], x[0], _ENDS, _ENDS, 16, 16),
        lambda x: flash_attn.flash_attn_fp8_func(x, x, x),
        lambda x: flash_attn.flash_attn_qkvpacked_fp8_func(torch.stack((x, x, x), 2)),
        lambda x: cute.flash_attn_func(x, x, x, return_lse=True)[1],
    ],
    ids=["dropout", "packed sequences", "fp8", "fp8 packed", "lse of FlashAttention-4"],
)
def test_attention_refuses(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="has no second derivative"):
        _penalty(function, (1, 16, 2, 16))


def test_attention_refuses_more_scores_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_derivative, "MAX_SCORES", 511)
    with pytest.raises(RuntimeError, match=r"attention of 512 scores, more than 511, has no second derivative"):
        _penalty(lambda x: flash_attn.flash_attn_func(x, x, x), (1, 16, 2, 16))


# seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v and options of a call.
EXACT: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((3, 4, 2, 1, 4, 4), {}),
    "causal": ((4, 3, 2, 2, 3, 3), {"causal": True, "softmax_scale": -0.7}),
    "window and softcap": ((4, 5, 2, 2, 4, 2), {"window_size": (1, 1), "softcap": 2.0}),
    "alibi": ((3, 4, 2, 1, 4, 4), {"alibi_slopes": torch.tensor([0.5, 0.25], device=DEVICE)}),
    "no keys": ((3, 0, 2, 2, 4, 4), {}),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="fp64 is for a CPU")
@pytest.mark.parametrize("case", EXACT.values(), ids=list(EXACT))
@pytest.mark.parametrize("extra", [False, True], ids=["alone", "sinks and bias"])
def test_attention_is_exact(case: tuple[tuple[int, ...], dict[str, Any]], extra: bool) -> None:
    (seqlen_q, seqlen_k, heads, heads_k, dim, dim_v), options = case
    torch.manual_seed(0)
    shapes = ((1, seqlen_q, heads, dim), (1, seqlen_k, heads_k, dim), (1, seqlen_k, heads_k, dim_v))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if extra:
        inputs.append(torch.randn(heads, dtype=torch.float32, requires_grad=True).double())
        if "alibi_slopes" not in options:
            inputs.append(torch.randn(1, 1, seqlen_q, seqlen_k, dtype=torch.float64, requires_grad=True))

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> Any:
        names: dict[str, Any] = dict(zip(("s_aux", "attn_bias"), more, strict=False))
        if "s_aux" in names:
            names["s_aux"] = names["s_aux"].float()
        return flash_attn.flash_attn_func(q, k, v, **names, **options)

    tolerance: dict[str, Any] = {"eps": 1e-3, "atol": 1e-3, "rtol": 1e-2} if extra else {}
    assert torch.autograd.gradgradcheck(function, inputs, **tolerance)


def _by_book(x: torch.Tensor) -> torch.Tensor:
    return reference.attention(x, x, x, causal=True, dtype=x.dtype)[0]


def _deterministic(x: torch.Tensor) -> Any:
    return flash_attn.flash_attn_func(x, x, x, causal=True, deterministic=True)


def _by_op(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.flash_attn._flash_attn_forward(x, x, x, 0.0, 0.25, True, -1, -1, 0.0, None, False)[0]


def _exported(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    return torch.export.export(Module(), (torch.randn(1, 16, 2, 16, device=DEVICE),)).module()


SERVED: dict[str, Callable[..., Callable[[torch.Tensor], torch.Tensor]]] = {
    "eager": lambda f: f,
    "compiled": lambda f: torch.compile(f, backend="eager"),
    "compiled, deterministic": lambda _: torch.compile(_deterministic, backend="eager"),
    "traced": lambda f: torch.jit.trace(f, (torch.randn(1, 16, 2, 16, device=DEVICE),), check_trace=False),
    "exported": _exported,
    "the op": lambda _: _by_op,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:The .grad")
@pytest.mark.parametrize("mode", SERVED.values(), ids=list(SERVED))
def test_attention_in_every_mode(mode: Callable[..., Callable[[torch.Tensor], torch.Tensor]]) -> None:
    torch.compiler.reset()
    got = _penalty(mode(lambda x: flash_attn.flash_attn_func(x, x, x, causal=True)), (1, 16, 2, 16))
    assert_close("penalty", got, _penalty(_by_book, (1, 16, 2, 16)), tiny=2e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("backend", "function"),
    [
        ("eager", lambda x: flash_attn.flash_attn_func(x, x, x, dropout_p=0.5, deterministic=True)),
        ("eager", lambda x: flash_attn.flash_attn_varlen_func(x[0], x[0], x[0], _ENDS, _ENDS, 16, 16)),
        ("eager", lambda x: flash_attn.flash_attn_fp8_func(x, x, x)),
        ("aot_eager", lambda x: flash_attn.flash_attn_func(x, x, x)),
    ],
    ids=["dropout", "packed sequences", "fp8", "aot_eager"],
)
def test_compiled_attention_refuses(backend: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In the words of flash_attn, of PyTorch's operators without a formula, or of AOTAutograd."""
    torch.compiler.reset()
    says = "has no second derivative|_first_derivative_only|does not currently support double backward"
    with pytest.raises(RuntimeError, match=says):
        _penalty(torch.compile(function, backend=backend), (1, 16, 2, 16))


def test_keys_that_are_computed_from_queries() -> None:
    def function(attention: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        k = x.sin()
        return attention(x, k, k * x)

    got = _penalty(lambda x: function(flash_attn.flash_attn_func, x), (1, 16, 2, 16))
    expected = _penalty(lambda x: function(lambda *qkv: reference.attention(*qkv)[0], x), (1, 16, 2, 16))
    assert_close("penalty", got, expected, tiny=2e-5)


@pytest.mark.parametrize("packed", [2, 3])
def test_packed_tensors(packed: int) -> None:
    def function(x: torch.Tensor) -> Any:
        joint = torch.stack([x * (place + 1) for place in range(packed)], 2)
        if packed == 3:
            return flash_attn.flash_attn_qkvpacked_func(joint)
        return flash_attn.flash_attn_kvpacked_func(x.cos(), joint)

    def book(x: torch.Tensor) -> torch.Tensor:
        return reference.attention(*((x, x * 2, x * 3) if packed == 3 else (x.cos(), x, x * 2)))[0]

    assert_close("penalty", _penalty(function, (1, 16, 2, 16)), _penalty(book, (1, 16, 2, 16)), tiny=5e-5)


def test_the_third_derivative() -> None:
    x = torch.randn(1, 3, 1, 8, device=DEVICE, requires_grad=True)
    results = []
    for function in (lambda x: flash_attn.flash_attn_func(x, x, x), lambda x: reference.attention(x, x, x)[0]):
        y = function(x).square().sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            y = gradient.square().sum()
        results.append(gradient.detach())
    assert_close("third", *results, tiny=1e-4)


@pytest.mark.parametrize("residual", [None, torch.float32], ids=["alone", "residual"])
@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
def test_norms(is_rms: bool, residual: torch.dtype | None) -> None:
    """By the kernels, against PyTorch's own operations, for every input of the norm and for what it keeps."""
    weight, bias, other = (torch.randn(24, device=DEVICE, requires_grad=True) for _ in range(3))

    def total(norm: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]) -> list[torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            added = None if residual is None else (x * other).sin()
            y, z = norm(x, added, weight + x.mean((0, 1)), bias, 1e-5, torch.float32, True, is_rms)
            return y if residual is None else y + z.cos()

        first = _penalty(function, (3, 5, 24))
        x = torch.randn(3, 5, 24, device=DEVICE, requires_grad=True)
        leaves = (x, weight, bias) if residual is None else (x, weight, bias, other)
        gradients = torch.autograd.grad(function(x).sin().sum(), leaves, create_graph=True)
        return [first, *torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)]

    got, expected = total(add_norm._AddNorm.apply), total(add_norm.reference)
    for name, a, b in zip(("penalty", "x", "weight", "bias", "other"), got, expected, strict=False):
        assert_close(name, a, b, tiny=2e-5)


@pytest.mark.parametrize("known", [False, True], ids=["lse computed", "lse known"])
def test_cross_entropy(known: bool) -> None:
    """By the kernels, against PyTorch's own operations; a row is ignored, its logits are NaN."""
    labels = torch.tensor([0, 11, -100, 5], device=DEVICE)
    options = (0.0, 1.0, 0.01, -100) if known else (0.1, 0.8, 0.01, -100)

    def total(loss: Callable[..., tuple[torch.Tensor, torch.Tensor]], *more: object) -> list[torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            x = torch.where(labels[:, None] == -100, torch.nan, x)
            lse = x.logsumexp(1).detach() if known else None
            return loss(x, labels, lse, *options, *more)[0]

        x = torch.linspace(-1.0, 2.0, 4 * 12, device=DEVICE).reshape(4, 12).requires_grad_()
        factor = torch.linspace(1.0, 2.0, 4, device=DEVICE).requires_grad_()
        (gradient,) = torch.autograd.grad((function(x) * factor).sum(), x, create_graph=True)
        return [_penalty(function, (4, 12)), *torch.autograd.grad(gradient.square().sum(), (x, factor))]

    got = total(cross_entropy._CrossEntropy.apply, False, None)
    expected = total(cross_entropy.reference)
    for name, a, b in zip(("penalty", "x", "factor"), got, expected, strict=True):
        assert b.isfinite().all()
        assert_close(name, a, b, tiny=1e-5)


def _penalty_over_two_processes(rank: int) -> list[torch.Tensor]:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    losses, _ = cross_entropy_loss(logits, torch.tensor([0, 9, 4, 5]), process_group=dist.group.WORLD)
    (gradient,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cross entropy over several processes has no second derivative"):
        torch.autograd.grad(gradient.square().sum(), logits)
    return [gradient.detach()]


def test_cross_entropy_over_processes_refuses(tmp_path: Path) -> None:
    both(tmp_path, _penalty_over_two_processes)


def test_a_gradient_written_over_the_logits_allows_one_backward() -> None:
    """The second backward would read the gradient as logits."""
    logits = torch.randn(4, 12, device=DEVICE)
    x = logits.clone().requires_grad_()
    losses, _ = cross_entropy._CrossEntropy.apply(
        x * 1.0, torch.arange(4, device=DEVICE), None, 0.0, 1.0, 0.0, -100, True, None
    )
    (first,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
    expected = logits.softmax(1) - torch.nn.functional.one_hot(torch.arange(4, device=DEVICE), 12)
    assert_close("first", first, expected, tiny=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


OPTIONS = (0.0, 0.3, False, (-1, -1), 0.0, None, False, False, True)
ENDS = torch.tensor([0, 4], dtype=torch.int32)
CLASSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "FlashAttnFunc": lambda x: interface.FlashAttnFunc.apply(x, x * 0.5, x, *OPTIONS),
    "FlashAttnKVPackedFunc": lambda x: interface.FlashAttnKVPackedFunc.apply(x, torch.stack((x, x), 2), *OPTIONS),
    "FlashAttnQKVPackedFunc": lambda x: interface.FlashAttnQKVPackedFunc.apply(torch.stack((x, x, x), 2), *OPTIONS),
    "FlashAttnVarlenFunc": lambda x: interface.FlashAttnVarlenFunc.apply(
        x[0], x[0], x[0], ENDS, ENDS, 4, 4, *OPTIONS[:-2], False, None, True
    ),
    "FlashAttnVarlenKVPackedFunc": lambda x: interface.FlashAttnVarlenKVPackedFunc.apply(
        x[0], torch.stack((x[0], x[0]), 1), ENDS, ENDS, 4, 4, *OPTIONS
    ),
    "FlashAttnVarlenQKVPackedFunc": lambda x: interface.FlashAttnVarlenQKVPackedFunc.apply(
        torch.stack((x[0], x[0], x[0]), 1), ENDS, 4, *OPTIONS
    ),
}


def _outcome(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor | None, str]:
    """What a function returns, or the message of its RuntimeError."""
    try:
        return function(), ""
    except RuntimeError as error:
        return None, str(error)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_the_autograd_classes_in_a_compiled_function(name: str, constant: bool) -> None:
    """backend="eager": a second derivative is right or raises, whether or not the incoming gradient is constant."""

    def penalty(attention: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64).cos().view(1, 4, 2, 8).requires_grad_()
        out = attention(x)
        (gradient,) = torch.autograd.grad(out.sum() if constant else out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum() + x.square().sum(), x)[0]

    torch.compiler.reset()
    compiled = torch.compile(CLASSES[name], backend="eager")
    result, message = _outcome(lambda: penalty(compiled))
    if result is None:
        assert "second derivative" in message or "_first_derivative_only" in message
    else:
        assert_close(name, result, penalty(CLASSES[name]))
