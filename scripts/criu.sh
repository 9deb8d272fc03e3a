#!/usr/bin/env bash
# Puts CRIU 4.1.1 or later into .criu/, for process snapshots: Debian 12's CRIU 3.17.1 does not start on new kernels.
# It is Debian 13's, with the libraries it is linked to and their loader. Nothing is installed, and nothing is done if
# `criu` on PATH is recent enough.
#
# Quick when it is there; safe to interrupt and to run twice at once. Needs the network the first time (about 20 MB), not root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work="$PWD/build/criu"

say() { printf 'criu: %s\n' "$*" >&2; }

found="$(criu --version 2>/dev/null | sed -n 's/^Version: *//p' || true)"
[[ $found && $(printf '%s\n' 4.1.1 "$found" | sort -V | head -n 1) == 4.1.1 ]] && exit 0
# One at a time; the lock is on this file, so that nothing has to be cleaned up.
exec 9<scripts/criu.sh
flock 9
stamp="$(uname -m) $(sha256sum scripts/criu.sh)"
[[ -e .criu/stamp && "$(head -n 1 .criu/stamp)" == "$stamp" ]] && exit 0

say "fetching Debian 13's CRIU into .criu/ (about 20 MB)"
rm -rf "$work"
mkdir -p "$work"/{lists,archives,unpacked,new/lib}
touch "$work/status"
# The mirror that this machine uses, from apt's lists or, if these were never fetched, by the usual path on it.
mirror="$({
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian'
  apt-get --print-uris update | sed -nE "s|^'(.*/debian)/+dists/.*|\1|p"
} 2>/dev/null | sed -n 1p)"
[[ $mirror ]] || { say "apt has no mirror of Debian here; install CRIU 4.1.1 or later by hand"; exit 1; }
printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg arch=%s target=Packages] %s trixie main\n' \
  "$(dpkg --print-architecture)" "$mirror" >"$work/sources.list"
# Read after the machine's own configuration, which may name proxies, but whose hooks must not run. No package counts as
# installed here, so apt downloads all that CRIU depends on; as root, it would do so as a user who may not write here.
cat >"$work/apt.conf" <<CONF
Dir::Etc { SourceList "$work/sources.list"; SourceParts "/dev/null"; Preferences "/dev/null"; PreferencesParts "/dev/null"; };
Dir::State "$work"; Dir::State::Status "$work/status"; Dir::Cache "$work"; APT::Sandbox::User "root";
#clear APT::Update;
CONF
apt() { apt-get -c "$work/apt.conf" --quiet --quiet "$@" </dev/null >&2 9<&-; }
apt update
apt install --yes --download-only --no-install-recommends criu
for package in "$work"/archives/*.deb; do dpkg-deb --extract "$package" "$work/unpacked"; done
cd "$work/unpacked/usr"
loader="$(echo lib/*-linux-gnu/ld-linux-*.so.*)"
mapfile -t libraries < <("$loader" --library-path "${loader%/*}" --list sbin/criu | awk '$2 == "=>" && !/ld-linux/ { print $3 }')
cp "$loader" "${libraries[@]}" "$work/new/lib/"
cp sbin/criu "$work/new/criu.bin"
cd "$work/new"
cat >criu <<'CRIU'
#!/bin/sh
# CRIU with its own loader and libraries, wherever this folder is mounted.
here="${0%/*}"
exec "$here"/lib/ld-linux-*.so.* --library-path "$here/lib" "$here/criu.bin" "$@"
CRIU
chmod +x criu
version="$(./criu --version)"
printf '%s\n' "$stamp" "$version" >stamp
cd "$work/../.."
rm -rf .criu
mv "$work/new" .criu
rm -rf "$work"
say "done: ${version%%$'\n'*}"
