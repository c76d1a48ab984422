"""What `flash_attn.diagnosis.advice` knows: versions.toml, as JSON. It is in every wheel and on the site."""

from __future__ import annotations

from typing import Any

from rocm_wheels.matrix.versions import Target, Versions
from rocm_wheels.package_modules import module
from rocm_wheels.tables import version_key


def facts(versions: Versions) -> dict[str, Any]:
    """The facts, JSON-ready."""
    targets = module("kernels.targets")
    return {
        "python": list(versions.python),
        "amd_python": list(versions.advice.amd_python),
        "oldest_torch": versions.advice.oldest_torch,
        "recommended": versions.advice.rocm,
        "device_packages": versions.advice.device_packages,
        "generic_since": ".".join(map(str, targets.GENERIC_SINCE)),
        "rocm": {
            name: {"uncertain": bool(rocm.uncertain), "amd_index": rocm.amd_index}
            for name, rocm in versions.rocm.items()
        },
        "torch": {
            name: {"python": list(torch.python), "rocm": dict(torch.rocm), "uncertain": bool(torch.uncertain)}
            for name, torch in versions.torch.items()
        },
        "targets": {name: _target(target) for name, target in versions.targets.items() if not target.is_generic},
    }


def _target(target: Target) -> dict[str, Any]:
    runs_as, override = module("kernels.targets").override(target.name) or ("", "")
    return {
        "products": list(target.products),
        "since": min(target.backends.values(), key=version_key),
        "pytorch": target.pytorch or "",
        "generic": target.universal is not None,
        "integrated": target.integrated,
        "windows": target.windows,
        "runs_as": runs_as,
        "override": override,
    }
