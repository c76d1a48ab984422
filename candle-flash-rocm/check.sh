#!/usr/bin/env bash
# Every check of the crate: format, lints, documentation, tests, dependencies, and the package that a release carries.
set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")"
if ! command -v cargo >/dev/null; then
    echo "error: no cargo on PATH: install Rust 1.94 or newer from https://rustup.rs" >&2
    exit 5
fi
export RUSTDOCFLAGS="-D warnings" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"
cargo fmt --check
cargo clippy --locked --all-targets --quiet -- -D warnings
cargo doc --locked --no-deps --quiet
# The lints compile the examples. Linking them here would take as long as the tests.
cargo test --locked --quiet --lib --tests
cargo test --locked --quiet --doc
if command -v cargo-deny >/dev/null; then
    cargo deny --offline --log-level error check licenses bans sources
else
    echo "note: no cargo-deny on PATH: licences and sources of the dependencies are not checked"
fi
rm -f "$CARGO_TARGET_DIR"/package/candle-flash-rocm-*.crate
cargo package --locked --allow-dirty --quiet --no-verify
# The package alone compiles, as a user of it finds it. Its dependencies are there from the lints.
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar xf "$CARGO_TARGET_DIR"/package/candle-flash-rocm-*.crate -C "$unpacked" --strip-components 1
cargo check --locked --quiet --manifest-path "$unpacked/Cargo.toml" --config 'profile.dev.debug="line-tables-only"'
