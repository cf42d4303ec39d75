#!/bin/sh
# Inside fresh namespaces: make a node's file system and become its init.
#   node.sh ROOTFS WORK HOSTNAME
set -eu
rootfs=$1 work=$2 name=$3
root=$work/root

mkdir -p "$work/upper" "$work/overlay" "$root" "$work/docker"
mount -t overlay overlay -o "lowerdir=$rootfs,upperdir=$work/upper,workdir=$work/overlay" "$root"
mkdir -p "$root/var/lib/docker" "$root/lab"
mount --bind "$work/docker" "$root/var/lib/docker"
mount --bind "$work/lab" "$root/lab"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
hostname "$name"
exec chroot "$root" /bin/sh /lab/init.sh
