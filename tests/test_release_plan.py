"""A release is one value, its plan: a part of it never counts as the whole."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import wheelhouse
from fake_github import Hub
from publishing import TAG, client, publish, publish_as, silent, state
from wheelhouse import COMMIT

from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix import names, release_plan, select, versions
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.matrix.release_plan import FILE, PlannedWheel, ReleasePlan
from rocm_wheels.publish import assets, catalogue, plans, published
from rocm_wheels.publish.coverage import matrix_of
from rocm_wheels.publish.directory import read
from rocm_wheels.publish.release import Release

CELL = wheelhouse.cell("2.8.3 3.11 2.5.1 6.2")
OTHER = wheelhouse.cell("2.8.3 3.12 2.5.1 6.2")
UNIVERSAL = Universal(flash_attn="2.8.3", python="3.10", backend="ck")
FULL = ("gfx90a", "gfx942", "gfx1100")
PART = ("gfx942",)


def plan_of(*wheels: tuple[Any, Sequence[str]], tag: str = TAG) -> ReleasePlan:
    """The plan of these combinations, each with GPU targets."""
    result = [
        PlannedWheel(stem=names.stem(names.wheel_name(claim)), targets=tuple(sorted(targets)))
        for claim, targets in wheels
    ]
    return ReleasePlan(tag=tag, commit=COMMIT, wheels=tuple(result))


def start(hub: Hub, plan: ReleasePlan) -> ReleasePlan:
    """What the first job of a run does."""
    api = client(hub)
    release = Release(api, plan.tag, COMMIT, silent)
    return plans.start(release, plan, published.public_wheels(api, but=plan.tag))


def send(hub: Hub, dist: Path, tag: str = TAG) -> str:
    return publish_as(client(hub), tag, dist, silent)


def listed(hub: Hub) -> dict[str, tuple[str, ...]]:
    """Name -> GPU targets of the wheels that the index lists."""
    fetch = lambda asset: hub.content[asset["id"]]  # noqa: E731
    result = catalogue.from_releases(catalogue.final(hub.releases.values()), fetch, {})
    return {wheel.name: wheel.verdict.targets for wheel in result.wheels if wheel.listed}


def test_the_matrix_makes_the_plan_of_everything_that_the_jobs_build() -> None:
    data = versions.load()
    selected = select.select(data, {"rocm": matrix_of()})
    plan = ReleasePlan(
        tag=TAG, commit=COMMIT, wheels=release_plan.planned(data, [*selected.universals, *selected.cells])
    )
    assert release_plan.parse(FILE, plan.as_json().encode()) == plan
    stems = plan.by_stem
    assert {"flash_attn-2.8.3+rocm-cp310", "flash_attn-2.8.3+rocm-cp310-windows"} <= stems.keys()
    assert "flash_attn_3-3.0.0+rocm62torch2.5-py3" in stems
    windows, linux = (set(stems[f"flash_attn-2.8.3+rocm-cp310{each}"].targets) for each in ("-windows", ""))
    assert windows < linux
    assert len([stem for stem in stems if stem.startswith("flash_attn-")]) == 2 * len(selected.universals) + len(
        selected.cells
    )


def test_several_globs_choose_what_a_release_holds() -> None:
    result = select.select(versions.load(), {"rocm": matrix_of()}, only="2.8.3 universal; 2.8.3 3.12 2.6.0 6.2 ck")
    assert [str(each) for each in (*result.universals, *result.cells)] == ["2.8.3", "2.8.3 3.12 2.6.0 6.2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheels": [{}]}, "wheels/0/stem is missing"),
        ({"commit": "main"}, "commit"),
        ({"extra": 1}, "is unknown"),
        ({"wheels": 2 * [vars(PlannedWheel(stem="a", targets=()))]}, "it names a wheel twice"),
    ],
)
def test_a_plan_from_outside_is_checked(change: dict[str, Any], message: str) -> None:
    content = {**json.loads(plan_of((CELL, FULL)).as_json()), **change}
    with pytest.raises(DataError, match=f"^x is no plan of a release: .*{message}"):
        release_plan.parse("x", json.dumps(content, default=list).encode())


def test_a_draft_has_its_plan_before_its_first_wheel(hub: Hub, dist: Path) -> None:
    publish(hub, dist)
    (release,) = hub.releases.values()
    assert release["assets"][0]["name"] == FILE


def test_a_part_of_the_plan_stays_a_draft(hub: Hub, tmp_path: Path) -> None:
    """A run of one combination at the tag of a run that died: what is there is not published, and the rest follows."""
    start(hub, plan_of((CELL, FULL), (OTHER, FULL)))
    wheelhouse.write(tmp_path / "one", CELL, targets=FULL)
    with pytest.raises(PublishFailed, match=r"lacks 1 of 2 wheels, such as .*cp312: it stays a draft\nBuild them: gh"):
        send(hub, tmp_path / "one")
    assert state(hub)["draft"] is True
    held = published.listing(client(hub), TAG, COMMIT)["there"]
    assert list(held) == [plan_of((CELL, FULL)).wheels[0].stem], "this wheel is not built again"
    wheelhouse.write(tmp_path / "other", OTHER, targets=FULL)
    send(hub, tmp_path / "other")
    assert state(hub)["draft"] is False


@pytest.mark.parametrize(("first", "second"), [(FULL, PART), (PART, FULL), (PART, ("gfx90a",))])
def test_a_draft_for_other_targets_is_refused_before_anything_is_built(
    hub: Hub, tmp_path: Path, first: Sequence[str], second: Sequence[str]
) -> None:
    start(hub, plan_of((CELL, first)))
    before = state(hub)
    wheelhouse.write(tmp_path, CELL, targets=second)
    with pytest.raises(
        PublishFailed, match=f"the draft of {TAG} holds .*, this run builds it for {sorted(second)[0]}"
    ) as error:
        start(hub, plan_of((CELL, second), (OTHER, second)))
    assert f"gh release delete {TAG}" in error.value.remedy
    with pytest.raises(PublishFailed, match=f"the draft of {TAG} holds "):
        send(hub, tmp_path)
    assert state(hub) == before


def test_leftovers_of_a_run_that_died_are_not_published(hub: Hub, tmp_path: Path) -> None:
    """A wheel for Windows without its report, a build number that another release has taken, an unfinished upload."""
    start(hub, plan_of((CELL, FULL)))
    wheel = wheelhouse.write(tmp_path, CELL, targets=FULL)
    (release,) = hub.releases.values()
    strangers = [wheel.name.replace("manylinux_2_17_x86_64", "win_amd64"), wheel.name.replace("-cp311", "-7-cp311", 1)]
    for name in (*strangers, f"{strangers[1]}.metadata", f"{strangers[1]}.verdict.json"):
        hub.add_asset(release, name, b"left over")
    send(hub, tmp_path)
    assert not [name for name in state(hub)["assets"] if name.startswith(tuple(strangers))]
    assert wheel.name in state(hub)["assets"]


def test_wheels_in_a_draft_without_a_plan_are_not_deleted(hub: Hub, tmp_path: Path) -> None:
    wheelhouse.write(tmp_path / "ours", CELL)
    stranger = wheelhouse.write(tmp_path / "theirs", OTHER)
    hub.add_asset(hub.add_release(TAG, target_commitish=COMMIT), stranger.name, b"of somebody")
    with pytest.raises(PublishFailed, match=f"holds {re.escape(stranger.name)}, and no {FILE} says what it is for"):
        send(hub, tmp_path / "ours")
    (release,) = hub.releases.values()
    assert stranger.name in {asset["name"] for asset in release["assets"]}


def test_a_fuller_build_at_a_public_tag_gets_the_next_number(hub: Hub, tmp_path: Path) -> None:
    """A universal wheel for one GPU first, then the full run at that tag."""
    start(hub, plan_of((UNIVERSAL, PART)))
    small = wheelhouse.write(tmp_path / "part", UNIVERSAL, targets=PART)
    send(hub, small.parent)
    plan = start(hub, plan_of((UNIVERSAL, FULL)))
    assert [wheel.build for wheel in plan.wheels] == [1]
    listing = published.listing(client(hub), TAG, COMMIT)
    assert listing["there"] == {}, "a part is not the whole"
    assert [wheel["name"] for wheel in listing["wheels"]] == [small.name], "it gives the build number"
    full = wheelhouse.write(tmp_path / "full", UNIVERSAL, targets=FULL, build=1, payload="more = 1\n")
    send(hub, full.parent)
    assert listed(hub) == {small.name: PART, full.name: FULL}
    assert published.listing(client(hub), TAG, COMMIT)["there"] == {plan.wheels[0].stem: list(FULL)}
    assert start(hub, plan_of((UNIVERSAL, PART))) == plan, "the fuller wheel serves that GPU too"
    with pytest.raises(PublishFailed, match=f"release {TAG} holds .* this run builds it for gfx950"):
        start(hub, plan_of((UNIVERSAL, ("gfx950",))))


def test_an_immutable_release_takes_no_other_plan(hub: Hub, tmp_path: Path) -> None:
    hub.immutable = True
    start(hub, plan_of((UNIVERSAL, PART)))
    send(hub, wheelhouse.write(tmp_path, UNIVERSAL, targets=PART).parent)
    assert start(hub, plan_of((UNIVERSAL, PART))).wheels[0].build == 0
    with pytest.raises(PublishFailed, match=f"release {TAG} is immutable: {FILE} cannot be added to it"):
        start(hub, plan_of((UNIVERSAL, FULL)))


def test_a_build_for_fewer_gpus_never_takes_the_place_of_a_fuller_one(hub: Hub, tmp_path: Path) -> None:
    """In a later release: it is refused before it is built. The index does not list one that is public all the same."""
    full = wheelhouse.write(tmp_path / "full", UNIVERSAL, targets=FULL)
    send(hub, full.parent, "v1.0.0")
    small = wheelhouse.write(tmp_path / "part", UNIVERSAL, targets=PART, build=1, payload="less = 1\n")
    for attempt in (
        lambda: start(hub, plan_of((UNIVERSAL, PART), tag="v1.1.0")),
        lambda: send(hub, small.parent, "v1.1.0"),
    ):
        with pytest.raises(
            PublishFailed, match=r"which also serves gfx90a, gfx1100\n.* publish a candidate: v1\.1\.0rc"
        ):
            attempt()
    send(hub, small.parent, "v1.1.0rc1")
    (candidate,) = (each for each in hub.releases.values() if each["tag_name"] == "v1.1.0rc1")
    assert listed(hub) == {full.name: FULL}
    candidate["prerelease"] = False  # as a person can, or an earlier version of this command
    assert listed(hub) == {full.name: FULL}
    result = catalogue.from_releases(hub.releases.values(), lambda asset: hub.content[asset["id"]], {})
    assert [wheel.name for wheel in catalogue.newest(result.wheels)] == [full.name]


def test_two_tags_at_once_never_publish_one_name_twice(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs planned build 0. The second one stops before it is public; run again, it has the next number."""
    first = wheelhouse.write(tmp_path / "first", CELL)
    second = wheelhouse.write(tmp_path / "second", CELL, payload="changed = 1\n")
    targets = read(first.parent).wheels[0].verdict.targets
    plan = plan_of((CELL, targets), tag="v2.0.0")
    start(hub, plan)
    check = plans.check_complete

    def meanwhile(*given: Any) -> None:
        monkeypatch.setattr(plans, "check_complete", check)
        send(hub, first.parent, "v1.0.0")
        check(*given)

    monkeypatch.setattr(plans, "check_complete", meanwhile)
    with pytest.raises(PublishFailed, match=r"became public in another release meanwhile.*\nRun all jobs again"):
        send(hub, second.parent, "v2.0.0")
    assert [each["tag_name"] for each in hub.releases.values() if not each["draft"]] == ["v1.0.0"]
    assert start(hub, plan).wheels[0].build == 1
    assert published.listing(client(hub), "v2.0.0", COMMIT)["there"] == {}
    again = wheelhouse.write(tmp_path / "again", CELL, payload="changed = 1\n", build=1)
    send(hub, again.parent, "v2.0.0")
    public = [asset for each in hub.releases.values() for asset in each["assets"] if asset["name"].endswith(".whl")]
    digests = {asset["name"]: hashlib.sha256(hub.content[asset["id"]]).hexdigest() for asset in public}
    assert sorted(digests) == sorted((first.name, again.name))
    assert len(public) == 2


