"""The machine of a selftest: versions, GPU, driver. Nothing that names a person or a host."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

from flash_attn.core.build_info import load
from flash_attn.core.platform import PLATFORM
from flash_attn.diagnosis import advice
from flash_attn.diagnosis.survey import TRITONS, known
from flash_attn.kernels.targets import serving_targets

# Variables that change what runs. Their values are numbers, targets or TRUE. Only these variables are reported.
_VARIABLES = (
    "FLASH_ATTENTION_TRITON_AMD_ENABLE",
    "FLASH_ATTENTION_KERNEL_SOURCE",
    "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE",
    "FLASH_ATTENTION_MAX_LAUNCH_SECONDS",
    "HSA_OVERRIDE_GFX_VERSION",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
)


def chosen(targets: tuple[str, ...]) -> int | None:
    """The GPU that counts here, as `advice.place` has it; None without a GPU."""
    devices = [target(index) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    served = [bool({*serving_targets(device, torch.version.hip)} & {*targets}) for device in devices]
    return advice.place(known(load()), devices, served) if devices else None


def target(index: int) -> str:
    """gfx942, sm_90 ..."""
    return architecture(index).split(":")[0]


def architecture(index: int) -> str:
    """The target with its features, as torch names it: "gfx942:sramecc+:xnack-"."""
    properties = torch.cuda.get_device_properties(index)
    return properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"


def facts(index: int | None) -> dict[str, Any]:
    """The machine part of a report. `index` is the number of the GPU, None for the CPU.

    "emulator" is there only if the GPU is emulated: the GPU's name and target are then the emulator's words.
    """
    fields: dict[str, Any] = {
        "device": "CPU",
        "target": "cpu",
        "architecture": platform.machine(),
        "memory_mib": 0,
        "compute_units": 0,
    }
    if index is not None:
        properties = torch.cuda.get_device_properties(index)
        fields = {
            "device": properties.name,
            "target": target(index),
            "architecture": architecture(index),
            "memory_mib": properties.total_memory >> 20,
            "compute_units": properties.multi_processor_count,
        }
    if emulator := PLATFORM.emulator():
        fields["emulator"] = emulator
    return fields | {
        "driver": PLATFORM.gpu_driver(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "triton": {name: version for name in TRITONS if (version := _version(name))},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
