"""How the commands of a remedy are typed: in a shell of Linux, or in PowerShell and cmd of Windows."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence

from flash_attn.core.platform.base import in_powershell


class Shell(ABC):
    """Writes commands as they are typed. python: starts the running Python. pip: starts its pip."""

    python: str
    pip: str

    @abstractmethod
    def then(self, commands: Sequence[str]) -> str:
        """The commands joined into one line of this shell, for the backticks of a remedy."""

    @abstractmethod
    def quote(self, path: str) -> str:
        """A path as an argument."""

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> str:
        """The command that deletes directories, in backticks."""

    @abstractmethod
    def assign(self, name: str, value: str) -> str:
        """The command that sets an environment variable, in backticks."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> str:
        """The command that removes environment variables, in backticks."""


class Posix(Shell):
    """sh, bash and zsh."""

    python = "python"
    pip = "pip"

    def then(self, commands: Sequence[str]) -> str:
        return " && ".join(commands)

    def quote(self, path: str) -> str:
        return shlex.quote(path)

    def delete(self, paths: Sequence[str]) -> str:
        return f"`rm -r {' '.join(map(shlex.quote, paths))}`"

    def assign(self, name: str, value: str) -> str:
        return f"`export {name}={value}`"

    def remove(self, names: Sequence[str]) -> str:
        return f"`unset {' '.join(names)}`"


class Windows(Shell):
    """PowerShell 5.1 and newer, and cmd. Where the two differ, both commands are written.

    executable: path of the running Python. A portable Python, such as ComfyUI's python_embeded, is not in PATH.
    """

    def __init__(self, executable: str) -> None:
        self.python = in_powershell(executable or "python")
        self.pip = f"{self.python} -m pip"

    def then(self, commands: Sequence[str]) -> str:
        return "`, then `".join(commands)  # no separator means the same in PowerShell 5.1 and in cmd

    def quote(self, path: str) -> str:
        return f'"{path}"'

    def delete(self, paths: Sequence[str]) -> str:
        in_powershell = ", ".join(f'"{path}"' for path in paths)
        in_cmd = " ".join(f'"{path}"' for path in paths)
        return f"`Remove-Item -Recurse -Force {in_powershell}` (PowerShell) or `rmdir /s /q {in_cmd}` (cmd)"

    def assign(self, name: str, value: str) -> str:
        return f'`$env:{name} = "{value}"` (PowerShell) or `set {name}={value}` (cmd)'

    def remove(self, names: Sequence[str]) -> str:
        in_powershell = ", ".join(f"Env:{name}" for name in names)
        in_cmd = "& ".join(f"set {name}=" for name in names)
        return f"`Remove-Item {in_powershell}` (PowerShell) or `{in_cmd}` (cmd)"
