#!/bin/sh
# Epilog of slurm.conf: unmounts what prolog.sh mounted. The cache keeps the blocks.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
environment=$(dirname "$0")/bootseer.env
[ ! -r "$environment" ] || { set -a; . "$environment"; set +a; }

folder=${BOOTSEER_SLURM_RUN:-/run/bootseer-slurm}/$SLURM_JOB_ID
[ -d "$folder" ] || exit 0
timeout 60 setpriv --reuid "$SLURM_JOB_UID" --regid "$SLURM_JOB_GID" --init-groups --reset-env \
  env ${BOOTSEER_CACHE:+"BOOTSEER_CACHE=$BOOTSEER_CACHE"} ${BOOTSEER_RUNTIME:+"BOOTSEER_RUNTIME=$BOOTSEER_RUNTIME"} \
  "${BOOTSEER:-bootseer}" image umount "$folder/image" </dev/null >/dev/null 2>&1
# If the image is still mounted, its folder stays.
rm -f "$folder/log"
rmdir "$folder/image" "$folder" 2>/dev/null
exit 0
