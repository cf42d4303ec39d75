#!/usr/bin/env bash
# Serve GLM-5.3-Flash from EXL3 weights as an OpenAI-compatible endpoint.
#
#   ./start.sh demo [--once]     no GPU needed: a small model, two ranks, one answer, an endpoint
#   ./start.sh start             start all ranks of .env; returns once the model answered (default)
#   ./start.sh status [--json]   every rank, and whether the model answers
#   ./start.sh logs [head|worker|all] [-f]
#   ./start.sh stop | restart | rollback   rollback: to the image and preset that answered last
#   ./start.sh plan | doctor [--json]   the exact commands on every node; what would refuse them
#   ./start.sh download | key | report   weights everywhere; an API key; an archive for bug reports
#   ./start.sh drafter | recode | ablit | bench   packed drafter; fewer bits; weight edits; speed
#   ./start.sh test [ARGS]       the tests; ARGS go to pytest, --lint adds the static checks
#
# The first call of a verb installs what it needs into .venv; GLM_PYTHON names the Python to use.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv
marks=$venv/.glm-exl3
locks=$here/config/locks
python=$venv/bin/python
installer=

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1" && exit 3; }

find_python() {
    local candidate version other=
    for candidate in ${GLM_PYTHON:+"$GLM_PYTHON"} python3.11 python3 python3.12 python3.13; do
        version=$("$candidate" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' \
            2>/dev/null) || continue
        [[ $version != 3.11 ]] || { echo "$candidate" && return; }
        [[ $version != 3.1[23] ]] || other=${other:-$candidate}
    done
    [[ -n $other ]] || die 'no Python 3.11 with venv: apt install python3.11-venv, or set GLM_PYTHON.'
    say "Python 3.11 was not found; trying $other, which is untested."
    echo "$other"
}

# Run pip with its output in a log: say what it is at, and show the end of the log if it fails.
install() {
    local what=$1 log=$marks/pip.log waited=0 at
    shift
    say "installing $what"
    "$python" -m pip install --disable-pip-version-check --no-input "$@" >"$log" 2>&1 </dev/null &
    installer=$!
    while kill -0 "$installer" 2>/dev/null; do
        sleep 0.5
        waited=$((waited + 1))
        at=$(grep -E '^ *(Collecting|Downloading|Installing)' "$log" | tail -n 1 | cut -c -80) || true
        ((waited % 30)) || say "  $((waited / 2)) s: $at"
    done
    wait "$installer" || { tail -n 15 "$log" >&2 && rm "$marks/unfinished" && die "pip failed, see $log"; }
    installer=
}

install_layer() {
    if [[ $1 != cpu ]]; then
        install "packages of the $1 set" --no-deps -r "$locks/$1.txt"
        return
    fi
    install 'vLLM and its packages, without torch (800 MB)' --no-deps -r "$locks/cpu.txt"
    if "$python" -m pip install -q --dry-run --no-deps -r "$locks/torch-cpu.txt" &>/dev/null; then
        install 'torch for CPUs (200 MB)' --no-deps -r "$locks/torch-cpu.txt"
    else
        say "pip's index has no CPU build of torch; this is the CUDA build, about 2.7 GB to download."
        install 'torch for CUDA' -r "$locks/torch-cuda.txt"
    fi
    install 'the plugin' --no-deps --no-build-isolation --no-index -e "$here"
}

# What a layer was made from; a changed lock, Python or entry point makes it again.
stamp() {
    local files=("$locks/$1.txt" "$venv/pyvenv.cfg")
    [[ $1 != cpu ]] || files+=("$locks"/torch-*.txt "$here/pyproject.toml")
    cat "${files[@]}" | sha256sum
}

is_made() {
    [[ -x $python && -f $marks/$1 && ! -e $marks/unfinished ]] && [[ $(stamp "$1") == "$(<"$marks/$1")" ]]
}

set_up() {
    local base layer
    mkdir -p "$here/.cache"
    exec 9>"$here/.cache/setup.lock"
    flock -n 9 || { say 'waiting for another set-up to finish' && flock 9; }
    trap '[[ -z $installer ]] || kill "$installer"; exit 130' INT TERM HUP
    if [[ -e $marks/unfinished ]] || { [[ -e $venv ]] && ! "$python" -m pip -V &>/dev/null; }; then
        say 'the last set-up was interrupted: making .venv again'
        rm -rf "$venv"
    fi
    if [[ ! -e $venv ]]; then
        base=$(find_python)
        "$base" -m venv "$venv" || die "$base could not make $venv"
    fi
    mkdir -p "$marks"
    for layer in "$@"; do
        is_made "$layer" && continue
        : >"$marks/unfinished"
        install_layer "$layer"
        stamp "$layer" >"$marks/$layer"
        rm "$marks/unfinished"
    done
    exec 9>&-
}

layers=(launcher)
case ${1:-start} in
-h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" && exit ;;
demo) layers+=(cpu) ;;
test) layers+=(cpu dev) ;;
esac
for layer in "${layers[@]}"; do
    is_made "$layer" || todo=${layers[*]}
done
[[ -z ${todo:-} ]] || set_up "${layers[@]}"
export PYTHONPATH=$here/launcher:$here/bench:$here/overlay:$here/ablit${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m glm_launch "$@"
