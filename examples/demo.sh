#!/usr/bin/env bash
# Starts the job of examples/moe in a container on three nodes without its image, and shows where the startup time goes:
# full pull, pip and a copied checkpoint; lazily, with a snapshot of pip's files and the checkpoint in four stripes; the
# same with the second start's record and snapshot. Then once more on the last node, and once in its container, as after
# a change of the code.
#
#   examples/demo.sh [FOLDER]        FOLDER, by default demo-out/ of the checkout, is emptied first
#
# Needs root, to build and mount an image and to empty the page cache before each start. Takes about two minutes on two
# cores, and four more the first time, when the image is built.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${here%/*}"
out="${1:-$root/demo-out}"
image="$root/.demo-cache/image"
mb=400

die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

[[ -x $root/.venv/bin/bootseer ]] || die "$root/.venv does not exist; run make setup first"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
if [[ -n "$(ls -A "$out")" && ! -e $out/.bootseer-demo ]]; then
  die "$out contains files that are not of this demo; choose another folder, or empty it"
fi
[[ $EUID -eq 0 ]] || die "needs root, to build and mount an image: sudo make demo"
touch "$out/.bootseer-demo"
find "$out" -mindepth 1 ! -path "$out/.bootseer-demo" -delete

printf '\n==> building the image of the job: Debian, Python, PyTorch, the script\n' >&2
"$here/image/build.sh" "$image"
checkpoints="$image/checkpoints-$mb"
if [[ ! -e $checkpoints/latest ]]; then
  printf '\n==> creating a checkpoint of %s MB: the job trains one step and saves\n' "$mb" >&2
  PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 "$here/moe/train.py" --steps 1 \
    --checkpoint-mb "$mb" --checkpoint-dir "$checkpoints" >"$out/train.log" 2>&1 || { tail -5 "$out/train.log" >&2; exit 1; }
fi
export RUN_ON="--steps 1000000"
export REQUIREMENTS="$here/moe/requirements.txt" IN_IMAGE=/app/requirements.txt WHEELS="$image/wheels"
"$here/with_hdfs.sh" "$out" "$checkpoints" -- "$here/starts.sh" "oci:$image/oci:latest" "$out" -- \
  torchrun --standalone --nproc-per-node 2 /app/train.py --steps 4 --checkpoint-mb "$mb" \
  --resume "$out/checkpoints" --checkpoint-dir /tmp/checkpoints

# Show the starts in a service until Ctrl-C; only on a terminal.
[[ -t 1 || -n ${DEMO_SERVE:-} ]] || exit 0
bootseer="$root/.venv/bin/bootseer"
"$bootseer" serve --data "$out/service" --listen 127.0.0.1:0 2>"$out/service.log" &
service=$!
trap 'kill $service 2>/dev/null; wait $service || true' EXIT
trap 'exit 0' INT TERM
for _ in {1..150}; do
  grep -q ' at http' "$out/service.log" && break
  kill -0 $service 2>/dev/null || { tail -3 "$out/service.log" >&2; exit 1; }
  sleep 0.2
done
address="$(sed -n 's/.* at \(http[^ ]*\).*/\1/p' "$out/service.log")"
"$bootseer" ship --quiet --to "$address" "$out"/{full-pull,lazy,recorded,again}
printf '\n==> the starts in a service: %s (Ctrl-C ends it)\n' "$address" >&2
wait $service
