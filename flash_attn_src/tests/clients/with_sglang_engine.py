"""SGLang's engine with the backend flash_rocm on a CPU, by tiny random models, next to transformers' log probabilities.

    python flash_attn_src/tests/clients/with_sglang_engine.py llama llama:page64 llama:mixed llama:graph deepseek_v3

The engine is SGLang's own, as its server starts it: a process that schedules and runs the model, chunked prefill (64
tokens a step), the prefix cache, and the processes beside it. They are forks of this one. A case is a model and
options: `page64` for the page size, `mixed` for steps with prefill and decoding, `graph` for decoding by SGLang's own
graph runner over a tape (`sglang_graphs.py`), `many` for 16 requests at once by chunks of 17 tokens, `http` for
SGLang's server with requests over HTTP (`sglang_server.py`), `standalone` for speculative decoding, which is refused.
Without arguments all of CASES run. SGLang itself refuses a pool in FP8 on a CPU without AMX.

The environment has SGLang's files (`releases.py` unpacks them), what they import, torch and transformers, and the
plug-in installed. SGLang's compiled operator for a CPU that this needs is written here in PyTorch.

Prints a line for each case; exits with 1 if a log probability differs from transformers' in fp32 by more than twice
what transformers' own bf16 does, plus a constant, if what a case is for did not happen, or if a case that is not served
is not refused.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")

import sglang_server
import tiny_models
import torch

OPTIONS: dict[str, dict[str, Any]] = {
    **{f"page{size}": {"page_size": size, "chunked_prefill_size": max(64, size)} for size in (1, 16, 32, 64, 128)},
    "mixed": {"enable_mixed_chunk": True},
    "graph": {},
    "many": {"chunked_prefill_size": 17, "max_running_requests": 16},
    "http": {},
    "standalone": {
        "speculative_algorithm": "STANDALONE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
}
REFUSED = {
    "deepseek_v2": "latent attention (MLA)",
    "deepseek_v3": "latent attention (MLA)",
    "llama:standalone": "speculative decoding",
}
CASES = [
    "llama", "llama:page16", "llama:page64", "llama:page128", "llama:mixed", "llama:many", "llama:graph",
    "llama:graph:page64", "llama:http:page16",
    "qwen3", "qwen3_moe", "qwen3_moe:graph", "gemma3_text", "gemma3_text:graph", *REFUSED,
]  # fmt: skip
TOLERANCE = 0.01  # the constant
COUNTS = "calls", "decoding calls", "mixed steps", "replays"


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
    vars(module).update(
        assign_req_to_token_pool_cpu=_assign,
        copy_all_layer_kv_cache_cpu=lambda *_: None,  # a pool for drafts tries it once
        __getattr__=lambda _: None,
    )
    sys.modules["sgl_kernel"] = module


def fork_processes() -> None:
    """The engine's processes are forks, which have what this one imported and replaced."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda _, force=True: set_start_method("fork", force)
    multiprocessing.set_start_method("spawn")


