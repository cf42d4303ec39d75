"""Programs that are piped to `python3 -` on a node: standard library, Python 3.8, JSON out."""
