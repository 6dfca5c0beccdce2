"""The tiled product's Triton kernel in Triton's interpreter on the CPU, and its launch code.

The interpreter runs the programs of a launch one after the other. In a list whose tiles are cut,
clusters that write parts must precede the clusters that add them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch

from ficco.compute.tiled import portable
from ficco.compute.tiled.products import (
    UNIT,
    Bind,
    Enqueue,
    Lists,
    TiledProducts,
    TileKernel,
    TileScales,
    TileTypes,
    Upload,
)
from ficco.compute.tiled.worklist import BK, MI300X, TileList, TileRates, Tiling


@cache
def interpreted() -> Any:
    """The kernel, from a copy of its module that is imported for the interpreter."""
    spec = importlib.util.find_spec("ficco.compute.tiled.triton_kernel")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        spec.loader.exec_module(module)
    _mend()
    return module.ficco_tiled


def _mend() -> None:
    """Patch two defects of Triton 3.6's interpreter: it multiplies the bits of bfloat16 as
    integers, and from NumPy 2.4 on it refuses a scalar as the end of a range."""
    from triton.runtime import interpreter

    interpreter.interpreter_builder.create_dot = _dot
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _dot(a: Any, b: Any, sums: Any, *_: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(_wide(a.data) @ _wide(b.data) + sums.data, sums.dtype.scalar)


def _wide(values: Any) -> Any:
    if values.dtype == np.uint16:  # bfloat16
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


class InterpretedKernel(TileKernel):
    """The kernel in the interpreter; memory is the host's, and a launch is over when it returns."""

    most = portable.MOST_PRODUCTS
    counts = 1

    def rates(self, types: TileTypes) -> TileRates:
        return replace(MI300X, multiply={Tiling(32, 32, 1): 1e-6})

    def prepare(self, lists: Lists, types: TileTypes, b_rows: bool, upload: Upload) -> Bind:
        tiles, dtype = lists.tiles, types.a
        table, rows = portable.tables(lists, upload)
        fixed = portable.constants("cpu", tiles.tiling, b_rows, tiles.work.k % BK == 0)

        def bind(
            a: Sequence[torch.Tensor],
            b: torch.Tensor,
            out: Sequence[torch.Tensor],
            scales: TileScales | None,
        ) -> Enqueue:
            assert rows.dtype == torch.int32
            values = portable.values(a, b, out, 0) | {"table": table}

            def enqueue(stream: Any) -> None:
                # The interpreter takes a tensor as a pointer. Each launch creates it: nothing may
                # hold an engine's memory.
                first = (ctypes.c_char * UNIT).from_address(values["b"])
                pointer = torch.frombuffer(first, dtype=torch.uint8).view(dtype)
                interpreted()[(tiles.clusters,)](**values | {"b": pointer}, **fixed)

            return enqueue

        return bind


class HostProducts(TiledProducts):
    """Products in the host's memory, by default on one processor."""

    def __init__(self, processors: int = 1) -> None:
        super().__init__(torch.device("cpu"), processors, InterpretedKernel())

    _apart: Callable[..., Any] = contextlib.nullcontext  # type: ignore[assignment]


def parts_first(tiles: TileList) -> TileList:
    """The list with clusters reordered so that no part comes after its owner. Such an order exists
    unless a cluster both owns a tile and has a part of a later tile."""
    owns = (tiles.items[:, :, 7] > 0).any(0)
    return replace(tiles, items=np.ascontiguousarray(tiles.items[:, np.argsort(owns)]))
