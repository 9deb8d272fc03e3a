#!/usr/bin/env bash
# Resumes the job of examples/moe twice from the same checkpoint: from plain storage, as jobs do it today, and from four
# stripes with `bootseer run --checkpoint`. Leaves reports in FOLDER.
#
#   examples/resume.sh [FOLDER [MB]]      FOLDER, by default resume-out/ of the checkout, is emptied first; MB: 1000
#
# The storage is the HDFS that `make hdfs` has started, where the plain way is to copy the files with one client and load
# the copy. Links are what stripes add up: `make hdfs RATE=400` gives each DataNode one, as in a cluster; without a rate
# all bytes come through the same memory and processors, for which what is fetched ahead competes with the job's imports.
# Without HDFS the storage is a folder, from which the plain way is to load: one disk gains nothing by stripes.
# Needs root, to mount and to empty the page cache in front of each start.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${here%/*}"
out="${1:-$root/resume-out}"
mb="${2:-1000}"
bin="$root/.venv/bin"
export BOOTSEER="$bin/bootseer" PATH="$bin:$PATH"
export OMP_NUM_THREADS=1 # as torchrun would, in four lines

say() { printf '\n==> %s\n' "$1" >&2; shift; [[ $# -eq 0 ]] || printf '    %s\n' "$@" >&2; }
die() { printf 'resume: %s\n' "$*" >&2; exit 1; }

[[ -x $BOOTSEER ]] || die "there is no $root/.venv; run make setup first"
[[ $EUID -eq 0 ]] || die "needs root, to mount and to empty the page cache"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
if [[ -n "$(ls -A "$out")" && ! -e $out/.bootseer-demo ]]; then
  die "$out holds something that is not of this demo; name another folder or empty it"
fi
touch "$out/.bootseer-demo"
find "$out" -mindepth 1 ! -path "$out/.bootseer-demo" -delete
export BOOTSEER_CACHE="$out/node" BOOTSEER_RUNTIME
BOOTSEER_RUNTIME="$(mktemp -d)"

train=(torchrun --standalone --nproc-per-node 2 "$here/moe/train.py" --checkpoint-mb "$mb")
hdfs="$("$root/scripts/hdfs.sh" uri 2>/dev/null || true)"
storage="${hdfs:+$hdfs/bootseer-demo-$$}"
storage="${storage:-$out/storage}"
finish() {
  trap '' INT TERM
  rm -rf "$BOOTSEER_RUNTIME" "$out/first" "$out/copy" "$out/storage"
  [[ -z $hdfs ]] || "$bin/python" -c 'import sys, hdfs_native
hdfs_native.Client(sys.argv[1]).delete(sys.argv[2], True)' "$hdfs" "${storage#"$hdfs"}" >/dev/null 2>&1 || true
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "a checkpoint of $mb MB" "The job trains one step and saves."
"${train[@]}" --steps 1 --checkpoint-dir "$out/first" >"$out/first.log" 2>&1 || { tail -5 "$out/first.log" >&2; exit 1; }
step="$(<"$out/first/latest")"

rate=""
[[ -z $hdfs ]] || rate="$("$root/scripts/hdfs.sh" rate)"
say "into ${hdfs:+HDFS, }${hdfs:-a folder, since no HDFS runs here (make hdfs RATE=400 starts one)}${rate:+, $rate}" \
  "Once as ordinary files, once as four stripes each."
"$BOOTSEER" ckpt put --stripes 1 "$out/first/$step" "$storage/plain" >&2
"$BOOTSEER" ckpt put --stripes 4 "$out/first/$step" "$storage/striped" >&2
rm -rf "$out/first"

resume() { # name, options of `bootseer run`..., -- command...
  local name="$1"
  shift
  sync
  echo 3 >/proc/sys/vm/drop_caches
  BOOTSEER_SUBMITTED="$(date +%s.%N)" "$BOOTSEER" run --quiet --job "$name" --spool "$out/$name" "$@" 2>&1 |
    (trap '' INT && exec sed -u 's/^/    | /') >&2
  "$BOOTSEER" report --html "$out/$name.html" "$out/$name" >"$out/$name.txt"
  "$BOOTSEER" report --json "$out/$name" >"$out/$name.json"
}

if [[ -n $hdfs ]]; then
  say "resume 1, plain: one client copies the files, then the job loads them"
  resume plain -- "$here/copy_and_train.sh" "$storage/plain" "$step" "$out/copy" "${train[@]}" --steps 1
else
  say "resume 1, plain: the job loads the files from the folder"
  resume plain -- "${train[@]}" --steps 1 --checkpoint-dir "$out/storage/plain"
fi

say "resume 2, striped: the job loads the same files from a mount" \
  "They are read from all nodes at once, ahead of the job, from before Python starts."
resume striped --checkpoint "$storage/striped" --checkpoint-dir "$out/mount" -- \
  "${train[@]}" --steps 1 --checkpoint-dir "$out/mount"

"$bin/python" "$here/resumed.py" "$out" plain striped
