#!/usr/bin/env bash
# Tests, table and memory checks of the CUDA kernels on the GPU at hand, results under the folder given.
set -euo pipefail
out=${1:?usage: device_run.sh OUTPUT_FOLDER}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
mkdir -p "$out"
export PYTHONPATH=overlay:bench PYTHONUNBUFFERED=1
python3 -c 'from glm_exl3.ops import ext; print(ext.load())'
status=0
python3 -m pytest tests/gpu -q -p no:cacheprovider 2>&1 | tee "$out/tests.log" || status=1
python3 -m kernels --out "$out/h200.json" 2>&1 | tee "$out/table.log" || status=1
check() { # NAME TOOL: every kernel once under the tool; what it finds is a failure
    compute-sanitizer --tool "$2" --error-exitcode 9 python3 -m kernels.small 2>&1 | tee "$out/$1.log" || status=1
}
check memcheck memcheck
check racecheck racecheck
exit "$status"
