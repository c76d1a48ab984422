"""What a score_mod does to a score: a factor, a soft cap, an addend, hidden keys."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_attn.flex.terms import Term, UntraceableError

_T = torch.Tensor


@dataclass(frozen=True)
class Score:
    """A modified score: softcap * tanh(factor * score / softcap) + addend, or -inf for a hidden key.

    factor   of the score
    softcap  0.0 without one
    is_bare  whether there is no addend and no key is hidden: a value of score_mod is a function of the score alone
    names    the arguments of the addend and of what hides keys: among b, h, q, kv
    """

    factor: float = 1.0
    softcap: float = 0.0
    is_bare: bool = True
    names: frozenset[str] = frozenset()


_ADD = {torch.add, _T.add, _T.__add__, _T.__radd__, operator.add}
_SUBTRACT = {torch.sub, torch.subtract, _T.sub, _T.__sub__, operator.sub}
_MULTIPLY = {torch.mul, torch.multiply, _T.mul, _T.__mul__, _T.__rmul__, operator.mul}
_DIVIDE = {torch.div, torch.divide, torch.true_divide, _T.div, _T.__truediv__, operator.truediv}
_TANH = {torch.tanh, _T.tanh, torch.nn.functional.tanh}
_WHERE = {torch.where, _T.where}
_FILL = {torch.masked_fill, _T.masked_fill}
_FLOAT = {_T.float}


def of_term(term: Any) -> Score:
    """The modification that a traced score_mod makes. Raises UntraceableError for one that is none of these."""
    if not isinstance(term, Term) or "score" not in _names(term):
        raise UntraceableError("its value does not depend on the score")
    if term.is_argument:
        return Score()
    call, args = term.call, term.args
    if term.kwargs or call in _FLOAT:
        if call in _FLOAT and not term.kwargs:
            return of_term(args[0])
        raise UntraceableError(f"it modifies the score by {_name(call)} with named arguments")
    if call in _WHERE and len(args) == 3:
        return _hidden(term, *((args[1], args[0], args[2]) if call is _T.where else args))
    if call in _FILL:
        return _hidden(term, args[1], args[2], args[0])
    on_score = [x for x in args if "score" in _names(x)]
    if len(args) == 2 and len(on_score) == 1:
        (inner,) = on_score
        other = args[0] if args[1] is inner else args[1]
        if call in _ADD or (call in _SUBTRACT and inner is args[0]):
            return _with_names(of_term(inner), other)
        if call in _MULTIPLY or (call in _DIVIDE and inner is args[0]):
            factor = _number(other)
            return _scaled(inner, factor if call in _MULTIPLY else 1.0 / factor)
    raise UntraceableError(f"it modifies the score by {_name(call)}")


def _scaled(inner: Any, factor: float) -> Score:
    """factor times a term: of a tanh it is the soft cap, of the score itself it is a factor."""
    if isinstance(inner, Term) and inner.call in _TANH and not inner.kwargs:
        score = of_term(inner.args[0])
        if not (score.is_bare and score.softcap == 0.0 and factor > 0.0):
            raise UntraceableError("a tanh of more than the score")
        return replace(score, factor=score.factor * factor, softcap=factor)
    score = of_term(inner)
    if not score.is_bare or score.softcap:
        raise UntraceableError("it multiplies a score that it has modified before")
    return replace(score, factor=score.factor * factor)


def _hidden(term: Term, condition: Any, kept: Any, other: Any) -> Score:
    """The score of where(condition, kept, other), in which kept or other is -inf. UntraceableError if neither is."""
    if "score" in _names(condition):
        raise UntraceableError("it hides keys by their scores")
    values = [x for x in (kept, other) if "score" not in _names(x)]
    if len(values) != 1 or _number(values[0]) != -math.inf:
        raise UntraceableError(f"it modifies the score by {_name(term.call)} with another value than -inf")
    return _with_names(of_term(other if values[0] is kept else kept), condition)


def _names(value: Any) -> frozenset[str]:
    return value.names if isinstance(value, Term) else frozenset()


def _with_names(score: Score, value: Any) -> Score:
    return replace(score, is_bare=False, names=score.names | _names(value))


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UntraceableError("it multiplies the score by what is no number of Python")
    return float(value)


def _name(call: Any) -> str:
    return getattr(call, "__name__", type(call).__name__)
