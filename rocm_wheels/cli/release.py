"""The verbs that publish and find wheels; no logic of their own."""

# Modules are imported where they are used, because `plan` and `build` must run without the packages of the `release`
# group.

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix import names, release_plan, versions
from rocm_wheels.matrix.release_plan import FILE, ReleasePlan
from rocm_wheels.packages import packages_of
from rocm_wheels.paths import ROOT
from rocm_wheels.publish import published, which, yanks
from rocm_wheels.publish.home import Home
from rocm_wheels.wheel import assemble

if TYPE_CHECKING:
    from rocm_wheels.publish.github import GitHub


def add_verbs(verbs: Any) -> None:
    """Adds the verbs of this module to the command line."""
    publish = verbs.add_parser(
        "publish", help="upload a directory of wheels to a GitHub release, and publish the release"
    )
    some = publish.add_mutually_exclusive_group()
    some.add_argument(
        "--dry-run", action="store_true", help="check everything and print what would be uploaded; upload nothing"
    )
    some.add_argument(
        "--draft-only",
        action="store_true",
        help="create or find the draft release, write the plan into it, print commit=SHA for $GITHUB_OUTPUT, and stop",
    )
    publish.add_argument(
        "--plan", type=Path, metavar="FILE", help="output of `create_matrix.py --plan`; needed by --draft-only"
    )
    publish.add_argument(
        "--benchmarks",
        type=Path,
        metavar="FILE",
        help="output of benchmarks/trend.py, to add to the wheel's test report",
    )
    publish.add_argument(
        "--windows",
        type=Path,
        metavar="DIR",
        help="reports of wheel_tests/on_windows.py, to add to the test reports of the wheels for Windows",
    )
    publish.add_argument(
        "--attested-by",
        metavar="WORKFLOW",
        help="refuse files without an attestation of this workflow file at the commit, as `gh` verifies it",
    )
    publish.add_argument(
        "--verdicts", type=Path, metavar="DIR", help="test reports of the GPU job; they replace the reports in --dist"
    )
    publish.set_defaults(run=_publish)

    notes = verbs.add_parser(
        "notes", help="print the release notes for a directory of wheels, or update the notes of a release"
    )
    notes.add_argument(
        "--update", action="store_true", help="write the notes into the release, for everything that it holds"
    )
    notes.add_argument("--new", type=Path, metavar="FILE", help="Markdown file that describes what is new")
    notes.set_defaults(run=_notes)

    yank = verbs.add_parser("yank", help="yank a published wheel, so that installers skip it")
    yank.add_argument("wheel", help="its file name")
    why = yank.add_mutually_exclusive_group(required=True)
    why.add_argument("--reason", help="shown by installers when a user requests exactly this wheel")
    why.add_argument("--undo", action="store_true", help="undo the yank")
    yank.set_defaults(run=_yank)

    withdraw = verbs.add_parser("withdraw", help="remove published wheels with wrong results from the index")
    withdraw.add_argument("wheel", nargs="+", help="file names")
    why = withdraw.add_mutually_exclusive_group(required=True)
    why.add_argument("--reason", help="shown in the release notes and on the page for choosing a wheel")
    why.add_argument("--undo", action="store_true", help="add the wheels to the index again")
    withdraw.set_defaults(run=_withdraw)

    index = verbs.add_parser("index", help="write the site: package indexes and the page for choosing a wheel")
    source = index.add_mutually_exclusive_group()
    source.add_argument("--release-json", type=Path, metavar="FILE", help="releases as GitHub's API lists them")
    source.add_argument("--dir", type=Path, metavar="DIR", help="wheels and test reports; they become part of the site")
    index.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of the site; an earlier site is replaced, other files stay",
    )
    index.set_defaults(run=_index)

    coverage = verbs.add_parser("coverage", help="compare the wanted wheels with the published wheels")
    coverage.add_argument("--release", metavar="TAG", help="count this release only (default: all)")
    coverage.add_argument("--release-json", type=Path, metavar="FILE", help="releases as GitHub's API lists them")
    coverage.add_argument("--metadata", type=Path, metavar="FILE", help="metadata.json of a site")
    coverage.add_argument("--readme", action="store_true", help="update the tables and badges of the README instead")
    coverage.set_defaults(run=_coverage)

    hardware = verbs.add_parser("hardware", help="check a selftest report and add it to docs/hardware.json")
    hardware.add_argument("report", type=Path, help="output file of `python -m flash_attn.selftest` from a user's GPU")
    hardware.add_argument(
        "--wheel", type=Path, required=True, metavar="FILE", help="the wheel that the report is about"
    )
    hardware.set_defaults(run=_hardware)

    directory: dict[str, Any] = {"dest": "dist", "type": Path, "default": Path("dist"), "metavar": "DIR"}
    for verb in (publish, notes):
        verb.add_argument("--dist", "--dir", **directory, help="wheels and verdicts (dist)")
    publish.add_argument("--tag", required=True, type=names.release_tag, help="v1.2.3")
    notes.add_argument("--tag", required=True, help="v1.2.3")
    for verb in (publish, notes, index, coverage):
        verb.add_argument("--repo", metavar="OWNER/NAME", help="default: GITHUB_REPOSITORY")
    for verb in (publish, notes, index):
        verb.add_argument("--url", help="of the site (default: the repository's GitHub Pages)")

    there = verbs.add_parser(
        "published", help="list the public wheels, for create_matrix.py --missing and build --published"
    )
    there.add_argument(
        "tag", help="tag of the release; $GITHUB_REPOSITORY and $GITHUB_TOKEN name the repository and the token"
    )
    there.add_argument("--repo", metavar="OWNER/NAME", help="default: GITHUB_REPOSITORY")
    there.set_defaults(run=_published)
    for verb in (publish, there):
        verb.add_argument(
            "--commit", metavar="SHA", help="of the release (default: the tag's, else GITHUB_SHA, else git's)"
        )

    ready = verbs.add_parser("ready", help="check that the settings of a GitHub repository suit the workflows")
    ready.add_argument("--repo", metavar="OWNER/NAME", help="default: GITHUB_REPOSITORY")
    ready.set_defaults(run=_ready)

    tried = verbs.add_parser("tryout", help="install from the public index in a clean environment, run the selftest")
    tried.add_argument("--installer", choices=("pip", "uv"), default="pip", help="(pip)")
    tried.add_argument(
        "--python",
        default="newest",
        metavar="X.Y",
        help="a version, or `oldest` or `newest` (default) in versions.toml",
    )
    tried.add_argument("--repo", metavar="OWNER/NAME", help="default: GITHUB_REPOSITORY")
    tried.add_argument("--url", help="of the site (default: the repository's GitHub Pages)")
    tried.set_defaults(run=_tryout)

    parser = verbs.add_parser("which", help="print the line that installs flash_attn on this machine")
    which.add_options(parser)
    parser.set_defaults(run=which.run)


