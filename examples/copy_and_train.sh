#!/usr/bin/env bash
# What jobs do that cannot read HDFS: copy the checkpoint with one client, then start on the copy. Called by resume.sh.
#
#   copy_and_train.sh URI STEP FOLDER COMMAND...      copies URI/STEP to FOLDER, then COMMAND --checkpoint-dir FOLDER
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
uri="$1" step="$2" folder="$3"
shift 3
mkdir -p "$folder"
"$BOOTSEER" stage model_initialization.checkpoint_copy -- python "$here/plain_copy.py" "$uri/$step" "$folder/$step"
printf '%s\n' "$step" >"$folder/latest"
exec "$@" --checkpoint-dir "$folder"
