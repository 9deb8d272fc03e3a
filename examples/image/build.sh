#!/usr/bin/env bash
# Builds the container image of examples/moe as an OCI layout (five layers, about 400 MB compressed, 1.3 GB unpacked),
# and the wheels that the job installs when it starts.
#
#   examples/image/build.sh [FOLDER]      FOLDER: by default .demo-cache/image in the checkout. The image is
#                                         FOLDER/oci:latest, the wheels are in FOLDER/wheels
#
# Without Docker: debootstrap creates the base from apt's Debian mirror, buildah does the rest. Needs root. Takes about
# four minutes; fast if the image exists and its inputs have not changed.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
out="${1:-$root/.demo-cache/image}"
suite=bookworm
python_version=3.11 # of Debian bookworm: the wheels in the image are for it, not for .venv's Python

say() { printf 'image: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

[[ $EUID -eq 0 ]] || die "needs root, for debootstrap and for the owners of the files"
PATH="$PATH:/usr/sbin:/sbin"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
for program in buildah debootstrap; do
  command -v "$program" >/dev/null || die "there is no $program; run make setup first"
done
mkdir -p "$out"
out="$(cd "$out" && pwd)"
# One build at a time in a folder.
exec 9>"$out/lock"
flock 9

made_of() {
  (cd "$root" && sha256sum examples/image/{Containerfile,build.sh,libraries.txt} examples/moe/*.py \
    examples/moe/requirements.txt scripts/requirements.txt)
}
[[ -e $out/made-of && "$(<"$out/made-of")" == "$(made_of)" ]] && { say "$out/oci is there"; exit 0; }
# The checkpoints in it (of demo.sh) were written by the old script.
rm -rf "$out"/made-of "$out"/checkpoints-*

storage=(--root "$out/storage" --runroot "$out/storage-run" --storage-driver overlay)
work="$out/work"
forget() {
  # Removing the containers also removes an interrupted build's mounts.
  [[ -d $out/storage ]] && buildah "${storage[@]}" rm --all >/dev/null 2>&1
  rm -rf "$work" "$out/storage" "$out/storage-run"
}
trap forget EXIT
forget || true
mkdir -p "$work/context"

mirror="$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
  awk -v suite="$suite" '$1 == suite && $2 == "main" { print $3; exit }')"
say "base: Debian $suite from ${mirror:-the default mirror}"
eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
[[ -z ${http_proxy:-} ]] || export http_proxy
debootstrap --variant=minbase "$suite" "$work/base" ${mirror:+"$mirror"} >"$work/debootstrap.log" 2>&1 ||
  { tail -3 "$work/debootstrap.log" >&2; die "debootstrap failed"; }
rm -rf "$work"/base/var/cache/apt/* "$work"/base/var/lib/apt/lists/* "$work"/base/var/log/*.log

# Wheels for the image's Python. PyTorch's CPU build is in pip's configured indexes or at the address that uv has, as
# in scripts/setup.sh.
pip=("$root/.venv/bin/python" -m pip)
for_image=(--quiet --only-binary :all: --python-version "$python_version" --implementation cp
  --platform manylinux2014_x86_64)
for libc in 17 27 28; do for_image+=(--platform "manylinux_2_${libc}_x86_64"); done
install=("${pip[@]}" install --no-compile "${for_image[@]}")
pin="$(grep '^torch==' "$root/scripts/requirements.txt")"

say "libraries, $pin and the job's requirements for Python $python_version"
# pip's warnings concern .venv or this machine's settings, not the image.
quietly() { "$@" >>"$work/pip.log" 2>&1; }
failed() { tail -3 "$work/pip.log" >&2; die "$1"; }
quietly "${install[@]}" --target "$work/context/libraries" --requirement "$here/libraries.txt" ||
  failed "cannot get the libraries"
quietly "${install[@]}" --target "$work/context/torch" "$pin+cpu" || {
  quietly "${pip[@]}" install uv
  quietly "$root/.venv/bin/uv" pip install --target "$work/context/torch" --python-version "$python_version" \
    --python-platform x86_64-manylinux_2_28 --torch-backend cpu "$pin"
} || failed "cannot get the CPU build of $pin"
rm -rf "$out/wheels"
quietly "${pip[@]}" download "${for_image[@]}" --dest "$out/wheels" --requirement "$root/examples/moe/requirements.txt" ||
  failed "cannot get the job's requirements"
# A package belongs to the lowest layer that has it. Console scripts would name this machine's interpreter.
rm -rf "$work"/context/{libraries,torch}/bin
above() { # layer, the layers below it
  local layer="$1" name
  shift
  for name in "$work/context/$layer"/*; do
    for below in "$@"; do
      [[ ! -e $work/context/$below/${name##*/} ]] || rm -rf "$name"
    done
  done
}
above torch libraries
mkdir "$work/context/job"
cp "$root"/examples/moe/{*.py,requirements.txt} "$work/context/job/"

say "layers"
base="$(buildah "${storage[@]}" from scratch)"
buildah "${storage[@]}" add --quiet "$base" "$work/base" / >/dev/null
buildah "${storage[@]}" commit --quiet "$base" demo-base >/dev/null
buildah "${storage[@]}" build --quiet --layers --isolation chroot --network host --file "$here/Containerfile" \
  --build-arg BASE=localhost/demo-base --tag demo "$work/context" >"$work/build.log" 2>&1 ||
  { tail -5 "$work/build.log" >&2; die "buildah failed"; }

say "compressing"
rm -rf "$out/oci"
buildah "${storage[@]}" push --quiet --format oci demo "oci:$out/oci:latest" >&2
made_of >"$out/made-of"
say "$out/oci:latest, $(du -sh "$out/oci" | cut -f1) compressed"
