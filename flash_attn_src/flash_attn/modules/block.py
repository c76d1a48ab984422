"""Transformer blocks: a mixer (attention) and an MLP with the norms, dropouts and sums between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import Mlp
from flash_attn.ops import rms_norm
from flash_attn.ops.checks import check_int, check_number, check_switches, check_tensor
from flash_attn.ops.triton import layer_norm

_RMS_NORMS = (layer_norm.RMSNorm, rms_norm.RMSNorm)


class StochasticDepth(nn.Module):
    """In training each sample of x (batch, ...) becomes 0 with probability p, the others are divided by 1 - p
    (https://arxiv.org/abs/1603.09382)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = check_number("drop_path", p, 0.0, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.p == 0.0 or not self.training:
            return x
        kept = torch.rand((x.shape[0],) + (1,) * (x.dim() - 1), device=x.device) >= self.p
        return torch.where(kept, x / (1.0 - self.p) if self.p < 1.0 else x, 0.0)


class _Block(nn.Module):
    """The common part of both kinds of blocks:

    a mixer, an MLP, and norms of the residual, optionally fused with the sum.
    """

    def __init__(
        self, dim: int, mixer_cls: Callable[..., nn.Module] | None, mlp_cls: Callable[..., nn.Module] | None,
        norm_cls: Callable[..., nn.Module], dropout_cls: Callable[..., nn.Module], resid_dropout1: float,
        fused_dropout_add_ln: bool, residual_in_fp32: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        check_int("dim", dim, 1)
        check_switches(fused_dropout_add_ln=fused_dropout_add_ln, residual_in_fp32=residual_in_fp32)
        if mixer_cls is None and dim % 64:
            raise ValueError(f"dim: got {dim}, wanted a multiple of 64, because mixer_cls is None and heads have 64")
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = (mixer_cls or partial(MHA, num_heads=dim // 64))(dim)
        self.dropout1 = dropout_cls(resid_dropout1)
        self.norm1 = norm_cls(dim)
        self.mlp = (mlp_cls or partial(Mlp, hidden_features=4 * dim))(dim)
        if fused_dropout_add_ln and not (
            isinstance(self.norm1, (nn.LayerNorm, *_RMS_NORMS)) and self.norm1.weight is not None
        ):
            raise ValueError(
                f"norm_cls: got {type(self.norm1).__name__}, wanted LayerNorm or flash_attn's RMSNorm, with weights, "
                "for fused_dropout_add_ln"
            )

    def _mark(self, sequence_parallel: bool, mark_shared_params: bool) -> None:
        """What flash_attn.utils.distributed does with the norms' parameters."""
        check_switches(sequence_parallel=sequence_parallel, mark_shared_params=mark_shared_params)
        norms: list[Any] = [each for name, each in self.named_children() if name in ("norm1", "norm2")]
        for parameter in (each for norm in norms for each in norm.parameters()):
            if sequence_parallel:
                parameter._sequence_parallel = True
            if mark_shared_params:
                parameter._shared_params = True

    def _normalised(
        self, x: torch.Tensor, residual: torch.Tensor | None, *norms: Any, x1: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The norms of z = x + x1 + residual, and z."""
        first, second = norms[0], norms[1] if len(norms) > 1 else None
        if self.fused_dropout_add_ln:
            results = layer_norm.newest_layer_norm_fn(
                x, first.weight, first.bias, residual, x1,
                None if second is None else second.weight, None if second is None else second.bias, eps=first.eps,
                prenorm=True, residual_in_fp32=self.residual_in_fp32, is_rms_norm=isinstance(first, _RMS_NORMS),
                zero_centered_weight=getattr(first, "zero_centered_weight", False),
            )  # fmt: skip
            assert isinstance(results, tuple)
            return results  # type: ignore[return-value] # no dropout mask was asked for
        z = x if residual is None else x + residual
        z = z if x1 is None else z + x1
        normalised = [norm(z if getattr(norm, "weight", None) is None else z.to(norm.weight.dtype)) for norm in norms]
        return (*normalised, z.float() if self.residual_in_fp32 else z)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The mixer's."""
        mixer: Any = self.mixer
        return mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


class Block(_Block):
    """One sublayer after the other.

    prenorm                hidden_states and residual go in and come out, the block's sum being left to the next one's
                           norm: dropout, add, norm, mixer, dropout, add, norm, MLP. Else: mixer, dropout, add, norm,
                           MLP, dropout, add, norm
    mixer_cls, mlp_cls     called with dim; default MHA with heads of 64, Mlp of 4 * dim. With mlp_cls=nn.Identity
                           there is no second half
    drop_path1, 2          probability of leaving the mixer, the MLP out for a sample (StochasticDepth)
    fused_dropout_add_ln   sum and norm in one kernel
    return_residual        of prenorm=False: mixer and MLP return what to add to as well
    residual_in_fp32       of prenorm=True
    sequence_parallel, mark_shared_params  mark the norms' parameters for flash_attn.utils.distributed
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[..., nn.Module] | None = None,
        mlp_cls: Callable[..., nn.Module] | None = None,
        norm_cls: Callable[..., nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[..., nn.Module] = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        check_switches(prenorm=prenorm, return_residual=return_residual)
        if residual_in_fp32 and not prenorm:
            raise ValueError("residual_in_fp32: got True, wanted False with prenorm=False")
        super().__init__(
            dim, mixer_cls, mlp_cls, norm_cls, dropout_cls, resid_dropout1, fused_dropout_add_ln, residual_in_fp32
        )
        self.prenorm = prenorm
        self.return_residual = return_residual
        self.drop_path1 = StochasticDepth(drop_path1)
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2 = dropout_cls(resid_dropout2)
            self.drop_path2 = StochasticDepth(drop_path2)
            self.norm2 = norm_cls(dim)
        self._mark(sequence_parallel, mark_shared_params)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        mixer_subset: Any = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(hidden_states, residual) with prenorm, else hidden_states; shaped as hidden_states, (..., dim).

        residual       with prenorm: of the block before, None for the first
        mixer_subset   with prenorm, of cross attention: index of the tokens that ask, as MHA has it
        mixer_kwargs   go to the mixer
        """
        check_tensor("hidden_states", hidden_states)
        options = dict(mixer_kwargs or {})
        if not self.prenorm:
            if residual is not None or mixer_subset is not None:
                raise ValueError("residual, mixer_subset: got one of them, wanted None with prenorm=False")
            return self._after(hidden_states, options)
        hidden_states, residual = self._normalised(self.drop_path1(self.dropout1(hidden_states)), residual, self.norm1)
        if mixer_subset is not None:
            options["mixer_subset"] = mixer_subset
            residual = residual[:, mixer_subset]
        hidden_states = self.mixer(hidden_states, **options)
        if not isinstance(self.mlp, nn.Identity):
            dropped = self.drop_path2(self.dropout2(hidden_states))
            hidden_states, residual = self._normalised(dropped, residual, self.norm2)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def _after(self, hidden_states: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """The block with its norms after the sums."""
        out = self.mixer(hidden_states, **options)
        out, hidden_states = out if self.return_residual else (out, hidden_states)
        hidden_states, _ = self._normalised(self.drop_path1(self.dropout1(out)), hidden_states, self.norm1)
        if isinstance(self.mlp, nn.Identity):
            return hidden_states
        out = self.mlp(hidden_states)
        out, hidden_states = out if self.return_residual else (out, hidden_states)
        return self._normalised(self.drop_path2(self.dropout2(out)), hidden_states, self.norm2)[0]


class ParallelBlock(_Block):
    """Mixer and MLP side by side, as in GPT-J and PaLM: dropout, add, norm, then both, whose sum is left to the next
    block's norm. tied_norm: both take the norm of the mixer. Else as Block with prenorm."""

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[..., nn.Module] | None = None,
        mlp_cls: Callable[..., nn.Module] | None = None,
        norm_cls: Callable[..., nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[..., nn.Module] = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        check_switches(tied_norm=tied_norm)
        super().__init__(
            dim, mixer_cls, mlp_cls, norm_cls, dropout_cls, resid_dropout1, fused_dropout_add_ln, residual_in_fp32
        )
        self.tied_norm = tied_norm
        self.dropout2 = dropout_cls(resid_dropout2)
        if not tied_norm:
            self.norm2 = norm_cls(dim)
        self._mark(sequence_parallel, mark_shared_params)

    def forward(
        self,
        hidden_states1: torch.Tensor,
        hidden_states2: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(the mixer's, the MLP's, residual), shaped as hidden_states1, (..., dim), which is the mixer's of the block
        before or an embedding, as hidden_states2 is the MLP's, None for the first block."""
        check_tensor("hidden_states1", hidden_states1)
        second = None if hidden_states2 is None else self.dropout2(hidden_states2)
        norms = (self.norm1,) if self.tied_norm else (self.norm1, self.norm2)
        first, *others, residual = self._normalised(self.dropout1(hidden_states1), residual, *norms, x1=second)
        return self.mixer(first, **(mixer_kwargs or {})), self.mlp(others[0] if others else first), residual
