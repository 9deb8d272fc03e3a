#!/usr/bin/env bash
# Starts a command in a container three times, each time on a node without the image: with containerd, which first pulls
# and unpacks all of it; lazily; and lazily with the record of the second start. Then a fourth time on the last node, and
# once more in the container of the fourth start, as after a change of the code. Writes reports into FOLDER.
#
#   examples/starts.sh IMAGE FOLDER [OPTION...] -- COMMAND...
#
# IMAGE is a reference for skopeo, such as oci:DIR:TAG; OPTIONs are those of `bootseer run`. Environment variables:
#   RUN_ON: arguments appended to COMMAND that make it run until it is stopped; with them there is a hot update.
#   REQUIREMENTS (a file), IN_IMAGE (the same file in the image) and WHEELS (a folder): packages that every start needs;
#   BootSeer stores them as a snapshot in the image's repository.
#   CHECKPOINT_PLAIN and CHECKPOINT_STRIPED: folders in HDFS, whose checkpoints the command finds in FOLDER/checkpoints.
# Needs root. The nodes are this machine: caches and page cache are emptied before each of the three starts. All processes
# and mounts end with it, also when it is interrupted.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${here%/*}"
PATH="$PATH:/usr/sbin:/sbin"
export BOOTSEER="$root/.venv/bin/bootseer"

