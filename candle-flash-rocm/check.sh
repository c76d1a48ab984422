#!/usr/bin/env bash
# Every check of the crate: format, lints, documentation, tests, and the package that a release carries.
set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")"
if ! command -v cargo >/dev/null; then
    echo "error: no cargo on PATH: install Rust 1.89 or newer from https://rustup.rs" >&2
    exit 5
fi
export RUSTDOCFLAGS="-D warnings"
cargo fmt --check
cargo clippy --locked --all-targets --quiet -- -D warnings
cargo doc --locked --no-deps --quiet
cargo test --locked --quiet
# Builds from the package alone, as a user of it does; by the profile of the tests, so that dependencies are there.
cargo package --locked --allow-dirty --quiet --config 'profile.dev.debug="line-tables-only"'
