"""Measurements of the KV cache: what a request costs, and what a second turn reuses."""
