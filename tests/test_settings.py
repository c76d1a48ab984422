"""`ready`: the settings that a repository lacks for the workflows, each with the page to set it on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from fake_github import Hub
from workflows import ROOT, WORKFLOWS, holds, load

from rocm_wheels import cli
from rocm_wheels.publish import settings

RULES = [{"type": "deletion"}, {"type": "update"}]


def _reviewers(count: int, prevents: bool) -> list[dict[str, Any]]:
    reviewers = [{"type": "User"}] * count
    return [{"type": "required_reviewers", "prevent_self_review": prevents, "reviewers": reviewers}]


def ready() -> dict[str, Any]:
    """The settings of a repository that lacks nothing."""
    return {
        "": {"default_branch": "main", "has_issues": True, "private": False},
        "/actions/permissions": {"enabled": True, "allowed_actions": "all"},
        "/actions/permissions/workflow": {
            "default_workflow_permissions": "read",
            "can_approve_pull_request_reviews": True,
        },
        "/actions/permissions/artifact-and-log-retention": {"days": 90},
        "/actions/permissions/fork-pr-contributor-approval": {"approval_policy": "all_external_contributors"},
        "/actions/workflows": {
            "workflows": [
                {"path": f".github/workflows/{path.name}", "state": "active"} for path in WORKFLOWS.glob("[a-z]*.yml")
            ]
        },
        "/actions/variables/GPU_RUNNER": {"name": "GPU_RUNNER", "value": "true"},
        "/actions/runners": {"runners": [{"status": "online", "labels": [{"name": "mi300x"}]}]},
        "/pages": {"build_type": "workflow", "html_url": "https://owner.github.io/name/", "https_enforced": True},
        "/environments/github-pages": {"deployment_branch_policy": {"custom_branch_policies": True}},
        "/environments/github-pages/deployment-branch-policies": {"branch_policies": [{"name": "main"}]},
        "/environments/release": {
            "protection_rules": [{"type": "required_reviewers", "reviewers": [{"type": "User"}]}],
            "deployment_branch_policy": {"custom_branch_policies": True},
        },
        "/environments/release/deployment-branch-policies": {"branch_policies": [{"name": "v*", "type": "tag"}]},
        "/labels": [{"id": number, "name": name} for number, name in enumerate(settings.LABELS)],
        "/immutable-releases": {"enabled": True, "enforced_by_owner": False},
        "/rulesets": [{"id": 1, "target": "tag", "enforcement": "active"}],
        "/rulesets/1": {"conditions": {"ref_name": {"include": ["refs/tags/v*"], "exclude": []}}, "rules": RULES},
    }


def test_a_repository_with_everything_is_ready(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.settings = ready()
    assert cli.main(["ready"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("\nowner/name is ready for a tag\n")
    assert not re.search("(?m)^(missing|note|not seen)", said)


def test_a_fresh_repository_lacks_nearly_everything(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """As GitHub creates it: Actions on, with a token that can write; no Pages, environment, rules, variable."""
    hub.settings = {
        "": {"default_branch": "main", "has_issues": True},
        "/actions/permissions": {"enabled": True, "allowed_actions": "all"},
        "/actions/permissions/workflow": {
            "default_workflow_permissions": "write",
            "can_approve_pull_request_reviews": False,
        },
        "/rulesets": [],
        "/labels": [{"id": 1, "name": "bug"}],
    }
    assert cli.main(["ready"]) == 1
    said = capsys.readouterr().out
    result = dict(re.findall(r"(?m)^(?:missing|note) +([\w ]+): .*\n +(https://github.com/owner/name/\S+)$", said))
    home = "https://github.com/owner/name"
    assert result == {
        "workflows": f"{home}/actions",
        "pull requests of Actions": f"{home}/settings/actions",
        "token of a workflow": f"{home}/settings/actions",
        "Pages": f"{home}/settings/pages",
        "environment release": f"{home}/settings/environments",
        "rules for tags": f"{home}/settings/rules",
        "immutable releases": f"{home}/settings#releases-settings",
        "labels": f"{home}/labels",
        "GPU runner": f"{home}/settings/variables/actions",
    }
    assert said.endswith("\n7 to be set\n")


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/actions/permissions", {"enabled": False}, "Actions: switch them on"),
        ("/actions/permissions", {"enabled": True, "allowed_actions": "local_only"}, "allowed are local_only"),
        ("/actions/permissions/artifact-and-log-retention", {"days": 5}, "artifacts: they live 5 days"),
        ("/pages", {"build_type": "legacy"}, "choose the source GitHub Actions"),
        ("/pages", {"build_type": "workflow", "https_enforced": False}, "Pages over https"),
        (
            "/environments/github-pages/deployment-branch-policies",
            {"branch_policies": []},
            "let the branch main deploy",
        ),
        ("/environments/release", {"protection_rules": [{"type": "wait_timer"}]}, "name reviewers"),
        (
            "/environments/release/deployment-branch-policies",
            {"branch_policies": [{"name": "v*", "type": "branch"}]},
            "allow the tags v*",
        ),
        ("/rulesets", [{"id": 1, "target": "tag", "enforcement": "evaluate"}], "forbid deletion and update of v*"),
        ("/rulesets/1", {"conditions": {"ref_name": {"include": ["~ALL"]}}, "rules": RULES[:1]}, "forbid update of v*"),
        (
            "/rulesets/1",
            {"conditions": {"ref_name": {"include": ["~ALL"], "exclude": ["refs/tags/v1*"]}}, "rules": RULES},
            "forbid deletion and update of v*",
        ),
        (
            "/actions/runners",
            {"runners": [{"status": "offline", "labels": [{"name": "mi300x"}]}]},
            "no runner labelled",
        ),
        (
            "/actions/permissions/fork-pr-contributor-approval",
            {"approval_policy": "first_time_contributors"},
            "approval of forks",
        ),
        ("", {"default_branch": "main", "has_issues": False}, "issues: switch them on"),
        ("", {"default_branch": "main", "has_issues": True, "private": True}, "visibility: private: attestations need"),
        ("/labels", [{"id": 1, "name": "Bug"}], "labels: make selftest, wheel-request"),
        ("/actions/permissions", {"enabled": True, "allowed_actions": "selected"}, "allow actions created by GitHub"),
        (
            "/environments/release",
            {"protection_rules": _reviewers(1, True), "deployment_branch_policy": {"custom_branch_policies": True}},
            "one reviewer, who may not approve his own run",
        ),
        (
            "/environments/release",
            {"protection_rules": _reviewers(1, False), "deployment_branch_policy": {"protected_branches": True}},
            "protected branches only refuses every tag",
        ),
        (
            "/environments/github-pages",
            {"deployment_branch_policy": {"protected_branches": True, "custom_branch_policies": False}},
            "main is not protected",
        ),
        ("/immutable-releases", 404, "immutable releases: switch them on"),
        ("/immutable-releases", {"enabled": False, "enforced_by_owner": False}, "immutable releases: switch them on"),
        ("/rulesets", 403, "rules for tags: GET /repos/owner/name/rulesets: 403"),
    ],
)
def test_each_wrong_setting_is_named(
    hub: Hub, capsys: pytest.CaptureFixture[str], path: str, answer: Any, words: str
) -> None:
    hub.settings = {**ready(), path: answer}
    assert cli.main(["ready"]) == 1
    assert words in capsys.readouterr().out


def test_no_repository_is_one_message(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.settings = {"": 404}
    assert cli.main(["ready"]) != 0
    assert "there is no repository owner/name" in capsys.readouterr().err


def test_the_workflows_that_must_be_active_are_those_with_triggers() -> None:
    assert sorted(settings.WORKFLOWS) == sorted(path.stem for path in WORKFLOWS.glob("[a-z]*.yml"))
    checklist = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")
    assert "python -m rocm_wheels ready" in checklist


@pytest.mark.parametrize(
    ("selected", "refused"),
    [
        ({"github_owned_allowed": True, "patterns_allowed": ["peter-evans/create-pull-request@*"]}, []),
        ({"github_owned_allowed": True, "patterns_allowed": ["peter-evans/*"]}, []),
        ({"github_owned_allowed": False, "patterns_allowed": ["actions/*", "peter-evans/create-pull-request@v8"]}, []),
        ({"github_owned_allowed": True, "patterns_allowed": []}, ["peter-evans/create-pull-request"]),
        ({"github_owned_allowed": False, "patterns_allowed": ["peter-evans/*"]}, [*settings.ACTIONS[:-1]]),
        ({"github_owned_allowed": True, "patterns_allowed": ["*", "!actions/cache@*"]}, ["actions/cache"]),
    ],
)
def test_selected_actions(
    hub: Hub, capsys: pytest.CaptureFixture[str], selected: dict[str, Any], refused: list[str]
) -> None:
    hub.settings = ready()
    hub.settings["/actions/permissions"] = {"enabled": True, "allowed_actions": "selected"}
    hub.settings["/actions/permissions/selected-actions"] = selected
    assert cli.main(["ready"]) == bool(refused)
    assert ("for selected actions, among them all" in capsys.readouterr().out) is (not refused)
    assert settings._refused(selected) == refused


def test_one_reviewer_who_may_approve_himself_and_two_who_may_not(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    for count, prevents in ((1, False), (2, True)):
        hub.settings = ready()
        hub.settings["/environments/release"]["protection_rules"] = _reviewers(count, prevents)
        assert cli.main(["ready"]) == 0, capsys.readouterr().out


def test_the_actions_and_labels_are_those_of_the_files() -> None:
    used = {
        action
        for path in WORKFLOWS.glob("*.yml")
        for action in re.findall(r"uses: ([\w-]+/[\w-]+)", path.read_text(encoding="utf-8"))
    }
    assert used <= set(settings.ACTIONS)
    assert set(settings.ACTIONS) - used == {"actions/attest"}, "inside of attest-build-provenance"
    forms = (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
    labels = {label for form in forms for label in yaml.safe_load(form.read_text(encoding="utf-8"))["labels"]}
    assert labels == set(settings.LABELS)


def test_a_default_branch_of_another_name(hub: Hub) -> None:
    """`check` runs on it, and the environment of Pages must accept it."""
    hub.settings = ready()
    hub.settings[""]["default_branch"] = "trunk"
    assert cli.main(["ready"]) == 1
    hub.settings["/environments/github-pages/deployment-branch-policies"] = {"branch_policies": [{"name": "trunk"}]}
    assert cli.main(["ready"]) == 0
    check = load("check.yml")
    github = {"event_name": "push", "ref_name": "trunk", "event": {"repository": {"default_branch": "trunk"}}}
    assert check["on"]["push"] == {"branches": ["**"]}
    for name, runs in (("trunk", True), ("topic", False)):
        contexts = {"github": {**github, "ref_name": name}, "status": "success"}
        assert holds(check["jobs"]["tests"]["if"], contexts) is runs
    assert holds(
        check["jobs"]["tests"]["if"], {"github": {**github, "event_name": "pull_request"}, "status": "success"}
    )
