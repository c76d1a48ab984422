"""What a score_mod does to a score: factors, a soft cap, and then steps that add or hide."""

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
    """A modified score: softcap * tanh(factor * score / softcap), and then its steps.

    factor   of the score, a number of Python
    factors  of the score too: terms of the batch, the head and the query
    softcap  0.0 without one
    steps    in order: (ADD or SUBTRACT, addend), (HIDE or KEEP, condition), terms or numbers
    """

    factor: float = 1.0
    factors: tuple[Term, ...] = ()
    softcap: float = 0.0
    steps: tuple[tuple[str, Any], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The arguments on which the steps depend: among b, h, q, kv."""
        return frozenset[str]().union(*(_names(x) for _, x in self.steps))


ADD, SUBTRACT, HIDE, KEEP = "add", "subtract", "hide", "keep"


_ADD = {torch.add, _T.add, _T.__add__, _T.__radd__, operator.add}
_SUBTRACT = {torch.sub, torch.subtract, _T.sub, _T.__sub__, operator.sub}
_MULTIPLY = {torch.mul, torch.multiply, _T.mul, _T.__mul__, _T.__rmul__, operator.mul}
_DIVIDE = {torch.div, torch.divide, torch.true_divide, _T.div, _T.__truediv__, operator.truediv}
_TANH = {torch.tanh, _T.tanh, torch.nn.functional.tanh}
_WHERE = {torch.where, _T.where}
_FILL = {torch.masked_fill, _T.masked_fill}
_FLOAT = {_T.float}
_OF_ROWS = frozenset(("b", "h", "q"))


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
            score = of_term(inner)
            return replace(score, steps=(*score.steps, (ADD if call in _ADD else SUBTRACT, other)))
        if call in _MULTIPLY or (call in _DIVIDE and inner is args[0]):
            return _scaled(inner, other, is_divided=call in _DIVIDE)
    raise UntraceableError(f"it modifies the score by {_name(call)}")


def _scaled(inner: Any, other: Any, *, is_divided: bool) -> Score:
    """A factor times a term: of a tanh it is the soft cap, of the score itself it is a factor."""
    if _is_term_of_rows(other):
        score = _unmodified(inner)
        factor = Term(_T.reciprocal, (other,)) if is_divided else other
        return replace(score, factors=(*score.factors, factor))
    factor = _number(other)
    if is_divided:
        if factor == 0.0:
            raise UntraceableError("it divides the score by 0")
        factor = 1.0 / factor
    if isinstance(inner, Term) and inner.call in _TANH and not inner.kwargs:
        score = of_term(inner.args[0])
        if score.steps or score.softcap or not factor > 0.0:
            raise UntraceableError("a tanh of more than the score")
        return replace(score, factor=score.factor * factor, softcap=factor)
    score = _unmodified(inner)
    return replace(score, factor=score.factor * factor)


def _is_term_of_rows(x: Any) -> bool:
    """Whether x is a term of the batch, the head and the query, or a tensor, so that q can be multiplied by it."""
    if isinstance(x, torch.Tensor):
        return x.dim() == 0 and (x.requires_grad or x.device.type != "cpu")
    return isinstance(x, Term) and x.names <= _OF_ROWS


def _unmodified(inner: Any) -> Score:
    score = of_term(inner)
    if score.steps or score.softcap:
        raise UntraceableError("it multiplies a score that it has modified before")
    return score


def _hidden(term: Term, condition: Any, kept: Any, other: Any) -> Score:
    """The score of where(condition, kept, other), in which kept or other is -inf. UntraceableError if neither is."""
    if "score" in _names(condition):
        raise UntraceableError("it hides keys by their scores")
    values = [x for x in (kept, other) if "score" not in _names(x)]
    if len(values) != 1 or _number(values[0]) != -math.inf:
        raise UntraceableError(f"it modifies the score by {_name(term.call)} with another value than -inf")
    score = of_term(other if values[0] is kept else kept)
    return replace(score, steps=(*score.steps, (HIDE if values[0] is kept else KEEP, condition)))


def _names(value: Any) -> frozenset[str]:
    return value.names if isinstance(value, Term) else frozenset()


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UntraceableError("it multiplies the score by what is no number of Python")
    return float(value)


def _name(call: Any) -> str:
    return getattr(call, "__name__", type(call).__name__)
