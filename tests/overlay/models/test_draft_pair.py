"""The drafter's class refuses a wrong pair before it builds anything, and fuses the context."""

from __future__ import annotations

import json

import pytest
import torch

from glm_exl3.format.errors import GlmExl3Error


def speculation(folder) -> dict[str, object]:
    return {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}


@pytest.mark.slow
def test_the_plugin_refuses_a_causal_drafter(pristine, drafter, build) -> None:
    folder = drafter(packed=False)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_causal": True}))
    with pytest.raises(GlmExl3Error, match="causal in the drafter's layers 0, 1"):
        build(pristine("full"), draft=True, speculative_config=speculation(folder))


@pytest.mark.slow
def test_the_context_of_a_packed_drafter_is_one_product(pristine, drafter, build) -> None:
    folder = drafter(packed=True)
    model = build(pristine("full"), draft=True, speculative_config=speculation(folder)).model
    rows = [one.self_attn.qkv_proj.exl3.terms[0].matrix for one in model.layers]
    width = model.layers[0].self_attn.q_size
    assert torch.equal(model._fused_kv_weight, torch.cat([one[width:] for one in rows]))


class Layers:
    """Two attention layers as they are on a GPU: q packed, k and v one dense term."""

    def __init__(self, packed_keys: bool = False) -> None:
        from types import SimpleNamespace

        self.layers = [SimpleNamespace(self_attn=self.attention(seed, packed_keys))
                       for seed in (1, 2)]  # fmt: skip
        self._fused_kv_weight = None

    @staticmethod
    def packed(seed: int, rows: int):
        from glm_exl3.format.layout import Codebook
        from glm_exl3.ops.matrix import PackedMatrix

        generator = torch.Generator().manual_seed(seed)
        shape = (8, rows // 16, 96)
        trellis = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
        return PackedMatrix(trellis, torch.ones(128).half(), torch.ones(rows).half() / 9,
                            Codebook.MUL1)  # fmt: skip

    def attention(self, seed: int, packed_keys: bool):
        from types import SimpleNamespace

        from glm_exl3.quant.linear import Exl3LinearMethod, LoadedLinear, Term

        q, kv = Term(self.packed(seed, 256), 256, 128), torch.randn(128, 128).bfloat16()
        keys = Term(self.packed(seed, 128) if packed_keys else kv, 128, 128)
        method = Exl3LinearMethod.__new__(Exl3LinearMethod)
        loaded = LoadedLinear((q, keys), "reference")
        layer = SimpleNamespace(quant_method=method, exl3=loaded, bias=None)
        return SimpleNamespace(qkv_proj=layer, q_size=256)


def test_dense_keys_beside_packed_queries_are_fused_and_shared() -> None:
    from glm_exl3.models.dflash2 import fuse_context

    model = Layers()
    before = [one.self_attn.qkv_proj.exl3.terms[1].matrix for one in model.layers]
    x = torch.randn(5, 128).bfloat16()
    want = [one.self_attn.qkv_proj.exl3.apply(x, None) for one in model.layers]
    fuse_context(model)
    assert torch.equal(model._fused_kv_weight, torch.cat(before))
    for number, one in enumerate(model.layers):
        loaded = one.self_attn.qkv_proj.exl3
        rows = loaded.terms[1].matrix
        assert rows.data_ptr() == model._fused_kv_weight[128 * number].data_ptr()
        assert rows.is_contiguous()
        assert torch.equal(loaded.apply(x, None), want[number])


def test_packed_keys_stay_layer_by_layer() -> None:
    from glm_exl3.models.dflash2 import fuse_context

    model = Layers(packed_keys=True)
    fuse_context(model)
    assert model._fused_kv_weight is None


def test_a_mixed_projection_is_one_graph() -> None:
    loaded = Layers().layers[0].self_attn.qkv_proj.exl3
    whole = torch.compile(lambda x: loaded.apply(x, None), fullgraph=True, backend="eager")
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(whole(x), loaded.apply(x, None))
