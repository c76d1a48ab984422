"""PyTorch's flex_attention on these kernels, against the definition of attention with its score_mod and mask_mod.

On a CPU the door is a stand-in: tensors of the CPU count as tensors of a GPU, and the backend `torch` serves them.
"""

# ruff: noqa: ARG005 - PyTorch calls a mask_mod with four arguments and a score_mod with five

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn.flex import flex_attention as ours
from flash_attn.flex import flex_report, use_for_flex
from flash_attn.flex import plan as plans
from flash_attn.flex.plan import Dense, Parts, Sparse
from flash_attn.flex.runs import Run, groups, of_rows
from flash_attn.sdpa import attention as door
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    _vmap_for_bhqkv,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)

torch.set_num_threads(2)

# PyTorch warns of its own eager path, which serves the calls that are passed on here.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
B, H, N, D = 2, 2, 300, 32
Function = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not GPU:
        monkeypatch.setattr(door, "is_on_gpu", lambda _: True)
    code = flex_attention.__code__
    plans._kept.clear()
    yield
    assert flex_attention.__code__ is code


def _integers(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(3))


DOCUMENTS = _integers(5, B, N).sort()[0].to(DEVICE)
DOCUMENT = DOCUMENTS[0].contiguous()
LENGTHS = torch.tensor([50, 120], device=DEVICE)
SLOPES = torch.tensor([0.5, 0.125], device=DEVICE)
TABLE = torch.randn((H, 2 * N), generator=torch.Generator().manual_seed(4)).to(DEVICE)


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:  # noqa: ARG001
    return q >= kv


