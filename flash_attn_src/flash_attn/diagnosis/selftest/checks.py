"""Every check of the selftest by its name. A check makes calls of the public API and returns its errors.

A check raises AssertionError for a fault that is not an error against a reference. NotImplementedError means
that this GPU cannot do it.
"""

from __future__ import annotations

from collections.abc import Callable

from flash_attn.diagnosis.selftest import attention, layers, properties
from flash_attn.diagnosis.selftest.attention import Errors
from flash_attn.diagnosis.selftest.cases import Case
from flash_attn.diagnosis.selftest.inputs import DTYPES, Draw

CHECKS: dict[str, Callable[..., Errors]] = {
    "attention": attention.attention,
    "dominated": attention.dominated,
    "packed": attention.packed,
    "cache": attention.cache,
    "latent": attention.latent,
    "fp8": attention.fp8,
    "dropout": properties.dropout,
    "repeats": properties.repeats,
    "steady": properties.steady,
    "captured": properties.captured,
    "rotary": layers.rotary,
    "rms_norm": layers.rms_norm,
    "layer_norm": layers.layer_norm,
    "cross_entropy": layers.cross_entropy,
}


def run(case: Case, device: str) -> Errors:
    """The errors of a case on a torch device: of the forward, and of the backward if the case has one."""
    return CHECKS[case.check](Draw(device, DTYPES[case.dtype]), **case.options)
