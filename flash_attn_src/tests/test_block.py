"""Transformer blocks against their formulas written out, and embeddings of tokens and images."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from flash_attn.layers.patch_embed import PatchEmbed
from flash_attn.modules.block import Block, ParallelBlock, StochasticDepth
from flash_attn.modules.embedding import BertEmbeddings, GPT2Embeddings, ParallelGPT2Embeddings, VocabParallelEmbedding
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import Mlp
from flash_attn.ops.rms_norm import RMSNorm as OldRMSNorm
from flash_attn.ops.triton.layer_norm import RMSNorm
from torch import nn

DIM = 16
MIXER = partial(MHA, num_heads=2, use_flash_attn=True)
NORMS = {"layer norm": nn.LayerNorm, "RMS norm": RMSNorm, "the older RMS norm": OldRMSNorm,
         "around zero": partial(RMSNorm, zero_centered_weight=True)}  # fmt: skip


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _made(kind: Any, **options: Any) -> Any:
    """A block whose norms have different random weights."""
    torch.manual_seed(0)
    block = kind(DIM, **{"mixer_cls": MIXER, "mlp_cls": Mlp, **options})
    for name, parameter in block.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return block


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fused", [False, True])
def test_prenorm(fused: bool, norm: str) -> None:
    """Two blocks and the norm that would follow are a plain transformer."""
    block = _made(Block, norm_cls=NORMS[norm], fused_dropout_add_ln=fused)
    x = _draw(2, 5, DIM).requires_grad_()
    hidden, residual = block(x)
    hidden, residual = block(hidden, residual)
    expected = x
    for _ in range(2):
        expected = expected + block.mixer(block.norm1(expected))
        expected = expected + block.mlp(block.norm2(expected))
    torch.testing.assert_close(hidden + residual, expected)
    weights = [x, *block.parameters()]
    result, right = (torch.autograd.grad(out.square().sum(), weights) for out in (hidden + residual, expected))
    torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_postnorm(pairs: bool, fused: bool) -> None:
    parts = {"mixer_cls": partial(MIXER, return_residual=pairs), "mlp_cls": partial(Mlp, return_residual=pairs)}
    block = _made(Block, prenorm=False, return_residual=pairs, fused_dropout_add_ln=fused, **parts)
    x = _draw(2, 5, DIM)
    expected = x
    for part, norm in ((block.mixer, block.norm1), (block.mlp, block.norm2)):
        out = part(expected)
        expected = norm((out[0] if pairs else out) + expected)
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_parallel(tied: bool, fused: bool) -> None:
    block = _made(ParallelBlock, tied_norm=tied, fused_dropout_add_ln=fused, residual_in_fp32=True)
    x = _draw(2, 5, DIM)
    first, second, residual = block(*block(x))
    expected = x
    for _ in range(2):
        normed = block.norm1(expected)
        expected = expected + block.mixer(normed) + block.mlp(normed if tied else block.norm2(expected))
    torch.testing.assert_close(first + second + residual, expected)
    assert hasattr(block, "norm2") is not tied


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Block, ParallelBlock])
def test_half_precision_keeps_the_residual_wide(kind: Any, fused: bool) -> None:
    block = _made(kind, fused_dropout_add_ln=fused, residual_in_fp32=True).bfloat16()
    *hidden, residual = block(*block(_draw(2, 5, DIM).bfloat16()))
    assert residual.dtype is torch.float32
    assert {each.dtype for each in hidden} == {torch.bfloat16}


def test_dropouts_and_depth() -> None:
    """If dropout removes a whole layer, the result is that of the other layers."""
    x = _draw(3, 5, DIM)
    for fused in (False, True):
        block = _made(Block, resid_dropout2=1.0, fused_dropout_add_ln=fused)
        hidden, residual = block(x)
        torch.testing.assert_close(residual, x)
        torch.testing.assert_close(hidden, block.mlp(block.norm2(x)))
        block = _made(Block, drop_path1=1.0, fused_dropout_add_ln=fused)
        torch.testing.assert_close(block(x)[1], block.mixer(block.norm1(torch.zeros_like(x))))
        torch.testing.assert_close(block.eval()(x)[1], x + block.mixer(block.norm1(x)))
        parallel = _made(ParallelBlock, resid_dropout2=1.0, fused_dropout_add_ln=fused)
        torch.testing.assert_close(parallel(x, x, x)[2], 2 * x)


def test_stochastic_depth_takes_whole_samples() -> None:
    depth, x = StochasticDepth(0.25), torch.ones(4000, 2, 3)
    torch.manual_seed(0)
    out = depth(x)
    kept = out[:, 0, 0] != 0
    torch.testing.assert_close(out, kept[:, None, None] * x / 0.75)
    assert 0.7 < kept.float().mean() < 0.8
    torch.testing.assert_close(depth.eval()(x), x)


def test_a_block_of_a_mixer_alone() -> None:
    block = _made(Block, mlp_cls=nn.Identity)
    x, residual = _draw(2, 5, DIM), _draw(2, 5, DIM, seed=1)
    hidden, total = block(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(hidden, block.mixer(block.norm1(x + residual)))
    assert not hasattr(block, "norm2")
    assert block.allocate_inference_cache(2, 7).shape == (2, 7, 2, 2, 8)


def test_a_subset_of_the_tokens_asks() -> None:
    block = _made(Block, mixer_cls=partial(MIXER, cross_attn=True))
    x = _draw(2, 5, DIM)
    hidden, residual = block(x, mixer_subset=slice(0, 1))
    expected, all_residuals = block(x)
    torch.testing.assert_close(hidden, expected[:, :1])
    torch.testing.assert_close(residual, all_residuals[:, :1])


def test_the_default_layers() -> None:
    block = Block(128)
    assert (block.mixer.num_heads, block.mlp.fc1.out_features) == (2, 512)
    assert set(Block(64, mlp_cls=nn.Identity).state_dict()) >= {
        "mixer.Wqkv.weight",
        "mixer.out_proj.bias",
        "norm1.weight",
    }


def test_marks_are_on_the_norms_alone() -> None:
    for kind in (Block, ParallelBlock):
        block = _made(kind, sequence_parallel=True)
        marked = {name for name, each in block.named_parameters() if hasattr(each, "_sequence_parallel")}
        assert marked == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
        assert not any(hasattr(each, "_shared_params") for each in block.parameters())
        assert all(each._shared_params for each in _made(kind, mark_shared_params=True).norm2.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer_cls": None}, "dim: got 16, wanted a multiple of 64"),
        ({"prenorm": False, "residual_in_fp32": True}, "residual_in_fp32: got True"),
        ({"norm_cls": nn.Identity, "fused_dropout_add_ln": True}, "norm_cls: got Identity"),
        ({"norm_cls": partial(nn.LayerNorm, elementwise_affine=False), "fused_dropout_add_ln": True}, "with weights"),
        ({"drop_path1": 1.5}, "drop_path: got 1.5"),
    ],
)
def test_invalid_block_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _made(Block, **options)


def test_after_the_norm_there_is_no_residual() -> None:
    block, x = _made(Block, prenorm=False), _draw(2, 5, DIM)
    for wrong in ({"residual": x}, {"mixer_subset": slice(0, 1)}):
        with pytest.raises(ValueError, match="residual, mixer_subset: got one of them"):
            block(x, **wrong)


def test_embeddings() -> None:
    ids, types = torch.tensor([[3, 1, 1], [0, 2, 3]]), torch.tensor([[0, 0, 1]])
    gpt = GPT2Embeddings(4, 5, 6)
    words, places = gpt.word_embeddings.weight, gpt.position_embeddings.weight
    torch.testing.assert_close(gpt(ids), words[ids] + places[:3])
    later = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(gpt(ids, position_ids=later), words[ids] + places[later])
    narrow = GPT2Embeddings(4, 5, 0, word_embed_proj_dim=2)
    torch.testing.assert_close(narrow(ids, later), narrow.project_in(narrow.word_embeddings(ids)))
    bert = BertEmbeddings(4, 5, 6, 2, padding_idx=1)
    plain = bert.word_embeddings(ids) + bert.position_embeddings.weight[:3]
    torch.testing.assert_close(bert(ids), plain + bert.token_type_embeddings.weight[0])
    torch.testing.assert_close(bert(ids, token_type_ids=types), plain + bert.token_type_embeddings(types))
    assert set(BertEmbeddings(4, 5, 0, 0).state_dict()) == {"word_embeddings.weight"}
    alone = ParallelGPT2Embeddings(4, 5, 6, None)
    alone.load_state_dict(gpt.state_dict())
    torch.testing.assert_close(alone(ids), gpt(ids))
    torch.testing.assert_close(alone(ids, combine_batch_seqlen_dim=True), gpt(ids).view(6, 4))
    torch.testing.assert_close(VocabParallelEmbedding(5, 4, padding_idx=1)(ids)[0, 1], torch.zeros(4))


@pytest.mark.parametrize("flatten", [True, False])
def test_patches_are_a_convolution(flatten: bool) -> None:
    images = _draw(2, 3, 8, 12)
    layer = PatchEmbed((8, 12), (4, 2), 3, 5, norm_layer=nn.LayerNorm, flatten=flatten)
    filters = layer.proj.weight.view(5, 3, 4, 2)
    expected = nn.functional.conv2d(images, filters, layer.proj.bias, stride=(4, 2)).permute(0, 2, 3, 1)
    expected = layer.norm(expected)
    torch.testing.assert_close(layer(images), expected.flatten(1, 2) if flatten else expected)
    assert layer.num_patches == 12
    with pytest.raises(ValueError, match=r"x: got an image of \(8, 8\), wanted \(8, 12\)"):
        layer(images[..., :8])
    with pytest.raises(ValueError, match=r"img_size: got \(9, 9\), wanted multiples of patch_size, \(4, 4\)"):
        PatchEmbed(9, 4)
    with pytest.raises(NotImplementedError, match="fused_bias_fc: got True"):
        PatchEmbed(8, 4, fused_bias_fc=True)


def test_embeddings_refuse() -> None:
    gpt = GPT2Embeddings(4, 5, 2)
    with pytest.raises(ValueError, match="input_ids: got 3 tokens, wanted at most 2, max_position_embeddings"):
        gpt(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"input_ids: got torch\.float32, wanted torch\.int64 or torch\.int32"):
        gpt(torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"input_ids: got shape \(2,\), wanted \(batch, seqlen\)"):
        gpt(torch.zeros(2, dtype=torch.int64))
