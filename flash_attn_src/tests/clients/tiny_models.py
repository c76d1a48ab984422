"""Tiny random models in bf16, the prompts for them, and transformers' log probabilities by eager attention."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

VOCABULARY, TOKENS = 256, 14  # TOKENS: of an answer
WINDOW = {"sliding_window": 24}  # shorter than the prompts
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Each token takes each expert: with fewer, rounding alone changes which, and the log probabilities by 1.
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 32}
LATENT = {  # rows of 576 numbers and positions as DeepSeek's own
    "max_position_embeddings": 163840,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, **EXPERTS,
}  # fmt: skip
# What a model has beside COMMON.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16, **WINDOW},
    "gemma3_text": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, **WINDOW},
    "mistral": WINDOW,
    "qwen2": {},
    "phi3": {"hidden_size": 384},  # heads of 96 numbers
    "olmo2": {},
    "starcoder2": WINDOW,
    "gpt_neox": {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "falcon": {"multi_query": True, "parallel_attn": True},
    "bloom": {},  # ALiBi
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 4, "max_position_embeddings": 131072, **WINDOW},
    "deepseek_v2": {"topk_method": "greedy", "scoring_func": "softmax", **LATENT},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", **LATENT, "q_lora_rank": 32},
}  # fmt: skip


def _attention_with_fp8_keys(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any
) -> Any:
    """Eager attention to keys and values rounded to FP8 as a cache with a scale of 1 holds them."""
    key, value = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
    attend = sys.modules[type(module).__module__].eager_attention_forward  # of the model: gpt-oss has sinks
    return attend(module, query, key, value, *args, **named)


def _repeat(model: Any, period: int = 2) -> None:
    """Makes the most probable next token follow from the last one, in circles, so that guesses by n-grams are right."""
    embedded = torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
    after = torch.arange(VOCABULARY)
    after += torch.where(after % period == period - 1, 1 - period, 1)
    model.get_output_embeddings().weight[after] = 0.2 * embedded


def written(name: str, folder: Path, has_fp8_cache: bool = False, repeats: bool = False) -> list[Any]:
    """Writes a random model of a kind into a folder, and returns it in fp32 and bf16, by transformers' attention.

    repeats: its answers repeat themselves.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("fp8_cache", _attention_with_fp8_keys)
    AttentionMaskInterface.register("fp8_cache", eager_mask)
    values = {**COMMON, **MODELS[name]}
    if name == "falcon":
        del values["head_dim"]  # follows from the others
    config = AutoConfig.for_model(name, **values)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).bfloat16()
    for weights_name, weights in made.named_parameters():
        if weights.dim() > 1 or "sinks" in weights_name:
            torch.nn.init.normal_(weights, std=0.15 if weights.dim() > 1 else 1.0)
        elif weights_name.endswith(("q_proj.bias", "k_proj.bias", "query_key_value.bias")) and name != "gpt_oss":
            torch.nn.init.normal_(weights)
    if repeats:
        with torch.no_grad():
            _repeat(made)
    made.save_pretrained(folder)
    attention = "fp8_cache" if has_fp8_cache else "eager"
    return [
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
        for dtype in (torch.float32, torch.bfloat16)
    ]


def prompts(is_many: bool = False) -> list[list[int]]:
    """Prompts shorter and longer than 64 tokens, one that repeats itself, and two with one prefix of 96; or 16 of
    lengths around pages and chunks."""
    draw = torch.Generator().manual_seed(1)
    lengths = (1, 2, 15, 16, 17, 18, 31, 33, 34, 35, 47, 63, 64, 65, 128, 150) if is_many else (7, 40, 90, 3, 96)
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    if is_many:
        return drawn
    prefix = drawn.pop()
    return [*drawn, drawn[0] * 3, [*prefix, 5, 6, 7], [*prefix, 9]]


def log_probabilities(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """fp32 (tokens of the answer, VOCABULARY)."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a fork: what it returns, or the text of what it raises.

    Programs keep a model's settings for a process, and importing one takes a minute.
    """
    context = multiprocessing.get_context("fork")
    heard, told = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(told, function, args))
    process.start()
    told.close()
    try:
        result = heard.recv()
    except EOFError:
        result = None
    process.join()
    return f"the process ended with {process.exitcode}" if result is None else result


def _tell(told: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        told.send(function(*args))
    except BaseException as error:
        traceback.print_exc()
        told.send(f"{type(error).__name__}: {error}")