def test_an_older_release_keeps_its_plan_when_all_its_jobs_run_again(hub: Hub, tmp_path: Path) -> None:
    """A newer release has the next build of the wheel."""
    first = start(hub, plan_of((CELL, FULL), tag="v1.0.0"))
    send(hub, wheelhouse.write(tmp_path / "first", CELL, targets=FULL).parent, "v1.0.0")
    changed = wheelhouse.write(tmp_path / "next", CELL, targets=FULL, build=1, payload="changed = 1\n")
    assert start(hub, plan_of((CELL, FULL), tag="v1.1.0")).wheels[0].build == 1
    send(hub, changed.parent, "v1.1.0")
    requests = hub.requests
    assert start(hub, plan_of((CELL, FULL), tag="v1.0.0")) == first
    assert hub.requests - requests < 20, "no test report of this release is read to plan it"
    assert published.listing(client(hub), "v1.0.0", COMMIT)["there"].keys() == {first.wheels[0].stem}


def test_unchanged_wheels_belong_to_the_plan_and_stay_where_they_are(hub: Hub, tmp_path: Path) -> None:
    send(hub, wheelhouse.write(tmp_path / "old", CELL, targets=FULL).parent, "v1.0.0")
    start(hub, plan_of((CELL, FULL), (OTHER, FULL), tag="v1.1.0"))
    wheelhouse.write(tmp_path / "new", CELL, targets=FULL)
    wheelhouse.write(tmp_path / "new", OTHER, targets=FULL)
    send(hub, tmp_path / "new", "v1.1.0")
    held = published.listing(client(hub), "v1.1.0", COMMIT)["there"]
    assert {wheel.stem for wheel in plan_of((CELL, FULL), (OTHER, FULL)).wheels} == held.keys(), "nothing is left to do"
    (release,) = (each for each in hub.releases.values() if each["tag_name"] == "v1.1.0")
    (asset,) = (asset for asset in release["assets"] if asset["name"] == FILE)
    plan = release_plan.parse(FILE, hub.content[asset["id"]])
    assert [wheel.unchanged_in for wheel in plan.wheels] == ["v1.0.0", ""]


def test_two_drafts_that_runs_made_leave_one(hub: Hub, tmp_path: Path) -> None:
    """Two first jobs that did not see each other's draft. A person's draft is not touched."""
    plan = assets.of_bytes(FILE, plan_of((CELL, FULL)).as_json().encode(), final=False)
    for _ in range(2):
        draft = hub.add_release(TAG, target_commitish=COMMIT)
        hub.add_asset(draft, FILE, plan.content if isinstance(plan.content, bytes) else b"")
        hub.add_asset(draft, "kernels.zip", b"x")
    send(hub, wheelhouse.write(tmp_path, CELL, targets=FULL).parent)
    assert state(hub)["draft"] is False
