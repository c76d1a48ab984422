"""The doctor's part of the messages on Windows is the same on Linux, so a change of it is seen without Wine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / "golden" / "messages_on_windows.txt"


def sections(text: str) -> list[str]:
    """The sections of the doctor, each with its title."""
    return [part for part in re.split("(?m)^== ", text) if part.startswith("doctor, ")]


def test_the_doctors_messages_are_those_of_the_file() -> None:
    paths = [str(ROOT / part) for part in ("flash_attn_src", "flash_attn_src/tests", "tests/support")]
    code = f"import sys; sys.path[:0] = {paths!r}; import windows_messages; windows_messages.doctor()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = sections(done.stdout)
    assert len(result) > 20
    assert result == sections(GOLDEN.read_text(encoding="utf-8")), (
        "pytest --update-golden tests/test_wine.py -k messages"
    )
