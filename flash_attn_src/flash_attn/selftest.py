"""`python -m flash_attn.selftest` checks this flash_attn on your GPU and writes a report that you can send."""

import sys

from flash_attn.diagnosis.selftest.command import main

if __name__ == "__main__":
    sys.exit(main())
