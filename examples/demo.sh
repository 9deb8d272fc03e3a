#!/usr/bin/env bash
# Starts the container of examples/moe three times, each time on a node that has never seen its image, and shows where
# the startup time went: full pull, lazily, lazily with what the start before recorded.
#
#   examples/demo.sh [FOLDER]        FOLDER, by default demo-out/ of the checkout, is emptied first
#
# Needs root: it makes an image, mounts it and empties the page cache in front of each start. The first time it builds
# the image, four minutes on two cores; later about two minutes.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-$root/demo-out}"
cache="$root/.demo-cache"
PATH="$PATH:/usr/sbin:/sbin"

say() { printf '\n==> %s\n' "$*" >&2; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

bootseer="$root/.venv/bin/bootseer"
[[ -x $bootseer ]] || die "there is no $root/.venv; run make setup first"

mkdir -p "$out"
out="$(cd "$out" && pwd)"
if [[ -n "$(ls -A "$out")" && ! -e $out/.bootseer-demo ]]; then
  die "$out holds something that is not of this demo; name another folder or empty it"
fi
[[ $EUID -eq 0 ]] || die "needs root, to make an image and to mount it: sudo make demo"
touch "$out/.bootseer-demo"
find "$out" -mindepth 1 ! -path "$out/.bootseer-demo" -delete

registry_pid=
finish() {
  [[ -z $registry_pid ]] || { kill "$registry_pid" && wait "$registry_pid"; } 2>/dev/null
  rm -rf "$out/registry" "$out/cache"
}
trap finish EXIT

start_registry() {
  local port
  port="$("$root/.venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
  host="127.0.0.1:$port"
  mkdir "$out/registry"
  printf 'version: 0.1\nstorage: {filesystem: {rootdirectory: "%s"}}\nhttp: {addr: "%s"}\n' \
    "$out/registry/data" "$host" >"$out/registry/config.yml"
  docker-registry serve "$out/registry/config.yml" >"$out/registry/log" 2>&1 &
  registry_pid=$!
  for _ in {1..100}; do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && return
    kill -0 "$registry_pid" 2>/dev/null || break
    sleep 0.1
  done
  tail -3 "$out/registry/log" >&2
  die "the registry did not start"
}

# A node that has never seen the image: no block of it in BootSeer's cache, none of it in memory. The registry is
# another machine: its files are in memory.
cold_node() {
  rm -rf "$out/cache"
  sync
  echo 3 >/proc/sys/vm/drop_caches
  find "$out/registry/data" -type f -exec cat {} + >/dev/null
}

start() { # name, options...
  local name="$1"
  shift
  cold_node
  # Whoever submits a job can say when; a scheduler would.
  BOOTSEER_SUBMITTED="$(date +%s.%N)" BOOTSEER_CACHE="$out/cache" \
    "$bootseer" run --job "$name" --spool "$out/$name" --image "$host/moe:latest" "$@" -- \
    --steps 4 --checkpoint-mb 60 --checkpoint-dir /tmp/checkpoints >&2
  "$bootseer" report --html "$out/$name.html" "$out/$name" >"$out/$name.txt"
  "$bootseer" report --json "$out/$name" >"$out/$name.json"
}

say "the image of the job: Debian, Python, PyTorch, the script"
"$root/examples/image/build.sh" "$cache/image"

say "a registry on this machine, and the image in it; bootseer image convert attaches block files to it"
start_registry
skopeo copy --quiet --dest-tls-verify=false "oci:$cache/image/oci:latest" "docker://$host/moe:latest"
"$bootseer" image convert "$host/moe:latest" >&2

say "start 1 of 3: the whole image is pulled and unpacked, then the job starts"
start full-pull --loading pull

say "start 2 of 3: the job starts at once, its blocks come when they are read, and that is recorded"
start lazy --loading lazy

say "start 3 of 3: on another new node; what start 2 read comes ahead of the readers"
start recorded --loading lazy

for name in full-pull lazy recorded; do
  say "where the time of $name went"
  cat "$out/$name.txt"
done

say "recorded against full-pull"
"$bootseer" diff --exit-zero "$out/full-pull" "$out/recorded"

"$root/.venv/bin/python" "$root/examples/compare.py" "$out" full-pull lazy recorded
say "the three side by side, with a page for each: $out/index.html"