# mask -> (mask_mod, the plan that serves it, how many calls of variable lengths)
MASKS: dict[str, tuple[Function | None, type, int]] = {
    "no mask": (None, Dense, 0),
    "causal": (_causal, Dense, 0),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv <= 40), Dense, 0),
    "both sides": (lambda b, h, q, kv: (q - kv).abs() <= 40, Dense, 0),
    "documents": (lambda b, h, q, kv: DOCUMENTS[b, q] == DOCUMENTS[b, kv], Parts, 1),
    "causal document": (and_masks(_causal, lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv]), Parts, 1),
    "windows of documents": (
        lambda b, h, q, kv: (q >= kv) & (DOCUMENTS[b, q] == DOCUMENTS[b, kv]) & (q - kv < 20), Parts, 1,
    ),
    "chunks": (lambda b, h, q, kv: (q >= kv) & (q // 70 == kv // 70), Parts, 1),
    "prefixes": (or_masks(_causal, lambda b, h, q, kv: kv < LENGTHS[b]), Parts, 2),
    "prefix": (or_masks(_causal, lambda b, h, q, kv: kv < 70), Parts, 2),
    "padding": (lambda b, h, q, kv: (q >= kv) & (kv < LENGTHS[b]), Parts, 2),
    "padding, as transformers has it": (
        and_masks(_causal, lambda b, h, q, kv: (kv < LENGTHS[b]).to(LENGTHS[b].device)), Parts, 2,
    ),
    "queries without keys": (lambda b, h, q, kv: (q >= kv) & (q < LENGTHS[b]), Parts, 1),
    "blocks": (lambda b, h, q, kv: (q // 128 + kv // 128) % 2 == 0, Sparse, 0),
    "causal blocks": (lambda b, h, q, kv: ((q // 128 + kv // 128) % 2 == 0) & (q >= kv), Sparse, 0),
    "single keys": (lambda b, h, q, kv: (q + kv) % 3 == 0, Dense, 0),
    "a window for each head": (lambda b, h, q, kv: (q - kv).abs() <= 10 * (h + 1), Dense, 0),
}  # fmt: skip
SCORES: dict[str, Function | None] = {
    "plain": None,
    "ALiBi": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q),
    "ALiBi of distances": lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv).abs(),
    "soft cap": lambda s, b, h, q, kv: 20 * torch.tanh(s / 20),
    "relative bias": lambda s, b, h, q, kv: s + TABLE[h, q - kv + N],
    "hidden": lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")),
    "factor": lambda s, b, h, q, kv: s * 0.5,
    "soft cap and bias": lambda s, b, h, q, kv: (10 * (s / 10).tanh()) + TABLE[h, q - kv + N] - kv / 300,
}


def _draw(dtype: torch.dtype, heads_k: int = H, seqlen_k: int = N, seqlen_q: int = N) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, seqlen_q, D), (B, heads_k, seqlen_k, D), (B, heads_k, seqlen_k, D)]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def _definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Function | None, mask_mod: Function | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and the logsumexp by the definition, in the type of q."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    places = [torch.arange(n, device=q.device) for n in scores.shape]
    with TransformGetItemToIndex():
        if score_mod is not None:
            scores = _vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places).to(q.dtype)
        if mask_mod is not None:
            scores = scores.masked_fill(~_vmap_for_bhqkv(mask_mod, prefix=())(*places), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.float().logsumexp(-1)


def _block_mask(mask_mod: Function | None, seqlen_q: int = N, seqlen_k: int = N) -> BlockMask | None:
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, B, H, seqlen_q, seqlen_k, device=DEVICE)


def _check(leaves: list[torch.Tensor], score_mod: Function | None, mask_mod: Function | None, *, lse: bool) -> Any:
    """A served call, forward and backward, and its plan. Its error against the definition in fp32 is at most twice that
    of the definition in the call's own type."""
    block_mask = _block_mask(mask_mod, leaves[0].shape[2], leaves[1].shape[2])
    served = flex_report().served
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": True}
    with use_for_flex():
        out, aux = flex_attention(*leaves, **options, return_aux=AuxRequest(lse=lse))
    assert flex_report().served == served + 1, flex_report()
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(DEVICE, out.dtype)
    results = []
    for dtype in (torch.float32, out.dtype):
        copies = [x.detach().to(dtype).requires_grad_() for x in leaves]
        expected, expected_lse = _definition(*copies, score_mod, mask_mod)
        seen = expected_lse > -torch.inf
        dlse = torch.randn(seen.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE) * seen
        outputs, douts = ((expected, expected_lse), (dout.to(dtype), dlse)) if lse else ((expected,), (dout.to(dtype),))
        results.append((*outputs, *torch.autograd.grad(outputs, copies, douts)))
    outputs, douts = ((out, aux.lse), (dout, dlse)) if lse else ((out,), (dout,))
    got = (*outputs, *torch.autograd.grad(outputs, leaves, douts))
    names = ("out", "lse", "dq", "dk", "dv") if lse else ("out", "dq", "dk", "dv")
    for name, x, exact, own in zip(names, got, *results, strict=True):
        assert_close(name, x, exact, rough=own)
    return list(plans._kept.values())[-1][0]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_scores(mask: str, score: str) -> None:
    mask_mod, kind, parts = MASKS[mask]
    made = _check(_draw(torch.float32), SCORES[score], mask_mod, lse="cap" not in score)
    if score == "plain":
        assert type(made) is kind
        assert len(getattr(made, "parts", [])) == parts
        assert (getattr(made, "attn_bias", None) is not None) is (mask in ("single keys", "a window for each head"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score", ["plain", "ALiBi", "relative bias"])
@pytest.mark.parametrize("mask", ["causal", "windows of documents", "prefixes", "causal blocks", "single keys"])
def test_small_types_with_grouped_heads(mask: str, score: str, dtype: torch.dtype) -> None:
    _check(_draw(dtype, heads_k=1), SCORES[score], MASKS[mask][0], lse=True)


@pytest.mark.parametrize("mask", ["causal", "both sides", "prefix", "chunks", "single keys", "blocks"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(100, 300), (300, 100), (1, 300), (129, 1)])
def test_queries_and_keys_of_other_lengths(mask: str, seqlen_q: int, seqlen_k: int) -> None:
    _check(_draw(torch.float32, seqlen_q=seqlen_q, seqlen_k=seqlen_k), None, MASKS[mask][0], lse=True)


def test_alibi_keeps_memory_linear() -> None:
    """ALiBi is recognised from its numbers, with or without the distance's absolute value where the mask is causal."""
    for score in ("ALiBi", "ALiBi of distances"):
        made = _check(_draw(torch.float32), SCORES[score], _causal, lse=True)
        assert made.attn_bias is None
        torch.testing.assert_close(made.alibi_slopes, SLOPES)
    made = _check(_draw(torch.float32), SCORES["ALiBi"], None, lse=True)  # keys behind a query get a higher score
    assert made.attn_bias is not None


def test_a_learned_bias_has_its_gradient() -> None:
    table = TABLE.clone().requires_grad_()
    leaves = _draw(torch.float32)
    score_mod = lambda s, b, h, q, kv: s + table[h, q - kv + N]  # noqa: E731
    with use_for_flex():
        out = flex_attention(*leaves, score_mod=score_mod, block_mask=_block_mask(_causal))
    expected, _ = _definition(*leaves, score_mod, _causal)
    dout = torch.randn_like(out)
    for got, wanted in zip(*(torch.autograd.grad(x, [*leaves, table], dout) for x in (out, expected)), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert not plans._kept


def _of_documents(documents: torch.Tensor) -> tuple[Function, BlockMask]:
    """A mask whose function is asked in every block, so that it may change."""
    mask_mod = lambda b, h, q, kv: documents[q] == documents[kv]  # noqa: E731
    counts = torch.full((1, 1, 3), 3, dtype=torch.int32, device=DEVICE)
    indices = torch.arange(3, dtype=torch.int32, device=DEVICE).expand(1, 1, 3, 3).contiguous()
    return mask_mod, BlockMask.from_kv_blocks(counts, indices, mask_mod=mask_mod, seq_lengths=(N, N))


def test_a_plan_is_kept_until_a_tensor_changes_or_dies() -> None:
    documents = DOCUMENT.clone()
    mask_mod, block_mask = _of_documents(documents)
    leaves = [x.detach() for x in _draw(torch.float32)]
    with use_for_flex():
        for value in (None, None, 7):
            if value is not None:
                documents[:150] = value
            out = flex_attention(*leaves, block_mask=block_mask)
            torch.testing.assert_close(out, _definition(*leaves, None, mask_mod)[0])
    assert len(plans._kept) == 2
    del documents, mask_mod, block_mask
    assert not plans._kept


def test_lists_of_blocks_without_a_function_hide_keys() -> None:
    """PyTorch's eager path reads no lists; its compiled kernels do, and so do these."""
    seen = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]], dtype=torch.bool, device=DEVICE)
    counts, indices = torch_flex._dense_to_ordered(seen[None, None].int())
    mask = BlockMask.from_kv_blocks(torch.zeros_like(counts), indices, counts, indices, seq_lengths=(N, N))
    leaves = _draw(torch.float32)
    with use_for_flex():
        out = flex_attention(*leaves, block_mask=mask)
    expected, _ = _definition(*leaves, None, lambda b, h, q, kv: seen[q // 128, kv // 128])
    torch.testing.assert_close(out, expected)


def test_a_mask_made_in_inference_mode_may_change() -> None:
    leaves = [x.detach() for x in _draw(torch.float32)]
    with torch.inference_mode(), use_for_flex():
        documents = DOCUMENT.clone()
        mask_mod, block_mask = _of_documents(documents)
        for _ in range(2):
            out = flex_attention(*leaves, block_mask=block_mask)
            torch.testing.assert_close(out, _definition(*leaves, None, mask_mod)[0])
            documents[:150] = 7
    assert not plans._kept


def test_a_trace_is_pytorchs() -> None:
    """Its tensors have no numbers by which a mask could be recognised."""
    leaves = [x.detach() for x in _draw(torch.float32)]
    block_mask = _block_mask(_causal)
    served = flex_report().served
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x) for x in leaves]
    # PyTorch's own function may refuse a trace.
    with use_for_flex(), mode, contextlib.suppress(Exception):
        flex_attention(*fakes, block_mask=block_mask)
    assert flex_report().served == served


def _passed_on(*args: Any, **options: Any) -> list[str]:
    before = flex_report().passed_on
    with use_for_flex():
        flex_attention(*args, **options)
    after = flex_report().passed_on
    return [reason for reason, count in after.items() if count != before.get(reason, 0)]


@pytest.mark.parametrize(
    ("score_mod", "reason"),
    [
        (lambda s, b, h, q, kv: s * s, "modifies the score by __mul__"),
        (lambda s, b, h, q, kv: torch.where(q >= kv, s, -1e9), "another value than -inf"),
        (lambda s, b, h, q, kv: torch.where(s > 0, s, -float("inf")), "hides keys by their scores"),
        (lambda s, b, h, q, kv: torch.zeros_like(s), "modifies the score by zeros_like"),
        (lambda s, b, h, q, kv: (s + h) * 2, "has modified before"),
        (lambda s, b, h, q, kv: torch.tanh(s + h) * 2, "a tanh of more than the score"),
        (lambda s, b, h, q, kv: s * SLOPES[h], "no number of Python"),
        (lambda s, b, h, q, kv: s.to(torch.float16), "modifies the score by to"),
        (lambda s, b, h, q, kv: q + kv + 0.0 * b, "does not depend on the score"),
        (lambda s, b, h, q, kv: s * -1.0, "not positive"),
    ],
)
def test_other_functions_are_pytorchs(score_mod: Function, reason: str) -> None:
    leaves = [x.detach() for x in _draw(torch.float32)]
    assert any(reason in x for x in _passed_on(*leaves, score_mod=score_mod)), flex_report()


def test_other_calls_are_pytorchs() -> None:
    leaves = [x.detach() for x in _draw(torch.float32)]
    assert _passed_on(*leaves, kernel_options={"BLOCK_M": 64}) == ["kernel_options, which are for PyTorch's kernels"]
    assert _passed_on(*(x.double() for x in leaves)) == ["types torch.float64, torch.float64, torch.float64"]
    with torch.autocast(DEVICE, torch.bfloat16):
        assert _passed_on(*leaves) == ["fp32 under autocast"]


def test_pytorchs_errors_stay() -> None:
    leaves = [x.detach() for x in _draw(torch.float32)]
    before = flex_report()
    q, k, v = leaves
    for args, options in [
        ((q,), {}),
        ((q, k[:, :, :100], v[:, :, :100]), {"block_mask": _block_mask(_causal)}),
        ((q, k, v), {"block_mask": 3}),
        ((q, k[:, :1], v[:, :1]), {}),
        ((q, k, v), {"block_mask": _block_mask(_causal)[:1, :1, :1]}),
        ((q, k, v), {"wrong": 3}),
        ((q, k, v), {"scale": "1"}),
        ((q, k, 3), {}),
    ]:
        errors = []
        for active in (False, True):
            with pytest.raises(Exception) as caught:  # noqa: PT012
                if active:
                    with use_for_flex():
                        flex_attention(*args, **options)
                else:
                    flex_attention(*args, **options)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]
    assert flex_report() == before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_flex_attention_is_served(backend: str, fullgraph: bool) -> None:
    """torch.compile(flex_attention), as its manual asks for, is served without a compiler; a larger compiled function
    is PyTorch's."""
    compiled = torch.compile(flex_attention, backend=backend, fullgraph=fullgraph)
    leaves = [x.detach() for x in _draw(torch.float32)]
    block_mask = _block_mask(_causal)
    expected, _ = _definition(*leaves, None, _causal)
    before = flex_report()
    with use_for_flex():
        torch.testing.assert_close(compiled(*leaves, block_mask=block_mask), expected)
        assert flex_report().served == before.served + 1
        options = {"BLOCK_M": 64}
        torch.testing.assert_close(compiled(*leaves, block_mask=block_mask, kernel_options=options), expected)
        assert sum(flex_report().passed_on.values()) == sum(before.passed_on.values()) + 1

        @torch.compile(backend=backend, fullgraph=fullgraph)
        def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = flex_attention(q * 2, k / 2, v, block_mask=block_mask)
            return out

        served = flex_report().served
        torch.testing.assert_close(model(*leaves), expected)
        assert flex_report().served == served
    torch.testing.assert_close(compiled(*leaves, block_mask=block_mask), expected)
    assert flex_report().served == served
    torch.compiler.reset()


