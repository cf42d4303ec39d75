#!/usr/bin/env bash
# Install what the lab needs and make its two file systems. Needs root on Debian or Ubuntu.
#
#   tests/lab/setup.sh            packages, node root (about 800 MB) and image base (about 250 MB)
#
# GLM_LAB_CACHE is where they go (default: .cache/lab in the checkout), DEBIAN_MIRROR where packages
# come from. What is there already is kept, so a second call takes a second.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${GLM_LAB_CACHE:-$here/../../.cache/lab}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
tools=(debootstrap iproute2 iptables openssh-client rsync util-linux)
node_packages=openssh-server,openssh-client,docker.io,docker-cli,docker-buildx,docker-compose,rsync
node_packages+=,iproute2,iptables,iputils-ping,curl,python3,procps,ca-certificates

say() { printf '%s\n' "$*" >&2; }

install_tools() {
    if ! dpkg -s "${tools[@]}" &>/dev/null; then
        say "installing ${tools[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${tools[@]}"
    fi
}

# Make a root file system under another name first, so that an interrupted run leaves no half one.
make_root() {
    local name=$1 suite=$2 packages=$3 draft=$cache/$1.draft
    [[ ! -e $cache/$name ]] || return 0
    say "making $name ($suite)"
    rm -rf "$draft"
    debootstrap --variant=minbase --include="$packages" "$suite" "$draft" "$mirror" >"$cache/$name.log" ||
        { tail -n 20 "$cache/$name.log" >&2 && return 1; }
    rm -rf "$draft"/var/cache/apt/archives/*.deb "$draft"/var/lib/apt/lists/*
    rm -f "$draft"/etc/ssh/ssh_host_*
    mv "$draft" "$cache/$name"
}

mkdir -p "$cache"
exec 9>"$cache/setup.lock"
flock 9
[[ $EUID == 0 ]] || { say 'error: the lab makes network namespaces and needs root' && exit 3; }
install_tools
make_root node trixie "$node_packages"
say "the lab is ready in $cache"
