#!/usr/bin/env bash
# Runs a command while an HDFS of its own is there, with a checkpoint in it: what jobs resume from in a cluster.
#
#   examples/with_hdfs.sh FOLDER CHECKPOINTS -- COMMAND...
#
# The HDFS keeps its files in FOLDER/hdfs and has four DataNodes behind links of 400 Mbit/s each. CHECKPOINTS is a job's
# folder: `latest`, and the step that it names. COMMAND gets two variables: CHECKPOINT_PLAIN, a folder in HDFS with the
# files as they are, and CHECKPOINT_STRIPED, with the same in four stripes; CHECKPOINT_DISKS is where the DataNodes keep
# them. Where no such HDFS can be had (it takes root, Java, network namespaces) a line says so, and COMMAND runs without. All that is started ends with it, also when it
# is interrupted.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${here%/*}"
out="$1" checkpoints="$2"
shift 3

hdfs() { "$root/scripts/hdfs.sh" --folder "$out/hdfs" "$@"; }
put() { "$root/.venv/bin/bootseer" ckpt put --stripes "$1" "$checkpoints/$(<"$checkpoints/latest")" "$2" >&2; }
finish() {
  trap '' INT TERM
  hdfs stop >/dev/null 2>&1 || true
  rm -rf "$out/hdfs" "$out/hdfs.log"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

mkdir -p "$out"
printf '\n==> an HDFS on this machine, and the checkpoint in it\n' >&2
if uri="$(hdfs start --rate-mbit 400 2>"$out/hdfs.log")"; then
  printf '    Its four DataNodes have a link of 400 Mbit/s each.\n' >&2
  printf '    The checkpoint lies there twice: as ordinary files, and in four stripes.\n' >&2
  export CHECKPOINT_PLAIN="$uri/plain" CHECKPOINT_STRIPED="$uri/striped" CHECKPOINT_DISKS="$out/hdfs"
  put 1 "$CHECKPOINT_PLAIN"
  put 4 "$CHECKPOINT_STRIPED"
else
  printf '    NOT SHOWN: how a job resumes from a checkpoint in HDFS, because %s\n' "$(tail -n 1 "$out/hdfs.log")" >&2
fi
"$@"
