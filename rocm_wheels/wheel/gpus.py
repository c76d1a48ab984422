"""Names of GPUs in reports: which names are the same GPU, as drivers spell it."""

from __future__ import annotations

import re

NAMELESS = "a GPU without a name"  # a GPU whose tests failed before they named it
_BRANDS = {"amd", "radeon", "instinct", "ryzen", "graphics", "gpu", "tm", "r"}


def named(device: str, target: str) -> str:
    """The name of a GPU in a report: "AMD Instinct MI300X (gfx942)"."""
    return f"{device} ({target})"


def answers(newer: str, older: str) -> bool:
    """Whether a report of the GPU `newer` is about the GPU `older`, both by `named`.

    Drivers spell one GPU with or without its brand and its form, and may know nothing but the target. A GPU without a
    name can be any AMD GPU.
    """
    device, _, target = newer.rpartition(" (")
    old_device, _, old_target = older.rpartition(" (")
    if older == NAMELESS:
        return newer == NAMELESS or target.startswith("gfx")
    words, old_words = _words(device), _words(old_device)
    same = "".join(words) == "".join(old_words) or set(old_words) <= set(words)
    return target == old_target and (same or bool(words and set(words) <= set(old_words)))


def _words(device: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", device.lower()) if word not in _BRANDS]
