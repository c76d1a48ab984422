"""AMD's kernels and this project's as one backend: each call goes to the source that the table prefers for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flash_attn.attention.backends import asm, choice
from flash_attn.attention.backends.asm import planning
from flash_attn.attention.backends.asm.planning import Call
from flash_attn.call.calls import AttentionCall, CacheCall, ForwardResult, Fp8Result, GradientCall
from flash_attn.call.options import MEASURED_BACKWARD, MEASURED_FORWARD
from flash_attn.core import device
from flash_attn.core.environment import KERNEL_SOURCE
from flash_attn.kernels.providers import (
    ASM,
    BLOCKS,
    CK,
    DEFAULT,
    ERROR,
    FLUSHED,
    LARGEST,
    ROWS,
    TRITON,
    TRITON_ALONE,
    Row,
)

VARIABLE = KERNEL_SOURCE
_SIMULATED = {row.why: f"{row.why} simulated cycles, with an error of {ERROR:.0%}" for row in ROWS}

if TYPE_CHECKING:
    from flash_attn.attention.backends.protocol import Backend


class Decision(NamedTuple):
    """The source of an op of a call, and why. described: the facts of the call for a plan."""

    source: str
    why: str
    described: Call | None


class Sources:
    """Serves attention by assembly, Composable Kernel or Triton, and all other calls by Composable Kernel's backend."""

    name = "flash_attn.attention.backends.ck"

    def __init__(self, ck: Backend, triton: Backend, *, forced: str | None = None) -> None:
        """forced: the kernel provider that the environment selects."""
        self._ck = ck
        self._triton = triton
        self.forced = forced

    def decide(self, call: AttentionCall, op: str) -> Decision:
        """The kernel provider of an op (fwd or bwd) of a call.

        Raises NotImplementedError if assembly is forced and cannot serve it.
        """
        described = asm.describe(call)
        if self.forced is not None:
            if self.forced == ASM and (reason := asm.unsupported_reason(call, described, op)) is not None:
                raise NotImplementedError(
                    f"{VARIABLE}=asm: no assembly kernel does this call ({op}): {reason}. Unset the variable to let "
                    "other kernels of this wheel do it"
                )
            return Decision(self.forced, f"{VARIABLE}={self.forced}", described)
        row = _row(call, described, op)
        why = _SIMULATED.get(row.why, row.why)
        for source in row.sources:
            if source != ASM:
                return Decision(source, why, described)
            reason = asm.unsupported_reason(call, described, op)
            if reason is None:
                return Decision(ASM, why, described)
            why += f"; not asm, {reason}"
        return Decision(CK, why, described)

    def forward(self, call: AttentionCall) -> ForwardResult:
        decision = self.decide(call, "fwd")
        if decision.source == ASM and decision.described is not None:
            return asm.forward(call, decision.described)
        return self._of(decision.source).forward(call)

    def backward(self, gradients: GradientCall) -> torch.Tensor:
        decision = self.decide(gradients.forward, "bwd")
        if decision.source == ASM and decision.described is not None:
            return asm.backward(gradients, decision.described)
        return self._of(decision.source).backward(gradients)

    def _of(self, source: str) -> Backend:
        return self._triton if source == TRITON else self._ck

    def kvcache(self, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
        alone = self.forced is None and (
            call.qv is not None or _for_triton_alone(call.q, call.v_cache) or _is_flushed(call.q)
        )
        return (self._triton if alone else self._ck).kvcache(call)

    def fp8_forward(self, call: AttentionCall) -> Fp8Result:
        return self._ck.fp8_forward(call)

    def fp8_format(self, x: torch.Tensor) -> torch.dtype:
        return self._ck.fp8_format(x)

    def int8_forward(self, call: AttentionCall, mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ck.int8_forward(call, mean)

    def combine(self, partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._ck.combine(partial, partial_lse, out)


def _for_triton_alone(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether Composable Kernel has no kernels for the head dims."""
    return q.shape[-1] != v.shape[-1] or q.shape[-1] > LARGEST


def _is_flushed(q: torch.Tensor) -> bool:
    """Whether `providers.FLUSHED` holds for tensors like q."""
    return device.loses_range(q.get_device(), q.dtype)


def _row(call: AttentionCall, described: Call | None, op: str) -> Row:
    """The table's row for a call.

    Its cycles hold for plain scores. Other calls stay with one source, forward and backward: the random numbers of
    dropout differ from source to source.
    """
    if call.options.mask is not None:
        return BLOCKS
    if _is_flushed(call.q):
        return FLUSHED
    default = TRITON_ALONE if _for_triton_alone(call.q, call.v) else DEFAULT
    measured = MEASURED_FORWARD if op == "fwd" else MEASURED_BACKWARD
    if described is None or measured.unserved(call) is not None:
        return default
    entry = choice.find(
        described.target, op, described.dtype, described.head_dim, described.mask, described.seqlen_q,
        described.value_dim,
    )  # fmt: skip
    return default if entry is DEFAULT else entry


def explain(backend: Backend, call: AttentionCall) -> dict[str, dict[str, str | None]]:
    """For forward and backward of a call on a backend:

    the kernel provider, the kernel if the call determines it, and the reason.
    """
    passes: dict[str, dict[str, str | None]] = {}
    for name, op in (("forward", "fwd"), ("backward", "bwd")):
        if not isinstance(backend, Sources):
            source = backend.name.rpartition(".")[2]
            passes[name] = {"source": source, "kernel": None, "why": f"{source} serves every call of this process"}
            continue
        try:
            decision = backend.decide(call, op)
        except NotImplementedError as error:
            passes[name] = {"source": None, "kernel": None, "why": str(error)}
            continue
        kernel = None
        if decision.source == ASM and decision.described is not None:
            served = planning.find(decision.described, op)
            kernel = None if served is None else served.name
        passes[name] = {"source": decision.source, "kernel": kernel, "why": decision.why}
    return passes
