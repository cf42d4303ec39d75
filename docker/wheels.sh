#!/usr/bin/env bash
# Fetch the locked wheels of the CPU image, so that its build needs no network.
#
#   docker/wheels.sh [FOLDER]     default: .cache/wheels, where docker/build.hcl looks for them
#   docker/wheels.sh --ray PYTHON [FOLDER]    those of Ray (80 MB) for the targets with -ray; PYTHON
#                                 is the image's: 3.11 for cpu, 3.12 for cuda; .cache/wheels-ray
#
# Needs Python 3.11, the image's own; GLM_PYTHON names it. Wheels that are there already are kept.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
platform=()
if [[ ${1:-} == --ray ]]; then
    folder=${3:-$root/.cache/wheels-ray}
    locks=("$root/config/locks/ray.txt")
    for kind in manylinux2014 manylinux_2_28; do platform+=(--platform "${kind}_$(uname -m)"); done
    platform+=(--python-version "${2:?the Python of the image, such as 3.12}")
else
    folder=${1:-$root/.cache/wheels}
    locks=("$root"/config/locks/{launcher,cpu,torch-cpu}.txt)
fi

die() { printf 'error: %s\n' "$*" >&2 && exit 3; }

for python in ${GLM_PYTHON:+"$GLM_PYTHON"} "$root/.venv/bin/python" python3.11 python3 ''; do
    [[ -n $python ]] || die 'no Python 3.11 with pip was found, and the wheels are for 3.11; set GLM_PYTHON'
    "$python" -c 'import pip, sys; sys.exit(sys.version_info[:2] != (3, 11))' &>/dev/null && break
done
mkdir -p "$folder"
known="$(cat "${locks[@]}" | sha256sum)${platform[*]}"
if [[ ! -f $folder/complete || $(<"$folder/complete") != "$known" ]]; then
    rm -f "$folder/complete"
    # One call for each lock: a lock with hashes allows no package without one.
    for lock in "${locks[@]}"; do
        "$python" -m pip download --quiet --no-input --no-deps --only-binary :all: \
            "${platform[@]}" --find-links "$folder" --dest "$folder" -r "$lock" 2> >(grep -v '^WARNING: Location' >&2)
    done
    printf '%s\n' "$known" >"$folder/complete"
fi
printf 'the wheels are in %s\n' "$folder" >&2
