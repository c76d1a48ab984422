"""The files in which the kernel driver describes a machine with AMD GPUs to AMD's runtime."""

from __future__ import annotations

import re
from pathlib import Path

from amdgpu_simulator.isa import targets

# Chip numbers by which ROCr selects image layouts.
_CHIPS = {"CDNA": "141:60", "RDNA1": "143:1", "RDNA2": "143:40", "RDNA3": "145:1", "RDNA4": "152:80"}


def write(root: Path, target: str, gpus: int) -> dict[str, str]:
    """Writes the files that describe a machine with GPUs of a target, below root. Returns the variables that kfd.c
    reads.

    The numbers of units differ from real cards. Raises ValueError for a name that is not a GPU that the simulator
    knows.
    """
    known = targets.get(target)
    numbers = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", target)
    if numbers is None:
        raise ValueError(f"{target} is not one GPU: name one, such as gfx942")
    major, minor, step = int(numbers[1]), int(numbers[2], 16), int(numbers[3], 16)
    base = root / "sys/devices/virtual/kfd/kfd/topology"

    def listed(name: str, **values: int) -> None:
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{key} {value}\n" for key, value in values.items()), encoding="utf-8")

    def node(number: int, gpu_id: int, memory: dict[str, int], links: list[tuple[int, int]], **values: int) -> None:
        listed(f"nodes/{number}/properties", **values, mem_banks_count=1, io_links_count=len(links))
        (base / f"nodes/{number}/gpu_id").write_text(f"{gpu_id}\n", encoding="utf-8")
        (base / f"nodes/{number}/name").write_text(f"{target if gpu_id else ''}\n", encoding="utf-8")
        listed(f"nodes/{number}/mem_banks/0/properties", **memory, flags=0, width=64, mem_clk_max=1000)
        for index, (start, end) in enumerate(links):
            link = {"type": 2, "node_from": start, "node_to": end, "weight": 20, "flags": 1}
            listed(f"nodes/{number}/io_links/{index}/properties", **link)

    listed("system_properties", platform_oem=0, platform_id=0, platform_rev=0)
    (base / "generation_id").write_text("2\n", encoding="utf-8")
    every = range(1, gpus + 1)
    node(0, 0, {"heap_type": 0, "size_in_bytes": 1 << 34}, [(0, gpu) for gpu in every], cpu_cores_count=1)
    wide = known.wave == 64
    for gpu in every:
        node(
            gpu,
            4095 + gpu,  # from FIRST_GPU of kfd.c on
            {"heap_type": 1, "size_in_bytes": 1 << 36},
            [(gpu, 0)],
            caches_count=1,
            simd_count=256 if wide else 128,
            simd_per_cu=4 if wide else 2,
            cu_per_simd_array=8,
            array_count=8,
            simd_arrays_per_engine=1 if wide else 2,
            max_waves_per_simd=8 if wide else 16,
            max_slots_scratch_cu=32,
            wave_front_size=known.wave,
            lds_size_in_kb=known.shared_bytes >> 10,
            gfx_target_version=major * 10000 + minor * 100 + step,
            vendor_id=0x1002,
            device_id=0x7400,
            location_id=gpu << 8,
            drm_render_minor=127 + gpu,
            unique_id=gpu,
            num_cp_queues=24,
            num_xcc=1,
            max_engine_clk_fcompute=2000,
            fw_version=200,
            capability=2 << 12 | wide << 26,  # doorbells of 64 bits, and memory with ECC
        )
        listed(f"nodes/{gpu}/caches/0/properties", level=1, size=32, cache_line_size=128, type=9)
    driver = root / "sys/module/amdgpu"
    driver.mkdir(parents=True, exist_ok=True)
    (driver / "initstate").write_text("live\n", encoding="utf-8")
    return {"KFD_ROOT": str(root), "KFD_CHIP": _CHIPS[known.generation.name], "KFD_GPUS": str(gpus)}
