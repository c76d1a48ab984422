from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_wheels.errors import BadTarget, DataError, ImpossibleCell, UnknownVersion
from rocm_wheels.matrix import machine as machines
from rocm_wheels.matrix.machine import Machine, detect_targets, gfx_name
from rocm_wheels.matrix.plan import Plan, make_plan, make_universal_plan, parallel_jobs, wants_triton_too
from rocm_wheels.matrix.versions import Versions

BARE = Machine(cores=8, available_mib=16384)
COMMON = ("gfx90a", "gfx942", "gfx1030", "gfx1100")
CK_COMMON = ("gfx90a", "gfx942")
NO_GPU = "no GPU found here; PYTORCH_ROCM_ARCH chooses others"


def plan(
    data: Versions,
    machine: Machine = BARE,
    env: Mapping[str, str] | None = None,
    *,
    backend: str | None = None,
) -> Plan:
    versions = {"flash_attn": "2.8.3", "python": "3.11", "torch": "2.5.1", "rocm": "6.2"}
    return make_plan(data, **versions, backend=backend, env=env or {}, machine=machine)


def test_the_plan_of_the_readme(data: Versions) -> None:
    made = plan(data, backend="triton")
    assert made.as_dict() == {
        "cell": {
            "flash_attn": "2.8.3",
            "python": "3.11",
            "torch": "2.5.1",
            "rocm": "6.2",
            "backend": "triton",
        },
        "targets": COMMON,
        "targets_from": NO_GPU,
        "jobs": 8,
        "label": "rocm62torch2.5triton",
        "wheel": "flash_attn-2.8.3+rocm62torch2.5triton-cp311-cp311-linux_x86_64.whl",
        "torch_index": "rocm6.2",
        "image": data.rocm["6.2"].image,
        "compiler": f"triton {data.compilers['triton']}",
        "toolchain": "pypi",
        "steps": ("check", "compile", "assemble", "repair", "verify"),
        "notes": (),
        "platform": "linux",
    }
    assert json.loads(json.dumps(made.as_dict()))["targets"] == list(COMMON)


@pytest.mark.parametrize(
    ("env", "expected", "source"),
    [
        ({"PYTORCH_ROCM_ARCH": "gfx942;gfx90a"}, ("gfx90a", "gfx942"), "PYTORCH_ROCM_ARCH"),
        ({"GPU_ARCHS": "gfx942, gfx90a gfx1100;"}, ("gfx90a", "gfx942", "gfx1100"), "GPU_ARCHS"),
        ({"GPU_ARCHS": " ; "}, CK_COMMON, NO_GPU),
        ({"GPU_ARCHS": "", "PYTORCH_ROCM_ARCH": "gfx942"}, ("gfx942",), "PYTORCH_ROCM_ARCH"),
        (
            {"GPU_ARCHS": "gfx942 gfx90a", "PYTORCH_ROCM_ARCH": "gfx90a;gfx942"},
            ("gfx90a", "gfx942"),
            "GPU_ARCHS",
        ),
        ({"GPU_ARCHS": "sm_90"}, ("sm_90",), "GPU_ARCHS"),
        ({"GPU_ARCHS": "gfx942:XNACK-", "PYTORCH_ROCM_ARCH": "GFX942:xnack-"}, ("gfx942",), "GPU_ARCHS"),
    ],
)
def test_targets_of_the_environment(
    data: Versions, env: dict[str, str], expected: tuple[str, ...], source: str
) -> None:
    made = plan(data, env=env)
    assert (made.targets, made.targets_from) == (expected, source)


# ENV of rocm/pytorch with ROCm 6.2: the targets of its torch.
IMAGE = "gfx900;gfx906;gfx908;gfx90a;gfx942;gfx1030;gfx1100"


