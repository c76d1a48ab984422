"""Finds violations of the rules in a kernel, on every path through it, including the back edges of loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.cures import Finding
from rocm_wheels.compile.check.instructions import Instruction, Kernel
from rocm_wheels.compile.check.rules import STATES, VECTORS, Rule, for_target


class _Age(NamedTuple):
    """The wait states and vector instructions that have passed since an instruction."""

    states: int
    vectors: int
    transcendentals: int

    def of(self, unit: str) -> int:
        return {STATES: self.states, VECTORS: self.vectors}.get(unit, 0)

    def after(self, one: Instruction) -> _Age:
        return _Age(
            min(self.states + one.states, 99),
            min(self.vectors + bool(one.kinds & isa.VALU), 99),
            self.transcendentals + bool(one.kinds & isa.TRANSCENDENTAL),
        )


@dataclass(frozen=True)
class _Roles:
    """The roles of an instruction: for each rule its registers as a producer and as a consumer."""

    produces: tuple[tuple[int, int], ...]
    consumes: Mapping[int, int]


def findings(kernel: Kernel, target: str) -> list[Finding]:
    """The violations of the rules of a target, in the order of the instructions. Raises ValueError for an unknown
    instruction.
    """
    rules = for_target(target)
    roles = {op: _roles(op, rules) for op in set(kernel.instructions)}
    violations: dict[tuple[int, int], Finding] = {}
    pending: dict[int, dict[tuple[int, int], _Age]] = {0: {}}
    work = [0] if kernel.instructions else []
    while work:
        index = work.pop()
        state = pending[index]
        while True:
            op = kernel.instructions[index]
            for number, finding in _check(kernel, index, state, roles, rules, target):
                key = (index, number)
                if key not in violations or violations[key].missing < finding.missing:
                    violations[key] = finding
            state = _after(index, op, state, roles[op], rules)
            following = kernel.followers[index]
            if len(following) == 1 and following[0] == index + 1 and index + 1 not in pending:
                index += 1
                continue
            break
        for at in following:
            if at not in pending or _merge(pending[at], state):
                pending.setdefault(at, dict(state))
                work.append(at)
    return [violations[key] for key in sorted(violations)]


def _roles(op: Instruction, rules: tuple[Rule, ...]) -> _Roles:
    produces = tuple((number, bits) for number, rule in enumerate(rules) if (bits := rule.producer(op)))
    return _Roles(produces, {number: bits for number, rule in enumerate(rules) if (bits := rule.consumer(op))})


State = dict[tuple[int, int], _Age]


def _check(
    kernel: Kernel,
    index: int,
    state: State,
    roles: Mapping[Instruction, _Roles],
    rules: tuple[Rule, ...],
    target: str,
) -> list[tuple[int, Finding]]:
    second = kernel.instructions[index]
    consumes = roles[second].consumes
    violations: list[tuple[int, Finding]] = []
    for (producer, number), age in state.items() if consumes else ():
        first, rule = kernel.instructions[producer], rules[number]
        if number not in consumes or not rule.producer(first) & consumes[number]:
            continue
        need = rule.most if rule.need is None else rule.need(first, second, target)
        missing = need - age.of(rule.unit)
        if missing > 0:
            problem = f"{second.text}: {missing} {rule.unit} too early after {first.text}"
            name = f"{rule.name}; {rule.source}"
            violations.append((number, Finding(kernel.symbol, index, name, problem, missing, rule.cure)))
    return violations


def _after(index: int, op: Instruction, state: State, roles: _Roles, rules: tuple[Rule, ...]) -> State:
    """The producers that are still too recent after an instruction."""
    left = {}
    for (producer, number), age in state.items():
        rule, older = rules[number], age.after(op)
        if rule.ends is not None and (rule.ends(op) or older.transcendentals > 1):
            continue
        if older.of(rule.unit) < rule.most:
            left[producer, number] = older
    for number, _ in roles.produces:
        left[index, number] = _Age(0, 0, 0)
    return left


def _merge(into: State, state: State) -> bool:
    """Merges the state of another path. Returns whether a producer became more recent."""
    younger = False
    for key, age in state.items():
        known = into.get(key)
        least = age if known is None else _Age(*map(min, known, age))
        if least != known:
            into[key], younger = least, True
    return younger
