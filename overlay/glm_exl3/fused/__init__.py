"""Decode steps that are no matrix product, in fewer launches than vLLM's own.

Each op is a kernel with a twin in `ref`, takes vLLM's class by its out-of-tree registry, and leaves
every call it is not made for to that class. `ops.fused_names` says which are in use.
"""
