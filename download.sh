#!/usr/bin/env bash
# The same as ./start.sh download.
exec "$(dirname "${BASH_SOURCE[0]}")/start.sh" download "$@"
