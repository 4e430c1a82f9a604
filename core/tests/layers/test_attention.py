"""The attention layer: what it tells the runner, and what it hands to the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rabbet.contracts.kv_cache_dtype import PageFormat
from rabbet.contracts.quantization import KVCacheMethod
from rabbet.errors import ConfigError
from rabbet.layers import Attention, ForwardContext, get_forward_context, set_forward_context
from rabbet.types.kv import CacheKind


class Backend:
    """Keeps what it was given and writes ones."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
        self.calls.append((layer, q, k, v, cache, metadata))
        out.fill_(1.0)


class Connector:
    def __init__(self) -> None:
        self.events: list[str] = []

    def wait_for_layer(self, name: str) -> None:
        self.events.append(f"wait {name}")

    def save_layer(self, name: str) -> None:
        self.events.append(f"save {name}")


def build(context: Any, prefix: str = "layers.0.attn", **options: Any) -> Attention:
    return Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5, context=context, prefix=prefix, **options)


def step(layer: Attention, backend: Any, **changes: Any) -> ForwardContext:
    name = layer.spec.name
    values: dict[str, Any] = {"kv_caches": {name: torch.zeros(3)}, "metadata": {name: "m"}, "backends": {name: backend}}
    return ForwardContext(**(values | changes))


@pytest.mark.parametrize("is_flat", [True, False])
def test_backend_gets_heads_cache_and_metadata_of_the_layer(context: Any, is_flat: bool) -> None:
    layer, backend = build(context(), window=7, soft_cap=30.0), Backend()
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    given = [tensor.flatten(1) if is_flat else tensor for tensor in (q, k, v)]
    with set_forward_context(step(layer, backend)):
        out = layer(*given)
    assert torch.equal(out, torch.ones(5, 32))
    spec, got_q, got_k, got_v, cache, metadata = backend.calls[0]
    assert (spec.scale, spec.window, spec.soft_cap, metadata, cache.shape) == (0.5, 7, 30.0, "m", (3,))
    assert torch.equal(got_q, q) and torch.equal(got_k, k) and torch.equal(got_v, v)


def test_without_a_cache_the_output_has_its_size_and_no_backend_is_called(context: Any) -> None:
    layer = build(context())
    with set_forward_context(ForwardContext()):
        out = layer(torch.randn(3, 32), torch.randn(3, 16), torch.randn(3, 16))
    assert torch.equal(out, torch.zeros(3, 32))


def test_connector_is_asked_before_and_told_after(context: Any) -> None:
    layer, connector = build(context()), Connector()
    with set_forward_context(step(layer, Backend(), connector=connector)):
        layer(torch.randn(1, 32), torch.randn(1, 16), torch.randn(1, 16))
    assert connector.events == ["wait layers.0.attn", "save layers.0.attn"]


def test_layers_stand_in_the_context_in_the_order_in_which_they_were_built(context: Any) -> None:
    environment = context()
    for name in ("b", "a", "c"):
        build(environment, name)
    assert list(environment.attention_layers) == ["b", "a", "c"]
    with pytest.raises(ValueError, match="two attention layers are called a"):
        build(environment, "a")


def test_cache_spec_names_kind_window_and_bytes(context: Any) -> None:
    full = build(context(block_size=32)).kv_cache_spec()
    assert (full.kind, full.block_size, full.page_size_bytes) == (CacheKind.FULL_ATTENTION, 32, 2 * 32 * 2 * 8 * 4)
    sliding = build(context(kv_cache_dtype="bfloat16"), window=9).kv_cache_spec()
    assert (sliding.kind, sliding.window, sliding.page_size_bytes) == (CacheKind.SLIDING_WINDOW, 9, 2 * 16 * 2 * 8 * 2)


def in_pages(form: PageFormat, seen: list[tuple[int, int]] | None = None) -> dict[str, Any]:
    def page_format(num_kv_heads: int, head_dim: int) -> PageFormat:
        if seen is not None:
            seen.append((num_kv_heads, head_dim))
        return form

    return {"kv_cache_dtype": "packed4", "page_format": page_format}


def test_cache_spec_has_the_pages_of_the_kv_cache_dtype(context: Any) -> None:
    seen: list[tuple[int, int]] = []
    form = PageFormat(storage_dtype="uint8", bytes_per_token=16, scale_bytes_per_token=8)
    spec = build(context(**in_pages(form, seen))).kv_cache_spec()
    assert (spec.dtype, spec.kv_cache_dtype, spec.page_size_bytes) == ("uint8", "packed4", 16 * (16 + 8))
    assert seen == [(2, 8)]
    assert build(context()).kv_cache_spec().kv_cache_dtype == ""


class Scales(KVCacheMethod):
    """Gives what a checkpoint held."""

    def __init__(self, k: Any, v: Any) -> None:
        self.scales = k, v

    def create_weights(self, layer: Any) -> None:
        pass

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.k_scale, layer.v_scale = self.scales

    def get_quant_method(self, layer: Any, prefix: str) -> Scales:
        return self


def scaled(context: Any, k: Any, v: Any, *, has_head_scales: bool) -> Any:
    form = PageFormat(storage_dtype="float8_e4m3fn", bytes_per_token=32, has_head_scales=has_head_scales)
    layer = build(context(quantization=Scales(k, v), **in_pages(form)))
    layer.process_weights_after_loading()
    return layer.spec


def test_scales_of_a_checkpoint_reach_the_backend_as_the_kv_cache_dtype_has_them(context: Any) -> None:
    spec = scaled(context, torch.tensor([0.5]), 2.0, has_head_scales=False)
    assert (spec.k_scale, spec.v_scale, spec.k_head_scales, spec.v_head_scales) == (0.5, 2.0, None, None)
    assert isinstance(spec.k_scale, float)
    spec = scaled(context, torch.tensor([0.5, 4.0]), torch.tensor(2.0), has_head_scales=True)
    assert spec.k_head_scales.tolist() == [0.5, 4.0] and spec.v_head_scales.tolist() == [2.0, 2.0]
    assert spec.k_head_scales.dtype == torch.float32 and spec.v_head_scales.is_contiguous()
    form = PageFormat(storage_dtype="float8_e4m3fn", bytes_per_token=32, has_head_scales=True)
    plain = build(context(**in_pages(form)))
    plain.process_weights_after_loading()
    assert plain.spec.k_head_scales.tolist() == [1.0, 1.0], "without a checkpoint's scales they are 1"


@pytest.mark.parametrize(("k", "has_head_scales"), [([0.5, 4.0], False), ([1.0, 2.0, 3.0], True)])
def test_scales_that_the_kv_cache_dtype_has_no_place_for_are_refused(
    context: Any, k: list[float], has_head_scales: bool
) -> None:
    with pytest.raises(ConfigError, match=rf"gives k_scale as \[{len(k)}\]; --kv-cache-dtype packed4 takes one"):
        scaled(context, torch.tensor(k), 1.0, has_head_scales=has_head_scales)


def test_context_ends_with_its_block_even_after_an_error() -> None:
    outer, inner = ForwardContext(num_tokens=1), ForwardContext(num_tokens=2)
    with set_forward_context(outer):
        with pytest.raises(KeyError), set_forward_context(inner):
            assert get_forward_context() is inner
            raise KeyError
        assert get_forward_context() is outer
    with pytest.raises(RuntimeError, match="no forward context"):
        get_forward_context()
