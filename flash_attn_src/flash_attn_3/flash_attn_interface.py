"""The name that the interface has within this package: the module flash_attn_interface itself."""

import sys

import flash_attn_interface

sys.modules[__name__] = flash_attn_interface
