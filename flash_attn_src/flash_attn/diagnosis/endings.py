"""How a process ended, in words."""

from __future__ import annotations

import signal

# The statuses of Windows (NTSTATUS) that a program ends with when a library fails.
_STATUSES = {
    0xC0000005: "access violation",
    0xC000001D: "illegal instruction",
    0xC00000FD: "stack overflow",
    0xC0000135: "a DLL is missing",
    0xC0000409: "abort",
}
_ERRORS_OF_WINDOWS = 0x80000000  # and above


def ending(code: int) -> str:
    """An exit code as `subprocess` gives it: "signal 11 (SIGSEGV)", "0xC0000005 (access violation)", "exit code 1"."""
    if code < 0:
        known = {each.value: each.name for each in signal.Signals}
        return f"signal {-code}" + (f" ({known[-code]})" if -code in known else "")
    if code >= _ERRORS_OF_WINDOWS:
        return f"0x{code:08X}" + (f" ({_STATUSES[code]})" if code in _STATUSES else "")
    return f"exit code {code}"
