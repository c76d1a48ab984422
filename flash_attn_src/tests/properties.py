"""Properties that hold for every backend and device. Each is a function of a random draw and asserts one thing.

`test_properties.py` runs them on a CPU with hypothesis, `hunt.py` on a GPU for as long as it is told. A draw is a
`Case`: sizes, a type, a mask and a seed. Nothing here compares with a reference: a call is compared with itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import flash_attn
import pytest
import torch
from assert_close import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEAD_DIMS = (8, 24, 33, 40, 64, 72, 80, 96, 128, 129, 192, 256, 320, 512)
# Of values with a head dim of their own, by the head dim of q and k; twice the pairs that have kernels of their own.
VALUE_DIMS = {24: 40, 96: 48, 128: 64, 192: 128}
LENGTHS = (1, 2, 7, 16, 33, 64, 100, 129, 200, 257)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One call of attention: q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_k, dim), v likewise with
    dim_v columns."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_k: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi: bool
    sinks: bool
    seed: int

    def tensors(self) -> Tensors:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(seqlen: int, heads: int, dim: int) -> torch.Tensor:
            return torch.randn(self.batch, seqlen, heads, dim, generator=generator).to(DEVICE, self.dtype)

        keys = (self.seqlen_k, self.heads_k)
        return draw(self.seqlen_q, self.heads, self.dim), draw(*keys, self.dim), draw(*keys, self.dim_v)

    @property
    def options(self) -> dict[str, object]:
        slopes = torch.linspace(0.1, 1.0, self.heads, device=DEVICE) if self.alibi else None
        sinks = torch.linspace(-2.0, 3.0, self.heads, device=DEVICE) if self.sinks else None
        return {
            "causal": self.causal, "window_size": self.window, "softcap": self.softcap, "alibi_slopes": slopes,
            "s_aux": sinks,
        }  # fmt: skip


def draw_case(rng: random.Random) -> Case:
    """A random case."""
    heads_k = rng.choice((1, 2))
    dim = rng.choice(HEAD_DIMS)
    return Case(
        rng.choice((1, 2, 3)), rng.choice(LENGTHS), rng.choice(LENGTHS), heads_k * rng.choice((1, 2)), heads_k,
        dim, rng.choice((dim, VALUE_DIMS.get(dim, dim))),
        rng.choice((torch.float16, torch.bfloat16, torch.float32)), rng.random() < 0.5,
        rng.choice(((-1, -1), (-1, -1), (9, 0), (40, 17))), rng.choice((0.0, 0.0, 15.0)), rng.random() < 0.25,
        rng.random() < 0.25, rng.randrange(1 << 30),
    )  # fmt: skip


def attend(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse)."""
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **case.options)  # type: ignore[arg-type]
    return out, lse


