"""GPUs that no wheel names and that run the kernels of a relative. Standard library only."""

from __future__ import annotations

# GPU target -> (the target whose kernels it runs, the value of HSA_OVERRIDE_GFX_VERSION that makes HIP load them).
OVERRIDES = {
    **{f"gfx103{stepping}": ("gfx1030", "10.3.0") for stepping in range(1, 7)},
    "gfx1103": ("gfx1100", "11.0.0"),
    "gfx1152": ("gfx1150", "11.5.0"),
    "gfx1153": ("gfx1150", "11.5.0"),
}
# What users call them, by the target whose kernels they run.
PRODUCTS = {
    "gfx1030": "Radeon RX 6400 to RX 6750 XT, Radeon 680M",
    "gfx1100": "Radeon 780M",
    "gfx1150": "Krackan Point",
}
