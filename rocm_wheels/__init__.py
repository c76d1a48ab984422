"""Builds, repairs, tests and publishes ROCm wheels of flash_attn.

Data flows downwards, and a stage imports only what stands above it:

| stage | modules | it hands on |
|-|-|-|
| common | errors, paths, environment, tables, schema, packages, artifacts | failures with a remedy, checked input |
| common | package_modules | modules of flash_attn |
| matrix | versions, cells, platforms, targets, names, machine, requested, plan, select, rows | a plan, rows of jobs |
| matrix | advice_facts, locks, refresh | what the adviser knows; pinned packages and their hashes |
| matrix | release_plan | what a release holds |
| compile | toolchain, compiler, units, workers, cache, progress, store, kernels, inspect_store | kernel stores |
| compile | sources, download, assembly_text, codeobject, isa, manifest | shared by compilers; a manifest |
| compile/check | stage, instructions, flow, forms, habits, scan, scalars, resources | a checked code object |
| compile/check | hazards, rules, pending, matrix, cures | hazards |
| compile/check | counters, exchanges, lanes, prologue, reserve, unfolding | proofs of waits, barriers and registers |
| compile/triton | units, tile_table, compiler, barriers, priorities, retarget, hazards | a code object of Triton |
| compile/asm | units, package | code objects of AMD, taken from a package |
| compile/ck | units, instances, sources, toolchain, compiler, planner | the same, and the planner |
| wheel | pe, dll, version_resource, launcher, signature | the launcher |
| wheel | interpreters, combinations, sbom, assemble, repair, windows | a wheel |
| wheel | contents, rewrite, numbering | the same, read and renamed |
| wheel | gpus, verdict, verify, container, manylinux | its verdict |
| wheel | workspace, forecast, closing, series, build, benchmark | the same by one call |
| wheel | hub | a repository of the Hugging Face Hub |
| wheel | one_file, ctypes_launcher | firstlight as one file |
| publish | links, yanks, catalogue, directory, github, published | the wheels of a directory and of releases |
| publish | admission, parts, assets, attestation | what may be published |
| publish | templates, notes, release, plans, publishing | a release |
| publish | home, products, answers, index, which, measured | package indexes, the page to choose a wheel on |
| publish | coverage, figures, report, hardware | tables and figures of the docs |
| publish | tryout, settings | whether the index serves, and the repository is set up |
| publish | emulation | what a wheel does on an emulated GPU |
| cli | build, kernels, wheels, pins, release, matrix, options | what people and workflows run |
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - an older Python gets this message instead of a SyntaxError
    running = ".".join(map(str, sys.version_info[:3]))
    sys.exit(
        f"error: this needs Python 3.10 or newer, {sys.executable} is Python {running}\n"
        "Run it with another one, such as python3.11; ./build_rocm.sh finds one by itself."
    )
