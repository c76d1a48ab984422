"""torch.compile, torch.export, opcheck and meta tensors: what traces the public functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flash_attn
import pytest
import torch
from assert_close import assert_close
from flash_attn.attention import backends
from flash_attn.attention.backends import triton
from flash_attn.attention.operators import dispatch
from op_arguments import op_arguments
from small_calls import in_one_graph, offsets, qkv
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(2)

# Dynamo itself makes an instance of torch.autograd.Function, and what compiles uses torch.jit: torch warns at both.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning"
)


@pytest.mark.parametrize("dim", [16, 13])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "window_size": (3, 0), "softcap": 2.0}, {"deterministic": True}],
    ids=str,
)
def test_compile_dense(dim: int, options: dict[str, Any]) -> None:
    tensors = [x.requires_grad_() for x in qkv(dim=dim)]

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_func(q * 2, k, v, **options).cos()

    _same_compiled(block, tensors)


def test_compile_values_with_a_head_dim_of_their_own() -> None:
    q, k, v = qkv(dim=16)
    v = v[..., :12].contiguous()

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cached = flash_attn.flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), cache_seqlens=5)
        return flash_attn.flash_attn_func(q * 2, k, v).cos() + cached

    _same_compiled(block, [x.requires_grad_() for x in (q, k, v)])
    dropped = in_one_graph(lambda *x: flash_attn.flash_attn_func(*x, 0.2))(q, k, v)
    assert dropped.shape == (*q.shape[:-1], 12)


def test_compile_keys_and_values_that_the_graph_counts() -> None:
    """As diffusers packs them: the rows of k and of v have sizes that torch.compile does not know to be equal."""
    q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        lengths = mask.sum(dim=1, dtype=torch.int32)
        cu_seqlens_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        keys, values = (torch.cat([x[index, : lengths[index]] for index in range(2)]) for x in (k, v))
        cu_seqlens_q = torch.arange(0, 27, 9, dtype=torch.int32)
        return flash_attn.flash_attn_varlen_func(q.flatten(0, 1), keys, values, cu_seqlens_q, cu_seqlens_k, 9, 9)

    mask = torch.arange(9) < torch.tensor([9, 5])[:, None]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_close(
            "out", torch.compile(packed, fullgraph=True, backend="eager")(q, k, v, mask), packed(q, k, v, mask)
        )


def test_compile_latent_attention_leaves_the_graph() -> None:
    """A traced call does not tell that the values are the cache's first columns: the error says what to do."""
    q, cache = torch.randn(2, 1, 4, 576), torch.randn(2, 9, 1, 576)

    def attend(q: torch.Tensor) -> torch.Tensor:
        out = flash_attn.flash_attn_with_kvcache(q, cache, cache[..., :512], cache_seqlens=5)
        assert isinstance(out, torch.Tensor)
        return out

    with pytest.raises(ValueError, match=r"got head_dim 576, .* not seen under torch\.compile: @torch\.compiler"):
        torch.compile(attend, backend="aot_eager")(q)
    outside = torch.compiler.disable(attend)
    compiled = torch.compile(lambda q: outside(2 * q) + 1, backend="aot_eager")
    assert_close("out", compiled(q), attend(2 * q) + 1)


def _same_compiled(block: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> None:
    results = []
    for function in (block, in_one_graph(block)):
        out = function(*tensors)
        results.append((out, *torch.autograd.grad(out.sum(), tensors)))
    for got, expected in zip(*reversed(results), strict=True):
        assert_close("compiled", got, expected, tiny=1e-6)


def test_compile_packed_and_varlen() -> None:
    torch.manual_seed(0)
    cu = offsets(0, 3, 9)

    def block(qkv: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        first = flash_attn.flash_attn_qkvpacked_func(qkv[None], causal=True)[0]
        second = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 6)
        third = flash_attn.flash_attn_varlen_kvpacked_func(first + second, kv, cu, cu, 6, 6, causal=True)
        fourth = flash_attn.flash_attn_kvpacked_func(third[None], kv[None])[0]
        return flash_attn.flash_attn_varlen_func(fourth, *kv.unbind(1), cu, cu, 6, 6)

    _same_compiled(block, [torch.randn(9, n, 2, 8, requires_grad=True) for n in (3, 2)])


def test_compile_returns_statistics() -> None:
    q, k, v = qkv()

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)

    for tensors in ((q, k, v), (q.requires_grad_(), k, v)):
        for got, expected in zip(in_one_graph(block)(*tensors), block(*tensors), strict=True):
            assert torch.equal(got, expected)
            assert got.requires_grad == expected.requires_grad


