"""What a run builds: the cells of all platforms, selected; and the command line of create_matrix.py."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rocm_wheels import names, published, rows, versions
from rocm_wheels.cells import AXES, Cell, has_interface, product
from rocm_wheels.errors import DataError, exit_code
from rocm_wheels.plan import requested_targets
from rocm_wheels.rows import Row, cell_name, stem
from rocm_wheels.verdict import VERDICT
from rocm_wheels.versions import Versions

Platforms = Mapping[str, Mapping[str, Sequence[str]] | bool]

EVENTS = ("pull_request", "push", "workflow_dispatch")


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The selected cells, and (combination, reason) for the others."""

    cells: tuple[Cell, ...]
    left_out: tuple[tuple[str, str], ...]

    def reasons(self) -> list[str]:
        """A line for each reason, with what it holds for."""
        named: dict[str, list[str]] = {}
        for name, why in self.left_out:
            named.setdefault(why, []).append(name)
        lines = []
        for why, which in named.items():
            few = ", ".join(which) if len(which) <= 3 else f"{which[0]} to {which[-1]}, {len(which)} in all"
            lines.append(f"left out: {few}: {why}")
        return lines


def select(
    data: Versions,
    platforms: Platforms,
    *,
    only: str = "*",
    event: str = "push",
    has: Sequence[str] = (),
) -> Matrix:
    """The cells of all platforms that are on and whose backend is ready, in ascending order.

    `only` is a glob over `cell_name`; a pull request gets the oldest and the newest cell; `has` are names of
    published files: a cell whose wheel, verdict and wheel of flash-attn-3 are among them is left out. DataError if the
    glob matches no cell.
    """
    cells: list[Cell] = []
    left_out: list[tuple[str, str]] = []
    for platform, wanted in platforms.items():
        if wanted is False:
            left_out.append((platform, "switched off"))
            continue
        if wanted is True:
            raise DataError(f"platform {platform!r} is on without a matrix", remedy="Give it its axes, or False.")
        found, impossible = product(data, wanted)
        left_out += [(" ".join(values[axis] for axis in AXES), why) for values, why in impossible]
        for cell in found:
            if data.backends[cell.backend].ready:
                cells.append(cell)
            else:
                left_out.append((cell_name(cell), f"the {cell.backend} backend is not ready (versions.toml)"))
    cells.sort()
    matching = [cell for cell in cells if fnmatch.fnmatchcase(cell_name(cell), only)]
    if cells and not matching:
        raise DataError(
            f"no cell matches {only!r}",
            remedy=f"Cells read as {cell_name(cells[0])!r}; `--list` shows all, '2.8.3 * 6.2 *' matches some.",
        )
    if event == "pull_request":
        matching = list(dict.fromkeys((matching[0], matching[-1]))) if matching else []
    there = {stem(name) for name in has if name.endswith(".whl") and name + VERDICT in has}
    missing = [
        cell
        for cell in matching
        if stem(names.wheel_name(cell)) not in there
        or (has_interface(data, cell) and names.interface_wheel_name(cell) not in has)
    ]
    left_out += [(cell_name(cell), "already released") for cell in matching if cell not in missing]
    return Matrix(cells=tuple(missing), left_out=tuple(left_out))


def main(platforms: Platforms, argv: Sequence[str] | None = None) -> int:
    """The command line of create_matrix.py; a failure is one message on stderr."""
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _run(platforms, arguments))


def _run(platforms: Platforms, arguments: argparse.Namespace) -> int:
    data = versions.load()
    selected = select(
        data,
        platforms,
        only=arguments.only,
        event=arguments.event,
        has=published.files(arguments.missing) if arguments.missing else (),
    )
    requested, notes = (arguments.target, ()) if arguments.target else requested_targets(data, os.environ)
    made = rows.rows(data, selected.cells, requested)
    for line in (*selected.reasons(), *(f"note: {note}" for note in notes)):
        print(line, file=sys.stderr)
    print(_TEXTS[arguments.form](made, arguments.tag))
    return 0


def _json(made: dict[str, list[Row]], tag: str) -> str:
    return json.dumps({"tag": tag, **{name: {"include": each} for name, each in made.items()}}, indent=2)


def _outputs(made: dict[str, list[Row]], tag: str) -> str:
    lines = [f"tag={tag}"]
    for name, each in made.items():
        lines += [f"{name}={json.dumps({'include': each})}", f"{name}-count={len(each)}"]
    lines.append(f"newest={json.dumps({'include': _newest(made['wheels'])})}")
    return "\n".join(lines)


def _newest(wheels: list[Row]) -> list[Row]:
    """The newest cell's first wheel: by Composable Kernel where both backends are built, with the kernels of both."""
    cells = [str(row["name"]).rpartition(" ")[0] for row in wheels]
    return wheels[cells.index(cells[-1]) :][:1] if wheels else []


def _listing(made: dict[str, list[Row]], tag: str) -> str:
    lines = [f"{name:<8} {row['name']:<28} {row['runner']}  {row['container'] or 'no container'}"
             for name, each in made.items() for row in each]  # fmt: skip
    counts = ", ".join(f"{len(each)} {name}" for name, each in made.items())
    return "\n".join([*lines, f"{counts}{f' for {tag}' if tag else ''}"])


_TEXTS: dict[str, Callable[[dict[str, list[Row]], str], str]] = {
    "json": _json,
    "list": _listing,
    "github": _outputs,
}


def _tag(text: str) -> str:
    return names.release_tag(text) if text else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="create_matrix.py", description="Prints what the release builds, as JSON.")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cells that match, as '2.8.3 * * 6.2 triton'")
    parser.add_argument(
        "--event",
        choices=EVENTS,
        default="push",
        help="what started the run: a pull_request gets the oldest and the newest cell",
    )
    parser.add_argument(
        "--missing",
        default="",
        metavar="RELEASE",
        help="leave out what this release has: a tag ($GITHUB_REPOSITORY, $GITHUB_TOKEN), or a file of GitHub's JSON",
    )
    parser.add_argument(
        "--tag", type=_tag, default="", metavar="vX.Y.Z", help="the release it is for; checked, printed"
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="GFX",
        help="these GPU targets alone; may be repeated (default: PYTORCH_ROCM_ARCH or GPU_ARCHS, else all common ones)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--list", dest="form", action="store_const", const="list", help="a line for each row, for people")
    form.add_argument(
        "--github-output", dest="form", action="store_const", const="github", help="lines for $GITHUB_OUTPUT"
    )
    parser.set_defaults(form="json")
    return parser
