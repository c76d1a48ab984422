"""A table of distances as `attn_bias`: query i and key j read entry j - i + seqlen_q - 1."""

from __future__ import annotations

from typing import Any

import flash_attn
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from flash_attn.attention.backends import torch as oracle
from flash_attn.attention.backends import triton
from op_arguments import op_arguments
from small_calls import in_one_graph

torch.set_num_threads(2)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
Shape = tuple[int, int]


def _draw(
    shared: Shape = (1, 4),
    dtype: torch.dtype = FULL,
    of_table: torch.dtype | None = None,
    lengths: Shape = (41, 37),
    dim: int = 16,
) -> list[torch.Tensor]:
    """q (2, seqlen_q, 4, dim), k and v (2, seqlen_k, 2, dim), a table (*shared, seqlen_q + seqlen_k - 1)."""
    generator = torch.Generator().manual_seed(dim)
    seqlen_q, seqlen_k = lengths
    rows = ((2, seqlen_q, 4, dim), (2, seqlen_k, 2, dim), (2, seqlen_k, 2, dim), (*shared, seqlen_q + seqlen_k - 1))
    types = (dtype, dtype, dtype, of_table or dtype)
    drawn = (torch.randn(shape, generator=generator) for shape in rows)
    return [x.to(DEVICE, each).requires_grad_() for x, each in zip(drawn, types, strict=True)]


def _of_each_score(table: torch.Tensor, lengths: Shape) -> torch.Tensor:
    seqlen_q, seqlen_k = lengths
    queries, keys = torch.arange(seqlen_q, device=table.device), torch.arange(seqlen_k, device=table.device)
    return table[..., keys - queries[:, None] + seqlen_q - 1]


def _check(leaves: list[torch.Tensor], sinks: torch.Tensor | None = None, **options: Any) -> None:
    """Compares out, lse and the four gradients with reference attention, which has a bias of each score."""
    *inputs, table = leaves
    lengths = (inputs[0].shape[1], inputs[1].shape[1])
    out, lse, _ = flash_attn.flash_attn_func(
        *inputs, return_attn_probs=True, attn_bias=table, s_aux=sinks, **reference.public(options)
    )
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, out.dtype)
    got = (out, lse, *torch.autograd.grad(out, leaves, dout))
    results = []
    for dtype in (torch.float64, inputs[0].dtype):
        wide = [x.detach().to(dtype).requires_grad_() for x in leaves]
        bias = _of_each_score(wide[3], lengths)
        best, best_lse = reference.attention(*wide[:3], attn_bias=bias, s_aux=sinks, dtype=dtype, **options)
        results.append((best, best_lse, *torch.autograd.grad(best, wide, dout.to(dtype))))
    assert got[-1].dtype is table.dtype
    assert got[-1].shape == table.shape
    for name, value, exact, rough in zip(("out", "lse", "dq", "dk", "dv", "dtable"), got, *results, strict=True):
        tiny = 2.0 * torch.finfo(table.dtype).eps if name == "dtable" else 0.0  # a sum, rounded at the end
        assert_close(name, value, exact, rough=None if name == "lse" else rough, tiny=max(tiny, 4e-5))


# Options of a call, who shares the table, the types of q and of the table, and the lengths.
CASES: dict[str, tuple[dict[str, Any], Shape, torch.dtype, torch.dtype, Shape]] = {
    "shared by the batch": ({}, (1, 4), HALF, HALF, (41, 37)),
    "shared by the heads, causal": ({"causal": True}, (2, 1), HALF, FULL, (41, 37)),
    "shared by all, window": ({"window": (9, 3)}, (1, 1), FULL, FULL, (37, 70)),
    "of each, softcap": ({"softcap": 2.0, "softmax_scale": -0.4}, (2, 4), FULL, FULL, (50, 33)),
    "causal with a window": ({"causal": True, "window": (11, 0)}, (1, 4), HALF, HALF, (19, 64)),
    "one query": ({"causal": True}, (1, 4), HALF, FULL, (1, 65)),
    "one key": ({}, (2, 4), FULL, FULL, (35, 1)),
}


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_agrees_with_a_bias_of_each_score(
    case: tuple[dict[str, Any], Shape, torch.dtype, torch.dtype, Shape], backend: Any
) -> None:
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    options, *of_tensors = case
    with backends.using(backend):
        _check(_draw(*of_tensors), **options)


@pytest.mark.parametrize("of_table", [BRAIN, FULL], ids=str)
def test_bf16(of_table: torch.dtype) -> None:
    """Triton's interpreter has no bf16: its kernels run in `test_amd_grid`."""
    _check(_draw((1, 4), BRAIN, of_table), causal=True)


