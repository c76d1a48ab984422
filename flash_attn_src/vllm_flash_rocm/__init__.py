"""Attention backends for vLLM on the kernels of flash_attn: FLASH_ROCM, and FLASH_ROCM_MLA for latent attention.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. Nothing else happens until a
user asks for a backend: `vllm serve MODEL --attention-backend FLASH_ROCM`.
"""

from __future__ import annotations

from typing import Any

from flash_attn.interfaces.plug_in import join

__all__ = ["BACKENDS", "RAN_WITH", "register"]

# The releases of vLLM on whose classes the tests of this plug-in ran.
RAN_WITH = ("0.32.0", "0.33.0")

BACKENDS = {
    "FLASH_ROCM": "vllm_flash_rocm.backend.FlashRocmBackend",
    "FLASH_ROCM_MLA": "vllm_flash_rocm.mla.FlashRocmMLABackend",
}


def register() -> None:
    """Adds the backends to vLLM's registry, or logs why this vLLM cannot have them. It may be called again."""
    join("vllm-flash-rocm", "vllm", RAN_WITH, lambda: [_member(name) for name in BACKENDS])


def _member(name: str) -> Any:
    """The member of vLLM's enum of backends, new at the first call."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not hasattr(AttentionBackendEnum, "register"):
        raise ImportError("its registry takes no backend with a name of its own")
    if name not in AttentionBackendEnum.__members__:
        register_backend(name, BACKENDS[name])
        # A spawned process unpickles vLLM's configuration before it loads plug-ins: the member brings its registration.
        AttentionBackendEnum[name].__reduce_ex__ = lambda _protocol: (_member, (name,))
    return AttentionBackendEnum[name]
