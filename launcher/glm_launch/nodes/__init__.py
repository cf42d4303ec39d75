"""Ranks in containers on one to four machines.

Facts come from a probe piped to each node and are plain values; `fabric`, `memory` and `preflight`
decide on values only, so recorded facts of any kit can be judged anywhere. `ssh`, `docker_cli`,
`images` and `weights` act, each through argument lists and one `Shell`. Nothing is installed on a
node.
"""
