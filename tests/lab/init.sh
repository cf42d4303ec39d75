#!/bin/sh
# The init process of a node: ssh server, docker daemon, then wait.
set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
home=/root
mkdir -p /run/sshd "$home/.ssh" /etc/docker
chmod 700 "$home/.ssh"
cp /lab/authorized_keys "$home/.ssh/authorized_keys"
cp /lab/hosts /etc/hosts
cp /lab/host_key /etc/ssh/ssh_host_ed25519_key
chmod 600 /etc/ssh/ssh_host_ed25519_key "$home/.ssh/authorized_keys"
cp /lab/daemon.json /etc/docker/daemon.json
# With this docker takes --gpus; it looks once, when it starts. A test adds an nvidia-smi.
hook=/usr/local/bin/nvidia-container-runtime-hook
printf '#!/bin/sh\nexit 0\n' >$hook && chmod 755 $hook
/usr/sbin/sshd -o UsePAM=no -E /lab/sshd.log
dockerd >/lab/dockerd.log 2>&1 &
wait