def test_the_switch() -> None:
    """The same object under every name; several switches; the function without a switch."""
    signature = inspect.signature(flex_attention)
    leaves = [x.detach() for x in _draw(torch.float32)]
    served = flex_report().served
    first, second = use_for_flex(), use_for_flex()
    assert torch_flex.flex_attention is flex_attention
    assert inspect.signature(flex_attention) == signature
    first.off()
    first.off()
    flex_attention(*leaves)
    second.off()
    flex_attention(*leaves)
    assert flex_report().served == served + 1
    with first:
        flex_attention(*leaves)
    ours(*leaves)
    assert flex_report().served == served + 3
    assert str(flex_report()).startswith(f"flex_attention: {served + 3} calls served by flash_attn")


def test_runs_are_the_rows() -> None:
    """Random runs give back their rows, and groups keep what each run sees."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        first, last = [], []
        while len(first) < 40:
            rows, left, right, start = (int(x) for x in torch.randint(0, 12, (4,), generator=generator))
            for row in range(rows):
                first.append(start + max(0, row - left))
                last.append(start + min(rows, row + right))
        runs = list(of_rows(0, first, last))
        found = groups(runs, len(runs))
        assert found is not None
        seen = {row: _seen(run, row - run.start, window) for window, of in found for run in of for row in _rows(run)}
        assert seen == {row: (first[row], last[row]) for row in range(len(first)) if last[row] >= first[row]}


def _rows(run: Run) -> range:
    return range(run.start, run.start + run.queries)


def _seen(run: Run, row: int, window: tuple[int, int]) -> tuple[int, int]:
    """The first and the last key of a row, by flash_attn_func's rule of windows."""
    middle, (left, right) = row + run.keys - run.queries, window
    first = 0 if left < 0 else max(0, middle - left)
    last = run.keys - 1 if right < 0 else min(run.keys - 1, middle + right)
    return run.first + first, run.first + last