def test_targets_of_torch_without_kernels_are_left_out_with_a_note(data: Versions) -> None:
    made = plan(data, replace(BARE, gpus=("gfx942",)), {"PYTORCH_ROCM_ARCH": IMAGE, "GPU_ARCHS": ""})
    assert (made.cell.backend, made.targets, made.targets_from) == ("ck", ("gfx908", *COMMON), "PYTORCH_ROCM_ARCH")
    assert made.notes == ("PYTORCH_ROCM_ARCH: gfx900, gfx906 left out, for which no backend has kernels",)
    alone = plan(data, env={"PYTORCH_ROCM_ARCH": "gfx900:xnack-;gfx1100"})
    assert (alone.cell.backend, alone.targets, len(alone.notes)) == ("triton", ("gfx1100",), 2)
    assert alone.notes[0].startswith("PYTORCH_ROCM_ARCH: gfx900:xnack- left out")


@pytest.mark.parametrize("python", ["311", "cp311"])
def test_a_python_without_a_dot_is_completed_and_reported(data: Versions, python: str) -> None:
    made = make_plan(data, flash_attn="2.8.3", python=python, torch="2.5.1", rocm="6.2", env={}, machine=BARE)
    assert made.cell.python == "3.11"
    assert f"Python {python!r} is taken for 3.11" in made.notes


def test_the_variable_of_flash_attn_precedes_torchs(data: Versions) -> None:
    """In an image of rocm/pytorch, where torch's variable is set, upstream's documentation says to set
    GPU_ARCHS=gfx942.
    """
    made = plan(data, env={"PYTORCH_ROCM_ARCH": IMAGE, "GPU_ARCHS": "gfx942"})
    assert (made.targets, made.targets_from) == (("gfx942",), "GPU_ARCHS")
    assert made.notes == (f"GPU_ARCHS counts, not PYTORCH_ROCM_ARCH={IMAGE}",)


@pytest.mark.parametrize(
    ("env", "unknown"),
    [
        ({"PYTORCH_ROCM_ARCH": "gfx900;gfx906"}, "no wheel has kernels for gfx900"),  # none is left
        ({"PYTORCH_ROCM_ARCH": "gfx110;gfx942"}, "'gfx110' is not a known GPU"),  # malformed
        ({"PYTORCH_ROCM_ARCH": "gfx900;gfx94;gfx942"}, "'gfx94' is not a known GPU"),
        ({"PYTORCH_ROCM_ARCH": "gfx942;sm_9"}, "'sm_9' is not a known GPU"),
        ({"GPU_ARCHS": IMAGE}, "no wheel has kernels for gfx900"),  # requested by name
        ({"GPU_ARCHS": IMAGE, "PYTORCH_ROCM_ARCH": IMAGE}, "no wheel has kernels for gfx900"),
        ({"PYTORCH_ROCM_ARCH": "RTX 4090"}, "'rtx 4090' is not a known GPU"),
    ],
)
def test_other_targets_without_kernels_are_refused(data: Versions, env: dict[str, str], unknown: str) -> None:
    with pytest.raises(BadTarget, match=unknown):
        plan(data, env=env)


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("mi300x", ("gfx942",)),
        ("7900 XTX", ("gfx1100",)),
        ("Radeon RX 7900 XTX; MI300X", ("gfx942", "gfx1100")),
        ("gfx942 gfx90a", ("gfx90a", "gfx942")),
        ("mi300x mi250", ("gfx90a", "gfx942")),
        ("gfx942:sramecc+:xnack-", ("gfx942",)),
    ],
)
def test_products_name_targets(data: Versions, text: str, targets: tuple[str, ...]) -> None:
    for name in ("PYTORCH_ROCM_ARCH", "GPU_ARCHS"):
        assert plan(data, env={name: text}).targets == targets


def test_the_environment_overrides_the_detected_gpu(data: Versions) -> None:
    machine = replace(BARE, gpus=("gfx1100",))
    assert plan(data, machine).targets == ("gfx1100",)
    assert plan(data, machine).targets_from == "GPU of this machine"
    for native in ("native", "Native"):
        assert plan(data, machine, {"GPU_ARCHS": native}).targets == ("gfx1100",)
    assert plan(data, machine, {"GPU_ARCHS": "gfx942"}).targets == ("gfx942",)


