"""The environment variables that flash_attn reads, parsed. A build reads upstream's switch here too.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

TRITON_ENABLE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
TRITON_AUTOTUNE = "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE"
KERNEL_SOURCE = "FLASH_ATTENTION_KERNEL_SOURCE"
MAX_LAUNCH_SECONDS = "FLASH_ATTENTION_MAX_LAUNCH_SECONDS"

_TRUE, _FALSE = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def seconds(env: Mapping[str, str], name: str) -> float | None:
    """The value of a variable in seconds, None where it is unset or empty. Raises ValueError if it is no number from 0
    on."""
    text = env.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name}={text} is no number of seconds")
    return value


def switch(env: Mapping[str, str], name: str) -> bool | None:
    """The value of a boolean variable, None where it is unset or empty. Raises ValueError for any other value."""
    text = env.get(name, "").strip()
    if not text:
        return None
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(f"{name}={text} is neither TRUE nor FALSE")
    return text.lower() in _TRUE
