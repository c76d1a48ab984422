"""An attention backend for SGLang on the kernels of flash_attn: flash_rocm.

SGLang calls `register` in each of its processes, by the entry point `sglang.srt.plugins`. Nothing else happens until a
user asks for the backend: `sglang serve --model-path MODEL --attention-backend flash_rocm`.
"""

from __future__ import annotations

from typing import Any

from flash_attn.interfaces.plug_in import join

__all__ = ["NAME", "RAN_WITH", "register"]

NAME = "flash_rocm"
# The releases of SGLang on whose classes the tests of this plug-in ran.
RAN_WITH = ("0.5.21", "0.5.22", "0.5.23")


def register() -> None:
    """Adds the backend to SGLang's registry and to the choices of --attention-backend, or logs why this SGLang cannot
    have it. It may be called again.
    """
    join("sglang-flash-rocm", "sglang", RAN_WITH, _add)


def _add() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(_create)
        add_attention_backend_choices([NAME])


def _create(model_runner: Any) -> Any:
    from sglang_flash_rocm.backend import FlashRocmAttnBackend

    return FlashRocmAttnBackend(model_runner)
