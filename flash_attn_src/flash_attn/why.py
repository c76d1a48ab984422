"""`python -m flash_attn.why PROGRAM ...` runs a program and says what its attention costs, and what would be faster.

SDPA and FlexAttention are served by flash_attn meanwhile. The report goes to stderr at the end, also where the program
ends with an error.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from flash_attn.diagnosis.costs import Costs
from flash_attn.flex import use_for_flex
from flash_attn.sdpa import use_for_sdpa
from flash_attn.sdpa.program import run


def main(words: list[str]) -> None:
    """Runs the program that the words name. Exits with status 2 for words that name none."""
    costs, started = Costs(), 0.0
    with ExitStack() as active:

        def begin() -> None:
            nonlocal started
            for each in (use_for_sdpa(), use_for_flex(), costs.watching()):
                active.enter_context(each)
            started = time.perf_counter()

        try:
            run(words, "flash_attn.why", begin)
        finally:
            active.close()
            if started:
                print(costs.report(time.perf_counter() - started), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
