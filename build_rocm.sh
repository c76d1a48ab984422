#!/usr/bin/env bash
# Builds the wheel of one combination on this machine. Needs Linux x86_64 and a Python from 3.10 to 3.14, no GPU, no ROCm.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: build_rocm.sh <flash-attn> [<python> <torch> <rocm>] [options]
       build_rocm.sh --store <target>... [--backend NAME] [--only GLOB] [--dist DIR] [--cache DIR]
       build_rocm.sh --setup [GROUP]

Builds a flash_attn wheel for AMD GPUs into dist/, and verifies it. Needs no GPU and no ROCm.

  build_rocm.sh 2.8.3                       the universal wheel: every GPU, Python, torch and ROCm
  build_rocm.sh 2.8.3 3.11 2.5.1 6.2        the wheel of one combination
  build_rocm.sh 2.8.3 3.11 2.5.1 6.2 --plan

options:
  --plan          print what would be done, as JSON, and stop
  --platform NAME linux (default, as on this machine), windows, or all, as in a release: who uses the
                  universal wheel. The wheel for Windows is made here, and cannot run here
  --docker        do it inside a container with the combination's ROCm, by the same steps
  --cibuildwheel  assemble the universal wheel in a manylinux image and test it there under
                  each Python, too; needs Docker and Python 3.11
  --packages      write the wheels of flash-attn-3, flash-attn-4, sageattention, spas-sage-attn, block-sparse-attn
                  and of the plug-ins for vLLM and SGLang into dist/, too
  --backend NAME  ck, which holds the Triton kernels too, or triton alone
                  (default: ck where it has kernels for one of the targets)
  --dist DIR      where the wheel goes (default: dist in this repository)
  --cache DIR     compiled kernels, kept between builds (default: $ROCM_WHEELS_CACHE,
                  else $XDG_CACHE_HOME/rocm_wheels, else ~/.cache/rocm_wheels)
  --without asm   leave out AMD's assembly kernels, code objects of the package amd-aiter (MIT)
  --cached-kernels  compile nothing: refuse where the cache lacks a kernel

  --store TARGET  write the kernel store of a GPU target, such as gfx942, into dist/ and stop;
                  candle-flash-rocm and other programs without Python run its kernels

  --setup [GROUP] make an environment and stop: build/env, or build/env-GROUP for another dependency group

environment:
  PYTORCH_ROCM_ARCH or GPU_ARCHS  GPU targets: "gfx90a;gfx942", or native
                                  (default: the GPU found here, else some that the build prints)
  MAX_JOBS                        compile jobs at once (default: by cores and memory)
  BUILD_TRITON_BACKEND            true: the triton wheel too
  FLASH_ATTENTION_TRITON_AMD_ENABLE
                                  true: the triton wheel alone, in minutes, as --backend triton
USAGE
}

fail() {
    printf 'error: %s\n' "$1" >&2
    if [[ $# -gt 1 ]]; then
        printf '%s\n' "$2" >&2
    fi
    exit 5
}

# Prints the first Python that can run the pipeline, or, with 11, the packages that need Python 3.11.
find_python() {
    local oldest=${1:-10} name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if "$name" -I -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info < (3, 15))" 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "no Python from 3.$oldest to 3.14 is on PATH (python3: $(python3 --version 2>/dev/null || echo none))" \
        "Install one: apt-get install python3 python3-venv, or any other."
}

# Runs pip or what calls it. Its output goes to a log; the user gets one message.
logged() {
    local why="What it printed is in ${venv#"$PWD"/}.log." reached="retrying|max retries|connection|resolve|timed out"
    if "$@" >>"$venv.log" 2>&1; then
        return
    fi
    if grep -qiE "$reached" "$venv.log"; then
        why="The package index did not answer: see the network, HTTPS_PROXY, PIP_INDEX_URL. $why"
    fi
    fail "pip could not make the environment ${venv#"$PWD"/}" "$why"
}

# Creates an empty environment of the Python $1 with pip in it; Debian splits venv's pip off into a package of its own.
make_venv() {
    local base=$1
    if "$base" -I -m venv --clear "$venv" >/dev/null 2>&1; then
        logged "$venv/bin/python" -I -m pip "${locked[@]}" "$root/locks/pip.txt"
    elif "$python" -I -m pip --version >/dev/null 2>&1 && "$base" -I -m venv --clear --without-pip "$venv"; then
        logged "$python" -I -m pip --python "$venv/bin/python" "${locked[@]}" "$root/locks/pip.txt"
    else
        fail "$python can neither make a virtual environment with pip nor run pip" \
            "Install its venv package: apt-get install python3-venv."
    fi
}

# Installs the packages of a lock file by the uv that it names, in half of pip's time. Fails where it names none, and where
# pip's own settings say where packages come from.
by_uv() {
    sed -n '/^uv==/,/[^\\]$/p' "$1" >"$venv/uv.txt"
    [[ -s $venv/uv.txt ]] &&
        ! "$venv/bin/python" -I -m pip config list 2>/dev/null | grep -qE '\.((extra-)?index-url|no-index|proxy)=' &&
        logged "$venv/bin/python" -I -m pip "${locked[@]}" "$venv/uv.txt" &&
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --require-hashes -r "$1" >>"$venv.log" 2>&1
}

# Says every 20 seconds how far an environment is, until its process is ended.
progress() {
    while sleep 20 >/dev/null 2>&1; do
        echo "  $((SECONDS - $1)) s, $(du -sm "$venv" 2>/dev/null | cut -f1) MiB"
    done
}

# Recreates the environment of a dependency group if its lock file or its Python has changed; the stamp is written last.
environment() {
    local group=$1 base stamp detail start=$SECONDS
    # The same Python has the same path inside and outside an activated environment: a build may be running in $venv.
    base="$("$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')"
    stamp="$(
        cat "$root/locks/pip.txt" "$root/locks/$group.txt"
        printf '%s\n' "$root" "$base"
        "$python" -I -c 'import sys; print(sys.version)'
    )"
    if [[ -x $venv/bin/python && -f $venv/stamp && "$(<"$venv/stamp")" == "$stamp" ]]; then
        detail="unchanged"
    else
        echo "environment is made, in ${venv#"$PWD"/}: what it downloads may take minutes"
        : >"$venv.log"
        progress "$start" {lock}>&- &
        trap 'kill $! 2>/dev/null || true' EXIT
        make_venv "$base"
        # pip would compile all byte code on one core, but only imported modules need it.
        by_uv "$root/locks/$group.txt" ||
            logged "$venv/bin/python" -I -m pip "${locked[@]}" "$root/locks/$group.txt" --no-compile
        # $root, from build/env*/lib/python*/site-packages: a path in ASCII is read in every locale.
        echo ../../../../.. >"$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rocm_wheels.pth"
        printf '%s\n' "$stamp" >"$venv/stamp"
        kill $! 2>/dev/null || true
        trap - EXIT
        detail="made with $("$venv/bin/python" -I --version)"
    fi
    printf '%-12s%7d s  %s, %s\n' environment $((SECONDS - start)) "${venv#"$PWD"/}" "$detail"
}

