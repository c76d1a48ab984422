"""`python -m rocm_wheels <verb>`."""

from __future__ import annotations

import sys

from rocm_wheels.cli import main

if __name__ == "__main__":
    sys.exit(main())
