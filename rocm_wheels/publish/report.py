"""A report of the selftest from a user's GPU: its schema, and whether that GPU can be of that target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rocm_wheels.compile import sources
from rocm_wheels.errors import DataError
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.schema import ListSchema, MapSchema, ObjectSchema, none_or, number, one_of, problems, shown, text
from rocm_wheels.schema import load as load_json

REMEDY = "Ask for a run of `python -m flash_attn.selftest` with the wheel as it was published."
_MAX_BYTES = 1 << 20  # a real report has about 40 KiB
_MAX_PROBLEMS = 5  # number of problems that a message names
_TARGET = text(24, r"gfx[0-9a-f]+(-[0-9]+)?(-generic)?|gfx[0-9-]+-generic|sm_[0-9]+|cpu")
_VERSION = text(48, r"[0-9][0-9A-Za-z.+_-]*")
_NAME = text(80, r"[A-Za-z0-9][A-Za-z0-9 ,.;:()=/+*_-]*")
DEVICE = text(64, r"[A-Za-z0-9][A-Za-z0-9 ./()+_-]*")
_SENTENCE = text(300, empty=True)
_ERROR = none_or(number(most=1e6))
_TIME = none_or(number(most=1e7))
_FREE = none_or(lambda value: isinstance(value, str) and len(value) <= 4000)  # not shown to users

_WHEEL = ObjectSchema(
    {
        "version": _VERSION,
        "label": text(40, r"[a-z0-9.]+", empty=True),
        "targets": ListSchema(_TARGET, 64),
        "contents": text(64, r"[0-9a-f]+", empty=True),
        "sha256": text(64, r"[0-9a-f]{64}", empty=True),
        "damaged": ListSchema(text(200, r"[A-Za-z0-9_./+-]+"), 10_000),
    },
    {"backend": _FREE, "gpu_backend": _FREE},
)
_MACHINE = ObjectSchema(
    {
        "device": DEVICE,
        "target": _TARGET,
        "architecture": text(64, r"[A-Za-z0-9_:+-]+"),
        "driver": text(80, r"[A-Za-z0-9 .:_+~()-]+", empty=True),
        "python": _VERSION,
        "torch": _VERSION,
        "hip": none_or(_VERSION),
        "variables": MapSchema(text(64, r"[A-Za-z0-9.,_:-]+", empty=True), 16, text(64, r"[A-Z0-9_]+")),
    },
    {
        "memory_mib": number(whole=True),
        "compute_units": number(most=1e5, whole=True),
        "emulator": _NAME,
        "system": _FREE,
        "cuda": none_or(_VERSION),
        "triton": MapSchema(_VERSION, 8, _NAME),
    },
)
_CHECK = ObjectSchema(
    {
        "check": _NAME,
        "group": _NAME,
        "ok": one_of(True, False, None),
        "forward": _ERROR,
        "backward": _ERROR,
        "limits": ListSchema(number(most=1e6), 2),
    },
    {
        "failure": _FREE,
        "kernels": ListSchema(_FREE, 1000),
        "notes": ListSchema(_FREE, 100),
        "seconds": number(most=1e6),
    },
)
_SPEED = ObjectSchema(
    {"shape": _NAME},
    {
        **dict.fromkeys(("forward_ms", "backward_ms", "sdpa_forward_ms", "sdpa_backward_ms"), _TIME),
        "sdpa": _FREE,
        "failure": _FREE,
    },
)
SCHEMA = ObjectSchema(
    {
        "format": number(whole=True),
        "date": text(10, r"\d{4}-\d\d-\d\d"),
        "ok": one_of(True, False),
        "trouble": _SENTENCE,
        "wheel": _WHEEL,
        "machine": _MACHINE,
        "checks": ListSchema(_CHECK, 1000),
        "speed": ListSchema(_SPEED, 50),
    },
    # What `python -m flash_attn.firstlight` adds to a report.
    {
        "firstlight": number(whole=True),
        "troubles": MapSchema(_SENTENCE, 8, _NAME),
        "shapes": ListSchema(_SPEED, 50),
        **dict.fromkeys(("probes", "providers"), ListSchema(lambda line: isinstance(line, dict), 500)),
    },
)


def read(path: Path) -> Any:
    """The content of a report. Raises DataError unless all of it has the schema that the selftest writes."""
    try:
        with path.open("rb") as file:
            content = load_json(path.name, file.read(_MAX_BYTES + 1), _MAX_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy="Give the file of the report.") from error
    expected = sources.module("diagnosis.selftest.cases").FORMAT
    there = content.get("format") if isinstance(content, dict) else None
    if there != expected:
        raise DataError(f"{path.name} has format {shown(there)}, this command reads format {expected}", remedy=REMEDY)
    wrong = list(problems(content, SCHEMA))
    if wrong:
        more = f", and {len(wrong) - _MAX_PROBLEMS} more" if len(wrong) > _MAX_PROBLEMS else ""
        raise DataError(
            f"{path.name} has not the form that the selftest writes: {'; '.join(wrong[:_MAX_PROBLEMS])}{more}",
            remedy=REMEDY,
        )
    return content


def wrong_device(device: str, target: str, versions: Versions) -> str:
    """The reason why a GPU with that name cannot be of that target, "" if it can: by products and families of
    versions.toml.

    A name that versions.toml does not know, such as "AMD Radeon Graphics", may be any GPU of its kind.
    """
    words = re.findall(r"[a-z0-9]+", device.lower())
    if not {"amd", "radeon", "instinct", "ryzen"} & set(words) and not re.search(
        r"\bgfx|\bdevice [0-9a-f]{4}", device.lower()
    ):
        return "is no name of an AMD GPU"
    runs = ["".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)]
    products = {product: name for name, each in versions.targets.items() for product in each.products}
    named = max((run for run in runs if run in products), key=len, default="")
    if named and products[named] != target:
        return f"is {products[named]}"
    is_instinct = versions.targets[target].family.startswith("MI")
    if is_instinct and "radeon" in words and "instinct" not in words:
        return "is a Radeon, and that target an Instinct"
    if not is_instinct and "instinct" in words:
        return "is an Instinct, and that target none"
    return ""
