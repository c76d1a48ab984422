"""FlashAttention-4's block_sparse_tensors, forward and backward, against dense attention with the same mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn import cute
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as torch_backend
from flash_attn.attention.backends import triton as triton_backend
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = (
    "mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "cu_total_m_blocks", "cu_block_idx_offsets",
    "block_size", "dq_write_order", "dq_write_order_full", "spt",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("interpreter_multiplies_bf16")


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest, fresh_kernels: None) -> Iterator[str]:  # noqa: ARG001
    with backends.using(triton_backend if request.param == "triton" else torch_backend):  # type: ignore[arg-type]
        yield request.param


def _draw(rows: int, keys: int, dim: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((2, rows, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim))
    return [torch.randn(shape, generator=generator).to(DEVICE).half().requires_grad_() for shape in shapes]


def _blocks(batch: int, heads: int, rows: int, cols: int) -> torch.Tensor:
    """Which list a block is in, int (batch, heads, rows, cols): 0 none, 1 the partial blocks, 2 the full ones."""
    result = torch.randint(0, 3, (batch, heads, rows, cols), generator=torch.Generator().manual_seed(rows))
    result[..., 0, :] = 0  # these queries see nothing
    return result.to(DEVICE)


def _listed(chosen: torch.Tensor, longest: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and numbers of the chosen columns; garbage follows the numbers that count."""
    counts = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
    order = torch.where(torch.arange(chosen.shape[-1], device=DEVICE) < counts[..., None], order, 77)
    return counts, order[..., : longest or chosen.shape[-1]]


def _lists(blocks: torch.Tensor, size: tuple[int, int] | None, **more: Any) -> BlockSparseTensorsTorch:
    return BlockSparseTensorsTorch(*_listed(blocks == 1), *_listed(blocks == 2), block_size=size, **more)


