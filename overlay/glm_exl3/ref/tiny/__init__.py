"""Complete small checkpoints of GLM-5.3-Flash, made from a seed in seconds.

`geometry` holds the dims, `target` and `drafter` the tensors, `configs` and `tokenizer` the other
files, `folder` writes, `twin` decodes, `cli` is `python -m glm_exl3.ref.tiny`. `build` is the same
as one function call.
"""
