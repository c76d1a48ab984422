"""Attention over ranges of keys and ids: kernels and PyTorch's path against dense attention with the same mask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn import backends
from flash_attn.backends import torch as torch_backend
from flash_attn.backends import triton as triton_backend
from flash_attn.ranges import flash_attn_ranges_func
from flash_attn.sparse import BlockMask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, FULL = torch.float16, torch.float32
pytestmark = pytest.mark.usefixtures("interpreter_multiplies_bf16")


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest, fresh_kernels: None) -> Iterator[str]:  # noqa: ARG001
    with backends.using(triton_backend if request.param == "triton" else torch_backend):  # type: ignore[arg-type]
        yield request.param


def _draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, torch.int32)


def _random_ranges(batch: int, heads: int, sq: int, sk: int) -> torch.Tensor:
    """Ranges of any kind: empty, inverted, overlapping, beyond both ends."""
    return _integers(-20, sk + 20, batch, heads, sq, 2, 2)


def _documents(lengths: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(DEVICE, torch.int32)


def _prefix(sq: int, sk: int, prefix: int, wide: int) -> torch.Tensor:
    """A prefix that all see, and a window: two ranges that cross tiles and overlap at the beginning."""
    rows = torch.arange(sq)
    window = torch.stack([rows + sk - sq - wide, rows + sk - sq + 1], -1)
    return torch.stack([torch.tensor([0, prefix]).expand(sq, 2), window], 1)[None, None].to(DEVICE, torch.int32)


def _shuffled(sq: int, sk: int) -> dict[str, torch.Tensor]:
    return {"ids_q": _integers(0, 3, 1, sq, seed=4), "ids_k": _integers(0, 4, 2, sk, seed=5)}


CASES: dict[str, dict[str, Any]] = {
    "any ranges": {"sq": 130, "sk": 200, "mask": lambda: {"ranges": _random_ranges(2, 1, 130, 200)}},
    "for each head": {"sq": 70, "sk": 150, "heads": (4, 2), "mask": lambda: {"ranges": _random_ranges(1, 4, 70, 150)}},
    "one range": {"sq": 90, "sk": 90, "mask": lambda: {"ranges": _random_ranges(1, 1, 90, 90)[:, :, :, 0]}},
    "prefix and window": {"sq": 300, "sk": 333, "mask": lambda: {"ranges": _prefix(300, 333, 75, 40)}},
    "causal": {"sq": 150, "sk": 150, "causal": True, "mask": lambda: {"ranges": _random_ranges(1, 1, 150, 150)}},
    "window": {"sq": 150, "sk": 210, "window": (40, 9), "mask": lambda: {"ranges": _random_ranges(1, 1, 150, 210)}},
    "documents": {"sq": 300, "sk": 300, "causal": True, "mask": lambda: {"ids_q": _documents([64, 100, 3, 1, 132])}},
    "ids in any order": {"sq": 129, "sk": 193, "mask": lambda: _shuffled(129, 193)},
    "nothing visible": {"sq": 70, "sk": 70, "mask": lambda: {"ranges": _random_ranges(1, 1, 70, 70) * 0}},
    "everything visible": {"sq": 130, "sk": 190, "mask": lambda: {"ranges": _prefix(130, 190, 190, 0)}},
    "one query": {"sq": 1, "sk": 300, "mask": lambda: {"ranges": _random_ranges(2, 2, 1, 300)}},
    "fp32": {"sq": 130, "sk": 200, "dtype": FULL, "mask": lambda: {"ranges": _random_ranges(2, 1, 130, 200)}},
    "bf16": {"sq": 130, "sk": 200, "dtype": torch.bfloat16, "mask": lambda: {"ranges": _prefix(130, 200, 90, 60)}},
    "head dim 44": {"sq": 65, "sk": 70, "dim": 44, "mask": lambda: {"ranges": _random_ranges(1, 1, 65, 70)}},
    "head dim 200": {"sq": 65, "sk": 130, "dim": 200, "mask": lambda: {"ranges": _random_ranges(1, 1, 65, 130)}},
    "sinks": {"sq": 130, "sk": 200, "sinks": True, "mask": lambda: {"ranges": _random_ranges(2, 1, 130, 200) // 2}},
    "all parts": {
        "sq": 200, "sk": 260, "heads": (4, 2), "window": (190, 30), "sinks": True,
        "mask": lambda: {"ranges": _prefix(200, 260, 100, 150), **_shuffled(200, 260),
                         "block_mask": BlockMask(_integers(0, 2, 1, 4, 4, 5).bool(), (64, 64))},
    },
}  # fmt: skip


def _visible(mask: dict[str, Any], sq: int, sk: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    keys = torch.arange(sk, device=DEVICE)
    distance = keys - torch.arange(sq, device=DEVICE)[:, None] - sk + sq
    visible = torch.ones(1, 1, sq, sk, dtype=torch.bool, device=DEVICE)
    if window[0] >= 0:
        visible = visible & (distance >= -window[0])
    right = 0 if causal else window[1]
    if right >= 0:
        visible = visible & (distance <= right)
    ranges = mask.get("ranges")
    if ranges is not None:
        pairs = ranges.reshape(*ranges.shape[:3], -1, 2)
        visible = visible & ((keys >= pairs[..., :1]) & (keys < pairs[..., 1:])).any(3)
    if "ids_q" in mask:
        ids_k = mask.get("ids_k", mask["ids_q"])
        visible = visible & (mask["ids_q"][:, None, :, None] == ids_k[:, None, None])
    if "block_mask" in mask:
        visible = visible & mask["block_mask"].tokens(sq, sk)
    return visible


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention with a dense mask, in the type of its inputs."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(group, 1), v.transpose(1, 2)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)


@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention_with_the_mask(backend: str, case: str) -> None:  # noqa: ARG001
    given = {"heads": (2, 2), "causal": False, "window": (-1, -1), "dim": 64, "dtype": HALF, "sinks": False}
    given |= CASES[case]
    sq, sk, dim, dtype, (heads, heads_k) = (given[name] for name in ("sq", "sk", "dim", "dtype", "heads"))
    q = _draw(2, sq, heads, dim, dtype=dtype)
    k, v = (_draw(2, sk, heads_k, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    dout = _draw(2, sq, heads, dim, dtype=dtype, seed=3)
    sinks = [_draw(heads, dtype=dtype, seed=4)] if given["sinks"] else []
    mask = given["mask"]()
    visible = _visible(mask, sq, sk, given["causal"], given["window"])

    def results(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *sinks)]
        out = function(*leaves[:3], leaves[3] if sinks else None)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    options = {"causal": given["causal"], "window_size": given["window"]}
    got = results(lambda *x: flash_attn_ranges_func(*x[:3], **mask, **options, s_aux=x[3]), dtype)
    same = results(lambda *x: _dense(*x[:3], visible, x[3]), dtype)
    wanted = results(lambda *x: _dense(*x[:3], visible, x[3]), FULL)
    for name, ours, reference, lowered in zip(("out", "dq", "dk", "dv", "ds_aux"), got, wanted, same, strict=False):
        # A sum over rows, rounded at the end, as in test_sinks.
        tiny = 2.0 * torch.finfo(dtype).eps if name == "ds_aux" else 2e-5
        assert_close(name, ours, reference, rough=lowered, tiny=tiny)