@packages_of("release")
def _ready(arguments: argparse.Namespace) -> int:
    from rocm_wheels.publish import settings

    api = _github(arguments, writes=True)
    server = os.environ.get("GITHUB_SERVER_URL") or "https://github.com"
    findings = settings.check(settings.Repository(api, server))
    for finding in findings:
        print(finding.line())
    missing = [finding for finding in findings if finding.state in (settings.MISSING, settings.UNSEEN)]
    print(f"\n{len(missing)} to be set" if missing else f"\n{api.repository} is ready for a tag")
    return 1 if missing else 0


@packages_of("build")
def _tryout(arguments: argparse.Namespace) -> int:
    from rocm_wheels.publish import tryout

    home = Home.of(repository=arguments.repo, url=arguments.url)
    print(tryout.run(home.url, installer=arguments.installer, python=arguments.python))
    return 0


@packages_of("release")
def _published(arguments: argparse.Namespace) -> int:
    api = _github(arguments, writes=False)
    commit = _commit(api, arguments.tag, arguments.commit)
    print(json.dumps(published.listing(api, arguments.tag, commit), indent=1))
    return 0


@packages_of("release")
def _publish(arguments: argparse.Namespace) -> int:
    from rocm_wheels.publish import attestation, measured, plans, publishing, release

    say = partial(print, flush=True)
    if arguments.verdicts is not None:
        say(f"verdicts of the GPU: {', '.join(measured.adopt(arguments.dist, arguments.verdicts)) or 'none'}")
    if arguments.windows is not None:
        say(f"seen on Windows: {', '.join(measured.seen_on_windows(arguments.dist, arguments.windows)) or 'none'}")
    if arguments.benchmarks is not None:
        # A trend job that failed does not hold a release back: the notes then have no measurements.
        attached = measured.attach(arguments.dist, arguments.benchmarks) if arguments.benchmarks.is_file() else []
        say(f"benchmarks: {', '.join(attached) or 'of none of these wheels'}")
    if arguments.dry_run:
        home = Home.of(repository=arguments.repo, url=arguments.url)
        publishing.dry_run(arguments.dist, arguments.tag, index_url=home.url, repository=home.name, say=say)
        return 0
    api = _github(arguments, writes=True)
    if arguments.draft_only:
        plan = _plan(arguments)
        _check_tag(api, arguments.tag)
    commit = _commit(api, arguments.tag, arguments.commit)
    home = Home.of(repository=api.repository, url=arguments.url)
    if arguments.draft_only:
        if (run := os.environ.get("GITHUB_SHA")) and run != commit:
            raise PublishFailed(
                f"this run is of commit {run}, the release {arguments.tag} is of {commit}",
                remedy="Start it at the tag, so that workflow, sources and attestations are of one commit:"
                f" gh workflow run build.yml --ref {arguments.tag} -f tag={arguments.tag} -f dry-run=false",
            )
        tell = partial(print, file=sys.stderr, flush=True)
        public = published.public_wheels(api, but=arguments.tag)
        plans.check_targets(plan, public)  # before there is a draft
        draft = release.Release(api, arguments.tag, commit, tell)
        plan = plans.start(draft, replace(plan, commit=commit), public)
        tell(f"{'draft' if draft.draft else 'release'} of {arguments.tag}: {draft.fields['html_url']}")
        tell(f"it shall hold {len(plan.wheels)} wheels")
        say(f"commit={commit}")
        return 0
    if arguments.attested_by is not None:
        attested = attestation.check(
            arguments.dist,
            repository=api.repository,
            commit=commit,
            workflow=arguments.attested_by,
        )
        wheels = sum(name.endswith(".whl") for name in attested)
        say(f"attested by {arguments.attested_by} at {commit}: {wheels} wheels")
    url = publishing.publish(api, arguments.tag, arguments.dist, commit=commit, index_url=home.url, say=say)
    if output := os.environ.get("GITHUB_OUTPUT"):
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(f"url={url}\n")
    return 0


