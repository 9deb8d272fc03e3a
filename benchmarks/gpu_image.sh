#!/bin/bash
# Starts an image of this machine's CUDA environment lazily, with the GPU. Run as root, on a machine with a GPU whose
# driver libraries are in one folder:
#
#     benchmarks/gpu_image.sh FOLDER DRIVER_FOLDER PYTHON_ENVIRONMENT
#
# It needs room for three copies of the environment in FOLDER, writes /etc/cdi/nvidia.json, and empties the page cache
# before each start. Prints seconds since the command, from the stopwatch of gpu_job.py.
set -eu
work=$1 driver=$2 environment=$3
here=$(cd "$(dirname "$0")" && pwd)
export BOOTSEER_SPOOL=$work/spool
bootseer() { python3 -m bootseer "$@"; }
torchrun=(python3 -m torch.distributed.run --standalone --nproc-per-node 1)
job=(--backend nccl --stopwatch --steps 6)
mkdir -p "$work/out" /etc/cdi
cat > /etc/cdi/nvidia.json <<END
{"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu",
 "devices": [{"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
 "containerEdits": {
  "env": ["LD_LIBRARY_PATH=$driver/lib64"],
  "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-uvm"}, {"path": "/dev/nvidia-uvm-tools"}],
  "mounts": [{"hostPath": "$driver", "containerPath": "$driver", "options": ["ro", "nosuid", "nodev", "rbind"]}]}}
END

python3 "$here/gpu_layout.py" "$work/image" /usr /bin /sbin /lib /lib64 /etc/passwd /etc/group /etc/ld.so.cache \
    /etc/alternatives /etc/ssl "$environment" -x /usr/local/cuda "$driver" /usr/share /usr/src
bootseer image convert --jobs 16 "oci:$work/image" "$work/store"

cold() { sync; echo 3 > /proc/sys/vm/drop_caches; }
now() { python3 -S -c 'import time; print(time.monotonic_ns())'; }
show() { # NAME BEGAN_NS
    python3 -c "
import json
found = json.load(open('$work/out/$1-0.json'))
print('$1', {name: round((at - $2) / 1e9, 2) for name, at in found['points'].items()}, found['losses'][-1])"
}
start() { # NAME CACHE
    cold; began=$(now)
    BOOTSEER_CACHE=$work/$2 bootseer run --quiet --job "$1" --loading lazy --image "oci:$work/image" \
        --store "$work/store" --mount "$here:/job:ro" --mount "$work/out:/out" --tmpfs /tmp --tmpfs /root \
        -- "${torchrun[@]}" /job/gpu_job.py "${job[@]}" --out "/out/$1.json"
    show "$1" "$began"
    BOOTSEER_CACHE=$work/$2 bootseer report --json "$1" > "$work/$1.report.json"
}

cold; began=$(now)
"${torchrun[@]}" "$here/gpu_job.py" "${job[@]}" --out "$work/out/plain.json"
show plain "$began"
start lazy cache1
start recorded cache2
start recorded2 cache3
start again cache3
