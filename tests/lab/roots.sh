#!/usr/bin/env bash
# What setup.sh and make_base.sh share: where things go, and how a root file system is made.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${GLM_LAB_CACHE:-$here/../../.cache/lab}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
tools=(debootstrap iproute2 iptables openssh-client rsync util-linux)

say() { printf '%s\n' "$*" >&2; }

# One run at a time; needs root and the tools, which it installs.
prepare() {
    mkdir -p "$cache"
    exec 9>"$cache/setup.lock"
    flock 9
    [[ $EUID == 0 ]] || { say 'error: the lab makes root file systems and namespaces, and needs root' && exit 3; }
    dpkg -s "${tools[@]}" &>/dev/null && return
    say "installing ${tools[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${tools[@]}"
}

# make_root NAME SUITE PACKAGES: made under another name first, so that an interrupted run leaves no half one.
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
