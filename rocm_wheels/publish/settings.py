"""Checks the settings of a GitHub repository that the workflows need, and names the page of each missing setting."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rocm_wheels.errors import PublishFailed
from rocm_wheels.matrix import versions
from rocm_wheels.publish.github import GitHub

GOOD, MISSING, NOTE, UNSEEN = "good", "missing", "note", "not seen"
WORKFLOWS = ("build", "check", "emulator", "hardware", "installs", "nightly", "pages", "refresh", "trend")
ACTIONS = (  # actions in the workflows, and actions inside of these
    *("actions/attest", "actions/attest-build-provenance", "actions/cache", "actions/checkout", "actions/deploy-pages"),
    *("actions/download-artifact", "actions/upload-artifact", "actions/upload-pages-artifact"),
    "peter-evans/create-pull-request",
)
LABELS = ("bug", "selftest", "wheel-request")  # labels of the issue forms
TAGS = "refs/tags/v1.2.3"  # a tag that a protection rule must match
RETENTION_DAYS = 30  # days that an approval may wait


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One setting: its state, its required value and the reason, and the page to change it on."""

    state: str
    name: str
    text: str
    page: str = ""

    def line(self) -> str:
        there = f"\n{'':<10}{self.page}" if self.page and self.state != GOOD else ""
        return f"{self.state:<10}{self.name}: {self.text}{there}"


class Repository:
    """The settings of one repository. Each is requested once."""

    def __init__(self, api: GitHub, server: str) -> None:
        self.api = api
        self.home = f"{server}/{api.repository}"
        self._known: dict[str, Any] = {}

    def get(self, path: str) -> Any:
        """The answer; None for a 404. Raises PublishFailed if the token may not read it."""
        if path not in self._known:
            self._known[path] = self.api.get(path)
        return self._known[path]

    def page(self, name: str) -> str:
        return f"{self.home}/settings/{name}"


Check = Callable[[Repository], Iterator[Finding]]


def check(repository: Repository) -> list[Finding]:
    """All findings, in the order of docs/releasing.md. Raises PublishFailed if the repository cannot be read."""
    if repository.get("") is None:
        raise PublishFailed(
            f"there is no repository {repository.api.repository}, or the token may not see it",
            remedy="Give --repo owner/name, and a token of an administrator: GH_TOKEN=$(gh auth token).",
        )
    return [finding for name, ask in _CHECKS.items() for finding in _findings(name, ask, repository)]


def _findings(name: str, ask: Check, repository: Repository) -> list[Finding]:
    try:
        return list(ask(repository))
    except PublishFailed as error:
        text = f"{str(error).splitlines()[0]}; a token of an administrator sees it"
        return [Finding(state=UNSEEN, name=name, text=text)]


def _actions(repository: Repository) -> Iterator[Finding]:
    page = repository.page("actions")
    rights = repository.get("/actions/permissions") or {}
    if not rights.get("enabled"):
        yield Finding(state=MISSING, name="Actions", text="switch them on: every workflow needs them", page=page)
        return
    if (allowed := rights.get("allowed_actions", "all")) == "all":
        yield Finding(state=GOOD, name="Actions", text="on, for all actions; the workflows pin theirs by commit")
    elif allowed == "selected" and not (refused := _refused(repository.get("/actions/permissions/selected-actions"))):
        yield Finding(state=GOOD, name="Actions", text="on, for selected actions, among them all of these workflows")
    else:
        needed = ", ".join(refused if allowed == "selected" else ACTIONS)
        text = f"allowed are {allowed} actions: allow actions created by GitHub, and {needed}@*"
        yield Finding(state=MISSING, name="Actions", text=text, page=page)
    there = {each["path"]: each["state"] for each in (repository.get("/actions/workflows") or {}).get("workflows", [])}
    stopped = [name for name in WORKFLOWS if there.get(f".github/workflows/{name}.yml") != "active"]
    if stopped:
        text = f"not active: {', '.join(stopped)}; push the default branch, or enable them there"
        yield Finding(state=MISSING, name="workflows", text=text, page=f"{repository.home}/actions")
    else:
        yield Finding(state=GOOD, name="workflows", text="all are active")


def _refused(selected: dict[str, Any] | None) -> list[str]:
    """The actions of the workflows that the repository does not allow. GitHub's patterns may end in @ref."""
    selected = selected or {}
    patterns = [str(pattern).partition("@")[0] for pattern in selected.get("patterns_allowed") or []]
    barred = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]

    def allowed(action: str) -> bool:
        by_github = bool(selected.get("github_owned_allowed")) and action.startswith("actions/")
        named = any(fnmatch.fnmatchcase(action, pattern) for pattern in patterns)
        return (by_github or named) and not any(fnmatch.fnmatchcase(action, pattern) for pattern in barred)

    return [action for action in ACTIONS if not allowed(action)]


