"""The arguments of a custom operator by name: what is not given is what a call has without it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from flash_attn.call.calls import AttentionCall, CacheCall
from flash_attn.call.mask import block_size_of
from flash_attn.call.options import Options


def op_arguments(op: Any, **given: Any) -> list[Any]:
    """The arguments of an operator, such as torch.ops.flash_attn._extended_forward. TypeError for other names."""
    defaults = {field.name: field.default for kind in (CacheCall, AttentionCall, Options) for field in fields(kind)}
    defaults["block_size"] = block_size_of(None)
    names = [argument.name for argument in op.default._schema.arguments]
    if other := given.keys() - set(names):
        raise TypeError(f"{', '.join(sorted(other))}: not an argument of {op}")
    return [given[name] if name in given else _absent(name, defaults) for name in names]


def _absent(name: str, defaults: dict[str, Any]) -> Any:
    default = defaults.get(name)
    return None if default is MISSING else default
