#!/usr/bin/env bash
# An HDFS for development, which runs until it is stopped: a NameNode and four DataNodes on loopback ports.
#
#   scripts/hdfs.sh [start [--datanodes N] [--rate-mbit MBIT]]   start it, unless it is running, and print its address
#   scripts/hdfs.sh stop | status             stop it; print its state
#   scripts/hdfs.sh uri | rate                print its address; the rate of its links; exit code 1 if not running
#
# With --rate-mbit each DataNode has a separate network link with this rate, like in a cluster (needs root). `make hdfs`
# calls this, `make hdfs RATE=400` with a rate. HADOOP_HOME names an installed Hadoop; otherwise scripts/hadoop.sh
# fetches one. Files are kept between starts, in .hadoop/running/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x .venv/bin/python ]] || { echo "hdfs: there is no .venv; run make setup first" >&2; exit 1; }
[[ -n ${HADOOP_HOME:-} ]] || scripts/hadoop.sh
exec .venv/bin/python scripts/hdfs.py "$@"
