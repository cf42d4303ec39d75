#!/usr/bin/env bash
# Make a base for the CPU image without a registry: Debian 12, its Python 3.11 and venv, no more.
#
#   tests/lab/make_base.sh           base.tar in the lab's cache; needs root
#   tests/lab/make_base.sh NAME      and import it into the docker daemon as NAME
#
# Where a registry can be reached, CPU_BASE_IMAGE=python:3.11-slim is the same to the Dockerfile.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=roots.sh
source "$(dirname "${BASH_SOURCE[0]}")/roots.sh"

prepare
if [[ ! -e $cache/base.tar ]]; then
    make_root base bookworm python3,python3-venv
    tar -C "$cache/base" --sort=name --numeric-owner --exclude=./dev/* -cf "$cache/base.tar.draft" .
    mv "$cache/base.tar.draft" "$cache/base.tar"
    rm -rf "$cache/base"
fi
exec 9>&-
[[ $# == 0 ]] || docker import -c 'CMD ["python3"]' "$cache/base.tar" "$1"
