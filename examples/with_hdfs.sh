#!/usr/bin/env bash
# Runs a command with a temporary HDFS that has a checkpoint.
#
#   examples/with_hdfs.sh FOLDER CHECKPOINTS -- COMMAND...
#
# The HDFS has its files in FOLDER/hdfs, and four DataNodes behind links of 400 Mbit/s each. CHECKPOINTS is a job's folder
# with `latest` and the step that it names. COMMAND gets the variables CHECKPOINT_PLAIN (a folder in HDFS with ordinary
# files), CHECKPOINT_STRIPED (with four stripes) and CHECKPOINT_DISKS (the DataNodes' disks). Without root, Java or network
# namespaces COMMAND runs without an HDFS, and a line gives the reason. All servers end with it, also when it is
# interrupted.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${here%/*}"
out="$1" checkpoints="$2"
shift 3

# The servers stand for other machines but use these processors, for two minutes: Java compiles less.
export BOOTSEER_HDFS_BRIEF=1
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
printf '\n==> storing the checkpoint in an HDFS on this machine\n' >&2
if uri="$(hdfs start --rate-mbit 400 2>"$out/hdfs.log")"; then
  printf '    It has four DataNodes with links of 400 Mbit/s each.\n' >&2
  printf '    The checkpoint is stored twice: in four stripes, and as ordinary files.\n' >&2
  export CHECKPOINT_PLAIN="$uri/plain" CHECKPOINT_STRIPED="$uri/striped" CHECKPOINT_DISKS="$out/hdfs"
  # For some seconds after the ordinary files the NameNode refuses their DataNode as too busy, and four stripes need all four.
  put 4 "$CHECKPOINT_STRIPED"
  put 1 "$CHECKPOINT_PLAIN"
else
  printf '    NOT SHOWN: how a job resumes from a checkpoint in HDFS, because %s\n' "$(tail -n 1 "$out/hdfs.log")" >&2
fi
"$@"
