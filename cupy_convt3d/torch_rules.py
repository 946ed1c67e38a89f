"""What torch's tools are told of our operators: FLOP for `FlopCounterMode`, and how DTensor may shard them."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

_OPERATORS = torch.ops.cupy_convt3d


# Counted as torch counts a convolution, clipped taps too. (With groups torch's own count of wgrad is as many times too large.)


@register_flop_formula(_OPERATORS.conv_transpose3d)
def _fprop_flop(input_shape: Any, weight_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return conv_flop_count(input_shape, weight_shape, out_shape, transposed=True)


@register_flop_formula(_OPERATORS.conv_transpose3d_grad_input)
def _dgrad_flop(grad_output_shape: Any, weight_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return conv_flop_count(grad_output_shape, weight_shape, out_shape, transposed=False)


@register_flop_formula(_OPERATORS.conv_transpose3d_grad_weight)
def _wgrad_flop(input_shape: Any, grad_output_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return conv_flop_count(input_shape, out_shape, grad_output_shape, transposed=True)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, which has then been told how the operators may be sharded."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return False
    _register_sharding()
    return True


@lru_cache(maxsize=1)
def _register_sharding() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole, batch, channels = Replicate(), Shard(0), Shard(1)

    def rule(operator: Any, ways: list[tuple[list[Any], list[Any]]], by_group: list[tuple[list[Any], list[Any]]]) -> None:
        """Register placements of (result, operands): `ways` for any number of groups, `by_group` for one group without a bias."""

        def strategy(first: Any, second: Any, third: Any, *settings: Any) -> list[tuple[list[Any], list[Any]]]:
            biased, groups = operator is _OPERATORS.conv_transpose3d.default and third is not None, settings[3]
            found = [(result, list(operands)) for result, operands in ways + by_group * (groups == 1)]
            if biased:
                # A sum over shards would add the bias once for each.
                places = {0: whole, 1: Shard(0)}
                found = [(r, [*o, places[r[0].dim] if isinstance(r[0], Shard) else whole]) for r, o in found if r[0] != Partial()]
            else:
                found = [(result, [*operands, None]) for result, operands in found]
            return [(result, [*operands, *[None] * len(settings)]) for result, operands in found]

        register_sharding(operator)(strategy)

    everywhere: tuple[list[Any], list[Any]] = ([whole], [whole, whole])
    rule(
        _OPERATORS.conv_transpose3d.default,
        [everywhere, ([batch], [batch, whole])],
        [([channels], [whole, channels]), ([Partial()], [channels, Shard(0)])],
    )
    rule(
        _OPERATORS.conv_transpose3d_grad_input.default,
        [everywhere, ([batch], [batch, whole])],
        [([channels], [whole, Shard(0)]), ([Partial()], [channels, channels])],
    )
    rule(
        _OPERATORS.conv_transpose3d_grad_weight.default,
        [everywhere, ([Partial()], [batch, batch])],
        [([Shard(0)], [channels, whole]), ([channels], [whole, channels])],
    )
