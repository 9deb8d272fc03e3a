"""A real Slurm cluster of four nodes on this machine: munged, slurmctld and four slurmd in separate namespaces, with
accounting (slurmdbd with MariaDB) if that is installed.

The nodes are n1 to n4, each with its own address. All processes end with the test's process, even if that is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "unshare", "nsenter", "ip")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
ACCOUNTING = all(shutil.which(name, path=_PATH) for name in ("mariadbd", "slurmdbd", "sacct", "sacctmgr"))
MARKS = [
    pytest.mark.slurm,
    pytest.mark.root,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; apt-get install slurm-wlm munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="starting Slurm's daemons needs root"),
]
NODES = ("n1", "n2", "n3", "n4")
_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
AuthInfo=socket={0}/munge/socket
StateSaveLocation={0}/state
SlurmdSpoolDir={0}/spool-%n
SlurmctldPidFile={0}/ctld.pid
SlurmdPidFile={0}/%n.pid
SlurmctldLogFile={0}/ctld.log
SlurmdLogFile={0}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
MpiDefault=none
PropagateResourceLimits=NONE
"""
_ACCOUNTING_CONF = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePass={0}/munge/socket
"""
_DBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={0}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=root
StorageLoc=slurm
LogFile={0}/dbd.log
PidFile={0}/dbd.pid
"""
_MARIADB = """#!/bin/sh
exec mariadbd --no-defaults --user=root --datadir={0}/sql --socket={0}/sql/socket --bind-address=127.0.0.1 \\
  --skip-grant-tables --innodb-log-file-size=4M --innodb-flush-log-at-trx-commit=0 "$@"
"""
_START = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$0/hosts" /etc/hosts
ip link set lo up
while read -r address name; do [ $name = localhost ] || ip address add $address/32 dev lo; done < "$0/hosts"
munged --force --key-file="$0/munge.key" --socket="$0/munge/socket" --pid-file="$0/munge/pid" \
  --log-file="$0/munge/log" --seed-file="$0/munge/seed" 2>"$0/munge/said"
if [ -e "$0/slurmdbd.conf" ]; then
  { printf 'create database mysql;\\nuse mysql;\\n'; cat /usr/share/mysql/mysql_system_tables.sql; } |
    "$0/mariadb" --bootstrap
  "$0/mariadb" &
  i=0
  until [ -S "$0/sql/socket" ]; do i=$((i + 1)); [ $i -lt 3000 ]; sleep 0.1; done
  slurmdbd
  until sacctmgr --immediate add cluster test >&2; do i=$((i + 1)); [ $i -lt 3000 ]; sleep 0.1; done
fi
slurmctld
for name in "$@"; do slurmd -N $name; done
i=0
until [ "$(sinfo -h -o '%T %D')" = "idle $#" ]; do i=$((i + 1)); [ $i -lt 3000 ]; sleep 0.1; done
echo ready
cat > /dev/null
"""


@dataclass(frozen=True)
class Cluster:
    """`folder` holds Slurm's files; `init` is the first process of the namespaces."""

    folder: Path
    init: int

    def words(self, *words: str | Path) -> list[str]:
        """The command to run another command in the namespaces."""
        return ["nsenter", f"--target={self.init}", "--mount", "--net", "--pid", "--wdns=.", *map(str, words)]

    def env(self, env: dict[str, str]) -> dict[str, str]:
        """An environment with the variables for Slurm's programs."""
        return {**env, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}

    def run(self, env: dict[str, str], *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespaces and wait for its end."""
        return subprocess.run(
            self.words(*words), env=self.env(env), capture_output=True, text=True, timeout=600, check=False
        )


@contextmanager
def slurm_cluster(folder: Path, more: str = "") -> Iterator[Cluster]:
    """`more`: further lines of slurm.conf."""
    for name in ("state", "munge"):
        (folder / name).mkdir(mode=0o711)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    addresses = {name: f"10.99.0.{number}" for number, name in enumerate(NODES, 1)}
    hosts = [f"127.0.0.1 {name}\n" for name in ("localhost",)] + [f"{at} {name}\n" for name, at in addresses.items()]
    (folder / "hosts").write_text("".join(hosts))
    nodes = [
        f"NodeName={name} NodeHostname=localhost NodeAddr={at} Port={7000 + number} CPUs=2\n"
        for number, (name, at) in enumerate(addresses.items())
    ]
    accounting = _ACCOUNTING_CONF.format(folder) if ACCOUNTING else ""
    if accounting:
        (folder / "sql").mkdir()
        for name, text, mode in (("slurmdbd.conf", _DBD_CONF, 0o600), ("mariadb", _MARIADB, 0o700)):
            (folder / name).write_text(text.format(folder))
            (folder / name).chmod(mode)
    lines = [_CONF.format(folder), accounting, more, *nodes, "PartitionName=debug Nodes=ALL Default=YES\n"]
    (folder / "slurm.conf").write_text("".join(lines))
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
    words = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", _START, str(folder), *NODES]
    with (folder / "said").open("wb") as said, subprocess.Popen(
        words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            answer = process.stdout.readline()
            assert answer == "ready\n", (folder / "said").read_text()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield Cluster(folder, int(children[0]))
        finally:
            process.communicate("", timeout=300)
