"""The module spas_sage_attn: the signatures and calls of sparge_contract.toml, the choice of blocks, and errors."""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import spas_sage_attn
import torch
from assert_close import assert_close
from flash_attn.sparse.similarity import choose_blocks
from spas_sage_attn.autotune import (
    SparseAttentionMeansim,
    extract_sparse_attention_state_dict,
    load_sparse_attention_state_dict,
)
from spas_sage_attn.core import get_cuda_arch_versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONTRACT = tomllib.loads((Path(__file__).parent / "sparge_contract.toml").read_text(encoding="utf-8"))
TOPK = spas_sage_attn.spas_sage2_attn_meansim_topk_cuda
GIVEN = spas_sage_attn.block_sparse_sage2_attn_cuda


def _draw(rows: int, keys: int, heads_k: int = 2, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, ...]:
    """q, k, v (2, seqlen, heads, 64) whose rows resemble their neighbours in some blocks more than in others."""
    result = []
    for seed, length, heads in ((0, rows, 2), (1, keys, heads_k), (2, keys, heads_k)):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, length // 64 + 1, 1, heads, 64, generator=generator)
        noise = torch.rand(2, length // 64 + 1, 1, heads, 1, generator=generator) * 4.0
        x = x + noise * torch.randn(2, length // 64 + 1, 64, heads, 64, generator=generator)
        result.append(x.flatten(1, 2)[:, :length].to(dtype))
    return tuple(result)


def _similarity(rows: torch.Tensor) -> float:
    """The mean cosine of all pairs of rows."""
    return float(torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1).mean())


def _plain(
    q: torch.Tensor, k: torch.Tensor, threshold: Any, cdf: Any, topk: Any, causal: bool, smooth_k: bool, sink: bool
) -> torch.Tensor:
    """The choice block by block, in fp64."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    k = k - k.mean(1, keepdim=True) if smooth_k else k
    seen = torch.zeros(q.shape[0], q.shape[2], -(-q.shape[1] // 128), -(-k.shape[1] // 64), dtype=torch.bool)
    for entry, head in ((entry, head) for entry in range(q.shape[0]) for head in range(q.shape[2])):
        least, most, share = (x[head].item() if isinstance(x, torch.Tensor) else x for x in (threshold, cdf, topk))
        q_blocks, k_blocks = q[entry, :, head].split(128), k[entry, :, head].split(64)
        similar_k = [len(rows) == 64 and _similarity(rows) > least for rows in k_blocks]
        for i, rows in enumerate(q_blocks):
            reached = [j for j in range(len(k_blocks)) if not causal or 64 * j < 128 * (i + 1)]
            if len(rows) < 128 or _similarity(rows) <= least:
                seen[entry, head, i, reached] = True
                continue
            scored = [j for j in reached if similar_k[j]]
            scores = [float(rows.mean(0) @ k_blocks[j].mean(0)) / math.sqrt(64) for j in scored]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            order = weights.argsort(descending=True).tolist()
            count = int(share * len(k_blocks)) if most is None else int((weights[order].cumsum(0) <= most).sum())
            seen[entry, head, i, [scored[j] for j in order[: max(count, 1)]]] = True
            seen[entry, head, i, [j for j in reached if not similar_k[j]]] = True
            seen[entry, head, i, 0] |= sink
    return seen


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, causal: bool, scale: float | None = None,
    block: tuple[int, int] = (128, 64),
) -> torch.Tensor:  # fmt: skip
    """Attention (batch, seqlen, heads, head_dim) with the mask of blocks made dense, in the type of its inputs."""
    visible = blocks.repeat_interleave(block[0], 2)[:, :, : q.shape[1]].repeat_interleave(block[1], 3)[
        ..., : k.shape[1]
    ]
    visible = visible.tril() if causal else visible
    q, k, v = (x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (q, k, v))
    scores = (q @ k.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


CHOICES: dict[str, dict[str, Any]] = {
    "a share": {"topk": 0.4},
    "less than one block": {"topk": 0.01},
    "a cumulative weight": {"cdf": 0.8},
    "blocks that differ inside": {"topk": 0.2, "threshold": 0.2},
    "cumulative, strict": {"cdf": 0.6, "threshold": 0.3},
    "nothing is similar": {"topk": 0.2, "threshold": 1.0},
    "causal": {"topk": 0.4, "causal": True},
    "causal, cumulative": {"cdf": 0.7, "threshold": 0.1, "causal": True},
    "the first block": {"topk": 0.1, "sink": True},
    "the mean key stays": {"cdf": 0.7, "smooth_k": False},
    "GQA": {"topk": 0.3, "heads_k": 1},
    "a share for each head": {"topk": torch.tensor([0.1, 0.6]), "threshold": torch.tensor([-0.1, 0.2])},
    "a weight for each head": {"cdf": torch.tensor([0.3, 0.9])},
    "more keys": {"topk": 0.3, "keys": 700},
    "whole blocks": {"topk": 0.3, "rows": 512, "keys": 512, "causal": True},
}


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_the_choice_and_attention_over_it(case: str, layout: str) -> None:
    options = {"threshold": -0.1, "cdf": None, "topk": None, "causal": False, "smooth_k": True, "sink": False}
    options |= {"rows": 450, "keys": 450, "heads_k": 2} | CHOICES[case]
    q, k, v = _draw(options.pop("rows"), options.pop("keys"), options.pop("heads_k"))
    expected = _plain(q, k, **options)
    assert not expected.all() or case == "nothing is similar"
    names = {"threshold": "simthreshd1", "cdf": "cdfthreshd", "causal": "is_causal", "sink": "attention_sink"}
    given = {names.get(name, name): value for name, value in options.items()}
    mask = choose_blocks(q, k, **{name.removeprefix("is_"): value for name, value in given.items()})
    assert mask.block_size == (128, 64)
    assert torch.equal(mask.seen, expected)

    turn = layout == "HND"
    inputs = [x.transpose(1, 2) if turn else x for x in (q, k, v)]
    out, sparsity = TOPK(*inputs, **given, tensor_layout=layout, return_sparsity=True)
    assert out.is_contiguous()
    out = out.transpose(1, 2) if turn else out
    exact = _dense(q.float(), k.float(), v.float(), expected, options["causal"])
    assert_close("out", out, exact, rough=_dense(q, k, v, expected, options["causal"]), dtype=torch.float16)
    blocks = sum(
        min(2 * (i + 1), expected.shape[3]) if options["causal"] else expected.shape[3]
        for i in range(len(expected[0, 0]))
    )
    assert sparsity == pytest.approx(1 - int(expected.sum()) / (4 * blocks), abs=1e-6)


@pytest.mark.parametrize("name", list(CONTRACT["signatures"]))
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(spas_sage_attn, name)).parameters.values()
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == CONTRACT["signatures"][name]


def test_every_name_is_there() -> None:
    assert sorted(CONTRACT["signatures"]) == sorted(spas_sage_attn.__all__)
    assert len(get_cuda_arch_versions()) == torch.cuda.device_count()


@pytest.mark.parametrize("call", CONTRACT["calls"], ids=lambda call: call["caller"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_calls(call: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = _draw(300, 300, dtype=dtype)
    given = dict(call["arguments"])
    if given.get("output_dtype") == "q":
        given["output_dtype"] = dtype
    causal = given.get("is_causal", False)
    if "mask" in call:
        blocks = torch.rand(2, 2, 3, 5, generator=torch.Generator().manual_seed(3)) < 0.5
        given["mask_id"] = blocks.to(getattr(torch, call["mask"]))
    else:
        cdf, threshold = given.get("cdfthreshd"), given.get("simthreshd1", -0.1)
        half = [x.half() if dtype is torch.float32 else x for x in (q, k)]
        blocks = _plain(*half, threshold, cdf, given.get("topk"), causal, given.get("smooth_k", True), False)
    turn = given.get("tensor_layout", "HND") == "HND"
    inputs = [x.transpose(1, 2) if turn else x for x in (q, k, v)]
    out = getattr(spas_sage_attn, call["function"])(*inputs, **given)
    out = out.transpose(1, 2) if turn else out
    computed = torch.float16 if dtype is torch.float32 else dtype
    assert out.dtype is given.get("output_dtype", computed)
    exact = _dense(q.float(), k.float(), v.float(), blocks, causal, given.get("scale"))
    rough = _dense(*(x.to(computed) for x in (q, k, v)), blocks, causal, given.get("scale"))
    assert_close("out", out, exact, rough=rough)


def test_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in _draw(300, 300))
    blocks = choose_blocks(q, k, simthreshd1=0.1, topk=0.4, causal=True).seen
    out = TOPK(q, k, v, None, 0.0, True, simthreshd1=0.1, topk=0.4, tensor_layout="NHD")
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).half()
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(_dense(*exact, blocks, True), exact, dout.float())
    rough = torch.autograd.grad(_dense(q, k, v, blocks, True), (q, k, v), dout)
    for name, *results in zip(
        ("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), expected, rough, strict=True
    ):
        assert_close(name, *results[:2], rough=results[2])


@pytest.mark.parametrize("block", [(128, 64), (64, 128)], ids=str)  # a program's choice where torch says 9.0: MI200
def test_a_given_mask_may_be_for_all_heads_and_show_nothing(block: tuple[int, int]) -> None:
    q, k, v = _draw(300, 200)
    blocks = torch.zeros(1, 1, -(-300 // block[0]), -(-200 // block[1]))
    blocks[..., 0, 1] = blocks[..., 2, :] = 1.0
    out, sparsity = GIVEN(q, k, v, blocks, tensor_layout="NHD", return_sparsity=True)
    assert sparsity == pytest.approx(1 - float(blocks.mean()))
    assert not out[:, block[0] : 2 * block[0]].any()
    exact = _dense(q.float(), k.float(), v.float(), blocks.bool(), False, block=block)
    assert_close("out", out, exact, rough=_dense(q, k, v, blocks.bool(), False, block=block))


def test_compiled_without_graph_breaks() -> None:
    q, k, v = _draw(300, 300)
    run = torch.compile(TOPK, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(run(q, k, v, tensor_layout="NHD"), TOPK(q, k, v, tensor_layout="NHD"))


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tensor_layout": "HDN"}, ValueError, "tensor_layout: got 'HDN', wanted one of HND, NHD"),
    ({"attn_mask": torch.ones(300, 300)}, NotImplementedError, "attn_mask: got a mask, wanted None: pass blocks as"),
    ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: got 0.1, wanted 0"),
    ({"is_causal": "x"}, TypeError, "is_causal: got 'x', wanted a bool"),
    ({"is_causal": True, "k": torch.ones(2, 64, 2, 64).half(), "v": torch.ones(2, 64, 2, 64).half()}, ValueError,
     "is_causal: got 300 queries and 64 keys"),
    ({"scale": "x"}, TypeError, "softmax_scale: got 'x'"),
    ({"smooth_k": "x"}, TypeError, "smooth_k: got 'x'"),
    ({"simthreshd1": None}, TypeError, "simthreshd1: got None, wanted a float, or a tensor"),
    ({"simthreshd1": torch.ones(3)}, ValueError, r"simthreshd1: got a torch.float32 tensor of shape \(3,\)"),
    ({"simthreshd1": math.nan}, ValueError, "simthreshd1: got nan"),
    ({"cdfthreshd": 0.9}, ValueError, "cdfthreshd, topk: got 0.9 and 0.5, wanted one of them and None"),
    ({"topk": None}, ValueError, "cdfthreshd, topk: got None and None"),
    ({"topk": 8}, ValueError, "topk: got 8, wanted a share of the blocks of keys, 0 to 1"),
    ({"topk": "x"}, TypeError, "topk: got 'x'"),
    ({"pvthreshd": None}, TypeError, "pvthreshd: got None, wanted a float, or a tensor"),
    ({"pvthreshd": torch.ones(5)}, ValueError, r"pvthreshd: got a torch.float32 tensor of shape \(5,\)"),
    ({"attention_sink": "x"}, TypeError, "attention_sink: got 'x'"),
    ({"output_dtype": torch.int8}, TypeError, "output_dtype: got torch.int8, wanted torch.float16"),
    ({"return_sparsity": "x"}, TypeError, "return_sparsity: got 'x'"),
    ({"q": None}, TypeError, "q: got NoneType, wanted a tensor"),
    ({"q": torch.ones(2, 300, 64)}, ValueError, r"q: got shape \(2, 300, 64\), wanted \(batch, seqlen, heads"),
    ({"k": torch.ones(2, 300, 2, 64).int()}, TypeError, "k: got torch.int32, wanted float16"),
    ({"v": torch.ones(2, 200, 2, 64)}, ValueError, "v: got shape"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "match"), WRONG, ids=lambda x: str(x)[:40])
def test_what_cannot_be_honoured_is_named(options: dict[str, Any], error: type[Exception], match: str) -> None:
    q, k, v = _draw(300, 300)
    with pytest.raises(error, match=match):
        TOPK(**({"q": q, "k": k, "v": v, "tensor_layout": "NHD"} | options))


WRONG_MASKS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, TypeError, "mask_id: got NoneType, wanted a tensor"),
    ({"mask_id": torch.ones(1, 1, 5, 5)}, ValueError, r"\(1, 1, 5, 5\), wanted \(1 or 2, 1 or 2, and 3, 5 for bl"),
    ({"mask_id": torch.ones(3, 5)}, ValueError, r"mask_id: got shape \(3, 5\)"),
    ({"mask_id": torch.ones(1, 3, 3, 5)}, ValueError, r"mask_id: got shape \(1, 3, 3, 5\)"),
    ({"mask_id": torch.ones(1, 1, 3, 5, device="meta")}, ValueError, "mask_id: got it on meta, wanted cpu"),
    ({"mask_id": torch.ones(1, 1, 3, 5), "attention_sink": True}, NotImplementedError, "attention_sink: got True"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "match"), WRONG_MASKS, ids=lambda x: str(x)[:40])
def test_a_mask_that_does_not_fit_is_named(options: dict[str, Any], error: type[Exception], match: str) -> None:
    q, k, v = _draw(300, 300)
    with pytest.raises(error, match=match):
        GIVEN(q, k, v, tensor_layout="NHD", **options)


def _model() -> torch.nn.Module:
    return torch.nn.ModuleDict(
        {"layer": torch.nn.Linear(2, 2), "attention": SparseAttentionMeansim(l1=0.05, pv_l1=0.06)}
    )


def test_a_module_with_thresholds_for_each_head() -> None:
    """Thresholds pass from a tuned model to another one by name, as SpargeAttn's examples do it."""
    state = {
        "attention.is_sparse": torch.tensor([True, False]),
        "attention.cdfthreshd": torch.tensor([0.4, 1.0]),
        "attention.simthreshd1": torch.tensor([0.1, 1.0]),
        "attention.simthreshd2": torch.zeros(2),
        "attention.pvthreshd": torch.tensor([20.0, 15.0]),
    }
    model = load_sparse_attention_state_dict(_model(), state)
    assert all(torch.equal(value, state[name]) for name, value in extract_sparse_attention_state_dict(model).items())
    assert len(extract_sparse_attention_state_dict(model)) == len(state)
    q, k, v = (x.transpose(1, 2) for x in _draw(400, 400))
    got, sparsity = model["attention"](q, k, v, return_sparsity=True)
    expected, wanted_sparsity = spas_sage_attn.spas_sage2_attn_meansim_cuda(
        q, k, v, cdfthreshd=state["attention.cdfthreshd"], simthreshd1=state["attention.simthreshd1"],
        attention_sink=True, return_sparsity=True,
    )  # fmt: skip
    assert torch.equal(got, expected)
    assert sparsity == wanted_sparsity > 0.0


def test_errors_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.transpose(1, 2) for x in _draw(128, 128))
    module = SparseAttentionMeansim()
    with pytest.raises(RuntimeError, match="cdfthreshd, simthreshd1, pvthreshd: this module has no thresholds"):
        module(q, k, v)
    with pytest.raises(NotImplementedError, match="tune_mode: got True"):
        module(q, k, v, tune_mode=True)
    monkeypatch.setenv("TUNE_MODE", "1")
    with pytest.raises(NotImplementedError, match="tuning is not served here"):
        module(q, k, v)
    with pytest.raises(KeyError, match=r"saved_state_dict: got 'attention\.weight'"):
        load_sparse_attention_state_dict(_model(), {"attention.weight": torch.zeros(2)})
    assert extract_sparse_attention_state_dict(torch.nn.Linear(2, 2)) == {}