say() { printf '\n==> %s\n' "$1" >&2; shift; [[ $# -eq 0 ]] || printf '    %s\n' "$@" >&2; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

image="$1" out="$2"
shift 2
options=()
while [[ $# -gt 0 && $1 != -- ]]; do options+=("$1"); shift; done
[[ $# -gt 1 ]] || die "no command: put it after --"
shift
command=("$@")
for program in docker-registry skopeo containerd ctr runc; do
  command -v "$program" >/dev/null || die "$program is not installed; run make setup first"
done

# The paths of sockets are limited to 108 bytes.
short="$(mktemp -d)"
registry_pid='' containerd_pid='' job=''
export CHECKPOINTS="$out/checkpoints" FULL_PULL_CHECKPOINT="${CHECKPOINT_PLAIN:-}"
export BOOTSEER_CACHE="$out/node/cache" BOOTSEER_RUNTIME="$short/bootseer" CONTAINERD_ADDRESS="$short/containerd.sock"

end() { # pid
  [[ -z $1 ]] || { kill "$1" && wait "$1"; } 2>/dev/null || true
}
end_job() { # the job of the hot update
  [[ -z $job ]] || { kill "$(cat "$short/run.pid")" && wait "$job"; } 2>/dev/null || true
  job=''
}
stop_containerd() {
  [[ -n $containerd_pid ]] || return 0
  local task
  for task in $(ctr task list --quiet 2>/dev/null); do
    ctr task delete --force "$task" >/dev/null 2>&1 || true
  done
  end "$containerd_pid"
  containerd_pid=''
}
empty_node() {
  [[ ! -d $BOOTSEER_CACHE ]] || "$BOOTSEER" cache prune --to 0 >/dev/null
  rm -rf "$out/node"
  mountpoint -q "$CHECKPOINTS" || rm -rf "$CHECKPOINTS"
}
finish() {
  trap '' INT TERM
  end_job
  stop_containerd
  empty_node || true
  end "$registry_pid"
  rm -rf "$out/registry" "$short"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Servers run in new sessions, so that Ctrl-C does not reach them; they are stopped after their clients.
start_registry() {
  local port
  port="$("$root/.venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
  host="127.0.0.1:$port"
  mkdir "$out/registry"
  printf 'version: 0.1\nstorage: {filesystem: {rootdirectory: "%s"}}\nhttp: {addr: "%s"}\n' \
    "$out/registry/data" "$host" >"$out/registry/config.yml"
  setsid docker-registry serve "$out/registry/config.yml" >"$out/registry/log" 2>&1 &
  registry_pid=$!
  for _ in {1..100}; do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && return
    kill -0 "$registry_pid" 2>/dev/null || break
    sleep 0.1
  done
  tail -3 "$out/registry/log" >&2
  die "the registry did not start"
}

start_containerd() {
  mkdir -p "$out/node"
  printf 'version = 2\nroot = "%s"\nstate = "%s"\ndisabled_plugins = %s\n[grpc]\naddress = "%s"\n[ttrpc]\naddress = "%s"\n' \
    "$out/node/containerd" "$short/containerd" '["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]' \
    "$CONTAINERD_ADDRESS" "$CONTAINERD_ADDRESS.ttrpc" >"$short/containerd.toml"
  setsid containerd -c "$short/containerd.toml" >"$short/containerd.log" 2>&1 &
  containerd_pid=$!
  for _ in {1..100}; do
    ctr version >/dev/null 2>&1 && return
    kill -0 "$containerd_pid" 2>/dev/null || break
    sleep 0.1
  done
  tail -3 "$short/containerd.log" >&2
  die "containerd did not start"
}

# Empty the page cache, except for the files of registry and DataNodes, which stand for other machines.
forget_memory() {
  sync
  echo 3 >/proc/sys/vm/drop_caches
  # DataNodes still move the files of new blocks, so that some may be missing.
  find "$out/registry/data" ${CHECKPOINT_DISKS:+"$CHECKPOINT_DISKS"} -type f -exec cat {} + >/dev/null 2>&1 || true
}

start() { # name, options of `bootseer run`..., --, command...
  run "$@"
  show "$1" "$1"
}
run() { # the same
  local name="$1"
  shift
  # The time of the submission, which a scheduler would give.
  (
    export BOOTSEER_SUBMITTED="$(date +%s.%N)"
    echo "$BASHPID" >"$short/run.pid"
    exec "$BOOTSEER" run --quiet --job "$name" --spool "$out/$name" ${options[@]+"${options[@]}"} "$@" 2>&1
  ) |
    # Ctrl-C ends only the job, whose last output is still shown.
    (trap '' INT && exec sed -u 's/^/    | /') >&2
}
show() { # name, name of the run, more options of `bootseer report`...
  local name="$1" spool="$out/$2"
  shift 2
  "$BOOTSEER" report --html "$out/$name.html" "$@" "$spool" >"$out/$name.txt" 2>"$short/said" ||
    { cat "$short/said" >&2; exit 1; }
  "$BOOTSEER" report --json "$@" "$spool" >"$out/$name.json"
  "$root/.venv/bin/python" "$here/compare.py" "$out" "$name" >&2
}
until_event() { # name of the run, stage of the event, what else it has
  for _ in {1..600}; do
    grep -rhs "\"stage\":\"$2\"" "$out/$1" | grep -q "$3" && return
    sleep 0.1
  done
  die "there was no event $2 of $1 within a minute"
}

say "pushing the image to a registry on this machine" \
  "bootseer image convert adds block files of the layers; the image itself is unchanged."
start_registry
setup=()
if [[ -n ${REQUIREMENTS:-} ]]; then
  export FULL_PULL_INSTALL="$IN_IMAGE" FULL_PULL_WHEELS="$WHEELS"
  setup=(--requirements "$REQUIREMENTS" --store "oci://$host/team/job" --mount "$WHEELS:/wheels:ro"
    --container-env PIP_NO_INDEX=1 --container-env PIP_FIND_LINKS=/wheels --container-env PIP_QUIET=1)
fi
[[ -z ${CHECKPOINT_STRIPED:-} ]] || setup+=(--checkpoint "$CHECKPOINT_STRIPED" --checkpoint-dir "$CHECKPOINTS")
# Processes are restored from memory where `make setup` has fetched CRIU.
criu="$root/.criu"
dumped='' imports="It also names the modules that the ranks import: one process imports them for both (--warm)."
if [[ -x $criu/criu ]]; then
  dumped="At its end, CRIU dumps a process that has imported the ranks' modules (--process-snapshot)."
  imports="That process is restored from memory; torchrun and its ranks are forked from it."
  setup+=(--process-snapshot --cap-add CHECKPOINT_RESTORE --mount "$criu:/opt/criu:ro" --container-env BOOTSEER_CRIU=/opt/criu/criu)
fi
in_image() { # `start` or `run`, name, more options..., -- command...
  local how="$1" name="$2"
  shift 2
  "$how" "$name" --warm auto --image "$reference" --loading lazy --entrypoint none ${setup[@]+"${setup[@]}"} "$@"
}
reference="$host/team/job:1"
skopeo copy --quiet --dest-tls-verify=false "$image" "docker://$reference"
"$BOOTSEER" image convert "$reference" >&2

say "start 1, full-pull: without BootSeer, on a node without the image" \
  "containerd downloads and unpacks all layers${REQUIREMENTS:+, pip installs packages}, then the job starts." \
  ${CHECKPOINT_PLAIN:+"One client copies the checkpoint, file after file."}
start_containerd
forget_memory
start full-pull -- "$here/full_pull.sh" "$reference" "${command[@]}"
stop_containerd
empty_node

say "start 2, lazy: with BootSeer, on another node without the image" \
  "The container starts at once. Blocks of the image are fetched when the job reads them." \
  "BootSeer records which blocks these were: the hot set." \
  ${REQUIREMENTS:+"pip installs once more; BootSeer stores its files in the registry: the environment's snapshot."} \
  ${CHECKPOINT_STRIPED:+"The checkpoint is mounted, and read from all DataNodes, beginning before Python starts."} \
  ${dumped:+"$dumped"}
forget_memory
in_image start lazy -- "${command[@]}"
empty_node

say "start 3, recorded: on a third node without the image" \
  "The hot set is in the registry: its blocks are prefetched in the order in which the job needs them." \
  "$imports" \
  ${REQUIREMENTS:+"The snapshot is mounted, and nothing is installed."}
forget_memory
in_image start recorded -- "${command[@]}"

say "start 4, again: on the same node" \
  "The blocks of the image${REQUIREMENTS:+, of the snapshot}${CHECKPOINT_STRIPED:+, of the checkpoint} are in the node's cache." \
  ${RUN_ON:+"The job continues, and is restarted in its container as after a change of the code (bootseer restart)."} \
  ${RUN_ON:+"torchrun ends with a traceback then, as at each SIGTERM."}
names=(full-pull lazy recorded again)
if [[ -n ${RUN_ON:-} ]]; then
  # shellcheck disable=SC2086 - words
  in_image run again --restarts 0 -- "${command[@]}" $RUN_ON &
  job=$!
  until_event again image_start stage # after training has begun: with the cost of the image
  "$BOOTSEER" restart again >"$short/said"
  sed 's/^/    | bootseer restart: /' "$short/said" >&2
  until_event again training_began '"restart":1'
  end_job
  show again again --restart 0
  show hot-update again --restart 1
  names+=(hot-update)
else
  in_image start again -- "${command[@]}"
fi

"$root/.venv/bin/python" "$here/compare.py" "$out" "${names[@]}"
say "more" \
  "$out/index.html        the picture, and a page for each start" \
  "$out/recorded.txt      the report of a start by bootseer report" \
  "bootseer diff $out/full-pull $out/recorded"
