"""Which flash_attn transformers and diffusers take on ROCm: this wheel, or a kernel of the Hub.

    python flash_attn_src/tests/clients/with_hub_choice.py

Their own choosing code runs, with a torch that says it is for ROCm and has a GPU. Nothing is loaded from the Hub: the
name that would be loaded is printed. Prints a table for an environment with this wheel and without.

The environment has torch, transformers, diffusers and the package kernels.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
import torch

ASKED = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", "kernels-community/aiter-flash-attn")
DIST_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3+rocm\n", "top_level.txt": "flash_attn\n",
}  # fmt: skip


def _transformers(model: str) -> list[str]:
    """What a model takes for each name in ASKED: the name of a library, or of a repository on the Hub."""
    import transformers
    from transformers import modeling_utils

    taken: list[str] = []
    modeling_utils.lazy_import_flash_attention = lambda name, **_: taken.append(name)
    config = transformers.AutoConfig.for_model(model, **(tiny_models.COMMON | tiny_models.MODELS[model]))
    with torch.device("meta"):
        made: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return [_answer(made._check_and_adjust_attn_implementation, name) for name in ASKED]


def _answer(choose: Callable[[Any], Any], name: Any) -> str:
    try:
        return str(choose(name))
    except (ImportError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).partition('. ')[0]}"


def _choices(folder: str) -> list[tuple[str, str]]:
    """(what was asked for, what is taken). folder: where the wheel's metadata is, or an empty name."""
    sys.path = [*filter(None, [folder]), *sys.path] if folder else [x for x in sys.path if "flash_attn_src" not in x]
    torch.version.hip, torch.version.cuda = "7.2.53211", None
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (11, 0)
    rows = [
        (f"transformers, {model}, {asked}", taken)
        for model in ("llama", "gpt_oss")
        for asked, taken in zip(ASKED, _transformers(model), strict=True)
    ]
    from diffusers.models import attention_dispatch as diffusers

    active, _ = diffusers._AttentionBackendRegistry.get_active_backend()
    rows.append(("diffusers, no backend", active.value))
    for name in ("flash", "flash_hub", "aiter_fa2_hub"):
        backend = diffusers.AttentionBackendName(name)
        hub = diffusers._HUB_KERNELS_REGISTRY.get(backend)
        taken = "flash_attn" if hub is None else hub.repo_id
        refusal = _answer(diffusers._check_attention_backend_requirements, backend)
        rows.append((f"diffusers, {name}", taken if refusal == "None" else refusal))
    return rows


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "flash_attn-2.8.3+rocm.dist-info")
        place.mkdir()
        for name, text in DIST_INFO.items():
            (place / name).write_text(text)
        result = [tiny_models.forked(_choices, where) for where in (folder, "")]
    for rows in result:
        if isinstance(rows, str):
            print(rows)
            return 1
    print("| asked | with this wheel | without |\n|-|-|-|")
    for (asked, beside), (_, without) in zip(*result, strict=True):
        print(f"| {asked} | {beside} | {without} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
