"""Small random models of transformers by flash_attn against eager attention: logits, gradients, generation.

    python with_transformers.py [flash_attention_2 | flash_attention_3 | flash_attention_4 | sdpa | flex_attention]
    python with_transformers.py OWNER/NAME=DIRECTORY [--hip 6.2.41133]

With a GPU, in bf16 and through transformers' own checks. Without, in fp32 on the CPU: transformers' question whether
there is a GPU is answered yes, everything else is its own code. sdpa: PyTorch's scaled_dot_product_attention under
`flash_attn.use_for_sdpa()`. flex_attention: PyTorch's FlexAttention under `flash_attn.flex.use_for_flex()`.

The second form takes a repository for the package `kernels` from a directory, in the place of one on the Hub. Without a
GPU torch says that it is for CPUs, or with --hip for that version of HIP: `kernels` chooses the variant by it.
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any
from unittest import mock

import flash_attn
import torch
import transformers
from flash_attn.flex import flex_report, use_for_flex
from flash_attn.sdpa import attention as door
from transformers import modeling_flash_attention_utils as dispatch
from transformers.utils import import_utils

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32
MAJOR = int(transformers.__version__.split(".")[0])

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
HEADS: dict[str, Any] = {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
MODELS: dict[str, Any] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)),
    "Mistral, window of 6": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, **HEADS, sliding_window=6)
    ),
    "Gemma 2, softcap 2, window of 6": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **SIZES, **HEADS, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, sliding_window=6
        )
    ),
    "BERT": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
}
if MAJOR >= 5:
    MODELS |= {
        "gpt-oss, sinks, window of 6": lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(
                **SIZES, **HEADS, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
            )
        ),
        "Granite SWA, sinks, window of 6": lambda: transformers.GraniteSWAForCausalLM(
            transformers.GraniteSWAConfig(**SIZES, **HEADS, sliding_window=6)
        ),
        "Gemma 4, head dims 16 and 512": lambda: transformers.Gemma4ForCausalLM(
            transformers.Gemma4TextConfig(
                **SIZES, **HEADS, head_dim=16, global_head_dim=512, sliding_window=6, hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=101, layer_types=["sliding_attention", "full_attention"],
            )
        ),
        "DeepSeek V3, head dims 24 and 16": lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **SIZES, bos_token_id=1, eos_token_id=None, num_key_value_heads=4, moe_intermediate_size=32,
                n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
                kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
            )
        ),
    }  # fmt: skip
# transformers refuses these for flash_attention_2 and 3, because upstream's have no sinks.
WITH_SINKS = ("gpt-oss, sinks, window of 6", "Granite SWA, sinks, window of 6")
# transformers' sdpa ignores softcap and refuses sinks.
WITHOUT_SDPA = ("Gemma 2, softcap 2, window of 6", *WITH_SINKS)
# What transformers calls by PyTorch's functions, and who counts their calls.
BY_PYTORCH = {"sdpa": flash_attn.sdpa_report, "flex_attention": flex_report}
PACKAGES = {"2": "flash_attn.flash_attn_interface", "3": "flash_attn_interface", "4": "flash_attn.cute.interface"}


def chosen(implementation: str, every: bool) -> list[str]:
    """The models to test with an implementation:

    all with flash_attention_2, with the others only those that call other functions.
    """
    if implementation == "sdpa":
        return [name for name in MODELS if name not in WITHOUT_SDPA]
    if implementation == "flex_attention":  # transformers takes its sinks on a GPU alone
        return [name for name in MODELS if GPU or name not in WITH_SINKS]
    if every or implementation == "flash_attention_2":
        return list(MODELS)
    older = list(MODELS)[:4]
    return older if implementation == "flash_attention_3" else [older[0], *WITH_SINKS]


calls = {"dense": 0, "varlen": 0}


def build(name: str, implementation: str, dtype: torch.dtype) -> torch.nn.Module:
    """The same weights for every implementation and dtype."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for kind, parameter in model.named_parameters():  # scores far from 0, so that softcap, windows and sinks matter
        parameter.data.mul_(4.0 if parameter.dim() > 1 else 50.0 if kind.endswith("sinks") else 1.0)
    model = model.to(DEVICE, dtype).eval()
    if GPU or implementation in ("eager", *BY_PYTORCH) or "/" in implementation:
        model.set_attn_implementation(implementation)
    else:
        for module in model.modules():
            if isinstance(getattr(module, "config", None), transformers.PretrainedConfig):
                module.config._attn_implementation = implementation
    assert model.config._attn_implementation == implementation
    if implementation not in ("eager", *BY_PYTORCH):  # transformers imports the functions again for each model
        count_calls(implementation)
    return model


