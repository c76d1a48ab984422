"""The node: MODEL in, MODEL out, with attention by flash_attn, and a text in the node that says what was served."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from typing import Any

from .counts import Counts

KEY = "flash_attn"
_OVERRIDE = "optimized_attention_override"

_MISSING = (
    "{found}, but this node needs the flash_attn wheel for AMD GPUs. Install it into ComfyUI's own Python:\n"
    '    "{python}" -m pip install --no-deps <the wheel, flash_attn-...+rocm-....whl>'
) + ("\nIn PowerShell, type & and a space before it." if os.name == "nt" else "")


def _check_installed() -> None:
    """Raises RuntimeError with the remedy where flash_attn is absent or another project's."""
    if importlib.util.find_spec("flash_attn") is None:
        raise RuntimeError(_MISSING.format(found="flash_attn is not installed", python=sys.executable))
    if importlib.util.find_spec("flash_attn.sdpa") is None:
        import flash_attn

        problem = f"flash_attn {flash_attn.__version__} in {flash_attn.__file__} is not the one for AMD GPUs"
        raise RuntimeError(_MISSING.format(found=problem, python=sys.executable))


def _show(text: str, node_id: str) -> None:
    """Writes a text into ComfyUI's log, and into the node where the server can show one."""
    logging.info(text)
    server = getattr(sys.modules.get("server"), "PromptServer", None)
    instance = getattr(server, "instance", None)
    if instance is not None and hasattr(instance, "send_progress_text"):
        instance.send_progress_text(text, node_id)


class FlashAttentionROCm:
    """Attention of one model by flash_attn's kernels for AMD GPUs."""

    CATEGORY = "model/patch"
    DESCRIPTION = (
        "The attention of this model runs on flash_attn's kernels for AMD GPUs. Calls that they cannot serve go to "
        "ComfyUI's own attention. After each sampling, the node and the log tell how many were served, and why others "
        "were not. VAE and text encoders are not part of a model."
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 - ComfyUI's name
        return {"required": {"model": ("MODEL",)}, "hidden": {"node_id": "UNIQUE_ID"}}

    def patch(self, model: Any, node_id: str = "") -> tuple[Any]:
        """A clone of the model. Raises RuntimeError without this project's flash_attn."""
        _check_installed()
        from .attention import override

        patched = model.clone()
        options = patched.model_options["transformer_options"]
        previous = options.get(_OVERRIDE)
        if hasattr(previous, "flash_attn_previous"):  # of this node, which stands twice
            previous = previous.flash_attn_previous
        counts = Counts()
        options[_OVERRIDE] = override(counts, previous)
        patched.remove_callbacks_with_key("on_cleanup", KEY)
        patched.add_callback_with_key("on_cleanup", KEY, lambda _: _show(counts.take(), node_id))
        return (patched,)
