#!/usr/bin/env bash
# An HDFS for development that stays until it is stopped: a NameNode and four DataNodes on loopback ports.
#
#   scripts/hdfs.sh [start [--datanodes N]]   start it (quick when it runs), and print its address
#   scripts/hdfs.sh stop | status | uri       stop it; say how it is; print the address alone, exit code 1 if it is not there
#
# `make hdfs` calls this. HADOOP_HOME names an installed Hadoop; otherwise scripts/hadoop.sh fetches one. Files are kept
# from one start to the next, in .hadoop/running/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x .venv/bin/python ]] || { echo "hdfs: there is no .venv; run make setup first" >&2; exit 1; }
[[ -n ${HADOOP_HOME:-} ]] || scripts/hadoop.sh
exec .venv/bin/python scripts/hdfs.py "$@"