def test_compile_with_dynamic_shapes() -> None:
    def block(q: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_func(q, q, q, causal=True)

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (5, 17):
        q = torch.randn(2, seqlen, 2, 8, requires_grad=True)
        out = compiled(q)
        out.sum().backward()
        assert_close("dynamic", out, block(q), tiny=1e-6)


def test_compile_with_a_scale_that_changes() -> None:
    q, k, v = qkv()
    new = q[:, :1, :2].contiguous()
    tables = torch.rand(9, 8)

    def attend(q: torch.Tensor, scale: float) -> torch.Tensor:
        return flash_attn.flash_attn_func(q, k, v, softmax_scale=scale, alibi_slopes=torch.ones(4), softcap=scale)

    def attend_to_cache(q: torch.Tensor, scale: float) -> torch.Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q, k.clone(), v.clone(), new, new, tables, tables, cache_seqlens=3, softmax_scale=scale, softcap=scale
        )

    for function, scales in ((attend, (0.1, 0.2, 1.0)), (attend, (1, 2, 3)), (attend_to_cache, (0.1, 0.2, 1.0))):
        for dynamic in (None, True):
            torch.compiler.reset()
            compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=dynamic)
            for scale in scales:
                assert_close("scaled", compiled(q, scale), function(q, scale))


def _dense_in_a_window(q: torch.Tensor) -> torch.Tensor:
    return flash_attn.flash_attn_func(q, q, q, causal=True, window_size=(5, 1 << 40))


def _one_sequence(q: torch.Tensor) -> torch.Tensor:
    rows, cu = q.flatten(0, 1), torch.arange(2, dtype=torch.int32) * q.shape[1]
    return flash_attn.flash_attn_varlen_func(rows, rows, rows, cu, cu, q.shape[1], cu.max(), window_size=(5, -1))


def _cached(q: torch.Tensor) -> torch.Tensor:
    cache = q.repeat(1, 2, 1, 1)
    return flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=q.shape[1] + 1)


@pytest.mark.parametrize("function", [_dense_in_a_window, _one_sequence, _cached], ids=lambda f: f.__name__)
def test_export_with_a_dynamic_seqlen(function: Callable[..., torch.Tensor]) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return function(q)

    shapes = ({1: torch.export.Dim("seqlen")},)
    exported = torch.export.export(Module(), (torch.randn(1, 9, 2, 8),), dynamic_shapes=shapes, strict=False).module()
    for seqlen in (9, 3, 30):
        q = torch.randn(1, seqlen, 2, 8)
        assert_close("exported", exported(q), function(q))


OPCHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_opcheck(dropout_p: float) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    # Some checks compare runs, and dropout draws a different mask in each run.
    checks = OPCHECKS if dropout_p == 0.0 else OPCHECKS[:3]
    options = (dropout_p, 0.25, True, 4, -1, 2.0, torch.rand(4))
    op = torch.ops.flash_attn._flash_attn_forward.default
    torch.library.opcheck(op, (q, k, v, *options, True), test_utils=checks)
    out, lse, _, rng_state = op(q, k, v, *options, True)
    saved = (x.detach() for x in (q, k, v, out, lse))
    tensors = (torch.randn_like(out), *saved, *(torch.empty(x.shape) for x in (q, k, v)))
    op = torch.ops.flash_attn._flash_attn_backward.default
    torch.library.opcheck(op, (*tensors, *options, False, rng_state), test_utils=OPCHECKS)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_opcheck_varlen(dropout_p: float) -> None:
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in qkv())
    checks = OPCHECKS if dropout_p == 0.0 else OPCHECKS[:3]
    lengths = (offsets(0, 2, 12), offsets(0, 9, 18), 10, 9)
    options = (dropout_p, 0.25, True, 4, -1, 2.0, torch.rand(2, 4))
    op = torch.ops.flash_attn._flash_attn_varlen_forward.default
    torch.library.opcheck(op, (q, k, v, *lengths, *options, True), test_utils=checks)
    out, lse, _, rng_state = op(q, k, v, *lengths, *options, True)
    saved = (x.detach() for x in (q, k, v, out, lse))
    tensors = (torch.randn_like(out), *saved, *(torch.empty(x.shape) for x in (q, k, v)))
    op = torch.ops.flash_attn._flash_attn_varlen_backward.default
    torch.library.opcheck(op, (*tensors, *lengths, *options, False, rng_state), test_utils=OPCHECKS)


