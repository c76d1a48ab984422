"""GPUs that run the kernels of a relative where HIP loads no generic code objects: ROCm 6.1 to 6.3.

From ROCm 6.4 on such a GPU loads the generic target of its family. Standard library only.
"""

from __future__ import annotations

# GPU target -> (the target whose kernels it runs, the value of HSA_OVERRIDE_GFX_VERSION that makes HIP load them).
OVERRIDES = {
    **{f"gfx103{stepping}": ("gfx1030", "10.3.0") for stepping in range(1, 7)},
    **{f"gfx110{stepping}": ("gfx1100", "11.0.0") for stepping in range(1, 4)},
}
