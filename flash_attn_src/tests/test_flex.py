"""PyTorch's flex_attention on these kernels, against the definition of attention with its score_mod and mask_mod.

On a CPU the door is a stand-in: tensors of the CPU count as tensors of a GPU, and the backend `torch` serves them.
"""

# ruff: noqa: ARG005 - PyTorch calls a mask_mod with four arguments and a score_mod with five

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from assert_close import assert_close
from flash_attn.attention.backends.torch.scores import seen_by
from flash_attn.call.mask import Mask
from flash_attn.flex import attention, creation, flex_report, use_for_flex
from flash_attn.flex import flex_attention as ours
from flash_attn.flex import masks as flex_masks
from flash_attn.flex.masks import Masked
from flash_attn.flex.plan import Plan
from flash_attn.flex.request import Request, request
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
    create_mask,
    flex_attention,
    or_masks,
)

torch.set_num_threads(1)

# PyTorch warns of its own eager path, which serves the calls that are passed on here.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
B, H, N, D = 2, 2, 300, 32
Function = Callable[..., torch.Tensor]
PLANS: list[Plan] = []  # of the calls of a test
SIGNATURE = inspect.signature(create_block_mask)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not GPU:
        monkeypatch.setattr(door, "is_on_gpu", lambda _: True)
    codes = flex_attention.__code__, create_block_mask.__code__
    run = attention._attention

    def recorded(made: Plan, *args: Any) -> Any:
        PLANS.append(made)
        return run(made, *args)

    PLANS.clear()
    monkeypatch.setattr(attention, "_attention", recorded)
    yield
    assert (flex_attention.__code__, create_block_mask.__code__) == codes


def _integers(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(3))


DOCUMENTS = _integers(5, B, N).sort()[0].to(DEVICE)
DOCUMENT = DOCUMENTS[0].contiguous()
LENGTHS = torch.tensor([50, 120], device=DEVICE)
SLOPES = torch.tensor([0.5, 0.125], device=DEVICE)
TABLE = torch.randn((H, 2 * N), generator=torch.Generator().manual_seed(4)).to(DEVICE)


SCATTERED = _integers(4, N).to(DEVICE)
WIDE = DOCUMENTS * (1 << 32) - (DOCUMENTS % 2)
OFFSETS = torch.searchsorted(DOCUMENT, torch.arange(5, device=DEVICE))
REAL = (_integers(3, B, N) > 0).to(DEVICE)
CHOSEN = (_integers(2, H, 3, 3) + torch.eye(3, dtype=torch.long) > 0).to(DEVICE)


def _document_causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """As attention-gym has it: causal between the places inside of documents."""
    places = [x - OFFSETS[DOCUMENT[x]] for x in (q, kv)]
    return (DOCUMENT[q] == DOCUMENT[kv]) & _causal(b, h, *places)


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:  # noqa: ARG001
    return q >= kv


