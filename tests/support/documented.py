"""The commands in the repository's pages: lines of code blocks, and code in the text that is a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of the notes, those that say what to type: the kernel store, speed, the pipeline, programs, the simulator, releases.
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "docs/notes/[kps]*.md",
        "docs/notes/releases.md",
        "docker/*/README.md",
        "candle-flash-rocm/README.md",
    )
    for path in sorted(ROOT.glob(pattern))
)
# The first word of a command, after assignments of variables.
_PROGRAM = re.compile(
    r"(?:[A-Z_][A-Z0-9_]*=(?:\"[^\"]*\"|'[^']*'|\S*) +)*"
    r"(?:sudo |time )?"
    r"(?:\./|\.\\|\. |~/|/|build/|benchmarks/|env[\\/]|&)?"
    r"(?:[\w.+-]+/)*"
    r"(?P<program>actionlint|apt-get|bash|build_rocm\.sh|cargo|cd|check\.sh|create_matrix\.py|curl|docker|echo|export|"
    r"gh|git|grep|hf|huggingface-cli|install|ls|mypy|pip|pytest|python(?:3(?:\.\d+)?)?(?:\.exe)?|rocminfo|ruff|"
    r"run_tests\.sh|rustup|sha256sum|source|sudo|uv|winget|py|env|activate|modprobe|unset|set|\$env)\b"
)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_OTHER_LANGUAGES = ("python", "toml", "diff", "mermaid", "rust", "json", "c", "cpp", "xml", "yaml")


@dataclass(frozen=True, order=True)
class Command:
    """A command on a page, and the number of its line."""

    page: str
    line: int
    text: str


def commands(page: str) -> list[Command]:
    """The commands of a page, in their order. A page that repeats a command has it once."""
    result: dict[str, Command] = {}
    for number, code in parse((ROOT / page).read_text(encoding="utf-8")):
        result.setdefault(code, Command(page, number, code))
    return list(result.values())


def parse(text: str) -> list[tuple[int, str]]:
    """The number of its line, and each command, without HTML comments."""
    text = re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    return list(_commands(text.splitlines()))


def _commands(lines: list[str]) -> Iterator[tuple[int, str]]:
    fence, margin = "", 0  # the language of a fenced block; the indentation of the list item around a block
    in_block, blank = False, True
    joined: list[str] = []  # lines that end with a backslash
    for number, line in enumerate(lines, 1):
        code, indentation = line.strip(), len(line) - len(line.lstrip())
        if code.startswith("```"):
            fence = "" if fence else code[3:].partition(",")[0] or "sh"
        elif fence:
            if fence not in _OTHER_LANGUAGES:
                yield from _line(joined, number, code)
        elif code and indentation >= margin + 4 and (blank or in_block):
            in_block = True
            yield from _line(joined, number, code)
        elif code:
            in_block = False
            item = re.match(r"(?:\d+\.|[-*]) +", line)
            margin = len(item[0]) if item else margin if indentation else 0
            yield from ((number, span) for span in _SPAN.findall(line) if _is_command(span))
        blank = not code


def _line(joined: list[str], number: int, code: str) -> Iterator[tuple[int, str]]:
    """A line of a code block, joined with the lines that it continues; without its comment."""
    if code.endswith("\\"):
        joined.append(code[:-1].strip())
        return
    code = re.sub(r"(?:^|\s{2,})#\s.*$", "", " ".join([*joined, code])).strip()
    joined.clear()
    if code:
        yield number, code


def _is_command(code: str) -> bool:
    """Whether code in the text is a command: a program with an argument, not the name of a program or a file."""
    match = _PROGRAM.match(code)
    return match is not None and code[match.end() : match.end() + 1] == " "