# The environment of the group `build` is build/env, that of another group build/env-<group>. Of runs that start
# together one makes it; the others wait and find it made.
setup() {
    local group=$1 groups lock
    groups="$(sed -n '/^\[dependency-groups\]/,/^\[tool/s/^\([a-z0-9-]*\) = .*/\1/p' "$root/pyproject.toml")"
    if ! [[ $'\n'$groups$'\n' == *$'\n'"$group"$'\n'* ]]; then
        fail "--setup: there is no dependency group '$group'" "Known: ${groups//$'\n'/, }."
    fi
    [[ $group == build ]] || venv="$venv-$group"
    if ! { mkdir -p "${venv%/*}" && : >>"$venv.lock"; } 2>/dev/null; then
        fail "${venv%/*} cannot be written, where the environment of a build is made" \
            "Run the script from a clone in a directory that can."
    fi
    exec {lock}>"$venv.lock"
    "$python" -I -c 'import fcntl, sys; fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX)' "$lock"
    environment "$group"
    exec {lock}>&- # the build that follows holds nobody up
}

# Plans and containers need only the standard library, so an impossible build is refused before anything is installed.
# -I keeps the directory and the Python settings of the caller out.
bare() {
    "$python" -I -c '
import sys

sys.path.insert(0, sys.argv.pop(1))
from rocm_wheels.cli import main

usage = "build_rocm.sh <flash-attn> [<python> <torch> <rocm>] [options]\n       build_rocm.sh --help"
sys.exit(main(usage=usage))
' "$root" "$@"
}

root="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" # through links, and whatever CDPATH says
venv="$root/build/env"
# Every package comes in the version and with the sha256 that its lock file names: `python -m rocm_wheels lock`.
locked=(install --quiet --disable-pip-version-check --require-hashes --requirement)
if [[ $# -eq 0 ]]; then
    usage >&2
    exit 2
fi
if [[ $1 == --setup && ${2-} != -h && ${2-} != --help ]]; then
    if [[ $# -gt 2 ]]; then
        usage >&2
        exit 2
    fi
    case ${2-} in
        benchmarks | cibuildwheel | test) python="$(find_python 11)" ;;
        *) python="$(find_python)" ;;
    esac
    setup "${2:-build}"
    exit 0
fi
if [[ $1 == --store && ${2-} != -h && ${2-} != --help ]]; then
    if [[ $# -eq 1 ]]; then
        usage >&2
        exit 2
    fi
    python="$(find_python)"
    setup build
    exec "$venv/bin/python" -I -m rocm_wheels store --dist "$root/dist" "${@:2}"
fi
plan=false
container=false
group=build
oldest=10
for argument in "$@"; do
    case $argument in
        -h | --help)
            usage
            exit 0
            ;;
        --plan) plan=true ;;
        --docker) container=true ;;
        --cibuildwheel)
            group=cibuildwheel
            oldest=11
            ;;
    esac
done

python="$(find_python "$oldest")"
if [[ $plan == true ]]; then
    if [[ -x $venv/bin/python ]]; then
        python="$venv/bin/python" # its packages count the kernels
    fi
    bare plan --dist "$root/dist" "$@"
    exit
fi
planned="$(bare check --dist "$root/dist" "$@")"
if [[ $container == true ]]; then
    bare build --planned "$planned" --dist "$root/dist" "$@"
    exit
fi
setup "$group"
exec "$venv/bin/python" -I -m rocm_wheels build --planned "$planned" --dist "$root/dist" "$@"
