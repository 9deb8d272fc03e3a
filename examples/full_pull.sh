#!/usr/bin/env bash
# Starts a container like a container runtime on a node without the image, with the pull as a stage of the report:
#
#   bootseer run -- examples/full_pull.sh IMAGE COMMAND...
#
# A running containerd, whose socket is CONTAINERD_ADDRESS, pulls and unpacks IMAGE, then runs COMMAND in it. The spool and
# the hook are mounted into the container at the same paths, so that PyTorch's part of the startup is measured too.
# FULL_PULL_INSTALL, a file of requirements in the image, is installed before COMMAND from the wheels in the folder
# FULL_PULL_WHEELS. Before that, one client copies the folder FULL_PULL_CHECKPOINT in HDFS to the folder CHECKPOINTS, which
# is mounted too.
set -euo pipefail
image="$1"
shift

"$BOOTSEER" stage image_loading -- ctr image pull --plain-http "$image" >/dev/null

options=(--rm --net-host)
if [[ -n ${FULL_PULL_CHECKPOINT:-} ]]; then
  "$BOOTSEER" stage model_initialization.checkpoint_copy -- \
    "${BOOTSEER%/*}/python" "${0%/*}/plain_copy.py" "$FULL_PULL_CHECKPOINT" "$CHECKPOINTS"
  options+=(--mount "type=bind,src=$CHECKPOINTS,dst=$CHECKPOINTS,options=rbind:ro")
fi
for name in $(compgen -e); do
  case "$name" in
    BOOTSEER_CACHE | BOOTSEER_RUNTIME) ;;
    BOOTSEER_* | TRACEPARENT) options+=(--env "$name=${!name}") ;;
  esac
done
hook="${PYTHONPATH%%:*}"
package="${hook%/hook/path}"
command=("$@")
if [[ -n ${FULL_PULL_INSTALL:-} ]]; then
  options+=(--mount "type=bind,src=$FULL_PULL_WHEELS,dst=/wheels,options=rbind:ro")
  pip=(python3 -m pip install --quiet --no-index --find-links /wheels -r "$FULL_PULL_INSTALL")
  marked='import os, subprocess, sys, bootseer
with bootseer.stage("environment_setup"):
    subprocess.run(sys.argv[1].split(), check=True)
os.execvp(sys.argv[2], sys.argv[2:])'
  command=(python3 -c "$marked" "${pip[*]}" "$@")
fi
spool="${BOOTSEER_TRACE#spool:}"
options+=(--env "PYTHONPATH=$hook:${package%/*}")
options+=(--mount "type=bind,src=$package,dst=$package,options=rbind:ro")
options+=(--mount "type=bind,src=$spool,dst=$spool,options=rbind:rw")
container="full-pull-$$"
# The command has process id 1 in the container, and ignores signals that it does not handle.
trap 'ctr task kill --signal SIGKILL "$container"' INT TERM
ctr run "${options[@]}" "$image" "$container" "${command[@]}" <&0 &
code=0
# A trap interrupts `wait`.
while wait $! && code=0 || code=$?; kill -0 $! 2>/dev/null; do :; done
exit "$code"