@pytest.mark.parametrize(
    ("gpus", "built"),
    [
        (("gfx1036", "gfx1201"), ("gfx1201",)),
        (("gfx1100", "gfx1201"), ("gfx1100", "gfx1201")),
        (("gfx1151",), ("gfx1151",)),
        (("gfx1103", "gfx1036"), ("gfx1036", "gfx1103")),
    ],
)
def test_native_is_the_card_beside_the_gpu_of_a_processor(
    data: Versions, gpus: tuple[str, ...], built: tuple[str, ...]
) -> None:
    machine = replace(BARE, gpus=gpus)
    made = make_universal_plan(data, flash_attn="2.8.3", env={"PYTORCH_ROCM_ARCH": "native"}, machine=machine)
    assert made.targets == built
    left = [gpu for gpu in gpus if gpu not in built]
    assert [note for note in made.notes if "name both in PYTORCH_ROCM_ARCH" in note] == [
        f"built for {', '.join(built)} alone; to serve the {gpu} in the processor too, name both in PYTORCH_ROCM_ARCH"
        for gpu in left
    ]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "This machine has no AMD GPU."),
        ({"dev/dxg": ""}, "This is WSL"),
        ({".dockerenv": ""}, "start it with --device=/dev/kfd"),
        ({"sys/bus/pci/devices/0/vendor": "0x1002\n", "sys/bus/pci/devices/0/class": "0x030000\n"}, "modprobe amdgpu"),
        ({"sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x030000\n"}, "no AMD GPU"),
        ({"sys/bus/pci/devices/0/vendor": "0x1002\n", "sys/bus/pci/devices/0/class": "0x060400\n"}, "no AMD GPU"),
    ],
)
def test_why_a_machine_has_no_gpu(tmp_path: Path, files: Mapping[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert words in machines.why_no_gpu(tmp_path)


def test_a_gpu_that_the_combination_does_not_support_is_reported(data: Versions) -> None:
    made = plan(data, replace(BARE, gpus=("gfx1013", "gfx1100")))
    assert made.targets == ("gfx1100",)
    assert "no kernels are built for gfx1013 of this machine: the combination does not support it" in made.notes
    made = plan(data, replace(BARE, gpus=("gfx906",)))
    assert (made.targets, made.targets_from) == (CK_COMMON, NO_GPU)
    assert any("gfx906" in note for note in made.notes)


@pytest.mark.parametrize(
    ("env", "message", "remedy"),
    [
        (
            {"GPU_ARCHS": "native"},
            "GPU_ARCHS=native, but this machine has no GPU that",
            "PYTORCH_ROCM_ARCH=RX9070XT or gfx1201. README.md has a table. Targets: gfx908, gfx90a,",
        ),
        (
            {"GPU_ARCHS": "native;gfx942"},
            "GPU_ARCHS=native;gfx942 mixes native with targets",
            "Name native alone",
        ),
        ({"GPU_ARCHS": "Native;GFX942"}, "GPU_ARCHS=native;gfx942 mixes native with targets", "Name native alone"),
        ({"PYTORCH_ROCM_ARCH": "gfx950"}, "gfx950 (MI350) needs ROCm 7.0", "gfx942"),
    ],
)
def test_bad_targets(data: Versions, env: dict[str, str], message: str, remedy: str) -> None:
    with pytest.raises(BadTarget) as caught:
        plan(data, env=env)
    assert caught.value.message.startswith(message)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("cores", "available_mib", "env", "jobs"),
    [
        (8, 16384, {}, 8),
        (64, 7000, {}, 10),
        (64, 699, {}, 1),
        (2, 0, {}, 1),
        (16, 700, {"MAX_JOBS": " 12 "}, 12),
        (2, 16384, {"MAX_JOBS": "500"}, 2),
        (4, 16384, {"MAX_JOBS": ""}, 4),
    ],
)
def test_jobs(data: Versions, cores: int, available_mib: int, env: dict[str, str], jobs: int) -> None:
    assert data.backends["triton"].job_memory_mib == 700
    assert parallel_jobs(data, env, Machine(cores=cores, available_mib=available_mib), "triton") == jobs


@pytest.mark.parametrize("value", ["0", "-1", "four", "2.5", "²"])
def test_max_jobs_is_checked(data: Versions, value: str) -> None:
    with pytest.raises(DataError, match=f"MAX_JOBS='{value}' is not a whole number above 0\nUnset MAX_JOBS"):
        plan(data, env={"MAX_JOBS": value})


@pytest.mark.parametrize("value", ["abc", "-1", "1.5e9", "²", "1750000000000"])
def test_the_date_of_the_sources_is_checked(data: Versions, value: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"SOURCE_DATE_EPOCH={value!r} is not a number of seconds from 0 to")):
        plan(data, env={"SOURCE_DATE_EPOCH": value})
    for good in ("", "1750000000"):
        assert plan(data, env={"SOURCE_DATE_EPOCH": good}) == plan(data)


