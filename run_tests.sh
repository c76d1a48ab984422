#!/usr/bin/env bash
# Every test that runs without a GPU; what they need is set up first.
set -euo pipefail
case ${1-} in
    -h | --help)
        cat <<'USAGE'
usage: run_tests.sh [options of pytest]

Sets everything up and runs every test that runs without a GPU: lint, types, unit tests, and a wheel built, repaired,
installed and tested for real.

  run_tests.sh -k cells                 the tests with that word in their names
  run_tests.sh tests/test_cells.py      those of a file
USAGE
        exit 0
        ;;
esac
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")"
venv=build/test-env

# A python3 that the tool supports: the same choice as build_rocm.sh makes.
for python in python3 python3.14 python3.13 python3.12 python3.11 ""; do
    if [[ -z $python ]]; then
        echo "error: the tests need a Python from 3.11 to 3.14 on PATH" >&2
        exit 5
    fi
    if "$python" -I -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
        break
    fi
done

stamp="$(
    cat pyproject.toml
    "$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable), sys.version)'
    pwd -P
)"
if [[ ! -x $venv/bin/python || ! -f $venv/stamp || "$(<$venv/stamp)" != "$stamp" ]]; then
    echo "environment: $venv"
    "$python" -I -m venv --clear "$venv"
    pip_version="$(sed -n 's/^pip = "\([0-9.]*\)".*/\1/p' rocm_wheels/versions.toml)"
    "$venv/bin/python" -I -m pip install --quiet --disable-pip-version-check "pip==$pip_version"
    "$venv/bin/python" -I -m pip install --quiet --disable-pip-version-check --no-compile --group pyproject.toml:test
    printf '%s\n' "$stamp" >"$venv/stamp"
fi

export PATH="$PWD/$venv/bin:$PATH"
ruff check .
ruff format --check .
mypy
shellcheck --severity=style ./*.sh .ci/run
shfmt --indent 4 --case-indent --diff ./*.sh .ci/run
yamllint --strict .
check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
check-jsonschema --builtin-schema vendor.compose-spec docker/runner/compose.yml
hadolint docker/*/Dockerfile
zizmor --offline --quiet --persona pedantic .
# Processes side by side have a core each: threads of torch and numpy that wait for one another would take it from them.
export OMP_NUM_THREADS=1
# In the order of collection: files with the fewest tests, which xdist would leave to the end, are those that take longest.
exec python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=25 "$@"
