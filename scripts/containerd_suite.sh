#!/usr/bin/env bash
# Runs containerd's own snapshotter tests with `bootseer snapshotter`, through containerd's proxy plugin client.
#
# Needs root and Go. Downloads Debian's packages of Go libraries (57 MB) to a temporary folder; they are not installed.
# Takes about a minute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export BOOTSEER_COMMAND="${BOOTSEER_COMMAND:-$PWD/.venv/bin/bootseer}"
work="$(mktemp -d)"
trap 'rm -rf --one-file-system "$work"' EXIT
suite="$work/usr/share/gocode/src/bootseer"
mkdir -p "$work/debs" "$work/tmp" "$suite"
cp tests/snapshotter/suite_test.go "$suite/"
mapfile -t packages < <(
  apt-cache depends --recurse --no-{recommends,suggests,conflicts,breaks,replaces,enhances} \
    golang-github-containerd-containerd-dev | grep '^golang-.*-dev$' | grep -v protobuf-1-3 | sort -u
)
(cd "$work/debs" && apt-get -o APT::Sandbox::User=root download --quiet --quiet "${packages[@]}")
for package in "$work"/debs/*.deb; do dpkg-deb --extract "$package" "$work"; done
(cd "$suite" && GOPATH="$work/usr/share/gocode" GO111MODULE=off GOFLAGS='' go test -c -o "$work/suite" .)
# In a separate mount namespace, so that leftover mounts of failed tests are removed with it.
TMPDIR="$work/tmp" BOOTSEER_CACHE="$work/tmp/cache" unshare --mount "$work/suite" -test.root -test.v "$@" |
  grep -E '^ *(---|PASS|FAIL|[a-z_]+\.go:[0-9]+: (assertion|Failed))'
