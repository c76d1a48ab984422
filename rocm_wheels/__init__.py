"""Builds, repairs, tests and publishes ROCm wheels of flash_attn.

Data flows downwards:

| stage | modules | it hands on |
|-|-|-|
| what exists | versions.toml, versions, tables, errors | versions, known and checked |
| what is asked for | cells, targets, names, machine, plan | a plan: one cell, its targets, label and wheel |
| in a release | matrix, rows, published, refresh | rows of the workflow's jobs, without what a release has |
| checks | packages, toolchain, interpreters, container | a machine that can carry the plan out, or a container |
| compile | units, kernels, progress, sources, isa, codeobject | a kernel store for each target, from the cache |
| - of Triton | triton_compiler | |
| - of Composable Kernel | ck_instances, ck_sources, ck_toolchain, ck_compiler | |
| assemble | launcher, ck_planner, sbom, wheel | a wheel |
| repair | repair | a manylinux wheel |
| verify | verify, verdict, inspect_store, benchmark | a verdict beside the wheel |
| publish | assets, github, release, catalogue, entry, notes, coverage | a release |
| site | index, templates, which | package indexes, the page to choose a wheel on |
| commands | cli, build_cli, release_cli, build | what people and workflows run |
"""