def _plan(arguments: argparse.Namespace) -> ReleasePlan:
    """The plan in the file of --plan. Raises DataError if there is none, or if it is for another tag."""
    remedy = f"Make it with: ./create_matrix.py --plan --tag {arguments.tag} >{FILE}, and give --plan {FILE}"
    if arguments.plan is None:
        raise DataError("--draft-only needs the plan of the release", remedy=remedy)
    plan = release_plan.parse(str(arguments.plan), _read(arguments.plan).encode())
    if plan.tag != arguments.tag:
        raise DataError(
            f"{arguments.plan} is the plan of {plan.tag or 'no tag'}, not of {arguments.tag}", remedy=remedy
        )
    return plan


def _check_tag(api: GitHub, tag: str) -> None:
    """Raises PublishFailed for anything that would make the last job of a release fail, after all builds. A nightly
    candidate gets its tag when it becomes public.
    """
    if names.is_nightly(tag):
        return
    start = f"gh workflow run build.yml --ref {tag} -f tag={tag} -f dry-run=false"
    if api.tag_commit(tag) is None:
        raise PublishFailed(
            f"there is no tag {tag}", remedy=f"Push it: git tag {tag} && git push origin {tag}. That starts the run."
        )
    ref = os.environ.get("GITHUB_REF") or f"refs/tags/{tag}"
    if ref != f"refs/tags/{tag}":
        raise PublishFailed(
            f"this run is at {ref}, and the environment `release` takes the tags v* alone",
            remedy=f"Start it at the tag: {start}",
        )


def _commit(api: GitHub, tag: str, option: str | None) -> str:
    """The commit of a release: the option, else the commit of the tag, of the workflow run, or of this checkout.

    Raises DataError if the commit is unknown, or if a tracked file is changed.
    """
    commit = option or api.tag_commit(tag) or os.environ.get("GITHUB_SHA") or assemble.commit()
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise DataError(
            f"{commit!r} is not the commit of a release", remedy="Commit all changes, or give --commit SHA in full."
        )
    return commit


