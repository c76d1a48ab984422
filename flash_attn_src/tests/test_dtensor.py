"""DTensors: attention whose batch entries or heads are divided among two processes, against one process."""

# ruff: noqa: ARG005 - PyTorch calls a mask_mod with four arguments and a score_mod with five

from __future__ import annotations

from pathlib import Path
from typing import Any

import flash_attn
import pytest
import torch
from flash_attn.flex import flex_attention, flex_report
from flash_attn.ranges import flash_attn_ranges_func
from flash_attn.sdpa import attention as door
from torch.nn.attention.flex_attention import create_block_mask
from two_ranks import both

torch.set_num_threads(1)

HEADS, HEADS_K, DIM = 4, 2, 16


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (2, 19, HEADS, DIM), "k": (2, 23, HEADS_K, DIM), "v": (2, 23, HEADS_K, DIM), "s_aux": (HEADS,),
        "attn_bias": (1, HEADS, 19, 23), "table": (2, 1, 41),
    }  # fmt: skip
    numbers = {
        "ids_q": torch.arange(19).expand(2, -1) // 5, "ids_k": torch.arange(23).expand(2, -1) // 4 % 4,
        "ranges": torch.randint(0, 23, (1, HEADS, 19, 2, 2), generator=generator),
    }  # fmt: skip
    reals = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return reals | {name: x.to(torch.int32).contiguous() for name, x in numbers.items()}


# The tensors of a call besides q, k and v, and its other options.
CALLS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": ((), {"causal": True}),
    "window, softcap": ((), {"window_size": (5, 2), "softcap": 2.0}),
    "sinks": (("s_aux",), {}),
    "bias of heads": (("attn_bias",), {}),
    "bias of entries": (("table",), {}),
    "ranges of heads": (("ranges",), {"causal": True}),
    "ids of entries": (("ids_q", "ids_k"), {}),
}


def _results(name: str, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    more, options = CALLS[name]
    tensors = {("attn_bias" if each == "table" else each): inputs[each] for each in more}
    every = (inputs["q"], inputs["k"], inputs["v"], *tensors.values())
    leaves = [x.requires_grad_() for x in every if x.is_floating_point()]
    function: Any = flash_attn_ranges_func if tensors.keys() & {"ranges", "ids_q"} else flash_attn.flash_attn_func
    out = function(*every[:3], **tensors, **options)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def _rank(_number: int) -> list[torch.Tensor]:
    """The largest errors of out and of the gradients of each call, by batch entries and by heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    errors = []
    for by_heads in (False, True):
        for name in CALLS:
            placed = {}
            for each, x in _inputs().items():
                if each in ("table", "ids_q", "ids_k"):
                    axis = None if by_heads else 0
                elif each in ("s_aux", "attn_bias", "ranges"):
                    axis = int(each != "s_aux") if by_heads else None
                else:
                    axis = 2 if by_heads else 0
                placed[each] = distribute_tensor(x, mesh, [Replicate() if axis is None else Shard(axis)])
            result = _results(name, placed)
            assert result[0].placements == (Shard(2 if by_heads else 0),)
            pairs = zip(result, _results(name, _inputs()), strict=True)
            errors.append(torch.stack([(x.full_tensor() - right).abs().max() for x, right in pairs]).detach())
        errors += _flex_errors(placed)
    with pytest.raises(NotImplementedError, match=r"dropout_p: got 0\.5 with DTensors"):
        flash_attn.flash_attn_func(placed["q"], placed["k"], placed["v"], 0.5)
    uneven = [distribute_tensor(torch.randn(2, 9, 3, DIM), mesh, [Shard(2)]) for _ in range(3)]
    out = flash_attn.flash_attn_func(*uneven)
    whole = flash_attn.flash_attn_func(*(x.full_tensor() for x in uneven))
    return [*errors, (out.full_tensor() - whole).abs().max()]


def _flex_errors(placed: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The largest errors of flex_attention of DTensors, served by a mask, by slopes and by a bias."""
    door.is_on_gpu = lambda _: True
    ids, slopes, errors = torch.arange(23) // 5, torch.tensor([0.5, 0.25, 0.125, 0.1]), []
    block_mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), None, None, 19, 23, "cpu")
    mods = (
        (lambda s, b, h, q, kv: 5 * torch.tanh(s * (h + 1.0) / 5), block_mask),
        (lambda s, b, h, q, kv: s + slopes[h] * (q * kv % 5), block_mask), (None, None),
    )  # fmt: skip
    for score_mod, mask in mods:
        results: list[list[torch.Tensor]] = []
        for tensors in (placed, _inputs()):
            leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
            served = flex_report().served
            out, lse = flex_attention(
                *(x.transpose(1, 2) for x in leaves), score_mod, mask, enable_gqa=True, return_lse=True
            )
            assert flex_report().served == served + 1, flex_report()
            results.append([out, lse, *torch.autograd.grad((out * out).sum() + lse.sum(), leaves)])
        pairs = zip(*results, strict=True)
        errors.append(torch.stack([(x.full_tensor() - right).abs().max() for x, right in pairs]).detach())
    return errors


def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    for errors in both(tmp_path, _rank):
        assert len(errors) == 2 * (len(CALLS) + 3) + 1
        assert all((x < 2e-5).all() for x in errors)
