#!/usr/bin/env bash
# Signs the launcher for Windows of a version of flash_attn. The next build with the same cache finds it.
# CERTIFICATE: a .pfx file in base64. PASSWORD: its password. TIMESTAMPS: address of a server for time stamps, or empty.
set -euo pipefail
export -n CERTIFICATE PASSWORD # the programs below do not inherit them

command -v osslsigncode >/dev/null || sudo apt-get install --yes osslsigncode
./build_rocm.sh --setup

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
base64 --decode <<<"$CERTIFICATE" >"$scratch/certificate.pfx"
printf '%s' "$PASSWORD" >"$scratch/password"
build/env/bin/python -m rocm_wheels sign "$1" --cache build/cache --command \
    "osslsigncode sign -pkcs12 $scratch/certificate.pfx -readpass $scratch/password -h sha256 ${TIMESTAMPS:+-ts $TIMESTAMPS} -in {input} -out {output}"
