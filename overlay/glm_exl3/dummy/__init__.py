"""Checkpoints without weights: real headers, values made on the device.

`python -m glm_exl3.dummy` writes a folder whose config and safetensors headers are those of a real
EXL3 checkpoint while its file is sparse; `--load-format exl3_dummy` fills the model with random
trellises and unit-gain scales in seconds. Dispatch, cuts and completeness read the headers as ever,
so what is measured is the engine that serves real weights.
"""
