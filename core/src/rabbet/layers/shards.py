"""What one rank holds of an axis, and how it is cut out of a checkpoint tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rabbet.errors import WeightsError

__all__ = ["Part", "copy_checked", "even_part", "whole_part"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A rank's part of an axis of ``total`` elements.

            0          first        first + size                    total
            |----------|############|-------------------------------|
                       |############|000|                             what the rank stores: ``padded`` elements

    Attributes:
        first: First element of this rank.
        size: Elements that the checkpoint has for it; 0 where the ranks are more than the elements.
        padded: Elements that the rank stores, the same on all ranks; those past ``size`` are zero.
        total: Elements over all ranks.
    """

    first: int
    size: int
    padded: int
    total: int

    def take(self, tensor: torch.Tensor, axis: int, ratio: int, name: str) -> torch.Tensor:
        """This rank's part of a tensor.

        Args:
            tensor: The tensor over all ranks.
            axis: The divided axis.
            ratio: Elements of the axis that one element of the tensor stands for (packed values, groups of scales).
            name: For messages.

        Raises:
            WeightsError: If the tensor has another size than the axis.
        """
        if tensor.dim() <= axis or tensor.shape[axis] * ratio != self.total:
            raise WeightsError(
                f"{name} has the shape {tuple(tensor.shape)}, but the model needs {self.total // ratio} on axis {axis}",
                tensor=name,
            )
        if self.size == self.padded == self.total:
            return tensor
        part = tensor.narrow(axis, self.first // ratio, self.size // ratio)
        missing = self.padded // ratio - part.shape[axis]
        if missing <= 0:
            return part
        shape = list(tensor.shape)
        shape[axis] = missing
        return torch.cat((part, tensor.new_zeros(shape)), dim=axis)


def whole_part(total: int) -> Part:
    """All of an axis that is not divided."""
    return Part(first=0, size=total, padded=total, total=total)


def even_part(total: int, *, rank: int, world_size: int) -> Part:
    """Equal parts; where the axis does not divide, the last ranks are filled up with zeros."""
    padded = -(-total // world_size)
    first = min(padded * rank, total)
    return Part(first=first, size=min(padded, total - first), padded=padded, total=total)


def copy_checked(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Copy a shard into its place, converted to the place's type.

    Raises:
        WeightsError: If the shapes differ, or integers are given for reals (a quantised tensor for a dense layer).
    """
    if target.shape != source.shape:
        raise WeightsError(
            f"{name} has a shard of shape {tuple(source.shape)}, but the model needs {tuple(target.shape)}", tensor=name
        )
    if target.is_floating_point() != source.is_floating_point():
        raise WeightsError(
            f"{name} is stored as {_plain(source.dtype)}, but the model needs {_plain(target.dtype)}: "
            "is the checkpoint quantised with a method that its config.json does not name?",
            tensor=name,
        )
    target.copy_(source)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
