"""The decoder against ExLlamaV3's own device headers, compiled for the host.

The wheel is fetched once into the cache and read as an archive, never imported.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.codebook import codebook_table
from glm_exl3.ref.decode import codebook_values, unpack_states

HERE = Path(__file__).parent
PEER = "exllamav3==1.6.5"
HEADERS = ("codebook.cuh", "exl3_dq.cuh")
CODEBOOKS = {Codebook.INST3: 0, Codebook.MCG: 1, Codebook.MUL1: 2}
INTEGER_RATES = tuple(16 * k for k in range(1, 9))
HALF_RATES = (24, 40, 56)


def fetch_wheel() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "glm-exl3" / "peer"
    found = sorted(root.glob("exllamav3-1.6.5-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PEER]
        done = subprocess.run([*command, "-d", str(root)], capture_output=True, text=True)
        found = sorted(root.glob("exllamav3-1.6.5-*.whl"))
        if done.returncode or not found:
            pytest.skip(f"the wheel {PEER} cannot be had: {done.stderr.strip()[-200:]}")
    return found[0]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("oracle")
    (folder / "quant").mkdir()
    with zipfile.ZipFile(fetch_wheel()) as wheel:
        for header in HEADERS:
            source = wheel.read(f"exllamav3/exllamav3_ext/quant/{header}")
            (folder / "quant" / header).write_bytes(source)
    shutil.copy(HERE / "host_shim.cuh", folder / "ptx_portable.cuh")
    library = folder / "oracle.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{folder}"]
    subprocess.run([*command, str(HERE / "oracle.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("codebook", CODEBOOKS, ids=lambda c: c.value)
def test_all_states_are_bit_exact(oracle: ctypes.CDLL, codebook: Codebook) -> None:
    expected = torch.empty(65536, dtype=torch.int16)
    oracle.oracle_table(CODEBOOKS[codebook], pointer(expected))
    assert torch.equal(codebook_table(codebook).view(torch.int16), expected)


@pytest.mark.parametrize("last_dim", INTEGER_RATES + HALF_RATES)
@pytest.mark.parametrize("codebook", CODEBOOKS, ids=lambda c: c.value)
def test_random_tiles_are_bit_exact(oracle: ctypes.CDLL, codebook: Codebook, last_dim: int) -> None:
    generator = torch.Generator().manual_seed(last_dim)
    tiles = torch.randint(-(1 << 15), 1 << 15, (64, last_dim), generator=generator)
    trellis = tiles.to(torch.int16)
    ours = codebook_values(unpack_states(trellis), codebook).view(torch.int16)
    for tile, values in zip(trellis, ours, strict=True):
        expected = torch.empty(256, dtype=torch.int16)
        status = oracle.oracle_tile(CODEBOOKS[codebook], last_dim, pointer(tile), pointer(expected))
        assert status == 0
        assert torch.equal(values, expected)
