"""Says what is wrong with this installation and what to do: `python -m flash_attn.doctor`.

It prints what a bug report needs, runs one forward and one backward in a separate process, and ends with a remedy for
each problem that it finds. Exit code 0: nothing is wrong; 1: something is. --log reads the log of a failed build too,
and --json is for programs. It runs without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flash_attn.diagnosis import survey
from flash_attn.diagnosis.console import accept_every_character
from flash_attn.diagnosis.findings import examine, hip_runtimes
from flash_attn.diagnosis.survey import Facts
from flash_attn.diagnosis.troubles import BY_KEY


def report(facts: Facts) -> str:
    """What a report of a bug needs, as lines."""
    build, probe = facts.build, facts.probe
    torch, call = probe.get("torch"), probe.get("call")
    devices = facts.devices
    origin = "built by pip" if build.python else "a source tree"
    label = f"{build.version}+{build.label}" if build.label else f"{build.version}, {origin}"
    lines = [
        ("flash_attn", f"{label} in {facts.location}"),
        *((("commit", build.commit),) if build.commit else ()),
        ("backend", f"{build.backend}, compiled by {build.compiler}" if build.compiler else build.backend),
        ("targets", ", ".join(build.targets) or "no compiled kernels: Triton compiles each kernel at its first call"),
        ("python", facts.python),
        ("torch", f"{torch['version']}, HIP {torch['hip']}, CUDA {torch['cuda']}" if torch else "none that loads"),
        ("triton", ", ".join(f"{name} {version}" for name, version in facts.tritons.items()) or "none"),
        *(
            ("plug-in", f"{name} {facts.plug_ins[name]} for {program} {facts.plug_ins.get(program, '(not installed)')}")
            for name, program in survey.PLUG_INS.items()
            if name in facts.plug_ins
        ),
        ("system", facts.system),
        ("driver", facts.driver or "none"),
        *(("MES firmware", f"{version:#x}, {target}") for target, version in facts.mes.items()),
        *(
            ("device", f"{each['name']}, {each['target']}, {each['memory_mib']} MiB{_lack(facts, each)}")
            for each in devices
        ),
        *(() if devices else (("device", "none"),)),
        *((("long calls", f"in pieces of {facts.limit.seconds:g} s: {facts.limit.cause}"),) if facts.limit else ()),
        *(
            (each.path, f"{each.owner}:{each.group} {each.mode}, {'allowed' if each.allowed else 'denied'}")
            for each in (facts.kfd, facts.dxg, *facts.render)
            if each is not None
        ),
        *(() if facts.kfd or not facts.has_kfd else ((str(survey.KFD), "not there"),)),
        ("user", facts.user),
        ("library", probe.get("info", {}).get("launcher") or "no driver library is used"),
        *(("HIP runtime", path) for path in hip_runtimes(probe.get("libraries", ()))),
        *(("variable", f"{name}={value}") for name, value in facts.variables.items()),
    ]
    for each in probe.get("kernels", ()):
        for way in ("forward", "backward"):
            served = each[way]
            text = f"{served['kernel'] or served['source']} serves bf16, head dim {each['head_dim']}, causal"
            lines.append((f"{way} by", f"{text}: {served['why']}"))
    if call is not None:
        for way in ("forward", "backward"):
            text = (
                f"{call[f'{way}_ms']:.1f} ms at first, error {call[f'{way}_error']:.1e} (at most {call['limit']:.1e})"
            )
            lines.append((way, f"{text}, {call['backend']} on {call['device']}"))
    return "\n".join(f"{name:<16}{value}" for name, value in lines)


def _lack(facts: Facts, device: Mapping[str, Any]) -> str:
    return "" if facts.serves(device) or not facts.build.targets else ", no kernels in this wheel"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accept_every_character()
    parser.add_argument("--json", action="store_true", help="print facts and findings as one JSON object")
    parser.add_argument("--log", type=Path, metavar="FILE", help="the log of a build that failed")
    arguments = parser.parse_args(argv)
    try:
        log = arguments.log.read_text(encoding="utf-8", errors="replace") if arguments.log else ""
    except OSError as error:
        parser.error(f"--log {arguments.log}: {error.strerror}")
    if not arguments.json:
        print("looking; the first import of torch may take a while", file=sys.stderr, flush=True)
    facts = survey.survey(log)
    findings = examine(facts)
    problems = [finding for finding in findings if not BY_KEY[finding.key].note]
    if arguments.json:
        content = asdict(facts) | {"findings": [asdict(finding) for finding in findings]}
        content.pop("log")
        text = json.dumps(content, indent=1)
    else:
        told = [f"{BY_KEY[finding.key].title}: {finding.what}\n  {finding.remedy}" for finding in findings]
        if facts.windows and any('`& "' in finding.remedy for finding in findings):
            told.append('The commands that begin with `& "` are for PowerShell. In cmd, type them without the &.')
        text = "\n\n".join([report(facts), *told, *([] if problems else ["nothing is wrong"])])
    try:
        print(text, flush=True)
    except BrokenPipeError:  # who reads it, as `| head`, has enough; Python must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if problems else 0
