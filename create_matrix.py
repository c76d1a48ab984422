#!/usr/bin/env python3
"""Defines which wheels a release contains. Prints the rows of the workflow's jobs as JSON, or with `--list` as a table.

Needs the standard library alone. `--missing FILE` reads the list that `python -m rocm_wheels published TAG >FILE`
wrote. rocm_wheels/versions.toml has all versions that exist.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rocm_wheels.cli import matrix

ROCM_MATRIX = {
    "flash_attn": ["2.6.3", "2.7.4", "2.8.3"],
    "python": ["3.10", "3.11", "3.12"],
    "torch": ["2.5.1", "2.6.0", "2.13.0", "2.14.1", "2.15.0"],
    "rocm": ["6.1", "6.2", "7.2", "7.14", "10.0", "10.1"],
    "backend": ["ck", "triton"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows and returns the exit code."""
    return matrix.main({"rocm": ROCM_MATRIX}, argv)  # "rocm": False switches the platform off


if __name__ == "__main__":
    sys.exit(main())
