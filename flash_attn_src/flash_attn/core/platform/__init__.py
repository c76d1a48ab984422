"""What of flash_attn depends on the operating system. Nothing else in the package asks which system it runs on.

PLATFORM is the system of this process. Another system is another module with a subclass of `Platform`. The modules need
the standard library only, and none at import that one of the systems lacks.
"""

from __future__ import annotations

import sys

from flash_attn.core.platform.base import Platform
from flash_attn.core.platform.linux import Linux
from flash_attn.core.platform.windows import Windows

# A system of neither kind has no wheels. The package serves CPU tensors there by the names of Linux.
PLATFORM: Platform = Windows() if sys.platform == "win32" else Linux()

__all__ = ["PLATFORM", "Platform"]