@pytest.mark.parametrize("varlen", [False, True])
def test_opcheck_dropout(varlen: bool) -> None:
    """With its seed as an argument it is a pure function."""
    q, k, v = (x.requires_grad_() for x in qkv())
    lengths = (None, None, 6, 9)
    if varlen:
        q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v))
        lengths = (offsets(0, 2, 12), offsets(0, 9, 18), 10, 9)
    op = torch.ops.flash_attn._extended_forward
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    arguments = op_arguments(
        op, q=q, k=k, v=v, softmax_scale=0.25, causal=True, window_size=[4, -1], softcap=2.0,
        alibi_slopes=torch.rand(4), dropout_p=0.5, return_softmax=True, rng_state=torch.tensor([3, 4]),
        **dict(zip(names, lengths, strict=True)),
    )  # fmt: skip
    torch.library.opcheck(op.default, tuple(arguments), test_utils=OPCHECKS)


def _attend_with_dropout(varlen: bool) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not varlen:
            return flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        cu_seqlens = [torch.arange(3, dtype=torch.int32) * x.shape[1] for x in (q, k)]
        return flash_attn.flash_attn_varlen_func(*rows, *cu_seqlens, 6, 9, dropout_p=0.5).view(q.shape)

    return attend


@pytest.mark.parametrize("varlen", [False, True])
def test_compiled_dropout_draws_for_every_call(varlen: bool) -> None:
    attend = _attend_with_dropout(varlen)
    tensors = qkv()

    def twice(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(*tensors), attend(*tensors)

    torch.compiler.reset()
    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager_decomp_partition")
    torch.manual_seed(1)
    first, second = compiled(*tensors)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, attend(*tensors))


@pytest.mark.parametrize("varlen", [False, True])
def test_compiled_checkpoint_keeps_the_mask(varlen: bool) -> None:
    """out is linear in v, so that its gradient at w, times v, is out times w: by one mask."""
    q, k, v = qkv(torch.float64)
    v.requires_grad_()
    attend = _attend_with_dropout(varlen)
    torch.compiler.reset()
    block = torch.compile(
        lambda *tensors: checkpoint(attend, *tensors, use_reentrant=False), backend="aot_eager_decomp_partition"
    )
    out = block(q, k, v)
    w = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, v, w)
    difference = (gradient * v).sum() - (out * w).sum()
    assert abs(difference.item()) < 1e-9


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace() -> None:
    q, k, v = qkv()
    traced = torch.jit.trace(lambda q: flash_attn.flash_attn_func(q, k, v), (q,))
    assert_close("traced", traced(q + 1.0), flash_attn.flash_attn_func(q + 1.0, k, v))


def test_meta_tensors() -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in qkv())
    out = flash_attn.flash_attn_func(q, k, v)
    out.sum().backward()
    assert out.shape == q.shape
    assert k.grad.shape == k.shape


def test_ops_are_bypassed_in_eager_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = dispatch._wrapped_flash_attn_forward
    monkeypatch.setattr(dispatch, "_wrapped_flash_attn_forward", lambda *a: calls.append(1) or real(*a))
    q, k, v = qkv()
    flash_attn.flash_attn_func(q, k, v)
    flash_attn.flash_attn_func(torch.nn.Parameter(q), k, v)
    assert not calls

    class Tagged(torch.Tensor):
        pass

    for index in range(3):  # as of a value that is still on its way from another rank
        flash_attn.flash_attn_func(*(x.as_subclass(Tagged) if i == index else x for i, x in enumerate((q, k, v))))
        assert len(calls) == index + 1
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        flash_attn.flash_attn_func(q, k, v)
    assert len(calls) == 4


@pytest.fixture
def kernels() -> Iterator[str]:
    """Where tensors are that the ops give to Triton's kernels, which a CPU interprets."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    with backends.using(triton):
        yield "cpu"


class _Strides(TorchDispatchMode):
    """Asserts of the ops called that their fakes promise the strides that their results have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "flash_attn":
            given = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            with FakeTensorMode() as mode:
                fakes = func(*tree_map_only(torch.Tensor, mode.from_tensor, given))
            got, expected = ([x.stride() for x in tree_leaves(each) if x.numel()] for each in (results, fakes))
            assert got == expected, func
        return results


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("dim", [16, 13])
def test_kernels_return_the_strides_of_fakes(dim: int, kernels: str) -> None:
    """Of q and k (batch, heads, seqlen, dim) transposed, as projections of heads are."""
    q, k = (torch.randn(1, heads, 30, dim, device=kernels).transpose(1, 2) for heads in (4, 2))
    lengths = torch.tensor([10], dtype=torch.int32, device=kernels)
    with _Strides():
        flash_attn.flash_attn_func(q.requires_grad_(), k, k, dropout_p=0.5).sum().backward()
        flash_attn.flash_attn_with_kvcache(q.detach(), k.clone(), k.clone(), cache_seqlens=lengths)
        flash_attn.flash_attn_with_kvcache(q[:, :1].detach(), k.clone(), k.clone(), cache_seqlens=lengths)
