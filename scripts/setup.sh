#!/usr/bin/env bash
# Installs everything that `make demo`, `make check` and `make test` need on a bare Debian 12: system packages, and
# .venv with BootSeer, its tools and PyTorch. Reports what it installs; fast if nothing is missing.
#
# PYTHON=python3.12 sets the interpreter of a new .venv. Safe to interrupt and to run concurrently.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PATH:/usr/sbin:/sbin"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
python="${PYTHON:-python3}"
venv="$PWD/.venv"
stamp="$venv/.setup-stamp"

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# One setup at a time. The lock is on this file: nothing has to be cleaned up after an interrupt.
exec 9<scripts/setup.sh
flock --nonblock 9 || { say "another setup is running, waiting for it"; flock 9; }

check_python() {
  [[ -x $venv/bin/python ]] && return
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
    die "$python is not Python 3.11, 3.12 or 3.13; install one and run PYTHON=/path/to/python make setup"
}

# Program to look for, Debian package, what it is for.
packages_needed() {
  cat <<'LIST'
chromium chromium the test that opens the HTML report in a browser
runc runc starting containers as Kubernetes nodes do
crun crun the same, and images with other users without root
mkfs.erofs erofs-utils making EROFS images
fusermount3 fuse3 mounting FUSE file systems
busybox busybox-static the small images of the tests
docker-registry docker-registry the registry that tests, demo and benchmarks start
skopeo skopeo copying images into that registry
umoci umoci the unpacked images that ours are compared with
debootstrap debootstrap the image of the demo job
buildah buildah the image of the demo job
ip iproute2 the network links of the benchmarks
curl curl the plain pull that lazy images are compared with
fio fio the tests of mounted checkpoints
rsync rsync the tests of mounted checkpoints
aria2c aria2 the BitTorrent that peers are compared with
containerd containerd the full pull that lazy images are compared with
java default-jre-headless the HDFS that the tests start
krb5kdc krb5-kdc the test that runs an HDFS with Kerberos
kadmin.local krb5-admin-server the same
kinit krb5-user the same
slurmctld slurm-wlm the test that runs jobs under a real Slurm
slurmdbd slurmdbd the same, with accounting
mariadbd mariadb-server-core the database of that accounting
munged munge the key service that Slurm needs
pg_ctlcluster postgresql the database of a service with many nodes
promtool prometheus the check of the rules over its metrics
LIST
}

# Ubuntu has no package chromium, for example, and apt installs all packages or none.
install_each() {
  local package code=0
  for package in "${missing[@]}"; do
    "${apt[@]}" install --no-install-recommends "$package" || code=1
  done
  return "$code"
}

install_packages() {
  local missing=() program package reason
  while read -r program package reason; do
    command -v "$program" >/dev/null && continue
    say "missing: $package ($reason)"
    missing+=("$package")
  done < <(packages_needed)
  if [[ ! -x $venv/bin/python ]] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    say "missing: python3-venv (making .venv)"
    missing+=(python3-venv)
  fi
  [[ ${#missing[@]} -eq 0 ]] && return
  local by_hand="install by hand what you need: apt-get install ${missing[*]}"
  local as_root=()
  if ! command -v apt-get >/dev/null; then
    say "this is not Debian; $by_hand"
    return
  elif [[ $EUID -ne 0 ]]; then
    command -v sudo >/dev/null || { say "neither root nor sudo; $by_hand"; return; }
    as_root=(sudo)
    # No terminal for a password.
    [[ -t 0 ]] || as_root=(sudo --non-interactive)
  fi
  say "installing with apt: ${missing[*]}"
  as_root+=(env DEBIAN_FRONTEND=noninteractive)
  local apt=("${as_root[@]}" apt-get --quiet --yes -o DPkg::Lock::Timeout=300)
  {
    # Completes an interrupted run.
    "${as_root[@]}" dpkg --configure -a &&
      "${apt[@]}" update &&
      { "${apt[@]}" install --no-install-recommends "${missing[@]}" || install_each; }
  } </dev/null >&2 9<&- || say "apt failed; $by_hand"
}

wanted() {
  sha256sum pyproject.toml scripts/setup.sh scripts/requirements.txt examples/moe/requirements.txt
  printf '%s\n' "$PWD"
}

make_venv() {
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear "$venv" >&2 ||
    die "cannot make .venv; on Debian: apt-get install python3-venv, then make setup again"
}

pip_install() { "$venv/bin/python" -m pip install --progress-bar off "$@" >&2; }

# The default build of PyTorch for x86 includes gigabytes of CUDA libraries. pip's configured indexes may have the CPU
# build; otherwise uv has its address.
install_torch() {
  local pin
  pin="$(grep '^torch==' scripts/requirements.txt)"
  "$venv/bin/python" - "${pin#torch==}" <<'CHECK' && return
import sys
from importlib import metadata
try:
    sys.exit(metadata.version("torch").partition("+")[0] != sys.argv[1])
except metadata.PackageNotFoundError:
    sys.exit(1)
CHECK
  say "installing $pin (CPU build, about 200 MB)"
  pip_install --quiet "$pin+cpu" 2>/dev/null && return
  { pip_install --quiet uv && "$venv/bin/uv" pip install --python "$venv/bin/python" --torch-backend cpu "$pin" >&2; } ||
    die "cannot get the CPU build of $pin; install it into .venv by hand, then make setup again"
}

# Regardless of the stamp: after a failure without a network, the next run retries it.
get_hadoop() {
  [[ -n ${HADOOP_HOME:-} || ${BOOTSEER_WITHOUT_HDFS:-} == 1 ]] && return
  scripts/hadoop.sh || say "no Hadoop: tests of HDFS fail, unless BOOTSEER_WITHOUT_HDFS=1 skips them"
}

get_criu() { scripts/criu.sh || say "no CRIU 4.1.1: tests of process snapshots are skipped"; }

# pip does not compile editable installs, and a program that starts others must not spend time compiling itself. Also
# after each change of a source: tests start the program thousands of times.
compile_sources() { "$venv/bin/python" -m compileall -q src; }

check_python
install_packages
if [[ -e $stamp && "$(<"$stamp")" == "$(wanted)" && -x $venv/bin/bootseer ]]; then
  get_hadoop
  get_criu
  compile_sources
  exit 0
fi
make_venv
install_torch
say "installing BootSeer with its tools and the demo job's requirements into .venv"
pip_install --quiet --editable '.[dev]' --requirement scripts/requirements.txt || die "pip failed; run make setup again"
compile_sources
get_hadoop
get_criu
wanted >"$stamp"
say "done"