def _visibility(repository: Repository) -> Iterator[Finding]:
    fields, name = repository.get(""), "visibility"
    if not fields.get("private") and fields.get("visibility", "public") == "public":
        yield Finding(state=GOOD, name=name, text="public: attestations and Pages need no plan")
        return
    text = "private: attestations need GitHub Enterprise Cloud, Pages a paid plan; without them no release is published"
    yield Finding(state=MISSING, name=name, text=text, page=f"{repository.home}/settings")


def _token(repository: Repository) -> Iterator[Finding]:
    page, rights = repository.page("actions"), repository.get("/actions/permissions/workflow") or {}
    if rights.get("can_approve_pull_request_reviews"):
        yield Finding(state=GOOD, name="pull requests of Actions", text="allowed")
    else:
        text = "allow Actions to create pull requests: refresh.yml and trend.yml propose their results so"
        yield Finding(state=MISSING, name="pull requests of Actions", text=text, page=page)
    if rights.get("default_workflow_permissions") == "read":
        yield Finding(state=GOOD, name="token of a workflow", text="reads by default; each job asks for more")
    else:
        text = "set it to read: each job of these workflows asks for what it needs"
        yield Finding(state=NOTE, name="token of a workflow", text=text, page=page)
    kept = (repository.get("/actions/permissions/artifact-and-log-retention") or {}).get("days", 90)
    if kept < RETENTION_DAYS:
        text = f"they live {kept} days, an approval may wait {RETENTION_DAYS}: raise it"
        yield Finding(state=MISSING, name="artifacts", text=text, page=page)


def _pages(repository: Repository) -> Iterator[Finding]:
    fields, page = repository.get("/pages"), repository.page("pages")
    if fields is None or fields.get("build_type") != "workflow":
        text = "choose the source GitHub Actions: pages.yml deploys the package index"
        yield Finding(state=MISSING, name="Pages", text=text, page=page)
        return
    yield Finding(state=GOOD, name="Pages", text=f"{fields.get('html_url')}, deployed by Actions")
    if not fields.get("https_enforced", True):
        yield Finding(state=MISSING, name="Pages over https", text="enforce it: pip trusts the index", page=page)
    policy = (repository.get("/environments/github-pages") or {}).get("deployment_branch_policy")
    branch = repository.get("")["default_branch"]
    if (
        policy
        and policy.get("protected_branches")
        and not (repository.get(f"/branches/{branch}") or {}).get("protected")
    ):
        text = (
            f"it takes protected branches only, and {branch} is not protected: protect it, or choose selected branches"
        )
        page = repository.page("environments")
        yield Finding(state=MISSING, name="environment github-pages", text=text, page=page)
    takes_branch = not (policy or {}).get("custom_branch_policies") or _allows(
        repository, "github-pages", branch, "branch"
    )
    if not takes_branch:
        text = f"let the branch {branch} deploy: a release starts pages.yml there"
        page = repository.page("environments")
        yield Finding(state=MISSING, name="environment github-pages", text=text, page=page)


def _release(repository: Repository) -> Iterator[Finding]:
    name, page = "environment release", repository.page("environments")
    fields = repository.get("/environments/release")
    if fields is None:
        text = "make it, with reviewers: the jobs that write a release wait for them"
        yield Finding(state=MISSING, name=name, text=text, page=page)
        return
    rules = {rule["type"]: rule for rule in fields.get("protection_rules", [])}
    required = rules.get("required_reviewers", {})
    reviewers = required.get("reviewers") or []
    if not reviewers:
        text = "name reviewers: without them anyone who can push a tag publishes"
        yield Finding(state=MISSING, name=name, text=text, page=page)
    elif required.get("prevent_self_review") and len(reviewers) == 1 and reviewers[0].get("type", "User") == "User":
        text = "one reviewer, who may not approve his own run: name a second one, or allow self-review"
        yield Finding(state=MISSING, name=name, text=text, page=page)
    else:
        yield Finding(state=GOOD, name=name, text=f"{len(reviewers)} reviewers")
    policy = fields.get("deployment_branch_policy")
    if policy is None:
        text = "limit it to the tags v*: now a job on any branch can ask for it"
        yield Finding(state=NOTE, name="refs of the environment release", text=text, page=page)
    elif not policy.get("custom_branch_policies"):
        text = "protected branches only refuses every tag: choose selected branches and tags, and add the tags v*"
        yield Finding(state=MISSING, name="refs of the environment release", text=text, page=page)
    elif not _allows(repository, "release", "v1.2.3", "tag"):
        text = "allow the tags v*: releases are made at tags"
        yield Finding(state=MISSING, name="refs of the environment release", text=text, page=page)


