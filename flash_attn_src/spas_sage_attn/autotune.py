"""SpargeAttn's module of a model with a threshold for each head, by thresholds that were tuned before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spas_sage_attn.core import spas_sage2_attn_meansim_cuda

_PARAMETERS = ("is_sparse", "cdfthreshd", "simthreshd1", "simthreshd2", "pvthreshd")
_REMEDY = "load thresholds that SpargeAttn has tuned by load_sparse_attention_state_dict"


class SparseAttentionMeansim(nn.Module):
    """spas_sage2_attn_meansim_cuda with thresholds of its own for each head, and the first block of keys visible.

    cdfthreshd, simthreshd1, pvthreshd: (heads,) parameters without gradient, None until they are loaded. is_sparse
    and simthreshd2 are in SpargeAttn's files, and change no result there or here. The arguments are those of
    SpargeAttn's tuning, which this class does not have.
    """

    is_sparse: nn.Parameter | None
    cdfthreshd: nn.Parameter | None
    simthreshd1: nn.Parameter | None
    simthreshd2: nn.Parameter | None
    pvthreshd: nn.Parameter | None

    def __init__(
        self,
        sim_rule: str = "l1",
        l1: float = 0.07,
        pv_l1: float = 0.08,
        cos_sim: float = 0.98,
        rmse: float = 0.07,
        rearrange_kwargs: Mapping[str, Any] | None = None,
        tune_pv: bool = True,
    ) -> None:
        super().__init__()
        self.sim_rule, self.l1, self.pv_l1, self.cos_sim, self.rmse = sim_rule, l1, pv_l1, cos_sim, rmse
        self.rearrange_kwargs, self.tune_pv = dict(rearrange_kwargs or {}), tune_pv
        for name in _PARAMETERS:
            self.register_parameter(name, None)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: None = None,
        is_causal: bool = False,
        scale: float | None = None,
        tensor_layout: str = "HND",
        tune_mode: bool = False,
        smooth_k: bool = True,
        return_sparsity: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, float]:
        """Tensors and results as in `spas_sage2_attn_meansim_cuda`.

        NotImplementedError for tune_mode and the environment variable TUNE_MODE. RuntimeError before thresholds are
        loaded.
        """
        if tune_mode or os.environ.get("TUNE_MODE"):
            raise NotImplementedError(f"tune_mode: got True, wanted False: tuning is not served here; {_REMEDY}")
        if self.cdfthreshd is None or self.simthreshd1 is None or self.pvthreshd is None:
            raise RuntimeError(f"cdfthreshd, simthreshd1, pvthreshd: this module has no thresholds: {_REMEDY}")
        with torch.no_grad():
            return spas_sage2_attn_meansim_cuda(
                q, k, v, mask, is_causal=is_causal, scale=scale, smooth_k=smooth_k, tensor_layout=tensor_layout,
                cdfthreshd=self.cdfthreshd.float(), simthreshd1=self.simthreshd1.float(),
                pvthreshd=self.pvthreshd.float(), attention_sink=True, return_sparsity=return_sparsity,
            )  # fmt: skip


def _modules(model: nn.Module) -> list[tuple[str, SparseAttentionMeansim]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, SparseAttentionMeansim)]


def extract_sparse_attention_state_dict(model: nn.Module, verbose: bool = False) -> dict[str, torch.Tensor]:
    """The thresholds of a model: the entries of its state_dict that belong to a SparseAttentionMeansim."""
    state = model.state_dict()
    prefixes = tuple(f"{name}." if name else "" for name, _ in _modules(model))
    thresholds = {name: value for name, value in state.items() if name.startswith(prefixes)} if prefixes else {}
    if verbose:
        print("\n".join(thresholds))
    return thresholds


def load_sparse_attention_state_dict(
    model: nn.Module, saved_state_dict: Mapping[str, torch.Tensor], multigpu: bool = False, verbose: bool = False
) -> nn.Module:
    """Puts thresholds into the modules of a model, on the device of the model's first parameter.

    saved_state_dict: from extract_sparse_attention_state_dict, or SpargeAttn's file. multigpu: leave each threshold on
    its device. KeyError for a name that is no threshold of the model.
    """
    modules = dict(_modules(model))
    device = None if multigpu else next(model.parameters()).device
    for name, value in saved_state_dict.items():
        home, _, last = name.rpartition(".")
        if home not in modules or last not in _PARAMETERS:
            raise KeyError(
                f"saved_state_dict: got {name!r}, wanted {', '.join(_PARAMETERS)} of a module: "
                f"{', '.join(modules) or 'the model has no SparseAttentionMeansim'}"
            )
        setattr(modules[home], last, nn.Parameter(value.to(device), requires_grad=False))
        if verbose:
            print(name)
    return model
