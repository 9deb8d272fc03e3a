#!/usr/bin/env bash
# Starts the job of examples/moe in a container on three nodes that have never seen its image, and shows where the startup
# time went: full pull and pip; lazily, with a snapshot taken of what pip did; lazily with what the start before recorded,
# and the snapshot mounted. Then once more after a change of the code. At the end the job resumes from a checkpoint of 1 GB,
# read as it lies in storage and from four stripes.
#
#   examples/demo.sh [FOLDER]        FOLDER, by default demo-out/ of the checkout, is emptied first
#
# Needs root: it makes an image, mounts it and empties the page cache in front of each start. The first time it builds
# the image, four minutes on two cores; later about four minutes.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${here%/*}"
out="${1:-$root/demo-out}"
image="$root/.demo-cache/image"

die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

[[ -x $root/.venv/bin/bootseer ]] || die "there is no $root/.venv; run make setup first"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
if [[ -n "$(ls -A "$out")" && ! -e $out/.bootseer-demo ]]; then
  die "$out holds something that is not of this demo; name another folder or empty it"
fi
[[ $EUID -eq 0 ]] || die "needs root, to make an image and to mount it: sudo make demo"
touch "$out/.bootseer-demo"
find "$out" -mindepth 1 ! -path "$out/.bootseer-demo" -delete

printf '\n==> the image of the job: Debian, Python, PyTorch, the script\n' >&2
"$here/image/build.sh" "$image"
export REQUIREMENTS="$here/moe/requirements.txt" IN_IMAGE=/app/requirements.txt WHEELS="$image/wheels"
"$here/starts.sh" "oci:$image/oci:latest" "$out" -- \
  torchrun --standalone --nproc-per-node 2 /app/train.py --steps 4 --checkpoint-mb 60 --checkpoint-dir /tmp/checkpoints
"$here/resume.sh" "$out/resume"
