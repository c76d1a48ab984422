#!/usr/bin/env bash
# Signs the launcher for Windows of a version of flash_attn. The next build with the same cache finds it.
# CERTIFICATE: a .pfx file in base64. PASSWORD: its password.
set -euo pipefail

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
umask 077
base64 --decode <<<"$CERTIFICATE" >"$scratch/certificate.pfx"
printf '%s' "$PASSWORD" >"$scratch/password"
unset CERTIFICATE PASSWORD
command -v osslsigncode >/dev/null || sudo apt-get install --yes osslsigncode
./build_rocm.sh --setup
build/env/bin/python -m rocm_wheels sign "$1" --cache build/cache --command \
    "osslsigncode sign -pkcs12 $scratch/certificate.pfx -readpass $scratch/password -h sha256 ${TIMESTAMPS:+-ts $TIMESTAMPS} -in {input} -out {output}"