def test_the_default_backend_is_the_first_that_is_ready(data: Versions) -> None:
    assert plan(data).cell.backend == "ck"
    with pytest.raises(UnknownVersion, match="backend 'aiter' is not known"):
        plan(data, backend="aiter")
    unready = replace(data, backends={**data.backends, "ck": replace(data.backends["ck"], ready=False)})
    assert plan(unready).cell.backend == "triton"
    with pytest.raises(ImpossibleCell, match="the ck backend is not there yet") as caught:
        plan(unready, backend="ck")
    assert caught.value.remedy == "Use --backend triton."


@pytest.mark.parametrize(
    ("env", "gpus", "backend"),
    [
        ({}, ("gfx942",), "ck"),
        ({}, ("gfx1100",), "triton"),
        ({}, ("gfx942", "gfx1100"), "ck"),
        ({}, ("gfx906",), "ck"),  # no kernels for any of them: the wheel of the default targets
        ({"GPU_ARCHS": "gfx1100"}, ("gfx942",), "triton"),
        ({"GPU_ARCHS": "gfx1100 gfx90a"}, (), "ck"),
        ({"GPU_ARCHS": "sm_90"}, (), "triton"),
        ({"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}, ("gfx942",), "triton"),
        ({"FLASH_ATTENTION_TRITON_AMD_ENABLE": "FALSE"}, ("gfx942",), "ck"),
        ({"FLASH_ATTENTION_TRITON_AMD_ENABLE": ""}, (), "ck"),
    ],
)
def test_the_backend_fits_the_targets_unless_it_is_named(
    data: Versions, env: dict[str, str], gpus: tuple[str, ...], backend: str
) -> None:
    made = plan(data, replace(BARE, gpus=gpus), env)
    assert (made.cell.backend, made.label) == (backend, "rocm62torch2.5" + ("" if backend == "ck" else "triton"))
    moved = backend == "triton" and "FLASH_ATTENTION_TRITON_AMD_ENABLE" not in env
    assert any("the ck backend has no kernels for" in note for note in made.notes) == moved
    assert made.compiler.startswith("ziglang" if backend == "ck" else "triton")


def test_requested_targets_are_not_replaced(data: Versions) -> None:
    with pytest.raises(BadTarget, match="the ck backend has no kernels for gfx1100"):
        plan(data, env={"GPU_ARCHS": "gfx1100"}, backend="ck")
    with pytest.raises(BadTarget, match="the ck backend has no kernels for gfx1100"):
        plan(data, env={"GPU_ARCHS": "gfx1100", "FLASH_ATTENTION_TRITON_AMD_ENABLE": "FALSE"})
    env = {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
    assert plan(data, env=env, backend="ck").cell.backend == "ck"
    with pytest.raises(DataError, match="FLASH_ATTENTION_TRITON_AMD_ENABLE=ja is neither TRUE nor FALSE"):
        plan(data, env={"FLASH_ATTENTION_TRITON_AMD_ENABLE": "ja"})


def test_the_ck_backend_takes_the_compiler_of_rocm(data: Versions) -> None:
    made = plan(data, replace(BARE, rocm=True))
    assert (made.label, made.targets, made.notes) == ("rocm62torch2.5", CK_COMMON, ())
    assert (made.compiler, made.toolchain) == (f"ziglang {data.compilers['ziglang']}", "rocm")
    assert plan(data).toolchain == "pypi"
    assert plan(data, replace(BARE, rocm=True), backend="triton").toolchain == "pypi"


def test_a_refused_cell_costs_no_look_at_the_machine(data: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(env: object) -> Machine:
        raise AssertionError(f"surveyed with {env}")

    monkeypatch.setattr("rocm_wheels.matrix.plan.survey", look)
    for torch, env in [("2.6.0", {}), ("2.7.0", {"GPU_ARCHS": "gfx950"})]:
        with pytest.raises((ImpossibleCell, BadTarget)):
            make_plan(data, flash_attn="2.8.3", python="3.11", torch=torch, rocm="6.3", env=env)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90402, "gfx942"),
        (90010, "gfx90a"),
        (90500, "gfx950"),
        (100300, "gfx1030"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_gfx_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_gpus_are_found_in_the_topology_of_the_driver(tmp_path: Path) -> None:
    for node, version in enumerate([0, 90402, 90402, 110501]):
        properties = tmp_path / str(node) / "properties"
        properties.parent.mkdir()
        properties.write_text(f"cpu_cores_count 8\ngfx_target_version {version}\nvendor_id 4098\n")
    assert detect_targets(tmp_path) == ("gfx1151", "gfx942")


def test_without_the_driver_rocms_tool_lists_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "rocm_agent_enumerator"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool.write_text("#!/bin/sh\nprintf 'gfx000\\ngfx1100\\n'\n")
    tool.chmod(0o755)
    assert detect_targets(tmp_path / "none") == ("gfx1100",)
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert detect_targets(tmp_path / "none") == ()


def test_a_container_limits_cores_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   8388608 kB\n")
    monkeypatch.setattr(machines, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machines, "CGROUP", tmp_path)
    monkeypatch.setattr(machines, "KFD_NODES", tmp_path)
    assert machines.survey({"ROCM_PATH": str(tmp_path)}).available_mib == 8192
    (tmp_path / "memory.max").write_text("max\n")
    assert machines.survey({}).available_mib == 8192
    (tmp_path / "memory.max").write_text(f"{2**31}\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    clang = tmp_path / "llvm/bin/clang"
    clang.parent.mkdir(parents=True)
    clang.touch()
    result = machines.survey({"ROCM_PATH": str(tmp_path)})
    assert (result.cores, result.available_mib, result.rocm) == (1, 2048, True)


@pytest.mark.parametrize(
    ("on", "values"),
    [(True, ("1", "true", "ON", " yes ")), (False, ("0", "False", "off", "no", " "))],
    ids=["on", "off"],
)
def test_flags(data: Versions, on: bool, values: Sequence[str]) -> None:
    assert [wants_triton_too(plan(data), {"BUILD_TRITON_BACKEND": value}) for value in values] == [on] * len(values)


def test_a_malformed_flag_is_refused(data: Versions) -> None:
    with pytest.raises(DataError, match="BUILD_TRITON_BACKEND=maybe is neither TRUE nor FALSE"):
        plan(data, env={"BUILD_TRITON_BACKEND": "maybe"})
    also = {"BUILD_TRITON_BACKEND": "True"}
    (note,) = plan(data, env=also).notes
    assert note == f"BUILD_TRITON_BACKEND: {plan(data, backend='triton').wheel} is built after it"
    assert plan(data, env=also, backend="triton") == plan(data, backend="triton")
    assert wants_triton_too(plan(data), also)
    assert not wants_triton_too(plan(data), {})
    assert not wants_triton_too(plan(data, backend="triton"), also)


def test_uncertain_facts_are_notes(data: Versions) -> None:
    made = make_plan(
        data, flash_attn="2.8.3", python="3.12", torch="2.15", rocm="10.1", env={"PYTORCH_ROCM_ARCH": "gfx942"},
        machine=Machine(cores=1, available_mib=1024),
    )  # fmt: skip
    assert made.label == "rocm101torch2.15"
    assert [note.partition(":")[0] for note in made.notes] == ["torch 2.15.0", "ROCm 10.1"]
    assert all("not confirmed" in note for note in made.notes)
