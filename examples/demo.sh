#!/usr/bin/env bash
# Starts examples/moe twice under BootSeer and shows where the startup time of the second start went.
#
#   examples/demo.sh [FOLDER]        FOLDER, by default demo-out/ of the checkout, is emptied first
#
# Each start gets a fresh environment, as in a fresh container whose image holds PyTorch. About a minute on two cores.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-$root/demo-out}"

say() { printf '\n==> %s\n' "$*" >&2; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

bootseer="$root/.venv/bin/bootseer"
[[ -x $bootseer ]] || die "there is no $root/.venv; run make setup first"

mkdir -p "$out"
out="$(cd "$out" && pwd)"
if [[ -n "$(ls -A "$out")" && ! -e $out/.bootseer-demo ]]; then
  die "$out holds something that is not of this demo; name another folder or empty it"
fi
touch "$out/.bootseer-demo"
find "$out" -mindepth 1 ! -path "$out/.bootseer-demo" -delete

# The job's virtual environment sees the PyTorch of .venv, as a container sees that of its image; what the job requires
# is installed on top, again at each start.
fresh_environment() {
  local venv="$out/venv" packages
  rm -rf "$venv"
  "$root/.venv/bin/python" -m venv --without-pip "$venv"
  packages="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  "$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/image.pth"
  printf '#!/bin/sh\nexec "${0%%/*}/python" -m torch.distributed.run "$@"\n' >"$venv/bin/torchrun"
  chmod +x "$venv/bin/torchrun"
}

train=(torchrun --standalone --nproc-per-node 2 "$root/examples/moe/train.py" --checkpoint-dir "$out/checkpoints")

# What to accelerate is said here: each technique is one more option.
options=(--job demo --requirements "$root/examples/moe/requirements.txt")

start() { # number, arguments of the job...
  local spool="$out/start-$1" attempt=$(($1 - 1))
  shift
  fresh_environment
  # Whoever submits a job can say when; a scheduler would.
  BOOTSEER_SUBMITTED="$(date +%s.%N)" VIRTUAL_ENV="$out/venv" PATH="$out/venv/bin:$PATH" \
    OMP_NUM_THREADS=1 \
    PIP_IGNORE_INSTALLED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off \
    "$bootseer" run "${options[@]}" --attempt "$attempt" --spool "$spool" -- "${train[@]}" "$@" >&2
}

say "start 1 of 2: install the requirements, train 8 steps, save a checkpoint of 300 MB"
start 1 --steps 8

say "start 2 of 2: the same job resumes; this startup is the measured one"
start 2 --steps 4

say "where the time of start 2 went"
"$bootseer" report --html "$out/report.html" "$out/start-2"

say "the same as a page, with all ranks: $out/report.html"