def with_gradients(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv) for an incoming gradient of cosines."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
    out, _ = attend(case, *leaves)
    dout = torch.arange(out.numel(), device=DEVICE).cos().reshape(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def _near(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """As near as two orders of summing are."""
    assert_close(name, got, expected.float(), tiny=max(16.0 * torch.finfo(expected.dtype).eps, 1e-5))


def nan_stays_in_its_batch_entry_and_head(case: Case) -> None:
    """NaN in one key head of one sequence, in q, k and v: all others keep their bits, gradients too."""
    q, k, v = case.tensors()
    expected = with_gradients(case, q, k, v)
    group = case.heads // case.heads_k
    k[-1, :, -1] = v[-1, :, -1] = torch.nan
    q[-1, :, -group:] = torch.nan
    for name, got, best in zip(("out", "dq", "dk", "dv"), with_gradients(case, q, k, v), expected, strict=True):
        heads = group if name in ("out", "dq") else 1
        got[-1, :, -heads:] = best[-1, :, -heads:]
        assert torch.equal(got, best), name


def keys_that_are_not_seen_do_not_count(case: Case) -> None:
    """Infinity or NaN in keys does not change rows that do not see these keys."""
    q, k, v = case.tensors()
    out, lse = attend(case, q, k, v)
    place = case.seqlen_k // 2
    k[:, place:] = torch.inf if case.seed % 2 else torch.nan
    got, got_lse = attend(case, q, k, v)
    right = 0 if case.causal else case.window[1]
    if right < 0:
        return
    blind = max(min(place - right - case.seqlen_k + case.seqlen_q, case.seqlen_q), 0)  # rows that see keys < place only
    _near("out", got[:, :blind], out[:, :blind])
    _near("lse", got_lse[..., :blind], lse[..., :blind])


def a_mask_in_an_extra_channel_is_a_mask(case: Case) -> None:
    """If q has 1 in its last column, -inf in the last column of k hides keys. out, dk and dv are as with -3e4."""
    if case.softcap > 0.0:
        return
    q, k, v = case.tensors()
    hidden = torch.arange(case.seqlen_k, device=DEVICE) % 3 == 1
    q[..., -1] = 1.0
    results = []
    for low in (-3e4, -torch.inf):
        k[..., -1] = torch.where(hidden, low, 0.0).to(k.dtype)[:, None]
        out, _, dk, dv = with_gradients(case, q, k, v)
        results.append((out, dk, dv))
    # A row whose keys are all hidden averages them for -3e4.
    if case.causal or case.window != (-1, -1):
        return
    for name, got, expected in zip(("out", "dk", "dv"), results[1], results[0], strict=True):
        _near(name, got, expected)


def padding_the_head_dim_changes_nothing(case: Case) -> None:
    q, k, v = case.tensors()
    if case.dim > 504:
        return
    scale = case.dim**-0.5
    wide = [torch.nn.functional.pad(x, (0, 8)) for x in (q, k, v)]
    options = {**case.options, "softmax_scale": scale}
    expected = flash_attn.flash_attn_func(q, k, v, **options)  # type: ignore[arg-type]
    got = flash_attn.flash_attn_func(*wide, **options)  # type: ignore[arg-type]
    _near("out", got[..., : case.dim_v], expected)
    assert not got[..., case.dim_v :].any()


def strides_change_nothing(case: Case) -> None:
    """Tries transposed tensors, and slices of a wider tensor whose other columns are NaN."""
    tensors = case.tensors()
    expected, _ = attend(case, *tensors)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    parts = []
    for x in tensors:
        beside = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype, device=DEVICE)
        beside[..., 3:-2] = x
        parts.append(beside[..., 3:-2])
    for given in (transposed, parts):
        _near("out", attend(case, *given)[0], expected)


def packed_is_as_dense(case: Case) -> None:
    """Packed sequences, with rows of NaN between them that belong to no sequence; max_seqlen may be larger."""
    q, k, v = case.tensors()
    expected, _ = attend(case, q, k, v)

    def pack(x: torch.Tensor) -> torch.Tensor:
        beside = torch.full((3, *x.shape[2:]), torch.nan, dtype=x.dtype, device=DEVICE)
        return torch.cat((beside, x.flatten(0, 1), beside))

    cu = [
        torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * n + 3 for n in (case.seqlen_q, case.seqlen_k)
    ]
    for more in (0, 100):
        out = flash_attn.flash_attn_varlen_func(
            pack(q), pack(k), pack(v), *cu, case.seqlen_q + more, case.seqlen_k + more,
            **case.options,  # type: ignore[arg-type]
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        assert not out[:3].any()
        assert not out[-3:].any()
        _near("out", out[3:-3].view(expected.shape), expected)


def a_longest_length_that_is_too_small_shows(case: Case) -> None:
    """It raises, or rows are right or NaN."""
    q, k, v = (x.flatten(0, 1) for x in case.tensors())
    steps = torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE)
    cu = [steps * case.seqlen_q, steps * case.seqlen_k]
    expected = flash_attn.flash_attn_varlen_func(
        q, k, v, *cu, case.seqlen_q, case.seqlen_k, **case.options  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(expected, torch.Tensor)
    try:
        got = flash_attn.flash_attn_varlen_func(
            q, k, v, *cu, case.seqlen_q // 2, case.seqlen_k // 2, **case.options  # type: ignore[arg-type]
        )  # fmt: skip
    except ValueError:
        return
    assert isinstance(got, torch.Tensor)
    _near("out", torch.where(got.isnan(), expected, got), expected)


def a_sink_of_zero_is_a_key_of_zeros(case: Case) -> None:
    """A first key of zeros has the score 0, and its value of zeros adds nothing."""
    if case.causal or case.window != (-1, -1) or case.alibi:
        return
    q, k, v = case.tensors()
    options = {**case.options, "s_aux": None}
    longer = [torch.nn.functional.pad(x, (0, 0, 0, 0, 1, 0)) for x in (k, v)]
    expected = flash_attn.flash_attn_func(q, *longer, return_attn_probs=True, **options)  # type: ignore[arg-type]
    options["s_aux"] = torch.zeros(case.heads, dtype=case.dtype, device=DEVICE)
    got = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)  # type: ignore[arg-type]
    _near("out", got[0], expected[0])
    _near("lse", got[1], expected[1])


def a_bias_of_a_mask_and_alibi_is_both(case: Case) -> None:
    """The mask as -inf and the distances of ALiBi, spelled out in a bias, in out and in dq, dk and dv."""
    q, k, v = case.tensors()
    expected = with_gradients(case, q, k, v)
    rows = torch.arange(case.seqlen_q, device=DEVICE)[:, None] + case.seqlen_k - case.seqlen_q
    distance = (torch.arange(case.seqlen_k, device=DEVICE) - rows).float()
    left, right = case.window[0], 0 if case.causal else case.window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    slopes = torch.linspace(0.1, 1.0, case.heads, device=DEVICE)[:, None, None] if case.alibi else 0.0
    bias = (-slopes * distance.abs()).masked_fill(hidden, -torch.inf).reshape(1, -1, *hidden.shape)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    options = {**case.options, "causal": False, "window_size": (-1, -1), "alibi_slopes": None, "attn_bias": bias}
    out = flash_attn.flash_attn_func(*leaves, **options)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    dout = torch.arange(out.numel(), device=DEVICE).cos().reshape(out.shape).to(out.dtype)
    got = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        _near(name, a, b)


def nothing_is_left_unwritten(case: Case) -> None:
    """New memory holds NaN: torch's deterministic mode fills it."""
    tensors = case.tensors()
    expected = with_gradients(case, *tensors)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        got = with_gradients(case, *tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        assert b.isfinite().all(), name
        assert torch.equal(a, b), name


def a_second_derivative_with_dropout_is_refused(case: Case) -> None:
    x, _, _ = case.tensors()
    weight = torch.eye(case.dim, dtype=x.dtype, device=DEVICE, requires_grad=True)
    x.requires_grad_()
    h = x @ weight
    out = flash_attn.flash_attn_func(h, h, h, dropout_p=0.5)
    assert isinstance(out, torch.Tensor)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.square().sum(), weight)


def a_call_that_raises_writes_nothing(case: Case) -> None:
    """The last sequence does not fit into the cache, where the host knows its length."""
    q, k, v = case.tensors()
    caches = [torch.zeros_like(x) for x in (k, v)]
    lengths = torch.zeros(case.batch, dtype=torch.int32, device=DEVICE)
    lengths[-1] = case.seqlen_k
    place = lengths if DEVICE == "cpu" else case.seqlen_k
    with pytest.raises(ValueError, match="cache_seqlens: got"):
        flash_attn.flash_attn_with_kvcache(q, *caches, k[:, :1], v[:, :1], cache_seqlens=place)
    assert not any(cache.any() for cache in caches)


PROPERTIES: tuple[Callable[[Case], None], ...] = (
    nan_stays_in_its_batch_entry_and_head,
    keys_that_are_not_seen_do_not_count,
    a_mask_in_an_extra_channel_is_a_mask,
    padding_the_head_dim_changes_nothing,
    strides_change_nothing,
    packed_is_as_dense,
    a_longest_length_that_is_too_small_shows,
    a_sink_of_zero_is_a_key_of_zeros,
    a_bias_of_a_mask_and_alibi_is_both,
    nothing_is_left_unwritten,
    a_second_derivative_with_dropout_is_refused,
    a_call_that_raises_writes_nothing,
)