def _allows(repository: Repository, environment: str, ref: str, kind: str) -> bool:
    fields = repository.get(f"/environments/{environment}/deployment-branch-policies") or {}
    policies = fields.get("branch_policies", [])
    return any(each.get("type", "branch") == kind and fnmatch.fnmatchcase(ref, each["name"]) for each in policies)


def _tags(repository: Repository) -> Iterator[Finding]:
    name, page = "rules for tags", repository.page("rules")
    kept: set[str] = set()
    for each in repository.get("/rulesets") or []:
        if each["target"] == "tag" and each["enforcement"] == "active":
            ruleset = repository.get(f"/rulesets/{each['id']}") or {}
            names = ruleset.get("conditions", {}).get("ref_name", {})
            matched = any(_matches(pattern) for pattern in names.get("include", []))
            if matched and not any(_matches(pattern) for pattern in names.get("exclude", [])):
                kept |= {rule["type"] for rule in ruleset.get("rules", [])}
    if lacking := {"deletion", "update"} - kept:
        text = f"forbid {' and '.join(sorted(lacking))} of v*: a tag that moves names another commit than its wheels"
        yield Finding(state=MISSING, name=name, text=text, page=page)
    else:
        yield Finding(state=GOOD, name=name, text="v* cannot be moved or deleted")


def _immutable(repository: Repository) -> Iterator[Finding]:
    """GitHub answers 404 where immutable releases are off."""
    name, page = "immutable releases", f"{repository.home}/settings#releases-settings"
    if (repository.get("/immutable-releases") or {}).get("enabled"):
        yield Finding(state=GOOD, name=name, text="on: nobody can replace a published wheel or move its tag")
    else:
        text = "switch them on: without them, whoever may write can replace a published wheel"
        yield Finding(state=MISSING, name=name, text=text, page=page)


def _matches(pattern: str) -> bool:
    return pattern == "~ALL" or fnmatch.fnmatchcase(TAGS, pattern)


def _runner(repository: Repository) -> Iterator[Finding]:
    name, label = "GPU runner", versions.load().jobs.gpu_runner
    variable = (repository.get("/actions/variables/GPU_RUNNER") or {}).get("value", "")
    if variable != "true":
        text = "none: the notes will say that no wheel ran on a GPU (docker/runner/README.md)"
        yield Finding(state=NOTE, name=name, text=text, page=repository.page("variables/actions"))
        return
    runners = (repository.get("/actions/runners") or {}).get("runners", [])
    fitting = [each for each in runners if label in {tag["name"] for tag in each["labels"]}]
    if any(each["status"] == "online" for each in fitting):
        yield Finding(state=GOOD, name=name, text=f"{len(fitting)} labelled {label}")
    else:
        text = f"GPU_RUNNER is true and no runner labelled {label} is online: start it, or unset the variable"
        yield Finding(state=MISSING, name=name, text=text, page=repository.page("actions/runners"))
    policy = repository.get("/actions/permissions/fork-pr-contributor-approval") or {}
    if policy.get("approval_policy") != "all_external_contributors" and repository.get("").get("private") is not True:
        text = "require it for all external contributors: a pull request can name the runner in its own workflow"
        yield Finding(state=MISSING, name="approval of forks", text=text, page=repository.page("actions"))


def _issues(repository: Repository) -> Iterator[Finding]:
    if repository.get("").get("has_issues"):
        yield Finding(state=GOOD, name="issues", text="on: installs.yml opens one where the index breaks")
    else:
        text = "switch them on: installs.yml and the forms need them"
        yield Finding(state=MISSING, name="issues", text=text, page=f"{repository.home}/settings")


def _labels(repository: Repository) -> Iterator[Finding]:
    """Checks that the labels exist: GitHub silently drops a label of an issue form that the repository lacks."""
    names = {name.lower() for name in repository.api.labels()}
    if lacking := [label for label in LABELS if label.lower() not in names]:
        text = f"make {', '.join(lacking)}: the issue forms set them, and GitHub drops a label that does not exist"
        yield Finding(state=MISSING, name="labels", text=text, page=f"{repository.home}/labels")
    else:
        yield Finding(state=GOOD, name="labels", text=", ".join(LABELS))


_CHECKS: dict[str, Check] = {
    "visibility": _visibility,
    "Actions": _actions,
    "token of a workflow": _token,
    "Pages": _pages,
    "environment release": _release,
    "rules for tags": _tags,
    "immutable releases": _immutable,
    "GPU runner": _runner,
    "issues": _issues,
    "labels": _labels,
}