# mask -> (mask_mod, the arguments of flash_attn_ranges_func beside its blocks)
MASKS: dict[str, tuple[Function | None, str]] = {
    "no mask": (None, ""),
    "causal": (_causal, "window"),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv <= 40), "window"),
    "both sides": (lambda b, h, q, kv: (q - kv).abs() <= 40, "window"),
    "documents": (lambda b, h, q, kv: DOCUMENTS[b, q] == DOCUMENTS[b, kv], "ids"),
    "causal document": (and_masks(_causal, lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv]), "window ids"),
    "windows of documents": (
        lambda b, h, q, kv: (q >= kv) & (DOCUMENTS[b, q] == DOCUMENTS[b, kv]) & (q - kv < 20), "window ids",
    ),
    "chunks": (lambda b, h, q, kv: (q >= kv) & (q // 70 == kv // 70), "ranges"),
    "prefixes": (or_masks(_causal, lambda b, h, q, kv: kv < LENGTHS[b]), "ranges"),
    "prefix": (or_masks(_causal, lambda b, h, q, kv: kv < 70), "ranges"),
    "padding": (lambda b, h, q, kv: (q >= kv) & (kv < LENGTHS[b]), "ranges"),
    "padding, as transformers has it": (
        and_masks(_causal, lambda b, h, q, kv: (kv < LENGTHS[b]).to(LENGTHS[b].device)), "ranges",
    ),
    "queries without keys": (lambda b, h, q, kv: (q >= kv) & (q < LENGTHS[b]), "ranges"),
    "blocks": (lambda b, h, q, kv: (q // 128 + kv // 128) % 2 == 0, ""),
    "causal blocks": (lambda b, h, q, kv: ((q // 128 + kv // 128) % 2 == 0) & (q >= kv), "window"),
    "single keys": (lambda b, h, q, kv: (q + kv) % 3 == 0, "bits"),
    "a window for each head": (lambda b, h, q, kv: (q - kv).abs() <= 10 * (h + 1), "ranges"),
    "scattered documents": (lambda b, h, q, kv: (q >= kv) & (SCATTERED[q] == SCATTERED[kv]), "window ids"),
    "wide ids": (lambda b, h, q, kv: WIDE[b, q] == WIDE[b, kv], "ids"),
    "documents by their own places": (_document_causal, "window ids"),
    "documents twice": (
        lambda b, h, q, kv: (DOCUMENT[q] == DOCUMENT[kv]) & ((DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv)), "ranges ids",
    ),
    "documents and images": (
        lambda b, h, q, kv: (DOCUMENT[q] == DOCUMENT[kv]) & (SCATTERED[q] == SCATTERED[kv]) & (kv % 5 != 0), "ids",
    ),
    "sinks": (lambda b, h, q, kv: (q >= kv) & ((q - kv < 30) | (kv < 4)), "ranges"),
    "outside": (lambda b, h, q, kv: ~((q - kv).abs() < 20), "ranges"),
    "every second key": (lambda b, h, q, kv: (2 * kv <= q) & (kv % 2 == 0), "ranges ids"),
    "dilated": (lambda b, h, q, kv: ((q - kv).abs() <= 60) & ((q - kv).abs() % 3 == 0), "window ids"),
    "places in chunks": (lambda b, h, q, kv: (q // 70 == kv // 70) & (q % 70 >= kv % 70), "ranges"),
    "padded keys": (lambda b, h, q, kv: REAL[b, kv] & (q >= kv), "window ids"),
    "blocks of a table": (lambda b, h, q, kv: CHOSEN[h, q // 128, kv // 128] & (q >= kv), "window"),
    "documents of a head": (lambda b, h, q, kv: (SCATTERED[q] + h) % 3 == SCATTERED[kv], "bits"),
    "images in a text": (
        lambda b, h, q, kv: (q >= kv) | ((SCATTERED[q] == SCATTERED[kv]) & (SCATTERED[q] > 0)), "bits",
    ),
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
    return PLANS[-1]


# Every mask by itself, and with a quarter of the scores.
PAIRS = [
    (mask, score)
    for i, mask in enumerate(MASKS)
    for j, score in enumerate(SCORES)
    if score == "plain" or not (i + j) % 4
]


@pytest.mark.parametrize(("mask", "score"), PAIRS)
def test_masks_and_scores(mask: str, score: str) -> None:
    mask_mod, arguments = MASKS[mask]
    made = _check(_draw(torch.float32), SCORES[score], mask_mod, lse=True)
    if score == "plain" and isinstance(made, Masked):
        used = [name for name in ("ranges", "ids_q", "bits") if getattr(made, name) is not None]
        window = ["window"] if made.window_size != (-1, -1) else []
        assert " ".join([*window, *used]).replace("ids_q", "ids") == arguments
    elif score == "plain":
        assert mask == "no mask"
        assert made.attn_bias is None
    elif score in ("soft cap", "ALiBi of distances") and arguments:
        assert isinstance(made, Masked) or made.attn_bias is None


BITS, TYPES, SMALL = _integers(8, N).to(DEVICE), _integers(3, N).to(DEVICE), _integers(6, N).to(DEVICE, torch.uint8)
# Conditions by numbers that are no bools, and numbers that overflow -> whether ranges and ids serve them.
NUMBERS: dict[str, tuple[Function, bool]] = {
    "bits of both": (lambda b, h, q, kv: (BITS[q] & BITS[kv]).bool(), False),
    "a bit of a key": (lambda b, h, q, kv: (BITS[kv] & 2).bool() & (q >= kv), True),
    "a number of a key": (lambda b, h, q, kv: TYPES[kv].to(torch.bool) & (q >= kv), True),
    "turned bits": (lambda b, h, q, kv: (~BITS[kv]).bool() & (q >= kv), True),
    "a logical and": (lambda b, h, q, kv: torch.logical_and(BITS[q], TYPES[kv]), True),
    "bits in a logical and": (lambda b, h, q, kv: torch.logical_and(q >= kv, BITS[q] & BITS[kv]), False),
    "numbers of blocks": (lambda b, h, q, kv: TYPES[q // 128 + kv // 128].bool(), True),
    "an overflow": (lambda b, h, q, kv: kv <= SMALL[q] - 5, True),
    "a product that overflows": (lambda b, h, q, kv: kv <= 100 * SMALL[q], True),
}


@pytest.mark.parametrize("numbers", NUMBERS)
def test_numbers_are_no_conditions(numbers: str) -> None:
    mask_mod, has_bounds = NUMBERS[numbers]
    made = _check(_draw(torch.float32), None, mask_mod, lse=False)
    assert (made.bits is None) is has_bounds
    _check(_draw(torch.float32), lambda s, b, h, q, kv: s + TABLE[h][q] - TABLE[h, kv], mask_mod, lse=False)


PARTIAL: dict[str, Function] = {
    "images": lambda b, h, q, kv: (q >= kv) | (DOCUMENTS[b, q] == DOCUMENTS[b, kv]),
    "heads": lambda b, h, q, kv: (q * kv + h) % 5 < 2,
    "indirect": lambda b, h, q, kv: torch.stack([SCATTERED[q] * h, SCATTERED[kv]]).sum() % 2 == b,
}


@pytest.mark.parametrize("may_wait", [True, False], ids=["partial blocks", "every score"])
@pytest.mark.parametrize("block_size", [64, (128, 256), 100], ids=str)
@pytest.mark.parametrize("mask", PARTIAL)
def test_bits_of_some_blocks_at_a_time(
    monkeypatch: pytest.MonkeyPatch, mask: str, block_size: Any, may_wait: bool
) -> None:
    """Bits of blocks that the lists show or hide are left out where the call may wait for the GPU to find them."""
    monkeypatch.setattr(flex_masks, "_PIECES", 17)
    monkeypatch.setattr(Request, "may_wait", may_wait)
    sizes = (B, H, 129, N)
    blocks = create_block_mask(PARTIAL[mask], *sizes, device=DEVICE, BLOCK_SIZE=block_size)
    made = flex_masks.by_bits(request(None, blocks, sizes, torch.device(DEVICE)), None)
    assert made is not None
    shown, whole = seen_by(Mask(made.block_mask, bits=made.bits), slice(0, 129), slice(0, N), H)
    exact = create_mask(PARTIAL[mask], *sizes, device=DEVICE)
    assert torch.equal((shown | whole).expand(B, H, 1, 129, N).flatten(1, 2), exact)


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
    assert made.alibi_slopes is None
    assert made.attn_bias.dim() == 3


DISTANCES: dict[str, Function] = {
    "table": lambda s, b, h, q, kv: s + TABLE[h, q - kv + N],
    "scaled": lambda s, b, h, q, kv: s + (kv - q) / N - SLOPES[b] * (q - kv).abs(),
    "T5": lambda s, b, h, q, kv: s + TABLE[h, torch.clamp((1 + (q - kv).abs()).log2().long(), max=7)],
    "decay": lambda s, b, h, q, kv: s + (q - kv).abs() ** 0.5 * torch.log(1 - 2.0 ** (-5 - h)),
    "dilated": lambda s, b, h, q, kv: torch.where((q - kv) % 3 == 0, s, -float("inf")),
}


@pytest.mark.parametrize("sizes", [(N, N), (100, N), (N, 100)])
@pytest.mark.parametrize("score", DISTANCES)
def test_addends_of_the_distance_are_tables(score: str, sizes: tuple[int, int]) -> None:
    made = _check(_draw(torch.float32, seqlen_q=sizes[0], seqlen_k=sizes[1]), DISTANCES[score], None, lse=True)
    assert made.attn_bias.dim() == 3
    made = _check(_draw(torch.float32), DISTANCES[score], MASKS["window"][0], lse=True)
    assert made.attn_bias.dim() == 3
    assert made.window == (40, 0)


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


@pytest.mark.parametrize("filler", [-1, 3, 77])
def test_an_index_of_no_block_within_the_counts_is_not_seen(filler: int) -> None:
    """On a GPU an index out of bounds would end the process."""
    indices = torch.tensor([[[[0, filler], [filler, 1], [1, 2]]]], dtype=torch.int32, device=DEVICE)
    counts = torch.full((1, 1, 3), 2, dtype=torch.int32, device=DEVICE)
    mask = BlockMask.from_kv_blocks(counts, indices, mask_mod=_causal, seq_lengths=(N, N), compute_q_blocks=False)
    leaves = [x.detach() for x in _draw(torch.float32)]
    seen = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=torch.bool, device=DEVICE)
    shown = lambda b, h, q, kv: _causal(b, h, q, kv) & seen[q // 128, kv // 128]  # noqa: E731
    with use_for_flex():
        out = flex_attention(*leaves, block_mask=mask)
    torch.testing.assert_close(out, _definition(*leaves, None, shown)[0])


def _of_documents(documents: torch.Tensor) -> tuple[Function, BlockMask]:
    """A mask whose function is asked in every block, so that it may change."""
    mask_mod = lambda b, h, q, kv: documents[q] == documents[kv]  # noqa: E731
    counts = torch.full((1, 1, 3), 3, dtype=torch.int32, device=DEVICE)
    indices = torch.arange(3, dtype=torch.int32, device=DEVICE).expand(1, 1, 3, 3).contiguous()
    return mask_mod, BlockMask.from_kv_blocks(counts, indices, mask_mod=mask_mod, seq_lengths=(N, N))


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "data.copy_": lambda x: x.data.copy_(torch.full_like(x, 2)),
    "data.mul_": lambda x: x.data.mul_(0),
    "data =": lambda x: setattr(x, "data", torch.full_like(x, 2)),
    "view of the memory": lambda x: x.detach().view(-1)[: len(x.view(-1)) // 2].zero_(),
    "in place": lambda x: x.detach().zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_inference", [False, True])
def test_nothing_read_from_a_tensor_outlives_the_call(change: str, is_inference: bool) -> None:
    """Each call has the values of its own moment, of learned biases, of masks and of lists of blocks."""
    leaves = [x.detach() for x in _draw(torch.float32)]
    with torch.inference_mode(is_inference), torch.no_grad(), use_for_flex():
        documents, table, factor = DOCUMENT.clone(), TABLE.clone(), SLOPES.clone()
        mask_mod, block_mask = _of_documents(documents)
        score_mod = lambda s, b, h, q, kv: s * factor[h] + table[h, q - kv + N]  # noqa: E731
        for _ in range(2):
            for mod in (None, score_mod):
                out = flex_attention(*leaves, mod, block_mask)
                torch.testing.assert_close(out, _definition(*leaves, mod, mask_mod)[0])
            for x in (documents, table, factor):
                CHANGES[change](x)
        block_mask.kv_num_blocks.data.fill_(1)
        seen = lambda b, h, q, kv: mask_mod(b, h, q, kv) & (kv < 128)  # noqa: E731
        torch.testing.assert_close(flex_attention(*leaves, block_mask=block_mask), _definition(*leaves, None, seen)[0])


class _Layer(torch.nn.Module):
    """Attention with learned relative positions and a temperature, over documents that a buffer tells."""

    def __init__(self, attend: Function) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = torch.nn.Linear(H * D, 3 * H * D, device=DEVICE)
        self.table = torch.nn.Parameter(torch.zeros(H, 2 * N, device=DEVICE))
        self.temperature = torch.nn.Parameter(torch.ones(H, device=DEVICE))
        self.register_buffer("documents", DOCUMENT.clone())

    def forward(self, x: torch.Tensor, *, has_documents: bool) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        if has_documents:
            mask_mod = lambda b, h, q, kv: (q >= kv) & (self.documents[q] == self.documents[kv])  # noqa: E731
            score_mod = lambda s, b, h, q, kv: s * self.temperature[h]  # noqa: E731
        else:
            mask_mod, score_mod = _causal, lambda s, b, h, q, kv: s + self.table[h, q - kv + N]
        return self.attend(q, k, v, score_mod, mask_mod).transpose(1, 2).flatten(2)


def _served(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Function, mask_mod: Function) -> torch.Tensor:
    with use_for_flex():
        return flex_attention(q, k, v, score_mod, _block_mask(mask_mod))


def _losses(attend: Function) -> list[float]:
    """Losses of a training run: a fused optimizer, checkpoints, an average of weights, validation in two modes."""
    torch.manual_seed(0)
    layer = _Layer(attend)
    average = [x.detach().clone() for x in layer.parameters()]
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, fused=True)
    x, target = torch.randn(2, B, N, H * D).to(DEVICE)
    losses = []
    for _ in range(3):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                weights = [x.data.clone() for x in layer.parameters()]
                for weight, mean in zip(layer.parameters(), average, strict=True):
                    weight.data.copy_(mean)
                losses += [(layer(x, has_documents=y) - target).square().mean().item() for y in (False, True)]
                for weight, old in zip(layer.parameters(), weights, strict=True):
                    weight.data.copy_(old)
        for has_documents in (False, True):
            y = torch.utils.checkpoint.checkpoint(layer, x, has_documents=has_documents, use_reentrant=False)
            loss = (y - target).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert all(x.grad is not None for x in layer.parameters())
        optimizer.step()
        optimizer.zero_grad()
        layer.documents.data.copy_(layer.documents.flip(0))
        for weight, mean in zip(layer.parameters(), average, strict=True):
            mean.data.mul_(0.5).add_(weight.data, alpha=0.5)
    return losses


def test_a_training_run_is_the_definitions() -> None:
    """Every loss of a run in which weights and documents change as programs change them."""
    expected = _losses(lambda *args: _definition(*args)[0])
    assert _losses(_served) == pytest.approx(expected, rel=1e-4)
    assert len({round(loss, 4) for loss in expected}) > len(expected) // 2


def test_inference_mode_before_training() -> None:
    """A mask of each plan."""
    for mask_mod in {plan: mask_mod for mask_mod, plan in MASKS.values()}.values():
        leaves, block_mask = _draw(torch.float32), _block_mask(mask_mod)
        with use_for_flex():
            with torch.inference_mode():
                flex_attention(*leaves, block_mask=block_mask)
            flex_attention(*leaves, block_mask=block_mask).sum().backward()
        assert all(x.grad is not None for x in leaves)


@pytest.mark.parametrize(
    ("start", "score_mod", "mask_mod"),
    [
        (SLOPES, lambda x: lambda s, b, h, q, kv: s - x[h] * (q - kv).abs(), None),
        (SLOPES, lambda x: lambda s, b, h, q, kv: s + x[h] * (kv - q), _causal),
        (0 * TABLE, lambda x: lambda s, b, h, q, kv: s + x[h, q - kv + N], _causal),
        (0 * TABLE, lambda x: lambda s, b, h, q, kv: s + x[h, q - kv + N], None),
        (SLOPES, lambda x: lambda s, b, h, q, kv: s * x[h] - kv / 300, None),
        (TABLE, lambda x: lambda s, b, h, q, kv: s / (1 + x[h, q] ** 2), _causal),
        (SLOPES[0], lambda x: lambda s, b, h, q, kv: s * x + 1, _causal),
        (SLOPES[0], lambda x: lambda s, b, h, q, kv: s / x.exp() + x * (q - kv) / N, _causal),
    ],
)
def test_what_looks_simple_learns(
    start: torch.Tensor, score_mod: Callable[[torch.Tensor], Function], mask_mod: Function | None
) -> None:
    """Slopes, tables that start at zero and factors have their gradient."""
    leaves, learned = _draw(torch.float32), start.clone().requires_grad_()
    with use_for_flex():
        out = flex_attention(*leaves, score_mod=score_mod(learned), block_mask=_block_mask(mask_mod))
    expected, _ = _definition(*leaves, score_mod(learned), mask_mod)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for got, wanted in zip(*(torch.autograd.grad(x, [*leaves, learned], dout) for x in (out, expected)), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)


def test_a_mask_that_shows_nothing_has_a_gradient_of_zero() -> None:
    leaves = _draw(torch.float32)
    with use_for_flex():
        out = flex_attention(*leaves, block_mask=_block_mask(lambda b, h, q, kv: (q >= kv) & (q < 0 * LENGTHS[b])))
    out.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in leaves)


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_casts_as_pytorch_does(dtype: torch.dtype, to: torch.dtype) -> None:
    leaves = [x.detach() for x in _draw(dtype)]
    served = flex_report().served
    with torch.autocast(DEVICE, to):
        expected = flex_attention(*leaves)
        with use_for_flex():
            out = flex_attention(*leaves)
    assert flex_report().served == served + 1
    assert out.dtype is expected.dtype is to


def test_nan_stays() -> None:
    """A NaN of an addend is the NaN of a row, unless the mask hides it."""
    leaves = [x.detach() for x in _draw(torch.float32)]
    addend = torch.zeros(N, N, device=DEVICE)
    addend[3, 2] = addend[9] = addend[4, 200] = torch.nan
    for score_mod in (
        lambda s, b, h, q, kv: s + addend[q, kv],
        lambda s, b, h, q, kv: s - 0.5 * (q - kv).abs() + addend[q, kv],
    ):
        for mask_mod in (None, _causal):
            with use_for_flex():
                out = flex_attention(*leaves, score_mod, _block_mask(mask_mod))
            rows = out.isnan().any(-1)[0, 0].nonzero().flatten().tolist()
            assert rows == ([3, 9] if mask_mod else [3, 4, 9])


def test_the_score_may_change_in_place() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:  # noqa: ARG001
        s *= 0.5
        s += TABLE[h, q - kv + N]
        return s

    _check(_draw(torch.float32), score_mod, _causal, lse=True)


@pytest.mark.parametrize(("filler", "width"), [(-1, 3), (77, 3), (0, 2)])
def test_lists_end_at_their_counts(filler: int, width: int) -> None:
    """What stands behind the counts is no block, and lists may be narrower than all blocks of keys."""
    indices = torch.full((1, 1, 3, width), filler, dtype=torch.int32, device=DEVICE)
    indices[0, 0, 0, 0] = 0
    indices[0, 0, 1, :2] = torch.tensor([0, 1])
    indices[0, 0, 2, :2] = torch.tensor([1, 2])
    counts = torch.tensor([[[1, 2, 2]]], dtype=torch.int32, device=DEVICE)
    leaves = [x.detach() for x in _draw(torch.float32)]
    for mask_mod in (_causal, lambda b, h, q, kv: (q + kv) % 3 == 0):
        mask = BlockMask.from_kv_blocks(counts, indices, mask_mod=mask_mod, seq_lengths=(N, N), compute_q_blocks=False)
        band = lambda b, h, q, kv, f=mask_mod: f(b, h, q, kv) & (q // 128 - kv // 128 <= 1) & (q // 128 >= kv // 128)  # noqa: E731
        with use_for_flex():
            out = flex_attention(*leaves, block_mask=mask)
        torch.testing.assert_close(out, _definition(*leaves, None, band)[0])


def _of_documents(documents: torch.Tensor) -> tuple[Function, BlockMask]:
    """A mask whose function is asked in every block, so that it may change."""
    mask_mod = lambda b, h, q, kv: documents[q] == documents[kv]  # noqa: E731
    counts = torch.full((1, 1, 3), 3, dtype=torch.int32, device=DEVICE)
    indices = torch.arange(3, dtype=torch.int32, device=DEVICE).expand(1, 1, 3, 3).contiguous()
    return mask_mod, BlockMask.from_kv_blocks(counts, indices, mask_mod=mask_mod, seq_lengths=(N, N))


@pytest.mark.parametrize("score", ["plain", "soft cap", "ALiBi"])
@pytest.mark.parametrize(
    ("mask", "size"),
    [
        *((name, 128) for name in ("no mask", "causal", "windows of documents", "blocks", "single keys")),
        ("single keys", 100),  # of no multiple of a kernel's block: the bits hold what the lists say
    ],
)
def test_lists_hide_blocks_and_show_whole_ones(mask: str, size: int, score: str) -> None:
    """PyTorch's eager path reads no lists. Its compiled kernels do, and ask the mask_mod in partial blocks alone."""
    blocks = torch.tensor([[2, 0, 1], [0, 1, 2], [1, 1, 2]], device=DEVICE)
    lists = [x for kind in (1, 2) for x in torch_flex._dense_to_ordered((blocks == kind)[None, None].int())]
    mask_mod = MASKS[mask][0]
    block_mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(N, N))
    leaves = _draw(torch.float32)
    with use_for_flex():
        out = flex_attention(*leaves, SCORES[score], block_mask)
    asked = mask_mod or (lambda b, h, q, kv: q >= 0)
    at = lambda q, kv: blocks[q // size, kv // size]  # noqa: E731
    shown = lambda b, h, q, kv: (at(q, kv) == 2) | ((at(q, kv) == 1) & asked(b, h, q, kv))  # noqa: E731
    expected, _ = _definition(*leaves, SCORES[score], shown)
    torch.testing.assert_close(out, expected)


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
        (lambda s, b, h, q, kv: s * TABLE[h, kv], "no number of Python"),
        (lambda s, b, h, q, kv: s / 0, "divides the score by 0"),
        (lambda s, b, h, q, kv: s * 1e-40, "does not hold as a normal number"),
        (lambda s, b, h, q, kv: s.to(torch.float16), "modifies the score by to"),
        (lambda s, b, h, q, kv: q + kv + 0.0 * b, "does not depend on the score"),
        (lambda s, b, h, q, kv: s * -1.0, "not positive"),
        # A difference and a quotient with the score on the right are no addend and no factor.
        (lambda s, b, h, q, kv: 2.0 - s, "modifies the score by __rsub__"),
        (lambda s, b, h, q, kv: TABLE[h, kv] - s, "modifies the score by __sub__"),
        (lambda s, b, h, q, kv: torch.sub(TABLE[h, kv], s), "modifies the score by sub"),
        (lambda s, b, h, q, kv: 2.0 / s, "modifies the score by __r"),
        (lambda s, b, h, q, kv: torch.div(h + 1.0, s), "modifies the score by div"),
    ],
)
def test_other_functions_are_pytorchs(score_mod: Function, reason: str) -> None:
    leaves = [x.detach() for x in _draw(torch.float32)]
    assert any(reason in x for x in _passed_on(*leaves, score_mod=score_mod)), flex_report()


def test_other_calls_are_pytorchs() -> None:
    leaves = [x.detach() for x in _draw(torch.float32)]
    assert _passed_on(*leaves, kernel_options={"BACKEND": "TRITON"}) == ["kernel_options that are no hints"]
    assert _passed_on(*(x.double() for x in leaves)) == ["types torch.float64, torch.float64, torch.float64"]


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
        options = {"BACKEND": "AUTO"}
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


def _no_compiler(*_: Any, **__: Any) -> Any:
    raise AssertionError("it compiles")


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("block_size", [64, (64, 128)])
def test_create_block_mask_needs_no_compiler(block_size: Any, separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers and compiled programs call it; long masks are made in parts. The lists are PyTorch's."""
    mask_mod = MASKS["windows of documents"][0]
    sizes = (mask_mod, B, None, N, 200, DEVICE, block_size)
    options = {"separate_full_blocks": separate} if "separate_full_blocks" in SIGNATURE.parameters else {}
    expected = create_block_mask(*sizes, **options)
    for scores in (creation._SCORES, 1):
        monkeypatch.setattr(creation, "_SCORES", scores)
        with use_for_flex():
            masks = [
                create_block_mask(*sizes, **options),
                create_block_mask(*sizes, **options, _compile=True),
                torch.compile(create_block_mask, backend=_no_compiler)(*sizes, **options),
                torch.compile(create_block_mask, backend=_no_compiler, fullgraph=True)(*sizes, **options),
            ]
        for mask in masks:
            assert mask.shape == expected.shape
            assert mask.mask_mod is mask_mod
            assert mask.BLOCK_SIZE == expected.BLOCK_SIZE
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks"):
                torch.testing.assert_close(getattr(mask, name), getattr(expected, name))


def test_importing_flex_leaves_dynamo_alone() -> None:
    """It takes seconds, which a program that compiles nothing need not wait."""
    program = "import sys, flash_attn.flex; sys.exit('torch._dynamo' in sys.modules)"
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **path})


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
