"""`python -m flash_attn.doctor` finds what is wrong with this installation, and prints remedies."""

import sys

from flash_attn.diagnosis.doctor import main

if __name__ == "__main__":
    sys.exit(main())
