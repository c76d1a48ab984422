"""Generation: sampling by its odds, decoding with caches against decoding without any."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_attn.modules.block import Block
from flash_attn.modules.embedding import GPT2Embeddings
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import Mlp
from flash_attn.utils import generation
from flash_attn.utils.generation import GenerationMixin, InferenceParams, decode, sample
from torch import nn

WORDS, DIM = 13, 32
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


class Model(nn.Module, GenerationMixin):
    """A model of two layers with learned positions and rotary embedding."""

    def __init__(self, flash: bool = True, **place: Any) -> None:
        super().__init__()
        self.embeddings = GPT2Embeddings(DIM, WORDS + 3, 64, **place)
        self.layers = nn.ModuleList(
            Block(
                DIM,
                partial(MHA, num_heads=4, num_heads_kv=2, causal=True, rotary_emb_dim=8, layer_idx=index,
                        use_flash_attn=flash, **place),
                partial(Mlp, **place), partial(nn.LayerNorm, **place),
            )
            for index in range(2)
        )  # fmt: skip
        self.head = nn.Linear(DIM, WORDS + 3, **place)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **_: Any
    ) -> dict[int, torch.Tensor]:
        return {i: each.allocate_inference_cache(batch_size, max_seqlen, dtype) for i, each in enumerate(self.layers)}

    def forward(
        self, input_ids: torch.Tensor, position_ids: Any = None, inference_params: Any = None, num_last_tokens: int = 0
    ) -> Any:
        x, residual = self.embeddings(input_ids, position_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, mixer_kwargs={"inference_params": inference_params})
        return SimpleNamespace(logits=self.head((x + residual)[:, -num_last_tokens:]))


def _model(flash: bool = True, **place: Any) -> Model:
    torch.manual_seed(0)
    model = Model(flash, **place).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def _without_caches(model: Model, ids: torch.Tensor, length: int, words: int | None) -> torch.Tensor:
    while ids.shape[1] < length:
        ids = torch.cat([ids, model(ids).logits[:, -1, :words].argmax(-1, keepdim=True)], 1)
    return ids


PROMPT = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 12]])


@pytest.mark.parametrize("words", [WORDS, None])
@pytest.mark.parametrize("flash", [False, True])
def test_greedy(flash: bool, words: int | None) -> None:
    model = _model(flash)
    expected = _without_caches(model, PROMPT, 12, words)
    assert len(expected.unique()) > 3  # else any model would do
    output = model.generate(PROMPT, 12, vocab_size=words, return_dict_in_generate=True, output_scores=True)
    torch.testing.assert_close(output.sequences, expected)
    logits = model(expected[:, :-1]).logits[:, PROMPT.shape[1] - 1 :, :words]
    torch.testing.assert_close(torch.stack(output.scores, 1), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.generate(PROMPT.int(), 12, vocab_size=words), expected.int())
    assert model.generate(PROMPT, 12, return_dict_in_generate=True).scores is None


@GPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_greedy_by_graphs(dtype: torch.dtype) -> None:
    model = _model(device="cuda", dtype=dtype)
    for batch, length in ((3, 12), (2, 9), (3, 30), (1, 30)):
        prompt = PROMPT[:batch].cuda()
        eager = decode(prompt, model, length)
        graphs = decode(prompt, model, length, cg=True, teacher_outputs=eager.sequences)
        torch.testing.assert_close(torch.stack(graphs.scores), torch.stack(eager.scores), rtol=2e-2, atol=2e-2)
    assert set(model._decoding_cache.callables) == {(3, 1), (1, 1)}
    model(torch.ones(1, 60, dtype=torch.int64, device="cuda"))  # rotary tables in the place of the graphs'
    torch.testing.assert_close(decode(prompt, model, 30, cg=True).sequences, eager.sequences)


def test_generation_ends_when_all_sequences_have_ended() -> None:
    model = _model()
    whole = model.generate(PROMPT[:1], 12)[0]
    end = int(whole[6])
    first = whole[4:].tolist().index(end) + 5
    torch.testing.assert_close(model.generate(PROMPT[:1], 12, eos_token_id=end)[0], whole[:first])
    both = model.generate(PROMPT[:2], 12)
    other = next(each for each in range(WORDS) if each not in both[:, 4:])
    torch.testing.assert_close(model.generate(PROMPT[:2], 12, eos_token_id=other), both)


def test_a_teacher_goes_before() -> None:
    model = _model()
    said = torch.cat([PROMPT, torch.tensor([[0, 12], [0, 0], [11, 3]])], 1)
    out = decode(PROMPT, model, 9, teacher_outputs=said).sequences
    torch.testing.assert_close(out[:, :6], said)
    torch.testing.assert_close(out, _without_caches(model, said, 9, None))


def test_generation_makes_at_least_one_token() -> None:
    assert _model().generate(PROMPT, PROMPT.shape[1]).shape == (3, 5)


def _odds(logits: list[float], **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    rows = torch.tensor(logits).log().expand(20000, -1)
    before = rows.clone()
    tokens = sample(rows, **options)
    torch.testing.assert_close(rows, before)
    return torch.bincount(tokens, minlength=len(logits)) / len(tokens)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 0, 0]),
        ({"top_k": 0}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_k": 9}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_k": 2}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_k": 0, "top_p": 0.6}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_k": 0, "top_p": 0.75}, [0, 4 / 9, 3 / 9, 2 / 9]),
        ({"top_k": 3, "top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 1.0, "temperature": 0.5}, [0, 16 / 29, 9 / 29, 4 / 29]),
    ],
)
def test_sampling(options: dict[str, Any], expected: list[float]) -> None:
    torch.testing.assert_close(
        _odds([0.1, 0.4, 0.3, 0.2], **options), torch.tensor(expected, dtype=torch.float32), rtol=0, atol=0.015
    )


def test_filters_work_in_place() -> None:
    for function, value in (("top_k", 2), ("top_p", 0.6)):
        logits = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.2, 0.3]]).log()
        getattr(generation, f"modify_logits_for_{function}_filtering")(logits, value)
        assert logits.isinf().tolist() == [[True, False, False, True], [False, True, True, False]]


def test_caches() -> None:
    caches = generation.allocate_inference_cache(2, 7, 3, 8, 2, "cpu", torch.bfloat16)
    assert [(layer, each.shape, each.dtype) for layer, each in caches.items()] == [
        (layer, (2, 7, 2, 3, 8), torch.bfloat16) for layer in (0, 1)
    ]
    assert list(generation.allocate_inference_cache(2, 7, 3, 8, [4, 6], None)) == [4, 6]
    params = InferenceParams(7, 2, 5, lengths_per_sample=torch.tensor([5, 4]))
    params.reset(9, 1)
    assert (params.max_seqlen, params.max_batch_size, params.seqlen_offset) == (9, 1, 0)
    assert params.lengths_per_sample.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 3}, "max_length: got 3, wanted 4 to"),
        ({"max_length": 9, "temperature": 0.0}, "temperature: got 0.0, wanted more, or top_k=1"),
        ({"max_length": 9, "top_k": -1}, "top_k: got -1"),
        ({"max_length": 9, "top_p": 1.5}, "top_p: got 1.5, wanted 0.0 to 1.0"),
        ({"max_length": 9, "cg": True}, "cg: got True, wanted False for input_ids on cpu"),
        ({"max_length": 9, "enable_timing": True}, "enable_timing: got True"),
        ({"max_length": 9, "input_ids": PROMPT[:, :0]}, r"input_ids: got shape \(3, 0\), wanted at least one token"),
        ({"max_length": 9, "input_ids": PROMPT[0]}, r"input_ids: got shape \(4,\), wanted \(batch, seqlen\)"),
    ],
)
def test_invalid_decoding_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(**{"input_ids": PROMPT, "model": _model(), **options})
