"""The version, with the label of the cell, and the flash_attn of the same label."""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_INTERFACE = "3.0.0"
_FLASH_ATTN = "2.8.3"


class MetadataHook(MetadataHookInterface):
    """Reads FLASH_ATTN_VERSION and FLASH_ATTN_LOCAL_VERSION, as the build of flash_attn does."""

    def update(self, metadata: dict[str, Any]) -> None:
        flash_attn = os.environ.get("FLASH_ATTN_VERSION") or _FLASH_ATTN
        label = os.environ.get("FLASH_ATTN_LOCAL_VERSION")
        suffix = f"+{label}" if label else ""
        metadata["version"] = _INTERFACE + suffix
        metadata["dependencies"] = [f"flash_attn=={flash_attn}{suffix}"]
