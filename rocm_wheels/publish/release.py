"""The GitHub release of one tag: a draft of one commit that is filled, checked, and published.

Every method may be interrupted and repeated. Public files are never deleted first: a wheel stays, and a file that
changes with the wheels (SHA256SUMS, a test report) is deleted only after its successor is uploaded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix import names
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.matrix.release_plan import FILE
from rocm_wheels.publish import catalogue, github
from rocm_wheels.publish.assets import SUMS, Asset, sums
from rocm_wheels.publish.github import GitHub, Unanswered
from rocm_wheels.wheel.verdict import Verdict

Say = Callable[[str], None]
AGAIN = "Run the same command again: it goes on from what is there."
_NEXT = ".next"  # suffix of a file that will replace a file of a public release

Listing = dict[str, dict[str, Any]]


class Release:
    """The release of a tag. Raises PublishFailed if the tag, or a draft that holds files, is of another commit."""

    def __init__(self, api: GitHub, tag: str, commit: str, say: Say) -> None:
        self.api = api
        self.tag = tag
        self.commit = commit
        self.say = say
        self._digests: dict[int, str] = {}
        self._check_tag()
        self.fields = self._find_or_create()
        self._check_commit()

    @property
    def draft(self) -> bool:
        """Whether it was a draft at the last request."""
        return bool(self.fields["draft"])

    @property
    def immutable(self) -> bool:
        """Whether its assets can neither be added nor replaced any more."""
        return not self.draft and bool(self.fields.get("immutable"))

    def still_draft(self) -> bool:
        """Asks GitHub again whether it is a draft: another run may have published it."""
        self.fields = self.api.release(self.fields["id"])
        return self.draft

    def listing(self) -> Listing:
        """The current assets by name, in any state; each uploaded asset has a digest."""
        assets = {}
        for asset in self.api.assets(self.fields["id"]):
            assets[asset["name"]] = asset
            if asset["state"] == "uploaded" and catalogue.asset_sha256(asset) is None:
                if asset["id"] not in self._digests:
                    self._digests[asset["id"]] = hashlib.sha256(self.api.download(asset["url"])).hexdigest()
                asset["digest"] = f"sha256:{self._digests[asset['id']]}"
        return assets

    def without_leftovers(self) -> Listing:
        """The listing after leftovers of killed runs are completed or deleted: unfinished uploads block their names.

        A listing may be seconds old. So each asset is requested once more before it is deleted or renamed.
        """
        listing = self.listing()
        for name, asset in list(listing.items()):
            if asset["state"] != "uploaded":
                del listing[name]
                now = self.api.asset(asset["id"])
                if now is not None and now["state"] == "uploaded" and catalogue.asset_sha256(now) is not None:
                    listing[name] = now
                elif now is not None and now["state"] != "uploaded":
                    self.say(f"  {name}: an unfinished upload is deleted")
                    self.api.delete_asset(asset["id"])
        for name, asset in list(listing.items()):
            if name.endswith(_NEXT):
                del listing[name]
                now = self.api.asset(asset["id"])
                if now is not None and now["name"] != name:
                    listing[now["name"]] = {**asset, **now, "digest": asset["digest"]}
                elif now is None:
                    continue
                elif (final := name.removesuffix(_NEXT)) in listing:
                    self.api.delete_asset(asset["id"])
                else:
                    listing[final] = self.api.rename_asset(asset["id"], final)
        return listing

    def foreign_wheel(self, wanted: Asset, verdict: Verdict, listing: Listing) -> Verdict | None:
        """The test report of the wheel that GitHub has under the name of `wanted`; None if it is the same wheel or
        incomplete.

        Raises PublishFailed if it has other contents, because the same commit should have given the same contents.
        """
        there, claim = listing.get(wanted.name), listing.get(wanted.name + VERDICT)
        if there is None or there["state"] != "uploaded" or wanted.is_there(there) or claim is None:
            return None
        try:
            sha256 = catalogue.asset_sha256(there) or ""
            report = catalogue.checked_verdict(wanted.name, sha256, self.api.download(claim["url"]))
        except DataError:
            return None
        if report.contents == verdict.contents:
            return report
        raise PublishFailed(
            f"release {self.tag} holds {wanted.name} with other contents, of commit {report.commit or 'unknown'}",
            remedy="Build with --published: changed contents get the next build number."
            if not self.draft
            else f"Delete the draft (gh release delete {self.tag}) if its wheels are the wrong ones.",
        )

    def check(self, wanted: Sequence[Asset], listing: Listing) -> None:
        """Raises PublishFailed if one of these assets would replace a file that others rely on."""
        for asset in wanted:
            there = listing.get(asset.name)
            if asset.final and there is not None and not asset.is_there(there):
                self._may_delete(asset, there, {there["id"]})

    def upload(self, wanted: Asset, there: Mapping[str, Any] | None) -> str:
        """Uploads the asset unless GitHub has it. Returns how. there: the entry of the last listing under its name."""
        if there is not None and wanted.is_there(there):
            return "already there"
        if self.immutable:
            raise PublishFailed(
                f"release {self.tag} is immutable: {wanted.name} cannot be added to it",
                remedy="Publish it under a new tag; the index joins all releases.",
            )
        started = time.monotonic()
        stays = wanted.name == FILE or (not wanted.final and not self.draft)  # until its successor is there
        if there is not None and there["state"] == "uploaded" and stays:
            self._swap(wanted, there)
        else:
            self._send(wanted, there)
        return f"sent in {time.monotonic() - started:.1f} s"

    def verify(self, wanted: Sequence[Asset]) -> Listing:
        """The listing, once it shows every asset with its digest. Raises PublishFailed if it does not in time."""
        for attempt in range(github.ATTEMPTS):
            listing = self.listing()
            missing = {"state": "missing"}
            wrong = [asset.name for asset in wanted if not asset.is_there(listing.get(asset.name, missing))]
            if not wrong:
                return listing
            time.sleep(github.backoff(attempt))
        raise PublishFailed(f"release {self.tag} does not hold what was sent: {', '.join(wrong)}", remedy=AGAIN)

    def write_sums(self, wanted: Sequence[Asset]) -> str:
        """Writes SHA256SUMS for everything in the release: `wanted` and the files that another run added. Returns how,
        as `upload` does.

        Raises PublishFailed if the release changes in every attempt.
        """
        done = "already there"
        for attempt in range(github.ATTEMPTS):
            listing = self.verify(wanted)
            fresh = sums({name: catalogue.asset_sha256(asset) or "" for name, asset in listing.items()})
            there = listing.get(SUMS)
            if there is not None and fresh.is_there(there):
                return done
            if attempt:
                time.sleep(github.backoff(attempt))
            self.still_draft()  # If another run has published it, the old sums stay until the new ones are uploaded.
            done = self.upload(fresh, there)
        raise PublishFailed(f"release {self.tag} changes while {SUMS} is written", remedy=f"Stop other runs. {AGAIN}")

    def update(self, **fields: Any) -> None:
        """Sets fields of the release; a field that has its value already is not sent."""
        if any(self.fields.get(name) != value for name, value in fields.items()):
            self.fields = self.api.update_release(self.fields["id"], **fields)

    def publish(self) -> None:
        """Publishes the draft. Raises PublishFailed if GitHub then has the tag at another commit.

        GitHub calls the release the latest only if no other final release has a newer version.
        """
        changes: dict[str, Any] = {"prerelease": names.is_candidate(self.tag)}
        if self.draft:
            changes |= {"draft": False, "target_commitish": self.commit, "make_latest": str(self._is_newest()).lower()}
        self.update(**changes)
        self._check_tag()

    def _is_newest(self) -> bool:
        """Whether it is the newest final release by version: a backport and a candidate are not."""
        own = catalogue.release_key(self.tag)
        others = [release["tag_name"] for release in catalogue.final(self.api.releases())]
        return not names.is_candidate(self.tag) and all(catalogue.release_key(tag) <= own for tag in others)

    def drop_empty_draft(self) -> None:
        """Deletes the draft, unless it is public or holds a file: another run may be filling it."""
        github.settle()
        if self.still_draft() and not self._files(self.fields["id"]):
            self.api.delete_release(self.fields["id"])

    def _files(self, release: int) -> set[str]:
        """The names of the files in a release, without its plan, with which every draft begins."""
        return {asset["name"] for asset in self.api.assets(release)} - {FILE, FILE + _NEXT}

    def _send(self, asset: Asset, there: Mapping[str, Any] | None) -> Mapping[str, Any]:
        # A run may delete files that it saw at its start, and files that it uploaded. Other files belong to
        # another run.
        own = {there["id"]} if there is not None else set()
        for attempt in range(github.ATTEMPTS):
            if there is not None:
                self.still_draft()
                self._may_delete(asset, there, own)
                self.api.delete_asset(there["id"])
            there = self._once(asset, attempt, own)
            if there is not None and asset.is_there(there):
                return there
        raise PublishFailed(f"{asset.name} could not be sent in {github.ATTEMPTS} attempts", remedy=AGAIN)

    def _swap(self, asset: Asset, there: Mapping[str, Any]) -> None:
        """Replaces a file of a public release: the old file is deleted after the new one is uploaded."""
        sent = self._send(asset.renamed(asset.name + _NEXT), None)
        self.api.delete_asset(there["id"])
        self.api.rename_asset(sent["id"], asset.name)

    def _once(self, asset: Asset, attempt: int, own: set[int]) -> dict[str, Any] | None:
        """One attempt to upload. Returns the asset that GitHub has afterwards, None if it has none. own: receives the
        id of the upload.
        """
        try:
            sent = self.api.upload(self.fields["upload_url"], asset.name, asset.open, asset.content_type)
        except Unanswered as problem:
            wait = github.backoff(attempt)
            self.say(f"  {problem}; looking again in {wait:.0f} s")
            time.sleep(wait)
            return self.listing().get(asset.name)
        own.add(sent["id"])
        if sent["name"] != asset.name:
            self.api.delete_asset(sent["id"])
            raise PublishFailed(f"GitHub stored {asset.name} as {sent['name']}", remedy="Rename the file.")
        if catalogue.asset_sha256(sent) is None:
            return self.listing().get(asset.name)
        return sent

    def _may_delete(self, asset: Asset, there: Mapping[str, Any], own: Collection[int]) -> None:
        """Raises PublishFailed for a file of a public release, and for a file that another run sent meanwhile."""
        if there["state"] != "uploaded":
            return
        if self.draft:
            # Sums and plan are rewritten until they match the release, whoever wrote them.
            if there["id"] not in own and asset.name.removesuffix(_NEXT) not in (SUMS, FILE):
                raise PublishFailed(
                    f"{asset.name} came into the draft of {self.tag} meanwhile, with other contents:"
                    " another run publishes under this tag",
                    remedy=f"Wait for the other run, or stop it. {AGAIN}",
                )
            return
        if not asset.final:
            raise PublishFailed(f"{asset.name} was made public by another run meanwhile", remedy=AGAIN)
        raise PublishFailed(
            f"{asset.name} is published with other content",
            remedy="A published file never changes: build with --published, which gives the next build number,"
            " and yank the wheel if it is wrong.",
        )

    def _check_tag(self) -> None:
        there = self.api.tag_commit(self.tag)
        if there is not None and there != self.commit:
            raise PublishFailed(
                f"the tag {self.tag} names commit {there}, this release is of {self.commit}",
                remedy=f"Check out the tag and build there: git checkout {self.tag}",
            )

    def _check_commit(self) -> None:
        there = self.fields.get("target_commitish")
        if there == self.commit or not self.draft:
            return
        if self._files(self.fields["id"]):
            raise PublishFailed(
                f"the draft of {self.tag} was begun at {there} and holds files, this release is of {self.commit}",
                remedy=f"Check out {there}, or delete the draft: gh release delete {self.tag}",
            )
        self.update(target_commitish=self.commit)

    def _find_or_create(self) -> dict[str, Any]:
        for attempt in range(github.ATTEMPTS):
            if release := self.only():
                return release
            github.settle()  # the draft of a run that was killed a moment ago may not be listed yet
            if release := self.only():
                return release
            try:
                made = self.api.create_release(
                    tag_name=self.tag,
                    name=self.tag,
                    draft=True,
                    prerelease=names.is_candidate(self.tag),
                    target_commitish=self.commit,
                )
                github.settle()
                return self.only() or made  # another run may have created one at the same time
            except Unanswered as problem:
                wait = github.backoff(attempt)
                self.say(f"{problem}; looking again in {wait:.0f} s")
                time.sleep(wait)
        raise PublishFailed(f"no draft of {self.tag} could be made", remedy=AGAIN)

    def check_only(self) -> None:
        """Raises PublishFailed if another draft of the tag remains in place of this one."""
        if (remaining := self.only()) is None or remaining["id"] != self.fields["id"]:
            raise PublishFailed(f"another run has made the draft of {self.tag} that remains", remedy=AGAIN)

    def only(self) -> dict[str, Any] | None:
        """The published release of the tag, else the oldest draft that holds files, else the oldest draft.

        Any other draft goes if it is empty, or if runs of this command made both at the same commit: a run sends its
        files again. Raises PublishFailed if a person may have filled it.
        """
        entries = [release for release in self.api.releases() if release["tag_name"] == self.tag]
        files = {release["id"]: self._files(release["id"]) for release in entries}
        entries.sort(key=lambda release: (release["draft"], not files[release["id"]], release["id"]))
        for other in entries[1:]:
            if not other["draft"]:
                continue
            github.settle()
            ours = all(FILE in {asset["name"] for asset in self.api.assets(each["id"])} for each in (entries[0], other))
            same = entries[0]["target_commitish"] == other["target_commitish"]
            if self._files(other["id"]) and not (ours and same):
                raise PublishFailed(
                    f"the drafts {entries[0]['id']} and {other['id']} of {self.tag} both hold files",
                    remedy=f"Delete the wrong one: {other['html_url']}",
                )
            self.say(f"draft {other['id']} of {self.tag} is there a second time and is deleted")
            self.api.delete_release(other["id"])
        return entries[0] if entries else None
