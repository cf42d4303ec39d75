"""Fetch the output projections of a donor checkpoint, and nothing else of it.

`remote` asks for byte ranges, `recipe` decides which, `fetch` brings them and can be killed at any
moment. What was fetched is read by `glm_exl3.format.donor`.
"""
