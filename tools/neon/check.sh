#!/usr/bin/env bash
# The arm64 kernels, built by a cross compiler and run by an emulator, with `sdot` and on a processor without it: every
# vector operation against the scalar definition, and every kernel against the bits that this machine computes.
#
# Usage: tools/neon/check.sh [OPT_LEVEL]
#
# OPT_LEVEL is for the kernels: 0 by default, because optimizing them takes minutes; the operations are optimized always.
#
# Needs an arm64 standard library. If rustc has none (rustup target add aarch64-unknown-linux-gnu), it is Debian's, with
# Debian's newest compiler, the one for its browsers: unpacked in the target folder, since that package and rustup cannot
# both be installed. The linker and the emulator are installed by apt-get if they are missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

opt_level=${1:-0}
triple=aarch64-unknown-linux-gnu
out=${CARGO_TARGET_DIR:-target}/neon
mkdir -p "$out"
out=$(realpath "$out")
unpacked=$out/debian

die() {
    printf 'arm64: %s\n' "$*" >&2
    exit 1
}

# What cannot be had on a system other than Debian is left out, and said.
unavailable() {
    if grep -qsx 'ID=debian' /etc/os-release; then
        die "$*"
    fi
    printf 'arm64: not checked: %s\n' "$*"
    exit 0
}

as_root() {
    if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi
}

install() {
    command -v apt-get >/dev/null || unavailable "$* missing, and no apt-get to install it"
    local get=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
    local add=("${get[@]}" install --no-install-recommends "$@")
    { as_root "${add[@]}" || { as_root "${get[@]}" update && as_root "${add[@]}"; }; } >"$out/apt.log" 2>&1 ||
        { cat "$out/apt.log" >&2; unavailable "apt-get cannot install $*"; }
}

# Package lists of our own, for two architectures, so that the system's need not change.
apt_here() {
    local tool=$1
    shift
    "$tool" -qq -o Dir::State::Lists="$unpacked/lists" -o Dir::Cache="$unpacked/cache" -o APT::Sandbox::User="$(id -un)" \
        -o APT::Architectures::="$(dpkg --print-architecture)" -o APT::Architectures::=arm64 "$@"
}

# The package that $1 depends on and whose name matches $2.
dependency() {
    apt_here apt-cache depends "$1" | sed -n "s/^ *Depends: \($2\)\$/\1/p" | head -n 1
}

unpack_debian() {
    command -v apt-get >/dev/null || unavailable "rustc has no standard library for $triple, and there is no apt-get"
    rm -rf "$unpacked"
    mkdir -p "$unpacked"/{lists,cache/archives}/partial "$unpacked/packages"
    apt_here apt-get update || unavailable "apt-get update failed"
    local runtime llvm
    runtime=$(dependency libstd-rust-web-dev 'libstd-rust-web-[0-9.]*')
    [[ -n $runtime ]] || unavailable "there is no package rustc-web"
    llvm=$(dependency "$runtime" 'libllvm[0-9]*')
    install "$llvm"
    (cd "$unpacked/packages" && apt_here apt-get download rustc-web "$runtime" libstd-rust-web-dev:arm64) ||
        unavailable "apt-get download failed"
    local package
    for package in "$unpacked"/packages/*.deb; do
        dpkg -x "$package" "$unpacked"
    done
    rm -rf "$unpacked"/{lists,cache,packages}
}

if [[ $(uname -m) == aarch64 ]]; then
    echo "arm64: not checked by emulation: on this machine cargo test runs these kernels"
    exit 0
fi
command -v aarch64-linux-gnu-gcc >/dev/null || install gcc-aarch64-linux-gnu
command -v qemu-aarch64-static >/dev/null || install qemu-user-static
rustc=(rustc)
if [[ ! -d $(rustc --print target-libdir --target $triple) ]]; then
    rustc=(env LD_LIBRARY_PATH="$unpacked/usr/lib/$(uname -m)-linux-gnu" "$unpacked/usr/bin/rustc")
    "${rustc[@]}" -vV >/dev/null 2>&1 || unpack_debian
fi
printf 'arm64: %s, %s\n' "$("${rustc[@]}" -V)" "$(qemu-aarch64-static --version | head -n 1)"

compile() {
    "${rustc[@]}" --edition 2024 --target $triple -C linker=aarch64-linux-gnu-gcc -C target-feature=+crt-static \
        -D warnings --out-dir "$out" "$@"
}

# Only the kernels and the tests' random numbers: what else the tests of the crate use is not about arm64.
printf '#[path = "%s"]\npub mod rng;\n' "$PWD/crates/fixtures/src/rng.rs" >"$out/fixtures.rs"
compile --crate-name fixtures --crate-type rlib -O "$out/fixtures.rs"
compile --crate-name kernels --crate-type rlib -C opt-level="$opt_level" -W missing_docs -W unreachable_pub \
    crates/kernels/src/lib.rs
compile --crate-name units --test -C opt-level=1 crates/kernels/src/lib.rs
linked=(--extern kernels="$out/libkernels.rlib" --extern fixtures="$out/libfixtures.rlib")
compile --crate-name simd --test -C opt-level=3 "${linked[@]}" crates/kernels/tests/simd.rs
compile --crate-name digests -C opt-level=1 "${linked[@]}" crates/kernels/examples/digests.rs
# As the tests build it, so that after them nothing is left to compile.
cargo build --quiet --locked --release --workspace --example digests
"${CARGO_TARGET_DIR:-target}/release/examples/digests" >"$out/digests.want" 2>"$out/levels.want" ||
    { cat "$out/levels.want" >&2; die "this machine's own levels differ"; }
printf '%-10s %s\n' here "$(tail -n 1 "$out/levels.want")"

passed=0
failed=0

# Runs test program $2 on processor $1.
tests() {
    local log=$out/$2.$1.log
    if qemu-aarch64-static -cpu "$1" "$out/$2" >"$log" 2>&1; then
        local n
        n=$(sed -n 's/^test result: ok\. \([0-9]*\) passed.*/\1/p' "$log")
        passed=$((passed + n))
    else
        cat "$log"
        failed=$((failed + 1))
    fi
}

# Compares every digest on processor $1, which must have exactly the levels $2.
digests() {
    local got=$out/digests.$1 levels name digest
    qemu-aarch64-static -cpu "$1" "$out/digests" >"$got" 2>"$out/levels.$1" || cat "$out/levels.$1"
    levels=$(head -n 1 "$out/levels.$1")
    printf '%-10s %s\n' "$1" "$levels"
    if [[ $levels != "levels: $2" ]]; then
        printf '%s: not the levels %s\n' "$1" "$2"
        failed=$((failed + 1))
    fi
    while read -r digest name; do
        if grep -qxF "$digest $name" "$got"; then
            passed=$((passed + 1))
        else
            printf '%s differs: %s\n' "$1" "$name"
            failed=$((failed + 1))
        fi
    done <"$out/digests.want"
}

tests max units
for cpu in max cortex-a72; do
    tests $cpu simd
done
digests max "scalar neon neondot"
digests cortex-a72 "scalar neon"

printf 'arm64: %d passed, %d failed\n' "$passed" "$failed"
[[ $failed == 0 && $passed -gt 100 ]]
