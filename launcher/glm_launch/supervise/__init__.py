"""Looks after a launch that is READY: notices trouble, explains it, restarts all ranks together.

`core` decides (pure), `signs` is what it sees, `eyes` looks, `acts` stops and starts, `desk` is the
folder with state, lock and log, `watchman` is the process.
"""
