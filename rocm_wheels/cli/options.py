"""Command-line options that several verbs have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rocm_wheels.environment import cache_directory


def add_without(parser: argparse.ArgumentParser) -> None:
    """Adds --without, a list in `arguments.without`."""
    parser.add_argument(
        "--without",
        action="append",
        choices=("asm",),
        default=[],
        help="leave out a kernel provider of the ck backend: asm (AMD's assembly kernels)",
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Adds --cache. `cache_of` returns its value."""
    parser.add_argument(
        "--cache",
        type=directory,
        metavar="DIR",
        help="compiled kernels, kept between builds (default: $ROCM_WHEELS_CACHE, else ~/.cache/rocm_wheels)",
    )


def cache_of(arguments: argparse.Namespace) -> Path:
    """Returns the absolute path of the kernel cache. Raises DataError for a user without a home directory."""
    return (arguments.cache or cache_directory(os.environ)).absolute()


def directory(text: str) -> Path:
    """A directory from a variable. An empty value counts as unset; otherwise it would mean the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the directory is empty")
    return Path(text)
