"""What torch.compile has to know of the switch: guards, its caches on disk, graphs from before."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

_STATE = "flash_attn.sdpa.override"
_TAG = "+flash_attn.sdpa"


def guard() -> None:
    """While Dynamo traces a call: its graph is valid as long as SDPA is served, or not served, as it is now.

    Uses Dynamo's own modules. A torch in which their names differ gets a warning, and graphs keep their kernels.
    """
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    if dynamo is None or torch._guards.TracingContext.try_get() is None:
        return
    try:
        translator = getattr(dynamo.tls, "current_tx", None)
        if translator is None:
            return
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource

        source = AttrSource(translator.import_source(_STATE), "active")
        install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
    except (AttributeError, ImportError, TypeError) as error:
        warnings.warn(
            f"this torch has no guard for SDPA ({error}): a compiled graph keeps the kernels that it was compiled with "
            "until torch.compiler.reset()",
            stacklevel=2,
        )


def forget_graphs() -> None:
    """Drops what was compiled before the operator was overridden the first time: those graphs have no guard."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def set_cache_tag(active: bool) -> None:
    """Keeps graphs with these kernels apart from PyTorch's in the compiler's caches on disk, whose key is the graph
    before it is lowered."""
    config: Any = getattr(torch.compiler, "config", None)
    tag = getattr(config, "cache_key_tag", None)
    if isinstance(tag, str):  # torch 2.5 caches no such graph
        config.cache_key_tag = tag.replace(_TAG, "") + _TAG * active
