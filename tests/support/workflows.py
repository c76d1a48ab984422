"""GitHub Actions workflows on this machine: their expressions, and a runner for their jobs.

The runner treats `run:` steps as GitHub's runner does: bash with -e, the variables, the output files. The actions that
need GitHub (checkout, cache, artifacts) are stubs with the same results on a disk. Any other action is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import actions
import fewer_kernels
import yaml
from actions import ActionFailed

from rocm_wheels import cli

ROOT = Path(__file__).resolve().parent.parent.parent
WORKFLOWS = ROOT / ".github/workflows"
EXPRESSION = re.compile(r"\$\{\{((?:(?!\}\}).)*)\}\}", re.DOTALL)
_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^']|'')*')|(?P<number>-?\d+(?:\.\d+)?)|(?P<name>[A-Za-z_][\w-]*)"
    r"|(?P<operator>&&|\|\||==|!=|<=|>=|[!<>().,\[\]*]))"
)


def load(name: str) -> dict[str, Any]:
    """A workflow by file name; YAML 1.1 reads the key `on` as true."""
    content = yaml.load((WORKFLOWS / name).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return {"on" if key is True else key: value for key, value in content.items()}


class Expression:
    """GitHub's expression language: evaluates one expression with the contexts."""

    def __init__(self, text: str, contexts: Mapping[str, Any], *, workspace: Path | None = None) -> None:
        self.tokens = list(self._tokens(text))
        self.contexts = contexts
        self.workspace = workspace

    @staticmethod
    def _tokens(text: str) -> Iterator[tuple[str, str]]:
        position = 0
        text = text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ValueError(f"{text!r} is no expression from {text[position:]!r} on")
            position = match.end()
            kind = match.lastgroup or ""
            yield kind, match[kind]

    def value(self) -> Any:
        result = self._or()
        if self.tokens:
            raise ValueError(f"unexpected {self.tokens[0][1]!r}")
        return result

    def _take(self, *operators: str) -> str | None:
        if self.tokens and self.tokens[0][0] == "operator" and self.tokens[0][1] in operators:
            return self.tokens.pop(0)[1]
        return None

    def _need(self, operator: str) -> None:
        if self._take(operator) is None:
            raise ValueError(f"{operator!r} is missing before {self.tokens[:1]}")

    def _or(self) -> Any:
        result = self._and()
        while self._take("||"):
            other = self._and()
            result = result or other
        return result

    def _and(self) -> Any:
        result = self._comparison()
        while self._take("&&"):
            other = self._comparison()
            result = other if result else result
        return result

    def _comparison(self) -> Any:
        left = self._unary()
        if operator := self._take("==", "!="):
            equal = _text(left).lower() == _text(self._unary()).lower()
            return equal == (operator == "==")
        return left

    def _unary(self) -> Any:
        if self._take("!"):
            return not self._unary()
        if self._take("("):
            result = self._or()
            self._need(")")
            return result
        kind, text = self.tokens.pop(0)
        if kind == "string":
            return text[1:-1].replace("''", "'")
        if kind == "number":
            return float(text) if "." in text else int(text)
        if kind != "name":
            raise ValueError(f"unexpected {text!r}")
        if self._take("("):
            return self._call(text)
        if text in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[text]
        return self._look_up(text)

    def _look_up(self, name: str) -> Any:
        """The value of a path. An unknown context is an error; a missing key is empty, as on GitHub."""
        result = self.contexts[name]
        while True:
            if self._take("."):
                key = self.tokens.pop(0)[1]
            elif self._take("["):
                key = self._or()
                self._need("]")
            else:
                return result
            result = result.get(key, "") if isinstance(result, Mapping) else ""

    def _call(self, name: str) -> Any:
        arguments = []
        while not self._take(")"):
            arguments.append(self._or())
            self._take(",")
        functions: dict[str, Callable[..., Any]] = {
            "format": lambda text, *values: text.format(*map(_text, values)),
            "fromJSON": json.loads,
            "toJSON": json.dumps,
            "contains": lambda where, what: what in where,
            "startsWith": lambda text, start: text.lower().startswith(start.lower()),
            "always": lambda: True,
            "cancelled": lambda: False,
            "success": lambda: self.contexts["status"] == "success",
            "failure": lambda: self.contexts["status"] == "failure",
            "hashFiles": self._hash,
        }
        return functions[name](*arguments)

    def _hash(self, *patterns: str) -> str:
        assert self.workspace is not None
        files = sorted({path for each in patterns for path in self.workspace.glob(each) if path.is_file()})
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def render(value: Any, contexts: Mapping[str, Any], workspace: Path | None = None) -> Any:
    """A value of a workflow with its expressions evaluated. A value that is a single expression keeps its type."""
    if isinstance(value, dict):
        return {key: render(each, contexts, workspace) for key, each in value.items()}
    if isinstance(value, list):
        return [render(each, contexts, workspace) for each in value]
    if not isinstance(value, str):
        return value
    if whole := EXPRESSION.fullmatch(value.strip()):
        return Expression(whole[1], contexts, workspace=workspace).value()
    return EXPRESSION.sub(lambda match: _text(Expression(match[1], contexts, workspace=workspace).value()), value)


