"""`python -m flash_attn.sdpa PROGRAM ...`: runs a Python program and serves its scaled_dot_product_attention.

PROGRAM is a file, or -m and a module, as Python itself takes them. A line on stderr says that it is active, and at the
end the report says which calls were served. An environment variable would need code that every start of Python runs:
so there is none.
"""

from __future__ import annotations

import atexit
import sys

from flash_attn.sdpa import sdpa_report, use_for_sdpa
from flash_attn.sdpa.program import run


def _serve() -> None:
    use_for_sdpa()
    print("flash_attn: scaled_dot_product_attention is served where it can be", file=sys.stderr)
    atexit.register(lambda: print(sdpa_report(), file=sys.stderr))


if __name__ == "__main__":
    run(sys.argv[1:], "flash_attn.sdpa", _serve)