def results(model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Logits of tokens that count, and gradients of every parameter."""
    logits = model(input_ids=tokens, attention_mask=mask).logits
    kept = logits if mask is None else logits[mask.bool()]
    weights = torch.linspace(-1, 1, kept.numel(), device=DEVICE).view(kept.shape).to(kept.dtype)
    (kept * weights).sum().backward()
    result = {"logits": kept.detach()}
    result |= {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return result


def compare(label: str, got: dict[str, Any], rough: dict[str, Any], exact: dict[str, Any]) -> None:
    """Within three times the error of eager attention in the same dtype, and a floor; exact is eager in fp32."""
    assert got.keys() == exact.keys()
    worst = 0.0
    # A gradient that is zero but for rounding (that of a key's bias) is measured against the others.
    largest = max(float(each.abs().max()) for name, each in exact.items() if name != "logits")
    for name, value in got.items():
        want = exact[name].double()
        size = max(float(want.abs().max()), 1e-3 * largest)
        error = float((value.double() - want).abs().max()) / size
        # Gemma 4's gradients in fp32 differ by up to 3e-5, with transformers 5.22 and two threads.
        bar = 3.0 * float((rough[name].double() - want).abs().max()) / size + (5e-3 if GPU else 4e-5)
        assert error <= bar, f"{label}: {name}: relative error {error:.2e}, bar {bar:.2e}"
        worst = max(worst, error)
    print(f"{label}: {len(got)} tensors, largest relative error {worst:.1e}")


def check_package(implementation: str) -> None:
    """What transformers asks about the installed package, apart from the GPU."""
    if implementation in BY_PYTORCH:
        return
    if "/" in implementation:
        assert import_utils.is_kernels_available()
    elif MAJOR >= 5:
        entry = dispatch.FLASH_ATTENTION_COMPATIBILITY_MATRIX[int(implementation[-1])]
        assert entry["pkg_availability_check"](), "transformers does not see the package"
    elif implementation == "flash_attention_2":
        assert import_utils._is_package_available("flash_attn")
        assert import_utils.is_flash_attn_greater_or_equal("2.1.0")
    else:
        assert import_utils._is_package_available("flash_attn_3")


def package_of(implementation: str) -> str:
    """The module that the functions have to come from."""
    if "/" not in implementation:
        return PACKAGES[implementation[-1]]
    from kernels import get_loaded_kernels

    (loaded,) = get_loaded_kernels()
    print(f"kernels: {loaded.module.__name__} in {loaded.module.__file__}")
    return f"{loaded.module.__name__}.flash_attn_interface"


def count_calls(implementation: str) -> None:
    """Counts calls of the functions that transformers imported, so that a test cannot pass with eager attention."""
    dispatch.lazy_import_flash_attention(implementation)
    for key, name in (("dense", "_flash_fn"), ("varlen", "_flash_varlen_fn")):
        function = getattr(dispatch, name)
        if hasattr(function, "counted"):
            continue
        assert function.__module__ == package_of(implementation), function.__module__

        def counted(*args: Any, _key: str = key, _function: Any = function, **kwargs: Any) -> Any:
            calls[_key] += 1
            return _function(*args, **kwargs)

        counted.counted = True
        setattr(dispatch, name, counted)


def serve(implementation: str) -> None:
    """PyTorch's function by flash_attn. Without a GPU, tensors of the CPU count as those of one."""
    if not GPU:
        door.is_on_gpu = lambda _: True
    if implementation == "sdpa":
        flash_attn.use_for_sdpa()
    else:
        use_for_flex()


def calls_of(implementation: str, kind: str) -> int:
    """How often flash_attn was called so far. Raises AssertionError if PyTorch computed a call itself."""
    if implementation not in BY_PYTORCH:
        return calls[kind]
    report = BY_PYTORCH[implementation]()
    assert not report.passed_on, str(report)
    return report.served


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("implementation", nargs="?", default="flash_attention_2")
    parser.add_argument("--every", action="store_true", help="every model, by flash_attention_3 and 4 too")
    parser.add_argument("--hip", help="what torch.version.hip is to be, without a GPU")
    options = parser.parse_args()
    implementation, _, directory = options.implementation.partition("=")
    check_package(implementation)
    if implementation in BY_PYTORCH:
        serve(implementation)
    elif directory:
        os.environ["LOCAL_KERNELS"] = options.implementation
        if not GPU:
            torch.version.cuda, torch.version.hip = None, options.hip
    elif not GPU:
        answer = f"is_flash_attn_{implementation[-1]}_available"
        mock.patch.object(dispatch, answer, return_value=True).start()
    torch.manual_seed(1)
    tokens = torch.randint(2, 101, (3, 13), device=DEVICE)
    lengths = torch.tensor([13, 5, 9], device=DEVICE)
    right = (torch.arange(13, device=DEVICE) < lengths[:, None]).long()
    for name in chosen(implementation, options.every):
        if MAJOR < 5 and name == "BERT":
            print("BERT: this transformers has it without flash attention")
            continue
        if GPU and implementation != "flash_attention_4" and name in WITH_SINKS:
            print(f"{name}: transformers refuses {implementation}")
            continue
        for padding, mask in (("", None), (", padded", right), (", padded left", right.flip(1))):
            if name == "BERT" and padding == ", padded left":
                continue
            kind = "dense" if mask is None else "varlen"
            before = calls_of(implementation, kind)
            given = tokens if mask is None else tokens * mask
            got, rough, exact = (
                results(build(name, attention, dtype), given, mask)
                for attention, dtype in ((implementation, DTYPE), ("eager", DTYPE), ("eager", torch.float32))
            )
            compare(name + padding, got, rough, exact)
            made = calls_of(implementation, kind) - before
            assert made == 2, f"{name}{padding}: {made} calls of flash_attn"
        if name == "BERT":
            continue
        prompt, mask = tokens[:, :7] * right.flip(1)[:, -7:], right.flip(1)[:, -7:]
        length = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        # In fp32 on a CPU, so that no tie is broken by rounding; transformers takes none of it on a GPU.
        generated = [
            copy.deepcopy(build(name, attention, DTYPE)).generate(prompt, attention_mask=mask, **length)
            for attention in (implementation, "eager")
        ]
        assert generated[0].shape == (3, 19)
        alike = 4 if GPU else 12  # bf16 has ties among the logits of random weights
        ours, eager = (tokens_made[:, : 7 + alike] for tokens_made in generated)
        assert torch.equal(ours, eager), f"{name}: generated {ours.tolist()}, eager {eager.tolist()}"
        print(f"{name}: {alike} tokens generated as by eager attention")
    counted = calls_of(implementation, "dense") if implementation in BY_PYTORCH else calls
    print(f"transformers {transformers.__version__}, {implementation}, {DEVICE}, {DTYPE}: {counted} calls")


if __name__ == "__main__":
    main()