def holds(condition: Any, contexts: Mapping[str, Any]) -> bool:
    """Whether an `if:` holds. It requires success unless it names a status function."""
    if condition is None:
        return bool(contexts["status"] == "success")
    text = str(condition).strip()
    if whole := EXPRESSION.fullmatch(text):
        text = whole[1]
    result = bool(Expression(text, contexts).value())
    if not re.search(r"\b(success|failure|always|cancelled)\s*\(", text):
        return result and contexts["status"] == "success"
    return result


def direct(job: Mapping[str, Any]) -> list[str]:
    """The jobs in the `needs` of a job."""
    needs: str | list[str] = job.get("needs", [])
    return [needs] if isinstance(needs, str) else needs


def ancestors(jobs: Mapping[str, Any], key: str) -> set[str]:
    """All jobs before this one. A job without a condition requires the success of all, and a skipped job did not
    succeed.
    """
    return {result for need in direct(jobs[key]) for result in (need, *ancestors(jobs, need))}


@dataclass
class Job:
    """The result of a job, or the combined result of the jobs of a matrix."""

    result: str
    outputs: dict[str, str] = field(default_factory=dict)
    log: str = ""


@dataclass
class Runner:
    """Runs workflows in `workspace`. Artifacts and caches are in `storage`, cached paths of any key in `caches`.

    narrow: the checkout has fewer kernels to compile.
    """

    workspace: Path
    storage: Path
    caches: Path
    github: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    narrow: bool = False
    ran: list[str] = field(default_factory=list)

    def workflow(
        self,
        name: str,
        inputs: Mapping[str, Any],
        *,
        only: set[str] | None = None,
        earlier: Mapping[str, Job] | None = None,
    ) -> dict[str, Job]:
        """Runs the jobs of a workflow in the order of their needs. Jobs that are not in `only` count as skipped.

        earlier: the jobs of the attempt before, for "re-run failed jobs": a job that passed is not run again.
        """
        content = load(name)
        contexts: dict[str, Any] = {
            "github": self.github,
            "inputs": inputs,
            "vars": self.variables,
            "runner": {"temp": str(self.storage / "temp")},
        }
        jobs: dict[str, Job] = {}
        for key, job in content["jobs"].items():
            needs = direct(job)
            results = {need: {"result": jobs[need].result, "outputs": jobs[need].outputs} for need in needs}
            good = all(jobs[need].result == "success" for need in ancestors(content["jobs"], key))
            here = {**contexts, "needs": results, "status": "success" if good else "failure"}
            here["env"] = render(content.get("env", {}), here)
            if earlier is not None and earlier[key].result == "success":
                jobs[key] = earlier[key]
                continue
            if (only is not None and key not in only) or not holds(job.get("if"), here):
                jobs[key] = Job("skipped")
                continue
            jobs[key] = self._job(name, key, job, here)
        return jobs

    def _job(self, name: str, key: str, job: dict[str, Any], contexts: dict[str, Any]) -> Job:
        rows: list[dict[str, Any]] = [{}]
        if "strategy" in job:
            matrix = render(job["strategy"]["matrix"], contexts)
            rows = matrix["include"]
        done = []
        for row in rows:
            here = {**contexts, "matrix": row, "status": "success"}
            if "uses" in job:
                called = self.workflow(Path(job["uses"]).name, self._inputs(job, here))
                bad = [each for each in called.values() if each.result not in ("success", "skipped")]
                log = "\n".join(each.log for each in called.values())
                done.append(Job("failure" if bad else "success", log=log))
            else:
                done.append(self._steps(f"{name}:{key}", job, here))
        result = "success" if all(each.result == "success" for each in done) else "failure"
        outputs = {output: value for each in done for output, value in each.outputs.items()}
        return Job(result, outputs, "\n".join(each.log for each in done))

    def _inputs(self, job: dict[str, Any], contexts: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a called workflow: the passed values, else the defaults."""
        declared = (load(Path(job["uses"]).name)["on"]["workflow_call"] or {}).get("inputs", {})
        passed = render(job.get("with", {}), contexts)
        return {name: passed.get(name, entry.get("default", "")) for name, entry in declared.items()}

    def _steps(self, label: str, job: dict[str, Any], contexts: dict[str, Any]) -> Job:
        contexts["env"] = {**contexts["env"], **render(job.get("env", {}), contexts)}
        contexts["steps"] = {}
        contexts["status"] = "success"
        contexts["job"] = contexts  # `job.status` is the status so far
        log = []
        for step in job["steps"]:
            if not holds(step.get("if"), contexts):
                continue
            self.ran.append(f"{label}: {step['name']}")
            if "uses" in step:
                inputs = render(step.get("with", {}), contexts, self.workspace)
                try:
                    outputs = self._action(step["uses"].partition("@")[0], inputs)
                except ActionFailed as error:
                    log.append(f"{step['uses']}: {error}")
                    contexts["status"] = "failure"
                    continue
                contexts["steps"][step.get("id")] = {"outputs": outputs}
                continue
            done, outputs = self._run(step, contexts)
            log.append(f"$ {step['run']}\n{done.stdout}")
            if "id" in step:
                contexts["steps"][step["id"]] = {"outputs": outputs}
            if done.returncode != 0 and not step.get("continue-on-error"):
                contexts["status"] = "failure"
        outputs = {name: _text(value) for name, value in render(job.get("outputs", {}), contexts).items()}
        return Job(contexts["status"], outputs, "\n".join(log))

    def _run(
        self, step: dict[str, Any], contexts: Mapping[str, Any]
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
        temporary = self.storage / "temp"
        temporary.mkdir(parents=True, exist_ok=True)
        written = temporary / "output"
        written.write_text("")
        variables = {**contexts["env"], **render(step.get("env", {}), contexts)}
        environment = {
            **self.environment,
            **{name: _text(value) for name, value in variables.items()},
            "GITHUB_OUTPUT": str(written),
            "RUNNER_TEMP": str(temporary),
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.workspace / step.get("working-directory", ""),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = written.read_text().splitlines()
        return done, {name: value for name, _, value in (line.partition("=") for line in lines)}

    def _action(self, action: str, inputs: Mapping[str, Any]) -> dict[str, str]:
        """Runs the stub of an action and returns its outputs."""
        artifacts = self.storage / "artifacts"
        stubs: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "actions/checkout": self._checkout,
            "actions/cache/restore": self._restore,
            "actions/cache/save": self._save,
            "actions/upload-artifact": lambda inputs: actions.upload(inputs, self.workspace, artifacts),
            "actions/download-artifact": lambda inputs: actions.download(inputs, self.workspace, artifacts),
        }
        stubs[action](inputs)
        return {"cache-primary-key": inputs["key"]} if action == "actions/cache/restore" else {}

    def _checkout(self, inputs: Mapping[str, Any]) -> None:
        """Checks out the files of this repository. Of the previous job only its environments remain, which only cost
        time.
        """
        assert inputs["persist-credentials"] is False
        self.workspace.mkdir(parents=True, exist_ok=True)
        others = (path for path in self.workspace.iterdir() if path.name != "build")
        for path in (*others, *(self.workspace / "build").glob("[!e]*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        fewer_kernels.copy(self.workspace)
        if self.narrow:
            fewer_kernels.narrow(self.workspace)

    def _restore(self, inputs: Mapping[str, Any]) -> None:
        actions.check_keys(inputs)
        if self.caches.is_dir():
            shutil.copytree(self.caches, self.workspace / inputs["path"], dirs_exist_ok=True)

    def _save(self, inputs: Mapping[str, Any]) -> None:
        actions.check_keys(inputs)
        source = self.workspace / inputs["path"]
        if source.is_dir():
            shutil.copytree(source, self.caches, dirs_exist_ok=True)


@cache
def matrix_rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of a release's jobs from create_matrix.py: kernels, wheels and gpu."""
    command = [sys.executable, str(ROOT / "create_matrix.py"), "--tag", "v1.2.3"]
    done = subprocess.run(command, env=base_environment(), capture_output=True, text=True, check=True)
    return {name: each["include"] for name, each in json.loads(done.stdout).items() if name != "tag"}


def base_environment() -> dict[str, str]:
    """This process's environment without variables that would change a build."""
    dropped = ("PYTORCH_ROCM_ARCH", "GPU_ARCHS", "BUILD_TRITON_BACKEND", "ROCM_WHEELS_CACHE", "MAX_JOBS")
    return {key: value for key, value in os.environ.items() if key not in dropped and not key.startswith("GITHUB_")}


def verbs() -> set[str]:
    """The verbs of `python -m rocm_wheels`."""
    return set(re.findall(r"^    ([a-z]+)\b", cli._parser().format_help(), re.MULTILINE))
