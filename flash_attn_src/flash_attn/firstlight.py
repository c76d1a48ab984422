"""`python -m flash_attn.firstlight`: the first hour on a GPU in ten minutes, with a report that you can send."""

import sys

from flash_attn.diagnosis.firstlight.command import main

if __name__ == "__main__":
    sys.exit(main())
