#!/usr/bin/env bash
# Install what the lab needs and make its file systems. Needs root on Debian or Ubuntu.
#
#   tests/lab/setup.sh            packages and the root file system of a node (about 800 MB)
#   tests/lab/setup.sh --engine   the base of the CPU image (150 MB) and its wheels (1 GB) as well
#
# GLM_LAB_CACHE is where they go (default: .cache/lab in the checkout), DEBIAN_MIRROR where packages
# come from. What is there already is kept, so a second call takes a second.
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=roots.sh
source "$(dirname "${BASH_SOURCE[0]}")/roots.sh"
node_packages=openssh-server,openssh-client,docker.io,docker-cli,docker-buildx,docker-compose,rsync
node_packages+=,iproute2,iptables,iputils-ping,curl,python3,procps,ca-certificates

prepare
make_root node trixie "$node_packages"
exec 9>&-
if [[ ${1:-} == --engine ]]; then
    "$here/make_base.sh"
    "$here/../../docker/wheels.sh"
fi
say "the lab is ready in $cache"
