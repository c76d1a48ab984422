"""The version of an interface's wheel, with the label of the cell, and the flash_attn of the same label."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def _versions(root: Path) -> dict[str, Any]:
    """versions.toml, beside flash_attn_src in the repository and inside it in an sdist."""
    for parent in (root.parent, root.parent.parent):
        if (path := parent / "rocm_wheels" / "versions.toml").is_file():
            toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
            versions: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
            return versions
    raise SystemExit(f"error: no rocm_wheels near {root}: build from a whole checkout or sdist")


class MetadataHook(MetadataHookInterface):
    """Reads FLASH_ATTN_VERSION and FLASH_ATTN_LOCAL_VERSION, as the build of flash_attn does."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root).resolve()
        versions = _versions(root)
        releases = [name for name, release in versions["flash_attn"].items() if name == release]
        flash_attn = os.environ.get("FLASH_ATTN_VERSION") or releases[-1]
        label = os.environ.get("FLASH_ATTN_LOCAL_VERSION")
        suffix = f"+{label}" if label else ""
        metadata["version"] = versions["interfaces"][root.name]["version"] + suffix
        metadata["dependencies"] = [f"flash_attn=={flash_attn}{suffix}"]
