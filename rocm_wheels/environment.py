"""Parses the environment variables that a build reads. Each error names the variable, its value and a remedy."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from rocm_wheels.errors import BadTarget, DataError
from rocm_wheels.package_modules import module

TORCH_TARGETS = "PYTORCH_ROCM_ARCH"  # images of rocm/pytorch set it to the targets of their torch
TARGET_VARIABLES = ("GPU_ARCHS", TORCH_TARGETS)
NATIVE = "native"
TRITON_ENABLE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
BUILD_TRITON = "BUILD_TRITON_BACKEND"
# A zip file holds dates from 1980-01-01 to the end of 2107, here in seconds since 1970, UTC.
OLDEST_EPOCH, NEWEST_EPOCH = 315532800, 4354819199


def flag(env: Mapping[str, str], name: str) -> bool:
    """A boolean variable; False if it is unset. Raises DataError for a value that is neither true nor false."""
    return bool(_switch(env, name))


def _switch(env: Mapping[str, str], name: str) -> bool | None:
    try:
        value: bool | None = module("core.environment").switch(env, name)
    except ValueError as error:
        raise DataError(str(error), remedy=f"Set {name}=TRUE, or unset it.") from None
    return value


def backend(env: Mapping[str, str]) -> str | None:
    """The backend that FLASH_ATTENTION_TRITON_AMD_ENABLE requests; None if the variable is unset."""
    return {None: None, True: "triton", False: "ck"}[_switch(env, TRITON_ENABLE)]


def max_jobs(env: Mapping[str, str]) -> int | None:
    """MAX_JOBS; None if it is unset. Raises DataError if it is malformed."""
    text = env.get("MAX_JOBS", "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise DataError(
            f"MAX_JOBS={text!r} is not a whole number above 0",
            remedy="Unset MAX_JOBS to let cores and memory decide.",
        )
    return int(text)


def source_date_epoch(env: Mapping[str, str]) -> int | None:
    """SOURCE_DATE_EPOCH, at least the oldest date of a zip file; None if it is unset. Raises DataError if it is
    malformed.
    """
    text = env.get("SOURCE_DATE_EPOCH", "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > NEWEST_EPOCH:
        raise DataError(
            f"SOURCE_DATE_EPOCH={text!r} is not a number of seconds from 0 to {NEWEST_EPOCH}",
            remedy="Unset it, or set it to a number such as $(date +%s).",
        )
    return max(int(text), OLDEST_EPOCH)


def target_lists(env: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Variable -> the targets that it names, in lower case, or ("native",). Variables without targets are left out.

    GPU_ARCHS, flash-attn's own variable, comes before torch's variable. Raises BadTarget for native together with
    targets.
    """
    lists = {}
    for name in TARGET_VARIABLES:
        entries = tuple(itertools.chain(*map(_entries, re.split("[;,]", env.get(name, "").lower()))))
        if NATIVE in entries and len(entries) > 1:
            raise BadTarget(
                f"{name}={';'.join(entries)} mixes native with targets",
                remedy="Name native alone, or targets only.",
            )
        if entries:
            lists[name] = entries
    return lists


def _entries(text: str) -> list[str]:
    """The entries between two separators: one or more targets, or one product of several words such as "rx 7900
    xtx".
    """
    words = text.split()
    several = all(re.match(r"gfx|sm_|mi\d|native", word) for word in words)
    return words if several else [" ".join(words)]


def home() -> Path | None:
    """The user's home directory; None if the system has none, for example for a numeric user in a container."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cache_directory(env: Mapping[str, str]) -> Path:
    """$ROCM_WHEELS_CACHE, else rocm_wheels in the user's cache directory. Raises DataError for a user without a home
    directory.
    """
    if own := env.get("ROCM_WHEELS_CACHE"):
        return Path(own)
    if caches := env.get("XDG_CACHE_HOME"):
        return Path(caches) / "rocm_wheels"
    if (directory := home()) is None:
        raise DataError(
            "HOME is not set, so it is not known where compiled kernels are kept",
            remedy="Set ROCM_WHEELS_CACHE to a directory, or HOME.",
        )
    return directory / ".cache" / "rocm_wheels"
