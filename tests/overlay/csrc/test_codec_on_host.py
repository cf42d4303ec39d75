"""The register decoder, compiled for the host, against the reference: no GPU, no CUDA needed."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.format.layout import MCG_MARKER, MUL1_MARKER, Codebook
from glm_exl3.ref.codebook import codebook_table
from glm_exl3.ref.decode import unpack_states

CODES = {Codebook.INST3: "0", Codebook.MCG: "1", Codebook.MUL1: "2"}


@pytest.fixture(scope="module")
def program(compiled):
    return compiled("codec")


def hashes_of(states: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    if codebook is Codebook.INST3:
        return (states * 89226354 + 64248484) & 0xFFFFFFFF
    return (states * (MCG_MARKER if codebook is Codebook.MCG else MUL1_MARKER)) & 0xFFFFFFFF


def weights_of(words: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    low = (words & 0xFFFF).to(torch.uint16).view(torch.float16)
    if codebook is Codebook.MUL1:
        scale, bias = torch.tensor([0x1EEE, 0xC931]).to(torch.uint16).view(torch.float16).double()
        return (low.double() * scale + bias).to(torch.float16)
    high = (words >> 16).to(torch.uint16).view(torch.float16)
    return (low.float() + high.float()).to(torch.float16)


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_lanes_decode_the_states_of_the_reference(program, bits, codebook):
    generator = torch.Generator().manual_seed(bits)
    trellis = torch.randint(-(1 << 15), 1 << 15, (40, 16 * bits), generator=generator).short()
    written = program(CODES[codebook], str(bits), tensors=[trellis])
    found = torch.frombuffer(written, dtype=torch.int32).reshape(40, 32, 2, 8)
    found = found.long() & 0xFFFFFFFF
    states = unpack_states(trellis).long()
    assert torch.equal(found[:, :, 0].reshape(40, 256), hashes_of(states, codebook))
    weights = weights_of(found[:, :, 1].reshape(40, 256), codebook)
    assert torch.equal(weights, codebook_table(codebook)[states])
