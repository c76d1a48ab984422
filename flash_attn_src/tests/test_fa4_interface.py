"""FlashAttention-4's interface, flash_attn.cute, against attention in float64."""

from __future__ import annotations

import inspect
from typing import Any

import flash_attn
import pytest
import torch
from assert_close import assert_close
from flash_attn import cute
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton
from small_calls import in_one_graph
from torch._subclasses.fake_tensor import FakeTensorMode

torch.set_num_threads(2)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SIGNATURES = {
    "flash_attn_func": "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
    "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False",
    "flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, "
    "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
    "virtual_batch_idx=None, return_lse=True",
}


def draw(seqlen_q: int = 11, seqlen_k: int = 14, dim: int = 16) -> list[torch.Tensor]:
    """q (2, seqlen_q, 4, dim), k and v (2, seqlen_k, 2, dim), a sink of each query head."""
    torch.manual_seed(seqlen_q + seqlen_k)
    shapes = ((2, seqlen_q, 4, dim), (2, seqlen_k, 2, dim), (2, seqlen_k, 2, dim), (4,))
    return [torch.randn(shape).to(DEVICE).requires_grad_() for shape in shapes]


def index(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, hidden: torch.Tensor, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) in float64; hidden (batch or 1, 1, seqlen_q, seqlen_k) says what is masked."""
    group = q.shape[2] // k.shape[2]
    wide_q, wide_k, wide_v = (x.double() for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = torch.einsum("bqhd,bkhd->bhqk", wide_q, wide_k) * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        column = sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", weights, wide_v), lse


def hidden(
    used_q: list[int], used_k: list[int], shape: tuple[int, int], left: int | None, right: int | None
) -> torch.Tensor:
    """What a window hides in sequences of these lengths: query i sees keys i + shift - left to i + shift + right."""
    masks = []
    for length_q, length_k in zip(used_q, used_k, strict=True):
        row = torch.arange(shape[0])[:, None] + length_k - length_q
        key = torch.arange(shape[1])[None]
        mask = (key >= length_k) | (torch.arange(shape[0])[:, None] >= length_q)
        mask = mask if left is None else mask | (key < row - left)
        masks.append(mask if right is None else mask | (key > row + right))
    return torch.stack(masks)[:, None].to(DEVICE)


def check(
    got: tuple[torch.Tensor, torch.Tensor | None], wanted: tuple[torch.Tensor, torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    """out, softmax_lse, and the gradients of a sum of both."""
    out, lse = got
    assert lse is not None
    assert_close("out", out, wanted[0].to(out.dtype))
    assert_close("lse", lse, wanted[1].to(lse.dtype))
    seen = wanted[1] != -torch.inf
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    losses = [(x.double() * dout).sum() + (y.double() * dlse)[seen].sum() for x, y in ((out, lse), wanted)]
    gradients, expected = (torch.autograd.grad(loss, inputs) for loss in losses)
    for name, one, other in zip(("dq", "dk", "dv", "dsink"), gradients, expected, strict=False):
        assert_close(name, one, other)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(cute, name)).parameters.values()
    result = ", ".join(str(each.replace(annotation=each.empty)).replace(" = ", "=") for each in parameters)
    assert result == SIGNATURES[name]
    assert getattr(cute.interface, name) is getattr(cute, name)


@pytest.mark.parametrize(
    ("window", "causal", "softcap"),
    [((None, None), False, 0.0), ((None, None), True, 5.0), ((3, 2), False, 0.0), ((4, None), True, 0.0),
     ((None, -3), False, 0.0), ((-2, None), False, 0.0), ((6, -2), False, 0.0), ((-1, -1), False, 0.0)],
)  # fmt: skip
def test_dense(window: tuple[int | None, int | None], causal: bool, softcap: float) -> None:
    *inputs, sink = draw()
    q, k, v = inputs
    left, right = window[0], 0 if causal else window[1]
    if window == (-1, -1):  # upstream opens a window that would be empty
        left = right = None
    mask = hidden([11] * 2, [14] * 2, (11, 14), left, right)
    for given in (None, sink):
        got = cute.flash_attn_func(
            q, k, v, causal=causal, window_size=window, softcap=softcap, learnable_sink=given, return_lse=True
        )
        every = inputs if given is None else [*inputs, given]
        check(got, reference(q, k, v, given, mask, softcap), every)


def test_softmax_lse_is_returned_when_upstream_returns_it() -> None:
    q, k, v, _ = draw()
    assert cute.flash_attn_func(q.detach(), k.detach(), v.detach())[1] is None
    recorded = cute.flash_attn_func(q, k, v)[1]
    assert recorded is not None
    assert not recorded.requires_grad
    asked = cute.flash_attn_func(q, k, v, return_lse=True)[1]
    assert asked is not None
    assert asked.requires_grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
def test_softmax_lse_alone_has_a_gradient(backend: Any, layout: str, compiled: bool) -> None:
    """Of all inputs: of v zeros, because softmax_lse does not depend on it."""
    if DEVICE == "cuda" and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    inputs = draw()
    ends = index(0, 11, 22), index(0, 14, 28)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        if layout == "dense":
            lse = cute.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)[1]
        else:
            rows = (x.flatten(0, 1) for x in (q, k, v))
            given = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "max_seqlen_q": 11, "max_seqlen_k": 14}
            lse = cute.flash_attn_varlen_func(*rows, **given, causal=True, learnable_sink=sink, return_lse=True)[1]
        assert lse is not None
        return lse.square().sum()

    with backends.using(backend):
        result = torch.autograd.grad((in_one_graph(loss) if compiled else loss)(*inputs), inputs)
    _, lse = reference(*inputs, hidden([11] * 2, [14] * 2, (11, 14), None, 0), 0.0)
    expected = torch.autograd.grad(lse.square().sum(), inputs, materialize_grads=True)
    for name, got, best in zip(("dq", "dk", "dv", "dsink"), result, expected, strict=True):
        assert_close(name, got, best, tiny=5e-5)
    assert not result[2].any()


@pytest.mark.parametrize("window", [(None, None), (None, 0), (-2, None), (3, -1)])
@pytest.mark.parametrize("layout", ["packed", "used", "packed, used"])
def test_varlen(layout: str, window: tuple[int | None, int | None]) -> None:
    *inputs, sink = draw()
    q, k, v = inputs
    used_q, used_k = [7, 11], [9, 12]
    given: dict[str, Any] = {"return_lse": True, "learnable_sink": sink, "window_size": window}
    lengths_q, lengths_k = index(*used_q), index(*used_k)
    mask = hidden(used_q, used_k, (11, 14), *window)
    if layout == "used":
        given |= {"seqused_q": lengths_q, "seqused_k": lengths_k}
        got = cute.flash_attn_varlen_func(q, k, v, **given)
    else:
        used = layout != "packed"
        rows_q, rows_k = ([11, 11], [14, 14]) if used else (used_q, used_k)
        for name, rows in (("q", rows_q), ("k", rows_k)):
            given[f"cu_seqlens_{name}"] = index(0, rows[0], sum(rows))
        if used:
            given |= {"seqused_q": lengths_q, "seqused_k": lengths_k}
        packed = [
            torch.cat([x[i, :n] for i, n in enumerate(rows)]) for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k))
        ]
        out, lse = cute.flash_attn_varlen_func(*packed, **given)
        assert lse is not None
        assert lse.shape == (4, sum(rows_q))
        spread = torch.zeros(2, 11, 4, 16, device=DEVICE)
        spread_lse = torch.full((2, 4, 11), -torch.inf, device=DEVICE)  # of rows that are no rows
        start = 0
        for i, n in enumerate(rows_q):
            spread[i, :n] = out[start : start + n]
            spread_lse[i, :, :n] = lse[:, start : start + n]
            start += n
        got = spread, spread_lse
    out, lse = reference(q, k, v, sink, mask, 0.0)
    padding = torch.arange(11, device=DEVICE) >= lengths_q[:, None]
    check(got, (out, lse.masked_fill(padding[:, None], -torch.inf)), [*inputs, sink])


@pytest.mark.parametrize(
    ("compiled", "window"), [(False, (None, None)), (False, (-2, None)), (False, (3, -1)), (True, (None, 0))]
)
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_rows_that_do_not_count_train_nothing(
    layout: str, compiled: bool, window: tuple[int | None, int | None]
) -> None:
    """From seqused_q on: out is 0, softmax_lse -inf, and gradients that arrive there, NaN even, reach no input."""
    inputs = draw(6, 9)
    used = index(2, 0)
    given: dict[str, Any] = {"seqused_q": used, "seqused_k": index(5, 9), "return_lse": True, "window_size": window}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if layout == "dense":
            out, lse = cute.flash_attn_varlen_func(q, k, v, learnable_sink=sink, **given)
            assert lse is not None
            return out, lse.transpose(1, 2)
        ends = {"cu_seqlens_q": index(0, 6, 12), "cu_seqlens_k": index(0, 9, 18)}
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = cute.flash_attn_varlen_func(*rows, learnable_sink=sink, **ends, **given)
        assert lse is not None
        return out.view(q.shape), lse.view(4, 2, 6).permute(1, 2, 0)

    out, lse = (in_one_graph(attention) if compiled else attention)(*inputs)
    padding = torch.arange(6, device=DEVICE) >= used[:, None]
    assert not out[padding].any()
    assert (lse[padding] == -torch.inf).all()
    assert lse[~padding].isfinite().all()
    nothing = [
        torch.where(padding.view(*padding.shape, *(1,) * (x.dim() - 2)), torch.nan, 0.0).expand(x.shape)
        for x in (out, lse)
    ]
    for gradient in torch.autograd.grad((out, lse), inputs, nothing):
        assert not gradient.any()


TABLE = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.skipif(DEVICE != "cpu", reason="values are read on a CPU alone")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seqused_k": index(17, 2)}, r"seqused_k: got \[17, 2\], wanted 0 to the lengths \[16, 16\]"),
        ({"seqused_k": index(-1, 2)}, r"seqused_k: got \[-1, 2\]"),
        ({"seqused_k": index(1, 2, 3)}, "seqused_k: got 3 elements, wanted 2"),
        ({"seqused_k": index(17, 2), "window_size": (None, -3)}, r"seqused_k: got \[17, 2\]"),
        ({"seqused_k": index(-1, 2), "window_size": (None, -3)}, r"seqused_k: got \[-1, 2\]"),
        ({"seqused_q": index(7, 2)}, r"seqused_q: got \[7, 2\], wanted 0 to the lengths \[6, 6\]"),
        ({"seqused_q": index(-1, 2)}, r"seqused_q: got \[-1, 2\]"),
        ({"seqused_q": index(-1, 2), "window_size": (-1, None)}, r"seqused_q: got \[-1, 2\]"),
        ({"seqused_q": index(2)}, "seqused_q: got 1 elements, wanted 2"),
        ({"page_table": index(0, 1, 2, 8).view(2, 2)}, r"page_table: got 8 at index \(1, 1\), wanted 0 to 7"),
        (
            {"page_table": index(0, 1, 8, 2).view(2, 2), "seqused_q": index(2, 3)},
            r"page_table: got 8 at index \(1, 0\)",
        ),
        ({"page_table": index(0, 1)}, r"page_table: got shape \(2,\), wanted 2 dimensions"),
        ({"page_table": index(0, 1).view(1, 2)}, "page_table: got 1 rows, wanted 2"),
        ({"page_table": torch.zeros(2, 2)}, "page_table: got torch.float32, wanted int32"),
        ({"learnable_sink": torch.zeros(3)}, r"learnable_sink: got shape \(3,\)"),
    ],
)
def test_errors_over_pages_name_the_callers_arguments(wrong: dict[str, Any], message: str) -> None:
    q, k, v, _ = (x.detach() for x in draw(6, 16))
    pages = [x.reshape(8, 4, 2, 16) for x in (k, v)]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        cute.flash_attn_varlen_func(q, *pages, **{"page_table": torch.tensor(TABLE, dtype=torch.int32), **wrong})


@pytest.mark.parametrize("window", [(None, None), (6, -2), (-2, None), (None, -3), (3, 2)])
def test_fake_tensors(window: tuple[int | None, int | None]) -> None:
    with FakeTensorMode():
        q, pages = torch.empty(2, 6, 2, 8), torch.empty(4, 16, 2, 8)
        rows, table, used, ends = q.flatten(0, 1), *(torch.empty(shape, dtype=torch.int32) for shape in ((2, 2), 2, 3))
        lengths = {"seqused_q": used, "seqused_k": used}
        for x, keys, given in (
            (q, q, {}),
            (q, q, lengths),
            (rows, rows, {"cu_seqlens_q": ends, "cu_seqlens_k": ends, **lengths}),
            (q, pages, {"page_table": table, **lengths}),
        ):
            for qv in (None, x):
                out, lse = cute.flash_attn_varlen_func(
                    x, keys, keys, qv=qv, window_size=window, return_lse=True, learnable_sink=torch.empty(2), **given
                )  # fmt: skip
                assert lse is not None
                assert out.shape == x.shape
                assert sorted(lse.shape) == sorted(x.shape[:-1])


def test_rows_that_do_not_count_over_pages() -> None:
    q, k, v, sink = (x.detach() for x in draw(6, 16))
    pages = [x.reshape(8, 4, 2, 16) for x in (k, v)]
    given = {"page_table": index(*range(8)).view(2, 4), "learnable_sink": sink, "return_lse": True}
    for more in ({}, {"qv": torch.randn_like(q)}):
        out, lse = cute.flash_attn_varlen_func(q, *pages, seqused_q=index(2, 6), **given, **more)
        assert lse is not None
        assert not out[0, 2:].any()
        lse = lse if more else lse.transpose(1, 2)
        assert (lse[0, 2:] == -torch.inf).all()
        assert lse[0, :2].isfinite().all()
        assert lse[1].isfinite().all()


def test_pages() -> None:
    q, k, v, sink = (x.detach() for x in draw(11, 16))
    table = index(3, 0, 5, 1, 2, 7, 4, 6).view(2, 4)
    cache_k, cache_v = (torch.empty(8, 4, 2, 16, device=DEVICE) for _ in range(2))
    for cache, x in ((cache_k, k), (cache_v, v)):
        cache[table.flatten().long()] = x.reshape(8, 4, 2, 16)
    used_k, used_q = [5, 13], [11, 4]
    given = {"page_table": table, "seqused_k": index(*used_k), "learnable_sink": sink, "return_lse": True}
    for window in ((None, 0), (-2, None)):
        out, lse = cute.flash_attn_varlen_func(q, cache_k, cache_v, window_size=window, num_splits=3, **given)
        assert lse is not None
        expected = reference(q, k, v, sink, hidden([11, 11], used_k, (11, 16), *window), 0.0)
        assert_close("out", out, expected[0].float())
        assert_close("lse", lse, expected[1].float())
    seqused_q = index(*used_q)
    out, _ = cute.flash_attn_varlen_func(q, cache_k, cache_v, seqused_q=seqused_q, causal=True, **given)
    expected = reference(q, k, v, sink, hidden(used_q, used_k, (11, 16), None, 0), 0.0)
    assert_close("out", out, expected[0].float())
    with pytest.raises(RuntimeError, match="page_table: attention over pages has no backward"):
        cute.flash_attn_varlen_func(q.requires_grad_(), cache_k, cache_v, **given)


@pytest.mark.parametrize("layout", ["dense", "packed", "pages"])
def test_second_query(layout: str) -> None:
    """Equals attention of q and k concatenated with qv and v."""
    q, k, _, sink = (x.detach() for x in draw(11, 16))
    v, qv = (torch.randn(shape).to(DEVICE) for shape in ((2, 16, 2, 24), (2, 11, 4, 24)))
    wide_q, wide_k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    expected, wanted_lse = reference(wide_q, wide_k, v, sink, hidden([11] * 2, [16] * 2, (11, 16), None, 0), 0.0)
    given: dict[str, Any] = {"causal": True, "learnable_sink": sink, "return_lse": True, "qv": qv}
    if layout == "dense":
        out, lse = cute.flash_attn_func(q, k, v, **given)
    elif layout == "packed":
        ends = {f"cu_seqlens_{x}": index(0, n, 2 * n) for x, n in (("q", 11), ("k", 16))}
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        out, lse = cute.flash_attn_varlen_func(*rows, **ends, **{**given, "qv": qv.flatten(0, 1)})
        assert lse is not None
        out, lse = out.view_as(qv), lse.view(2, 11, 4)
    else:
        table = index(*range(8)).view(2, 4)
        pages = [x.reshape(8, 4, 2, x.shape[-1]) for x in (k, v)]
        out, lse = cute.flash_attn_varlen_func(q, *pages, page_table=table, **given)
    assert lse is not None
    assert_close("out", out, expected.float())
    assert_close("lse", lse, wanted_lse.transpose(1, 2).float())
    with pytest.raises(NotImplementedError, match="qv: attention with a second query has no backward"):
        cute.flash_attn_func(q.requires_grad_(), k, v, qv=qv)[0].sum().backward()


def test_second_query_alone() -> None:
    q, _, v, _ = draw()
    out, lse = cute.flash_attn_varlen_func(None, None, v, qv=q, return_lse=True)
    expected, wanted_lse = cute.flash_attn_func(q, v, v, return_lse=True)
    assert lse is not None
    assert wanted_lse is not None
    assert torch.equal(out, expected)
    assert torch.equal(lse, wanted_lse.transpose(1, 2))
    with pytest.raises(TypeError, match="q, qv: got None, wanted one of them"):
        cute.flash_attn_varlen_func(None, None, v)


def test_combine() -> None:
    torch.manual_seed(0)
    partial, lse = (torch.randn(shape).to(DEVICE) for shape in ((3, 2, 5, 4, 8), (3, 2, 5, 4)))
    lse[1:, 0] = -torch.inf
    expected = (torch.softmax(lse, 0)[..., None] * partial).sum(0)
    out, joined = cute.flash_attn_combine(partial, lse, seqused=index(5, 5))
    assert_close("out", out, expected)
    assert joined is not None
    assert_close("joined", joined, torch.logsumexp(lse, 0))
    half, nothing = cute.flash_attn_combine(partial.half(), lse, return_lse=False)
    assert half.dtype is torch.float16
    assert nothing is None


def test_under_compile() -> None:
    q, k, v, sink = draw()

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        out, lse = cute.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
        assert lse is not None
        return out.square().sum() + lse.sum()

    inputs = (q, k, v, sink)
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(in_one_graph(loss)(*inputs), inputs)
    for one, other in zip(compiled, eager, strict=True):
        assert_close("one", one, other)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("score_mod", "use softcap, alibi_slopes or attn_bias"), ("mask_mod", "attn_bias of .* with -inf"),
     ("aux_tensors", "nothing but score_mod"), ("gather_kv_indices", "pages of one key by page_table")],
)  # fmt: skip
def test_unsupported_options_name_an_alternative(name: str, instead: str) -> None:
    q, k, v, _ = draw()
    for function in (cute.flash_attn_func, cute.flash_attn_varlen_func):
        with pytest.raises(NotImplementedError, match=f"{name}: flash_attn for ROCm has none, .*{instead}"):
            function(q, k, v, **{name: [q]})


def test_wrong_arguments_are_refused() -> None:
    q, k, v, _ = draw()
    ends = index(0, 11, 22)
    with pytest.raises(TypeError, match=r"window_size: got 3, wanted \(left, right\), ints or None"):
        cute.flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(ValueError, match=r"q: got shape \(2, 11, 4, 16\), wanted \(total_q, heads, head_dim\)"):
        cute.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends)
    if DEVICE == "cpu":  # reading lengths on a GPU would wait for it
        with pytest.raises(ValueError, match=r"seqused_k: got \[20, 1\], wanted 0 to the lengths \[14, 14\]"):
            cute.flash_attn_varlen_func(q, k, v, seqused_k=index(20, 1))
    with pytest.raises(TypeError, match="pack_gqa: got 'yes', wanted a bool"):
        cute.flash_attn_func(q, k, v, pack_gqa="yes")
    with pytest.raises(ValueError, match=r"learnable_sink: got shape \(3,\)"):
        cute.flash_attn_func(q, k, v, learnable_sink=torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="k: got 3 sequences, wanted 2 as q has"):
        cute.flash_attn_varlen_func(q, k[0], v[0], cu_seqlens_k=index(0, 1, 2, 3))
    assert flash_attn.__version__ == cute.__version__
