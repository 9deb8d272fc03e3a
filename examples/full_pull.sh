#!/usr/bin/env bash
# What a container runtime does with an image that this node does not have, with the pull marked as a stage:
#
#   bootseer run -- examples/full_pull.sh IMAGE COMMAND...
#
# containerd pulls and unpacks IMAGE, then runs COMMAND in it. It must run already; CONTAINERD_ADDRESS is its socket.
# The container gets the events' folder and the hook's, at the places that they have here, and the variables that tell
# of them: so PyTorch's part of the startup is measured as it is without a container. FULL_PULL_INSTALL, a file of
# requirements in the image, is installed in front of COMMAND from the wheels in the folder FULL_PULL_WHEELS. One client
# copies the folder FULL_PULL_CHECKPOINT in HDFS to the folder CHECKPOINTS first, which the container sees too.
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
# The command has process id 1 there, and would ignore what is to end it.
trap 'ctr task kill --signal SIGKILL "$container"' INT TERM
ctr run "${options[@]}" "$image" "$container" "${command[@]}" <&0 &
code=0
# A trap ends `wait` before the container has ended.
while wait $! && code=0 || code=$?; kill -0 $! 2>/dev/null; do :; done
exit "$code"
