"""SGLang's ModelRunner with the backend flash_rocm on a CPU, by tiny random models, next to transformers' log
probabilities.

    python flash_attn_src/tests/clients/with_sglang_runner.py llama llama:page64 qwen3_moe deepseek_v3

The runner, the batches, the pools of keys and values and the models are SGLang's own, as its `benchmark.one_batch` uses
them: prefill, prefill with a cached prefix, decoding. Its scheduler and its server do not run. A case is a model and
a page size. Without arguments all of CASES run. SGLang itself refuses a pool in FP8 on a CPU without AMX.

The environment has SGLang's Python files (`releases.py` unpacks them), what they import, torch and transformers, and
the plug-in installed. SGLang's compiled operator for a CPU that this needs is written here in PyTorch.

Prints a line for each case; exits with 1 if a log probability differs from transformers' in fp32 by more than twice
what transformers' own bf16 does, plus a constant, or if a model that is not served is not refused.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")

import tiny_models
import torch

OPTIONS: dict[str, dict[str, Any]] = {f"page{size}": {"page_size": size} for size in (1, 16, 32, 64, 128)}
REFUSED = {"deepseek_v2": "latent attention (MLA)", "deepseek_v3": "latent attention (MLA)"}
SERVED = ("llama", "qwen3", "qwen3_moe", "gemma3_text")
CASES = [*SERVED, *(f"llama:{option}" for option in OPTIONS if option != "page1"), *REFUSED]
TOLERANCE = 0.01  # the constant
CUT = 20  # tokens of a prompt whose keys are cached before the others come


def _assign(
    requests: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor, _: int
) -> None:
    first = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = slots[first : first + end - start]
        first += end - start


def add_operators() -> None:
    """SGLang's compiled operators for a CPU. All are imported, and one is called here."""
    module = ModuleType("sgl_kernel")
    vars(module).update(assign_req_to_token_pool_cpu=_assign, __getattr__=lambda _: None)
    sys.modules["sgl_kernel"] = module


def run(case: str) -> tuple[float, float, int]:
    """The largest difference of a log probability to fp32, by SGLang and by transformers in bf16; the calls."""
    from sglang.benchmark import one_batch
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang_flash_rocm.backend import FlashRocmAttnBackend

    name, *options = case.split(":")
    calls, forward = 0, FlashRocmAttnBackend.forward_extend

    def counted(*args: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(*args, **named)

    FlashRocmAttnBackend.forward_extend = counted
    with tempfile.TemporaryDirectory() as folder:
        right, narrow = tiny_models.written(name, Path(folder))
        arguments: dict[str, Any] = {}
        for option in options:
            arguments |= OPTIONS[option]
        args = one_batch.ServerArgs(
            model_path=folder, device="cpu", attention_backend="flash_rocm", dtype="bfloat16", max_total_tokens=2048,
            max_running_requests=8, context_length=256, skip_tokenizer_init=True, disable_cuda_graph=True, **arguments,
        )  # fmt: skip
        args.resolve_once()
        _set_envs_and_config(args)
        ranks = one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
        one_batch.publish(args, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
        one_batch.get_tokenizer = lambda *_, **__: SimpleNamespace(encode=list)
        runner, tokenizer = one_batch.load_model(args, one_batch.PortArgs.init_new(args), 0, 0)
        prompts = [prompt for prompt in tiny_models.prompts() if len(prompt) > CUT]
        bench = one_batch.BenchArgs(batch_size=[len(prompts)], cut_len=CUT)
        prompts, requests = one_batch.prepare_inputs_for_correctness_test(bench, tokenizer, prompts)
        runner.extend(requests)
        requests = one_batch.prepare_extend_inputs_for_correctness_test(bench, prompts, requests, runner.torch_runner)
        tokens, logits, batch = runner.extend(requests)
        steps, answers = [logits], [tokens]
        for _ in range(tiny_models.TOKENS - 1):
            tokens, logits = runner.decode(tokens, batch)
            steps.append(logits)
            answers.append(tokens)
    worst, worst_narrow = 0.0, 0.0
    got = torch.stack(steps, 1).float().log_softmax(-1)
    for row, (prompt, answer) in enumerate(zip(prompts, torch.stack(answers, 1).tolist(), strict=True)):
        expected = tiny_models.log_probabilities(right, prompt, answer)
        worst = max(worst, float((got[row] - expected).abs().max()))
        rounded = tiny_models.log_probabilities(narrow, prompt, answer)
        worst_narrow = max(worst_narrow, float((rounded - expected).abs().max()))
    return worst, worst_narrow, calls


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES, help="MODEL or MODEL:pageSIZE")
    args = parser.parse_args()
    for case in args.cases:
        name, *options = case.split(":")
        if name not in tiny_models.MODELS or not {*options} <= {*OPTIONS}:
            parser.error(f"{case}: known models are {', '.join(tiny_models.MODELS)}, options {', '.join(OPTIONS)}")
    add_operators()
    torch.set_num_threads(1)  # a fork has no other threads
    from sglang.benchmark import one_batch  # noqa: F401 - once for all forks
    from sglang.srt.plugins import load_plugins

    load_plugins()
    is_right = True
    print("| case | largest difference to fp32 | of transformers' bf16 | calls of flash_rocm |\n|-|-|-|-|")
    for case in args.cases:
        found = tiny_models.forked(run, case)
        if isinstance(found, str):
            is_refused = case in REFUSED and f"does not serve {REFUSED[case]}" in found
            print(f"| {case} | {'refused' if is_refused else 'FAILS'}: {found} | | |", flush=True)
            is_right &= is_refused
            continue
        worst, narrow, calls = found
        is_right &= case not in REFUSED and worst <= 2 * narrow + TOLERANCE and calls > 0  # NaN is not <=
        print(f"| {case} | {worst:.4f} | {narrow:.4f} | {calls} |", flush=True)
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
