"""Looks for a call that breaks a property: `python flash_attn_src/tests/hunt.py --seconds 120`, best on a GPU.

It draws cases at random until the time is over, and prints each that breaks a property with the seed that draws it:
`--only NAME --seed SEED` runs that case alone. Exit status 1 says that there was one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

_TESTS = Path(__file__).resolve().parent
for _directory in (_TESTS, _TESTS.parent):
    sys.path.insert(0, str(_directory))

from properties import DEVICE, PROPERTIES, draw_case  # noqa: E402 - after the path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--only", choices=[holds.__name__ for holds in PROPERTIES])
    parser.add_argument("--seed", type=int, help="one case, the one of this seed")
    arguments = parser.parse_args()
    properties = [holds for holds in PROPERTIES if arguments.only in (None, holds.__name__)]
    start = time.monotonic()
    tried = broken = 0
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    while True:
        case = draw_case(random.Random(seed))
        for holds in properties:
            tried += 1
            try:
                holds(case)
            except Exception as error:
                broken += 1
                print(f"{holds.__name__} --seed {seed}: {case}\n  {type(error).__name__}: {error}", flush=True)
        seed += 1
        if arguments.seed is not None or time.monotonic() - start > arguments.seconds:
            break
    print(f"{tried} calls on {DEVICE}, {broken} broke a property")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
