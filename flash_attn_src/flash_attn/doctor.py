"""`python -m flash_attn.doctor` says what is wrong with this installation and what to do."""

import sys

from flash_attn.diagnosis.doctor import main

if __name__ == "__main__":
    sys.exit(main())
