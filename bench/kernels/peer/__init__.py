"""The peer, ExLlamaV3 1.6.5, measured in the same run as ours: its build and its calls."""
