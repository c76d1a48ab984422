"""The command line of create_matrix.py: prints the rows of the workflow's jobs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rocm_wheels.errors import exit_code
from rocm_wheels.matrix import names, release_plan, rows, versions
from rocm_wheels.matrix.cells import Claim
from rocm_wheels.matrix.release_plan import ReleasePlan
from rocm_wheels.matrix.requested import Requested, from_environment
from rocm_wheels.matrix.rows import Row
from rocm_wheels.matrix.select import Platforms, select
from rocm_wheels.publish import figures, published
from rocm_wheels.wheel import assemble

EVENTS = ("pull_request", "push", "workflow_dispatch")


def main(platforms: Platforms, argv: Sequence[str] | None = None) -> int:
    """Runs create_matrix.py. A failure prints one message on stderr."""
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _run(platforms, arguments))


def _run(platforms: Platforms, arguments: argparse.Namespace) -> int:
    data = versions.load()
    asked = Requested(tuple(arguments.target), "--target") if arguments.target else from_environment(data, os.environ)
    requested = None if asked.of_this_machine else asked.targets
    selected = select(
        data,
        platforms,
        only=arguments.only,
        event=arguments.event,
        has=published.there(arguments.missing) if arguments.missing else {},
        requested=requested,
    )
    if arguments.missing and (selected.cells or selected.universals):
        published.check_open(arguments.missing)
    cells, lacking = rows.with_targets(data, selected.cells, requested)
    if not selected.universals:
        cells = cells or selected.cells  # the first one tells why it cannot be
    sample = data.jobs.sample_targets if arguments.event == "pull_request" and requested is None else None
    made = rows.rows(data, cells, requested, selected.universals, universal_targets=sample)
    left_out = [*selected.reasons(), *lacking, *(f"note: {line}" for line in rows.left_out(data, cells, requested))]
    if len(left_out) > 1 and not arguments.verbose:
        left_out = [f"left out: combinations for {len(left_out)} reasons; --verbose prints them"]
    uncertain = dict.fromkeys(why for cell in cells for why in data.uncertain(cell.torch, cell.rocm))
    for line in (*left_out, *(f"note: {note}" for note in (*asked.notes, *uncertain))):
        print(line, file=sys.stderr)
    if arguments.form in ("plan", "list"):
        spent = figures.cost(data, made)
        print(
            f"note: a release of this is about {spent['jobs-after']} jobs and {spent['hours-after']} hours of runners, "
            "less what is cached (estimated: docs/notes/release-cost.md)",
            file=sys.stderr,
        )
    if arguments.form == "plan":
        claims: list[Claim] = [*selected.universals, *selected.cells]
        wheels = release_plan.planned(data, claims, requested, universal_targets=sample)
        commit = os.environ.get("GITHUB_SHA") or assemble.commit()
        print(ReleasePlan(tag=arguments.tag, commit=commit, wheels=wheels).as_json(), end="")
    else:
        print(_TEXTS[arguments.form](made, arguments.tag))
    return 0


def _json(made: dict[str, list[Row]], tag: str) -> str:
    return json.dumps({"tag": tag, **{name: {"include": each} for name, each in made.items()}}, indent=2)


def _outputs(made: dict[str, list[Row]], tag: str) -> str:
    lines = [f"tag={tag}"]
    for name, each in made.items():
        lines += [f"{name}={json.dumps({'include': each})}"] if name != "wheels" else []  # no job has these rows
    lines += [f"{name}-count={len(made[name])}" for name in ("kernels", "wheels")]
    lines.append(f"artifacts-count={len(made['assemble']) + len(made['verify'])}")
    data = versions.load()
    lines.append(f"windows-count={rows.count_for_windows(data, made['wheels'])}")
    lines.append(f"newest={json.dumps({'include': rows.newest(data, made['wheels'])})}")
    return "\n".join(lines)


def _listing(made: dict[str, list[Row]], tag: str) -> str:
    built = {name: made[name] for name in ("kernels", "wheels")}
    lines = [f"{name:<8} {row['name']:<28} {row['runner']}  {row['container'] or 'no container'}"
             for name, each in built.items() for row in each]  # fmt: skip
    lines += [f"{name:<8} {row['name']:<28} {row['runner']}" for name in ("assemble", "verify") for row in made[name]]
    lines += [f"{'gpu':<8} {row['name']:<28} {row['gpu-runner']}" for row in made["gpu"]]
    counts = ", ".join(f"{len(each)} {name}" for name, each in built.items())
    return "\n".join([*lines, f"{counts}{f' for {tag}' if tag else ''}"])


_TEXTS: dict[str, Callable[[dict[str, list[Row]], str], str]] = {
    "json": _json,
    "list": _listing,
    "github": _outputs,
}


def _file(text: str) -> Path | None:
    """The path in a variable, or None: a workflow without a release passes an empty name."""
    return Path(text) if text else None


def _tag(text: str) -> str:
    return names.release_tag(text) if text else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="create_matrix.py", description="Prints what the release builds, as JSON.")
    parser.add_argument(
        "--only", default="*", metavar="GLOBS", help="matching combinations, as '2.8.3 universal;2.8.3 * * 6.2 triton'"
    )
    parser.add_argument(
        "--event",
        choices=EVENTS,
        default="push",
        help="event that started the run; for pull_request, a sample: the oldest and the newest combination, and the "
        "newest universal wheel for few GPU targets",
    )
    parser.add_argument(
        "--missing",
        type=_file,
        metavar="FILE",
        help="leave out what the release has, by FILE, the output of `python -m rocm_wheels published TAG`",
    )
    parser.add_argument(
        "--tag", type=_tag, default="", metavar="vX.Y.Z", help="tag of the release; checked and printed"
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="GFX",
        help="only these GPU targets; may be repeated (default: PYTORCH_ROCM_ARCH or GPU_ARCHS, else all common ones)",
    )
    parser.add_argument("--verbose", action="store_true", help="print each reason why combinations are left out")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--list", dest="form", action="store_const", const="list", help="print one readable line per row")
    form.add_argument(
        "--github-output", dest="form", action="store_const", const="github", help="print lines for $GITHUB_OUTPUT"
    )
    form.add_argument(
        "--plan",
        dest="form",
        action="store_const",
        const="plan",
        help="print what the release holds, for publish --plan",
    )
    parser.set_defaults(form="json")
    return parser
