#!/bin/sh
# HealthCheckProgram of slurm.conf: drains this node if it was the last one too often in the starts of the last week.
# Needs BOOTSEER_SERVICE and BOOTSEER_SERVICE_TOKEN_FILE (scope read) in bootseer.env. While the service is unreachable
# no node is drained, and slurmd logs the reason.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
environment=$(dirname "$0")/bootseer.env
[ ! -r "$environment" ] || { set -a; . "$environment"; set +a; }

node=${SLURMD_NODENAME:-$(hostname -s)}
# A file of this name exempts a node, for example after it was checked.
[ ! -e "$(dirname "$0")/keep-$node" ] || exit 0
# shellcheck disable=SC2086 # several words
nodes=$(timeout 50 "${BOOTSEER:-bootseer}" fleet --since 7d --export drain ${BOOTSEER_FLEET-} </dev/null) || exit 1
printf '%s\n' "$nodes" | grep -F "NodeName=$node " | sh
exit 0
