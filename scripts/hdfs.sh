#!/usr/bin/env bash
# An HDFS for development that stays until it is stopped: a NameNode and four DataNodes on loopback ports.
#
#   scripts/hdfs.sh [start [--datanodes N] [--rate-mbit MBIT]]   start it (quick when it runs), and print its address
#   scripts/hdfs.sh stop | status             stop it; say how it is
#   scripts/hdfs.sh uri | rate                print the address alone, how quick its links are; exit code 1 if it is not there
#
# With --rate-mbit each DataNode has a network link of its own with that rate (root): what a cluster's links carry shows
# on one machine then. `make hdfs` calls this, `make hdfs RATE=400` with a rate. HADOOP_HOME names an installed Hadoop; otherwise scripts/hadoop.sh fetches one. Files are kept
# from one start to the next, in .hadoop/running/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x .venv/bin/python ]] || { echo "hdfs: there is no .venv; run make setup first" >&2; exit 1; }
[[ -n ${HADOOP_HOME:-} ]] || scripts/hadoop.sh
exec .venv/bin/python scripts/hdfs.py "$@"
