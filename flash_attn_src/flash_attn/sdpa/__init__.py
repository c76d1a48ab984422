"""PyTorch's scaled_dot_product_attention (SDPA) on the kernels of this package, for programs that ask for it.

    import flash_attn

    flash_attn.use_for_sdpa()              # from here on; or for a while:
    with flash_attn.use_for_sdpa():
        ...
    print(flash_attn.sdpa_report())        # calls that were served, and calls that PyTorch got, with reasons

    python -m flash_attn.sdpa main.py ...  # the same for a program that is not changed

modes.py        what records a call instead of running it
override.py     the kernel in PyTorch's dispatcher, and who uses it
compiled.py     what torch.compile has to know
attention.py    SDPA in the terms of flash_attn_func
switch.py       use_for_sdpa
report.py       counts
program.py      runs a program that is not changed

With torch 2.11 or newer, PyTorch's own choice of an implementation has the name "flash_attn" too: see
flash_attn.sdpa.aten. Nothing is active by an import alone.
"""

from __future__ import annotations

from flash_attn.sdpa import aten
from flash_attn.sdpa.attention import attention_or_reason
from flash_attn.sdpa.report import Report, sdpa_report
from flash_attn.sdpa.switch import Active, use_for_sdpa

__all__ = ["Active", "Report", "attention_or_reason", "sdpa_report", "use_for_sdpa"]

aten.register()
