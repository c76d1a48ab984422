"""vLLM's engine with the backend FLASH_ROCM on a CPU, by tiny random models, next to transformers' logits.

    python flash_attn_src/tests/clients/with_vllm_engine.py llama qwen3 gemma2 gemma3_text

The engine is vLLM's own: scheduler, chunked prefill (64 tokens a step), sampler. vLLM's wheel has no
compiled operators for a CPU; the three that a dense model needs are written here in PyTorch. Models with experts need
more of them, and do not run.

The environment has vLLM's Python files (`releases.py` unpacks them), what they import, torch and transformers. Prints a
line for each model; exits with 1 if a log probability differs from transformers' in fp32 by more than twice what
transformers' own bf16 does, plus a constant.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_TARGET_DEVICE="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
)  # fmt: skip

import torch

VOCABULARY, TOKENS = 256, 14
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "dtype": "bfloat16",
}  # fmt: skip
# What a model has beside COMMON. Gemma's windows are shorter than the prompts.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
}
TOLERANCE = 0.01  # the constant


def models(name: str, folder: Path) -> list[Any]:
    """Writes a random model of a kind into a folder, and returns it in fp32 and bf16, by transformers' attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **{**COMMON, **MODELS[name]})
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).bfloat16()
    for weights in made.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15)
    made.save_pretrained(folder)
    return [
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.bfloat16)
    ]


def prompts() -> list[list[int]]:
    """Prompts shorter and longer than a step, and two with one prefix of three pages."""
    draw = torch.Generator().manual_seed(1)
    lengths = [7, 40, 90, 3, 48]
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    prefix = drawn.pop()
    return [*drawn, [*prefix, 5, 6, 7], [*prefix, 9]]


def _slot_mapping(
    starts: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, page: int
) -> None:
    tokens = int(starts[-1])
    requests = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff().long())
    places = positions[:tokens]
    slots[:tokens] = table[requests, places // page].long() * page + places % page


def add_operators() -> torch.library.Library:
    """The compiled operators of vLLM for a CPU that a dense model needs. They live as long as the result."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda _nodes: None, "CompositeExplicitAutograd")
    library.define(
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int page)"
        " -> ()"
    )
    library.impl("compute_slot_mapping_kernel_impl", _slot_mapping, "CPU")
    library.define("greedy_argmax(Tensor logits) -> Tensor")
    library.impl("greedy_argmax", lambda logits: logits.argmax(-1).view(-1), "CPU")
    return library


def choose_plug_ins() -> None:
    """vLLM's platform for a CPU takes its own attention whatever was asked for; here it takes the backend asked for."""
    from vllm.platforms.cpu import CpuPlatform

    def chosen(_cls: Any, selected_backend: Any, **_more: Any) -> str:
        path: str = selected_backend.get_path()
        return path

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)


def difference(name: str) -> tuple[float, float, int]:
    """The largest difference of a log probability to fp32, by vLLM and by transformers in bf16; the backend's calls."""
    from vllm import LLM, SamplingParams
    from vllm_flash_rocm.backend import FlashRocmImpl

    calls, forward = 0, FlashRocmImpl.forward

    def counted(*args: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(*args, **named)

    with tempfile.TemporaryDirectory() as folder:
        peer, narrow = models(name, Path(folder))
        FlashRocmImpl.forward = counted
        engine = LLM(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=256,
            max_num_batched_tokens=64, max_num_seqs=8, block_size=16,
            max_logprobs=VOCABULARY, compilation_config={"custom_ops": ["none"], "mode": 0},
            attention_backend="FLASH_ROCM",
        )  # fmt: skip
        sampling = SamplingParams(
            max_tokens=TOKENS, temperature=0, logprobs=VOCABULARY, detokenize=False, ignore_eos=True
        )
        results = engine.generate([{"prompt_token_ids": x} for x in prompts()], sampling, use_tqdm=False)
        FlashRocmImpl.forward = forward
    worst, worst_narrow = 0.0, 0.0
    for result in results:
        (answer,) = result.outputs
        prompt = len(result.prompt_token_ids)
        tokens = torch.tensor([[*result.prompt_token_ids, *answer.token_ids]])
        with torch.no_grad():
            right, rounded = (x(tokens).logits[0, prompt - 1 : -1].float().log_softmax(-1) for x in (peer, narrow))
        by_token = [[row[token].logprob for token in range(VOCABULARY)] for row in answer.logprobs]
        worst = max(worst, float((torch.tensor(by_token) - right).abs().max()))
        worst_narrow = max(worst_narrow, float((rounded - right).abs().max()))
    return worst, worst_narrow, calls


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", choices=MODELS)
    args = parser.parse_args()
    library = add_operators()
    choose_plug_ins()
    is_right = True
    for name in args.models:
        worst, narrow, calls = difference(name)
        is_right &= worst <= 2 * narrow + TOLERANCE and calls > 0  # NaN is not <=
        print(
            f"{name}: {calls} calls of FLASH_ROCM, largest difference of a log probability {worst:.4f}, of "
            f"transformers in bf16 {narrow:.4f}",
            flush=True,
        )
    del library
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
