#!/bin/sh
# Prolog of slurm.conf, with PrologFlags=Alloc. A job that names its image, and the hot set of its program, by
#   sbatch --comment bootseer-image=registry.example/team/train:7,bootseer-workload=NAME
# gets these blocks into its user's cache while Slurm sets up the job. It never fails a node.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
environment=$(dirname "$0")/bootseer.env
[ ! -r "$environment" ] || { set -a; . "$environment"; set +a; }

comment=${SLURM_JOB_COMMENT-}
image=${comment##*bootseer-image=}
[ "$image" != "$comment" ] || exit 0
image=${image%%[ ,;]*}
case $image in
  # The comment is user input: only names in registries are accepted, no local paths and no options.
  -* | /* | .* | oci:* | dir:* | docker-archive:* | *[!A-Za-z0-9._:/@#-]*) exit 0 ;;
esac
workload=
case $comment in *bootseer-workload=*) workload=${comment##*bootseer-workload=} ;; esac
workload=${workload%%[ ,;]*}
case $workload in -* | *[!A-Za-z0-9._-]*) workload= ;; esac
run=${BOOTSEER_SLURM_RUN:-/run/bootseer-slurm}
folder=$run/$SLURM_JOB_ID
mkdir -p -m 0711 "$run" && mkdir -m 0700 "$folder" && mkdir -m 0700 "$folder/image" || exit 0
chown -R "$SLURM_JOB_USER" "$folder" || exit 0
# As the job's user: with that user's logins and cache, and without root's rights. slurmd kills the prolog's process
# group when the prolog ends; the log exists once the mount has its own session.
# shellcheck disable=SC2016,SC2086 # expanded by the inner shell; several options
setsid -f setpriv --reuid "$SLURM_JOB_UID" --regid "$SLURM_JOB_GID" --init-groups --reset-env \
  env ${BOOTSEER_CACHE:+"BOOTSEER_CACHE=$BOOTSEER_CACHE"} ${BOOTSEER_RUNTIME:+"BOOTSEER_RUNTIME=$BOOTSEER_RUNTIME"} \
  sh -c 'exec timeout 900 "$@" >"$0" 2>&1' "$folder/log" \
  "${BOOTSEER:-bootseer}" image mount ${BOOTSEER_SLURM_IMAGE_OPTIONS-} ${workload:+--workload "$workload"} \
  "$image" "$folder/image" \
  </dev/null >/dev/null 2>&1
i=0
until [ -e "$folder/log" ] || [ $i -ge 50 ]; do i=$((i + 1)); sleep 0.1; done
exit 0
