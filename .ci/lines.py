"""Prints how many lines a change adds to the product and to the tests, and holds the product to a budget.

    python .ci/lines.py [BASE]

BASE: what the change is compared with (default: origin's branch of a pull request, else origin/main). Where git does
not know it, the balance is left out. The budget is [tool.lines] of pyproject.toml: a change that needs more lines
raises it there, where a review sees it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

CODE = {".bat", ".c", ".cpp", ".h", ".hpp", ".j2", ".js", ".py", ".rs", ".sh", ".yml"}
TESTS = {"tests", "wheel_tests"}
_BUDGET = re.compile(r"^\[tool\.lines\]\nbudget = ([\d_]+)$", re.MULTILINE)  # tomllib is in Python 3.11 and newer alone


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def part(path: str) -> str:
    """ "product" or "tests" for a file of code, "" for another one."""
    name = PurePosixPath(path)
    if name.suffix not in CODE:
        return ""
    return "tests" if TESTS & set(name.parts) else "product"


def size() -> Counter[str]:
    """The lines of the tracked files, by part."""
    counts: Counter[str] = Counter()
    for path in git("ls-files", "-z").split("\0"):
        if part(path) and Path(path).is_file():
            counts[part(path)] += Path(path).read_bytes().count(b"\n")
    return counts


def balance(base: str) -> dict[str, tuple[int, int]]:
    """Part -> (lines added, lines removed) since the commit at which the change left the base."""
    changes = {"product": (0, 0), "tests": (0, 0)}
    for line in git("diff", "--numstat", "--no-renames", f"{base}...HEAD").splitlines():
        added, removed, path = line.split("\t")
        if (of := part(path)) and added != "-":
            changes[of] = (changes[of][0] + int(added), changes[of][1] + int(removed))
    return changes


def main(base: str) -> int:
    """Prints the balance; 1 where the product is larger than its budget."""
    has_base = subprocess.run(["git", "rev-parse", "--quiet", "--verify", f"{base}^{{commit}}"], capture_output=True)
    for name, (added, removed) in balance(base).items() if has_base.returncode == 0 else ():
        print(f"lines: {name} +{added} -{removed}, {added - removed:+d} since {base}")
    lines, match = size(), _BUDGET.search(Path("pyproject.toml").read_text(encoding="utf-8"))
    if match is None:
        sys.exit("error: pyproject.toml has no budget\nAdd [tool.lines] with a line such as: budget = 80_000")
    budget = int(match[1])
    print(f"lines: product {lines['product']} of {budget}, tests {lines['tests']}")
    if lines["product"] > budget:
        print(
            f"error: the product has {lines['product'] - budget} lines more than its budget\n"
            "Delete what the change makes needless, or raise budget in [tool.lines] of pyproject.toml.",
            file=sys.stderr,
        )
    return int(lines["product"] > budget)


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    sys.exit(main(sys.argv[1] if sys.argv[1:] else f"origin/{os.environ.get('GITHUB_BASE_REF') or 'main'}"))