@pytest.mark.usefixtures("_deep_tiles")
def test_head_dims_in_pieces_sinks_and_hidden_distances() -> None:
    leaves = _draw((1, 4), dim=13)
    table = leaves[3].detach().clone()
    table[..., ::3] = -torch.inf
    with backends.using(triton):
        _check([*leaves[:3], table.requires_grad_()], torch.linspace(-1.0, 1.0, 4, device=DEVICE))


@pytest.mark.skipif(not GPU, reason="needs a GPU that torch can use")
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL], ids=str)
@pytest.mark.parametrize("dim", [40, 64, 128, 192, 256])
def test_the_tiles_of_a_gpu(dim: int, dtype: torch.dtype) -> None:
    for place, lengths in enumerate([(256, 256), (113, 203), (203, 113), (6, 239), (130, 513), (255, 257), (64, 1)]):
        shared = ((1, 4), (2, 1), (1, 1), (2, 4))[place % 4]
        _check(_draw(shared, dtype, FULL if place % 3 else dtype, lengths, dim), causal=place % 2 == 1)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 6), (2, 6, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("backend", [oracle, triton], ids=["torch", "triton"])
def test_empty_calls_have_a_gradient_of_zeros(backend: Any, shape: tuple[int, int, int]) -> None:
    if GPU and backend is oracle:
        pytest.skip("PyTorch serves CPU tensors")
    batch, seqlen_q, seqlen_k = shape
    q = torch.randn(batch, seqlen_q, 2, 16, device=DEVICE, requires_grad=True)
    k, v = (torch.randn(batch, seqlen_k, 2, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    table = torch.ones(1, 2, max(seqlen_q + seqlen_k - 1, 0), device=DEVICE, requires_grad=True)
    with backends.using(backend):
        out = flash_attn.flash_attn_func(q, k, v, attn_bias=table)
        (gradient,) = torch.autograd.grad(out.sum(), table)
    assert gradient.shape == table.shape
    assert not gradient.any()


@pytest.mark.usefixtures("_tiles")
def test_views_are_taken_as_they_are() -> None:
    """A table that all share by strides of 0, a part of a longer one, and one whose entries are strided."""
    q, k, v, _ = (x.detach() for x in _draw())
    long = torch.randn(1, 4, 200, device=DEVICE)
    for table in (torch.randn(77, device=DEVICE).expand(2, 4, 77), long[..., 31:108], long[..., ::2][..., :77]):
        bias = _of_each_score(table, (41, 37))
        with backends.using(triton):
            expected = flash_attn.flash_attn_func(q, k, v, attn_bias=bias)
            assert torch.equal(flash_attn.flash_attn_func(q, k, v, attn_bias=table), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compile() -> None:
    leaves = _draw((1, 1))

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_func(q, k, v, causal=True, attn_bias=table * 2)

    results = []
    for function in (block, in_one_graph(block)):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for got, expected in zip(*reversed(results), strict=True):
        assert_close("compiled", got, expected.detach(), tiny=1e-6)


def test_opcheck() -> None:
    q, k, v, table = _draw((1, 4))
    op = torch.ops.flash_attn._extended_forward
    arguments = op_arguments(op, q=q, k=k, v=v, attn_bias=table, softmax_scale=0.25, causal=True)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(op.default, tuple(arguments), test_utils=checks)


def test_a_second_derivative() -> None:
    q, k, v, table = _draw((1, 1))
    results = []
    for bias in (table, _of_each_score(table, (41, 37))):
        out = flash_attn.flash_attn_func(q, k, v, attn_bias=bias)
        first = torch.autograd.grad(out.square().sum(), (q, table), create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in first), (v, table)))
    for got, expected in zip(*results, strict=True):
        assert_close("second derivative", got, expected, tiny=1e-3)


def test_vmap() -> None:
    q, k, v, table = (x.detach() for x in _draw((1, 4)))
    tables = torch.stack((table, table.flip(-1)))
    got = torch.vmap(lambda x: flash_attn.flash_attn_func(q, k, v, attn_bias=x))(tables)
    expected = torch.stack([flash_attn.flash_attn_func(q, k, v, attn_bias=x) for x in tables])
    assert_close("vmap", got, expected, tiny=1e-5)


@pytest.mark.parametrize(
    "cut", [lambda x: x[..., 1:], lambda x: x[0], lambda x: x.repeat(1, 2, 1)], ids=["1", "2", "3"]
)
def test_a_wrong_table(cut: Any) -> None:
    q, k, v, table = (x.detach() for x in _draw())
    with pytest.raises(
        ValueError, match=r"attn_bias: got shape .*, wanted .*\(1 or 2, 1 or 4, 77\) for a table of dist"
    ):
        flash_attn.flash_attn_func(q, k, v, attn_bias=cut(table))
