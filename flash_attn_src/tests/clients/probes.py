"""Reproduces what other libraries check when they are imported: versions, names, arities. No library is needed.

Each probe is what the library's source does, in our words; the library's release is named where it matters.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType

import flash_attn
from packaging.version import Version


def names(module: str, *wanted: str) -> ModuleType:
    result = importlib.import_module(module)
    missing = [name for name in wanted if not hasattr(result, name)]
    assert not missing, f"{module} lacks {', '.join(missing)}"
    return result


def extension() -> ModuleType:
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    return interface.flash_attn_cuda if hasattr(interface, "flash_attn_cuda") else interface.flash_attn_gpu


def xformers() -> None:
    """Up to 0.0.30: three integers in __version__, at least 2.6.3; then the extension's four functions."""
    assert tuple(int(part) for part in flash_attn.__version__.split(".")[:3]) >= (2, 6, 3)
    for name in ("fwd", "bwd", "varlen_fwd", "varlen_bwd"):
        assert callable(getattr(extension(), name))


def transformer_engine() -> None:
    """2.x: the distribution's version, at least 2.1.1; varlen_bwd of the extension; private functions by position,
    chosen by whether the version is at least 2.7.0."""
    version = Version(importlib.metadata.version("flash-attn"))
    assert version >= Version("2.1.1")
    names("flash_attn_2_cuda", "varlen_bwd")
    interface = names(
        "flash_attn.flash_attn_interface",
        "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
        "_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward",
    )  # fmt: skip
    function = interface._flash_attn_forward
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    assert ("window_size_left" in parameters) == (version >= Version("2.7.0"))
    # Where a distribution flash-attn-3 is installed it takes these from it, and does not import without them.
    if importlib.util.find_spec("flash_attn_interface") is not None:
        names(
            "flash_attn_interface",
            "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
            "_flash_attn_forward", "_flash_attn_backward",
        )  # fmt: skip


def vllm() -> None:
    """On ROCm: varlen attention, and apply_rotary for vision towers."""
    names("flash_attn", "flash_attn_varlen_func")
    names("flash_attn.ops.triton.rotary", "apply_rotary")


def axolotl() -> None:
    names("flash_attn.losses.cross_entropy", "CrossEntropyLoss")
    names("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")
    names("flash_attn.bert_padding", "pad_input", "unpad_input")


def megatron() -> None:
    """The package's version against 2.7.3; rotary embedding, attention with a cache."""
    assert Version(flash_attn.__version__) >= Version("2.1.0")
    names("flash_attn.layers.rotary", "apply_rotary_emb")
    names("flash_attn", "flash_attn_varlen_func", "flash_attn_with_kvcache")


def verl_and_openrlhf() -> None:
    """einops' rearrange from bert_padding; a gather with gradients for ring attention."""
    names("flash_attn.bert_padding", "index_first_axis", "pad_input", "rearrange", "unpad_input")
    names("flash_attn.utils.distributed", "all_gather")


def unsloth() -> None:
    """Softcap by version alone, 2.6.3: then it must be there. On AMD GPUs the extension, and whether it is Triton's."""
    assert isinstance(names("flash_attn.flash_attn_interface", "USE_TRITON_ROCM").USE_TRITON_ROCM, bool)
    assert extension().__file__
    assert Version(importlib.metadata.version("flash_attn")) >= Version("2.6.3")
    assert "softcap" in inspect.signature(flash_attn.flash_attn_func).parameters


def mosaic_and_nemo() -> None:
    """Modules and norms that model code imports by name."""
    names("flash_attn.modules.mha", "MHA", "FlashSelfAttention", "FlashCrossAttention")
    names("flash_attn.ops.rms_norm", "RMSNorm", "rms_norm")
    names("flash_attn.ops.triton.layer_norm", "layer_norm_fn", "rms_norm_fn", "RMSNorm")
    names("flash_attn.layers.rotary", "RotaryEmbedding")


def bonito_and_omnigen() -> None:
    """Gated layers; swiglu, imported wherever flash_attn is there."""
    names("flash_attn.modules.mlp", "GatedMlp", "Mlp", "FusedMLP")
    names("flash_attn.ops.activations", "swiglu")


PROBES: tuple[Callable[[], None], ...] = (
    xformers, transformer_engine, vllm, axolotl, megatron, verl_and_openrlhf, unsloth, mosaic_and_nemo,
    bonito_and_omnigen,
)  # fmt: skip
# These import the module flash_attn_2_cuda.
WITH_EXTENSION = (xformers, transformer_engine, unsloth)


def main() -> None:
    has_extension = importlib.util.find_spec("flash_attn_2_cuda") is not None
    for probe in PROBES:
        if probe in WITH_EXTENSION and not has_extension:
            print(f"{probe.__name__}: left out, this flash_attn has no module flash_attn_2_cuda")
            continue
        probe()
        print(f"{probe.__name__}: as it expects")


if __name__ == "__main__":
    main()
