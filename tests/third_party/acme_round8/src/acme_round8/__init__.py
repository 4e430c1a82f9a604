"""Rounds the weights of linear layers of any dense checkpoint to 8 bits a value, with a scale for each row, at load."""

import torch
import torch.nn.functional as F

from rabbet.contracts import Refusal, register_quantization_config
from rabbet.contracts.quantization import LinearMethod, QuantizationConfig
from rabbet.errors import ConfigError
from rabbet.layers import LinearBase


class _Rounded(LinearMethod):
    def create_weights(self, layer, *, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, weight_loader):
        weight = torch.nn.Parameter(
            torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype), requires_grad=False
        )
        weight.weight_loader, weight.output_dim, weight.input_dim = weight_loader, 0, 1
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer):
        if layer.weight.dtype == torch.int8:
            return
        weight = layer.weight.data.float()
        layer.scale_O1 = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-12)
        layer.weight = torch.nn.Parameter((weight / layer.scale_O1).round().to(torch.int8), requires_grad=False)

    def apply(self, layer, x_TI, bias_O=None):
        return F.linear(x_TI, (layer.weight.float() * layer.scale_O1).to(x_TI.dtype), bias_O)


@register_quantization_config("acme_round8")
class Round8(QuantizationConfig):
    @classmethod
    def supports(cls, query):
        refusals = []
        if query.device_type != "cpu":
            refusals.append(Refusal(code="DEVICE", message=f"{query.device_type} is not cpu"))
        if query.dtype not in ("float32", "bfloat16"):
            refusals.append(Refusal(code="DTYPE", message=f"{query.dtype} is neither float32 nor bfloat16"))
        return tuple(refusals)

    @classmethod
    def from_config(cls, config):
        if config:
            raise ConfigError(f"acme_round8 rounds dense checkpoints at load and has no settings, got {sorted(config)}")
        return cls()

    def get_quant_method(self, layer, prefix):
        return _Rounded() if isinstance(layer, LinearBase) and not prefix.endswith("lm_head") else None