def _visible(blocks: torch.Tensor, size: tuple[int, int], sq: int, sk: int, window: tuple[Any, Any]) -> torch.Tensor:
    seen = (blocks > 0).repeat_interleave(size[0], 2)[:, :, :sq].repeat_interleave(size[1], 3)[..., :sk]
    distance = torch.arange(sk, device=DEVICE) - torch.arange(sq, device=DEVICE)[:, None] - sk + sq
    seen = seen if window[0] is None else seen & (distance >= -window[0])
    return seen if window[1] is None else seen & (distance <= window[1])


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (x.transpose(1, 2).repeat_interleave(4 // x.shape[2], 1) for x in (q, k, v))
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2), scores.logsumexp(-1)


CASES: dict[str, dict[str, Any]] = {
    "one mask for all": {},
    "for each head": {"mask": (1, 4)},
    "for each entry": {"mask": (2, 1), "size": (64, 128), "shape": (200, 330)},
    "causal": {"mask": (2, 4), "causal": True, "shape": (257, 300)},
    "window": {"window": (90, 20), "size": (64, 64)},
    "head dim 44": {"dim": 44, "size": (192, 64), "scale": 0.3},
}


# The interpreter takes up to 20 s for a case; test_sparse.py has lists for each head and other head dims.
LONG = {"one mask for all", "for each head", "head dim 44"}


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(name, case, marks=pytest.mark.long if name == "triton" and case in LONG else ())
        for name in ("triton", "torch")
        for case in CASES
    ],
    indirect=["backend"],
)
def test_equals_dense_attention_with_the_blocks(backend: str, case: str) -> None:
    given = {
        "mask": (1, 1),
        "size": (128, 128),
        "shape": (300, 300),
        "causal": False,
        "window": (None, None),
        "dim": 64,
    }
    given |= {"scale": 0.125} | CASES[case]
    (sq, sk), size, causal, dim = (given[name] for name in ("shape", "size", "causal", "dim"))
    q, k, v = _draw(sq, sk, dim)
    blocks = _blocks(*given["mask"], -(-sq // size[0]), -(-sk // size[1]))
    window = (given["window"][0], 0) if causal else given["window"]
    visible = _visible(blocks, size, sq, sk, window)
    lists, backward = _lists(blocks, size), _lists(blocks.mT, size)
    options = {"softmax_scale": given["scale"], "causal": causal}
    out, lse = cute.flash_attn_func(
        q, k, v, window_size=given["window"], block_sparse_tensors=lists, block_sparse_tensors_bwd=backward,
        deterministic=True, return_lse=True, **options,
    )  # fmt: skip
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE).half()
    got = [out, *torch.autograd.grad(out, (q, k, v), dout)]

    # The same by the private functions, which take the lists of either direction.
    sides = {"window_size_left": given["window"][0], "window_size_right": given["window"][1], **options}
    same, same_lse = _flash_attn_fwd(q, k, v, block_sparse_tensors=lists, return_lse=True, **sides)
    assert torch.equal(same, out)
    assert torch.equal(same_lse, lse)

    def dense(*inputs: torch.Tensor) -> list[torch.Tensor]:
        result, _ = _dense(*inputs, visible, given["scale"])
        return [result, *torch.autograd.grad(result, inputs, dout.to(result.dtype))]

    exact, rough = dense(*(x.detach().float().requires_grad_() for x in (q, k, v))), dense(q, k, v)
    for name, ours, reference, lowered in zip(("out", "dq", "dk", "dv"), got, exact, rough, strict=True):
        assert_close(name, ours, reference, rough=lowered)
    if backend == "torch" or case == "causal":  # the same kernels, and the interpreter takes seconds for them
        private = _flash_attn_bwd(q, k, v, out.detach(), dout, lse.detach(), block_sparse_tensors=backward, **sides)
        for name, ours, reference, lowered in zip(("dq", "dk", "dv"), private, exact[1:], rough[1:], strict=True):
            assert_close(name, ours, reference, rough=lowered)
    _, expected = _dense(q.float(), k.float(), v.float(), visible, given["scale"])
    torch.testing.assert_close(lse, expected, rtol=0, atol=2e-3)


def test_full_blocks_are_optional_and_lists_may_be_short() -> None:
    q, k, v = _draw(300, 300)
    blocks = _blocks(1, 4, 3, 3)
    blocks[..., 2] = 0
    counts, indices = _listed(blocks > 0, 2)
    out, lse = cute.flash_attn_func(
        q, k, v, block_sparse_tensors=BlockSparseTensorsTorch(counts, indices, block_size=(128, 128))
    )
    expected, _ = cute.flash_attn_func(q, k, v, block_sparse_tensors=_lists(blocks, (128, 128)))
    assert torch.equal(out, expected)
    assert lse is not None  # autograd records the call
    assert not lse.requires_grad
    with torch.no_grad():
        assert cute.flash_attn_varlen_func(q, k, v, block_sparse_tensors=_lists(blocks, (128, 128)))[1] is None
    # One list for all heads next to counts for each.
    row = torch.arange(3, dtype=torch.int32, device=DEVICE).expand(1, 1, 3, 3)
    mixed = BlockSparseTensorsTorch(torch.full((1, 4, 3), 2, device=DEVICE).int(), row, block_size=(128, 128))
    first_two = torch.tensor([1, 1, 0], device=DEVICE).expand(1, 1, 3, 3)
    expected, _ = cute.flash_attn_func(q, k, v, block_sparse_tensors=_lists(first_two, (128, 128)))
    assert torch.equal(cute.flash_attn_func(q, k, v, block_sparse_tensors=mixed)[0], expected)


def test_lists_of_the_backward_may_have_other_blocks_of_the_same_mask() -> None:
    q, k, v = _draw(300, 300)
    blocks = _blocks(1, 1, 2, 3)
    finer = blocks.repeat_interleave(4, 2).repeat_interleave(2, 3)[:, :, :5, :5]
    lists = {"block_sparse_tensors": _lists(blocks, (256, 128))}
    cute.flash_attn_func(q, k, v, **lists, block_sparse_tensors_bwd=_lists(finer.mT, (64, 64)))
    if DEVICE == "cpu":  # a comparison on a GPU would wait for it
        with pytest.raises(
            ValueError, match="block_sparse_tensors_bwd: got other blocks than block_sparse_tensors has"
        ):
            cute.flash_attn_func(q, k, v, **lists, block_sparse_tensors_bwd=_lists(2 - finer.mT, (64, 64)))


def test_the_logsumexp_has_a_gradient() -> None:
    q, k, v = _draw(128, 128)
    lists = _lists(torch.ones(1, 1, 1, 1, device=DEVICE), (128, 128))
    gradients = []
    for options in ({"block_sparse_tensors": lists}, {}):
        _, lse = cute.flash_attn_func(q, k, v, **options, return_lse=True)
        assert lse is not None
        gradients.append(torch.autograd.grad(lse.square().sum(), (q, k)))
    for name, got, expected in zip(("dq", "dk"), *gradients, strict=True):
        assert_close(name, got, expected)


def test_the_fields_are_upstreams() -> None:
    assert BlockSparseTensorsTorch._fields == FIELDS
    assert list(BlockSparseTensorsTorch._field_defaults) == list(FIELDS[2:])


COUNTS, INDICES = torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3, dtype=torch.int32)
WRONG_FIELDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mask_block_cnt": None}, TypeError, "mask_block_cnt: got NoneType, wanted an int32 tensor"),
    ({"mask_block_idx": None}, TypeError, "mask_block_idx: got NoneType, wanted an int32 tensor"),
    ({"mask_block_cnt": COUNTS.long()}, TypeError, "mask_block_cnt: got torch.int64, wanted int32"),
    ({"mask_block_cnt": COUNTS[0]}, ValueError, r"mask_block_cnt: got shape \(1, 3\), wanted \(1 or 2, 1 or 4, 3\)"),
    ({"mask_block_cnt": COUNTS.expand(3, 1, 3)}, ValueError, r"mask_block_cnt: got shape \(3, 1, 3\)"),
    ({"mask_block_cnt": COUNTS.to("meta")}, ValueError, "mask_block_cnt: got it on meta, wanted"),
    ({"mask_block_idx": INDICES[..., :2, :]}, ValueError, r"mask_block_idx: got shape \(1, 1, 2, 3\)"),
    ({"mask_block_idx": torch.zeros(1, 1, 3, 4).int()}, ValueError, "4.*, wanted .*, 3, at most 3"),
    ({"full_block_cnt": COUNTS}, TypeError, "full_block_idx: got NoneType"),
    ({"full_block_idx": INDICES}, TypeError, "full_block_cnt: got NoneType"),
    ({"full_block_cnt": COUNTS, "full_block_idx": INDICES.float()}, TypeError, "full_block_idx: got torch.float32"),
    ({"cu_total_m_blocks": COUNTS}, NotImplementedError, "cu_total_m_blocks: got a tensor, wanted None: packed"),
    ({"cu_block_idx_offsets": COUNTS}, NotImplementedError, "cu_block_idx_offsets: got a tensor"),
    ({"block_size": None}, ValueError, r"block_size: got None, wanted \(queries, keys\)"),
    ({"block_size": (128, 80)}, ValueError, r"block_size: got \(128, 80\), wanted .*multiples of 64"),
    ({"dq_write_order": COUNTS}, ValueError, "dq_write_order: got shape"),
    ({"dq_write_order_full": INDICES.long()}, TypeError, "dq_write_order_full: got torch.int64"),
    ({"spt": 1}, TypeError, "spt: got 1, wanted a bool or None"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error", "match"), WRONG_FIELDS, ids=lambda x: str(x)[:40])
def test_a_field_that_does_not_fit_is_named(fields: dict[str, Any], error: type[Exception], match: str) -> None:
    q, k, v = _draw(300, 300)
    good = {"mask_block_cnt": COUNTS.to(DEVICE), "mask_block_idx": INDICES.to(DEVICE), "block_size": (128, 128)}
    moved = {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type != "meta" else x
        for name, x in fields.items()
    }
    lists = BlockSparseTensorsTorch(**(good | moved))
    with pytest.raises(error, match=f"block_sparse_tensors.{match}" if match[0] != "4" else match):
        cute.flash_attn_func(q, k, v, block_sparse_tensors=lists)
    with pytest.raises(error, match=f"block_sparse_tensors_bwd.{match}" if match[0] != "4" else match):
        cute.flash_attn_func(
            q, k, v, block_sparse_tensors=BlockSparseTensorsTorch(**good), block_sparse_tensors_bwd=lists
        )


def test_what_blocks_exclude_is_named() -> None:
    q, k, v = _draw(300, 300)
    lists = _lists(_blocks(1, 1, 3, 3), (128, 128))
    calls: list[tuple[dict[str, Any], str]] = [
        ({"mask_mod": lambda *_: True}, "mask_mod: flash_attn for ROCm has none"),
        ({"window_size": (-3, None)}, "window_size: got a negative side"),
        ({"qv": q}, "qv: got a tensor"),
    ]
    for options, match in calls:
        with pytest.raises(NotImplementedError, match=match):
            cute.flash_attn_func(q, k, v, block_sparse_tensors=lists, **options)
    with pytest.raises(TypeError, match="block_sparse_tensors: got list, wanted flash_attn"):
        cute.flash_attn_func(q, k, v, block_sparse_tensors=[q])
    with pytest.raises(
        ValueError, match="block_sparse_tensors_bwd: got lists, wanted None without block_sparse_tensors"
    ):
        cute.flash_attn_func(q, k, v, block_sparse_tensors_bwd=lists)
    with pytest.raises(TypeError, match="deterministic: got 'x'"):
        cute.flash_attn_func(q, k, v, block_sparse_tensors=lists, deterministic="x")
    starts = torch.tensor([0, 300, 600], dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="none, except for dense tensors: call flash_attn_func"):
        cute.flash_attn_varlen_func(q.flatten(0, 1), k, v, cu_seqlens_q=starts, block_sparse_tensors=lists)
    out, lse = cute.flash_attn_func(q, k, v, block_sparse_tensors=lists)
    with pytest.raises(ValueError, match="head_dim: got 64 and 32 for v"):
        _flash_attn_bwd(q, k, v[..., :32], out[..., :32], out[..., :32], lse, block_sparse_tensors=lists)
