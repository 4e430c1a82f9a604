"""Quantisation 1.0: weights kept as halves."""

import torch

from rabbet.contracts import register_quantization_config
from rabbet.contracts.quantization import LinearMethod, QuantizationConfig


class Halves(LinearMethod):
    def create_weights(self, layer, *, input_size_per_partition, output_partition_sizes, input_size, output_size,
                       params_dtype, weight_loader):
        weight = torch.nn.Parameter(
            torch.zeros(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype), requires_grad=False
        )
        weight.weight_loader = weight_loader
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer):
        layer.half = layer.weight.data / 2

    def apply(self, layer, x_TI, bias_O=None):
        return torch.nn.functional.linear(x_TI, layer.half + layer.half, bias_O)


@register_quantization_config("frozen_halves")
class FrozenHalves(QuantizationConfig):
    @classmethod
    def supports(cls, query):
        return ()

    @classmethod
    def from_config(cls, config):
        return cls()

    def get_quant_method(self, layer, prefix):
        return Halves()
