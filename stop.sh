#!/usr/bin/env bash
# The same as ./start.sh stop.
exec "$(dirname "${BASH_SOURCE[0]}")/start.sh" stop "$@"