def watch(counts: Any, refusals: Path, is_graph: bool) -> None:
    """Counts what the backend is called for, in the forks too, and keeps the words of a refusal."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang_flash_rocm.backend import FlashRocmAttnBackend

    forward, begin = FlashRocmAttnBackend.forward_extend, FlashRocmAttnBackend.__init__
    graphs, mix = ModelRunner.init_cuda_graphs, ScheduleBatch.mix_with_running

    def counted(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **named: Any) -> torch.Tensor:
        counts[0] += 1
        counts[1] += batch.forward_mode.is_decode()
        out: torch.Tensor = forward(self, q, k, v, layer, batch, *args, **named)
        return out

    def watched(self: Any, runner: Any) -> None:
        try:
            begin(self, runner)
        except NotImplementedError as error:
            refusals.write_text(str(error))
            raise

    def mixed(self: Any, *args: Any, **named: Any) -> None:
        counts[2] += 1
        mix(self, *args, **named)

    def replayed() -> None:
        counts[3] += 1

    def with_graphs(self: Any, *args: Any, **named: Any) -> None:
        import sglang_graphs

        graphs(self, *args, **named)
        sglang_graphs.capture(self, replayed)

    FlashRocmAttnBackend.forward_extend, FlashRocmAttnBackend.__init__ = counted, watched
    ScheduleBatch.mix_with_running = mixed
    if is_graph:
        ModelRunner.init_cuda_graphs = with_graphs


def run(case: str, refusals: Path) -> tuple[float, float, dict[str, int]]:
    """The largest difference of a log probability to fp32, by SGLang and by transformers in bf16; what ran."""
    import sglang

    name, *options = case.split(":")
    counts = multiprocessing.get_context("fork").Array("i", len(COUNTS))
    watch(counts, refusals, "graph" in options)
    worst, worst_narrow, cached = 0.0, 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        right, narrow = tiny_models.written(name, Path(folder))
        arguments: dict[str, Any] = {"chunked_prefill_size": 64, "max_running_requests": 8}
        for option in options:
            arguments |= OPTIONS[option]
        if "standalone" in options:
            arguments["speculative_draft_model_path"] = folder
        if "http" not in options:
            arguments["skip_tokenizer_init"] = True
        engine = (sglang_server.Server if "http" in options else sglang.Engine)(
            model_path=folder, device="cpu", attention_backend="flash_rocm", dtype="bfloat16", max_total_tokens=2048,
            context_length=256, disable_cuda_graph=True, log_level="error", **arguments,
        )  # fmt: skip
        sampling = {"temperature": 0, "max_new_tokens": tiny_models.TOKENS, "ignore_eos": True}
        # SGLang mixes no steps of requests that ask for log probabilities. Then the chosen tokens are compared: how far
        # below the most probable one in fp32 they are.
        wanted = {} if "mixed" in options else {"return_logprob": True, "top_logprobs_num": tiny_models.VOCABULARY}
        prompts = tiny_models.prompts("many" in options)
        if "http" in options:
            worst = engine.chat(prompts[1], right)
        for asked in (prompts, prompts[-1:]):  # the second time out of the prefix cache
            results = engine.generate(input_ids=asked, sampling_params=sampling, **wanted)
            for prompt, result in zip(asked, results, strict=True):
                cached += result["meta_info"]["cached_tokens"]
                tokens = prompt, result["output_ids"]
                expected = tiny_models.log_probabilities(right, *tokens)
                if wanted:
                    rows = [sorted(row, key=lambda x: x[1]) for row in result["meta_info"]["output_top_logprobs"]]
                    got = torch.tensor([[value for value, _, _ in row] for row in rows])
                    worst = max(worst, float((got - expected).abs().max()))
                else:
                    chosen = expected.gather(1, torch.tensor(result["output_ids"])[:, None])
                    worst = max(worst, float((expected.amax(1, keepdim=True) - chosen).max()))
                rounded = tiny_models.log_probabilities(narrow, *tokens)
                worst_narrow = max(worst_narrow, float((rounded - expected).abs().max()))
        engine.shutdown()
    return worst, worst_narrow, {**dict(zip(COUNTS, counts, strict=True)), "cached tokens": cached}


def line(case: str, forked: Callable[..., Any] = tiny_models.forked) -> tuple[str, bool]:
    """A case's row of the table, and whether it is right."""
    with tempfile.TemporaryDirectory() as folder:
        refusals = Path(folder, "refusals")
        result = forked(run, case, refusals)
        if isinstance(result, str):
            result = refusals.read_text() if refusals.exists() else result
            is_refused = f"does not serve {REFUSED.get(case)}" in result
            return f"| {case} | {'refused' if is_refused else 'FAILS'}: {result} | | |", is_refused
    worst, narrow, counts = result
    expected = {"calls", "decoding calls"}
    expected |= {"cached tokens"} if "page128" not in case else set()  # no prefix fills such a page
    expected |= {"mixed steps"} if "mixed" in case else set()
    expected |= {"replays"} if "graph" in case else set()
    missing = " ".join(f"MISSING {x}" for x in sorted(expected) if not counts[x])
    is_right = case not in REFUSED and worst <= 2 * narrow + TOLERANCE and not missing  # NaN is not <=
    ran = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"| {case} | {worst:.4f} | {narrow:.4f} | {ran} {missing} |", is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES, help="MODEL or MODEL:OPTION:OPTION")
    args = parser.parse_args()
    for case in args.cases:
        name, *options = case.split(":")
        if name not in tiny_models.MODELS or not {*options} <= {*OPTIONS}:
            parser.error(f"{case}: known models are {', '.join(tiny_models.MODELS)}, options {', '.join(OPTIONS)}")
    add_operators()
    fork_processes()
    torch.set_num_threads(1)  # a fork has no other threads
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server  # noqa: F401 - once for all forks
    from sglang.srt.plugins import load_plugins

    load_plugins()
    is_right = True
    print("| case | largest difference to fp32 | of transformers' bf16 | what ran |\n|-|-|-|-|")
    for case in args.cases:
        text, passed = line(case)
        print(text, flush=True)
        is_right &= passed
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