def _yank(arguments: argparse.Namespace) -> int:
    yanks.mark(arguments.wheel, None if arguments.undo else arguments.reason)
    state = "no longer yanked" if arguments.undo else f"yanked ({arguments.reason})"
    print(
        f"{arguments.wheel}: {state}, once {yanks.DATA_FILE.relative_to(ROOT)} is committed and the index is rendered"
    )
    return 0


def _withdraw(arguments: argparse.Namespace) -> int:
    state = "in the index again" if arguments.undo else f"withdrawn ({arguments.reason})"
    yanks.withdraw(arguments.wheel, None if arguments.undo else arguments.reason)
    for wheel in arguments.wheel:
        print(f"{wheel}: {state}, once {yanks.DATA_FILE.relative_to(ROOT)} is committed and the index is rendered")
    return 0


@packages_of("release")
def _notes(arguments: argparse.Namespace) -> int:
    from rocm_wheels.publish import directory, notes, publishing

    if arguments.update:
        api = _github(arguments, writes=True)
        home = Home.of(repository=api.repository, url=arguments.url)
        publishing.update_notes(api, arguments.tag, index_url=home.url, say=partial(print, flush=True))
        return 0
    home = Home.of(repository=arguments.repo, url=arguments.url)
    new = _read(arguments.new) if arguments.new else ""
    wheels = directory.read(arguments.dist).wheels
    print(notes.render(wheels, tag=arguments.tag, index_url=home.url, new=new, repository=home.name), end="")
    return 0


@packages_of("release")
def _index(arguments: argparse.Namespace) -> int:
    from rocm_wheels.publish import catalogue, directory, index

    home = Home.of(repository=arguments.repo, url=arguments.url)
    files = None
    if arguments.dir is not None:
        local = directory.read(arguments.dir)
        stock, files = catalogue.Catalogue(wheels=local.wheels, interfaces=local.interfaces), local.files
    else:
        # The JSON describes public files only, so no token is needed to fetch them.
        api = _github(arguments, writes=False)
        releases = _releases(arguments.release_json) if arguments.release_json else api.releases()

        def fetch(asset: Mapping[str, Any]) -> bytes:
            return api.download(asset["browser_download_url"])

        stock = catalogue.from_releases(catalogue.final(releases), fetch, yanks.load(), yanks.withdrawn())
    for problem in stock.problems:
        print(f"note: {problem}", file=sys.stderr)
    index.build(stock, arguments.out, versions=versions.load(), home=home, files=files)
    count = len(stock.wheels)
    print(f"{arguments.out}: {count} wheel{'s' * (count != 1)}, for {home.url}")
    return 0


@packages_of("release")
def _hardware(arguments: argparse.Namespace) -> int:
    from rocm_wheels.publish import coverage, hardware

    data = versions.load()
    run = hardware.check(arguments.report, arguments.wheel, data, datetime.date.today())
    hardware.add(ROOT / hardware.RUNS, run)
    print(run.summary)
    _write(coverage.generated(ROOT, data))
    return 0


@packages_of("release")
def _coverage(arguments: argparse.Namespace) -> int:
    from rocm_wheels.publish import coverage

    data = versions.load()
    if arguments.readme:
        if arguments.metadata:
            coverage.save(ROOT / coverage.PUBLISHED, coverage.from_site(arguments.metadata))
        _write(coverage.generated(ROOT, data))
        return 0
    if arguments.metadata:
        published = coverage.targets_on_site(arguments.metadata)
    else:
        api = _github(arguments, writes=False)
        releases = _releases(arguments.release_json) if arguments.release_json else list(api.releases())
        published = coverage.released(releases, arguments.release, lambda asset: api.download(asset["url"]))
    print(coverage.table(data, coverage.wanted(data), published, coverage.universals(data)))
    return 0


def _write(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


def _github(arguments: argparse.Namespace, *, writes: bool) -> GitHub:
    from rocm_wheels.publish.github import GitHub

    say = partial(print, file=sys.stderr, flush=True)
    return GitHub.from_environment(repository=arguments.repo, say=say, writes=writes)


def _releases(path: Path) -> list[dict[str, Any]]:
    from rocm_wheels.publish import catalogue

    return catalogue.load_releases(_read(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
