"""Compose the functions of a model into a forward pass: embedding, layers, head, objective."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core.types import Array, Batch, Context, Model, Params, Sums, add_sums


def scan_layers(block: Any, layers: Params, x: Any, aux: Any, context: Context) -> tuple[Any, Sums]:
    """Run layers [layers, ...] on x [batch, seq, d_model] in a plain scan; return (x, Sums)."""

    def run(x: Any, layer: tuple[Params, Array]) -> tuple[Any, Sums]:
        weights, index = layer
        return block(weights, x, aux, dataclasses.replace(context, layer=index))

    count = jax.tree.leaves(layers)[0].shape[0]
    x, sums = lax.scan(run, x, (layers, jnp.arange(count)))
    return x, {name: jnp.sum(values, axis=0) for name, values in sums.items()}


def row_chunks(rows: int, most: int) -> int:
    """Return the largest number of equal chunks of `rows` that is at most `most`."""
    return max(count for count in range(1, most + 1) if rows % count == 0)


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """The forward pass of a model; the defaults are for one device.

    Attributes:
        gather: params -> params whose leaves outside the stacked layers are gathered and cast.
        run_layers: (block, layers, x, aux, context) -> (x, Sums of all layers).
        max_row_chunks: maximum number of row chunks that pass the layers concurrently, so that
            collectives of one overlap with products of another.
    """

    model: Model
    gather: Callable[[Params], Params] = lambda params: params
    run_layers: Callable[..., tuple[Any, Sums]] = scan_layers
    max_row_chunks: int = 1

    def loss(self, params: Params, batch: Batch, context: Context) -> Sums:
        """Return loss and metrics (`Sums`) of a microbatch; layers are [num_layers, ...]."""
        model, params = self.model, self.gather(params)
        if model.block is None or model.embed is None:
            return self.head(params, None, batch, context)
        x = model.embed(params, batch, context)
        auxs = self.prepare(batch, context)
        if len(auxs) == 1:
            x, sums = self.run_layers(model.block, params["layers"], x, auxs[0], context)
        else:
            xs = tuple(jnp.split(x, len(auxs)))
            xs, sums = self.run_layers(self._block_of_chunks, params["layers"], xs, auxs, context)
            x = jnp.concatenate(xs)
        return add_sums(self.head(params, x, batch, context), sums)

    def head(self, params: Params, x: Array | None, batch: Batch, context: Context) -> Sums:
        """Return loss and metrics (`Sums`) of x [batch, seq_shard, d_model] after the layers."""
        output, sums = self.model.head(params, x, batch, context)
        return add_sums(self.model.objective(output, batch, context), sums)

    def prepare(self, batch: Batch, context: Context) -> tuple[Any, ...]:
        """Return the `aux` of `Model.prepare` for each row chunk of the batch [rows, ...]."""
        count = row_chunks(jax.tree.leaves(batch)[0].shape[0], self.max_row_chunks)
        prepare = self.model.prepare or (lambda rows, _: rows)
        if count == 1:
            return (prepare(batch, context),)
        rows = [jax.tree.map(lambda a, i=i: jnp.split(a, count)[i], batch) for i in range(count)]
        return tuple(prepare(part, context) for part in rows)

    def block(
        self, params: Params, x: Array, auxs: tuple[Any, ...], context: Context
    ) -> tuple[Array, Sums]:
        """Run one layer on each row chunk; return (x [rows, seq_shard, d_model], Sums)."""
        if len(auxs) == 1:
            assert self.model.block is not None
            return self.model.block(params, x, auxs[0], context)
        xs, sums = self._block_of_chunks(params, tuple(jnp.split(x, len(auxs))), auxs, context)
        return jnp.concatenate(xs), sums

    def _block_of_chunks(
        self, params: Params, xs: tuple[Array, ...], auxs: tuple[Any, ...], context: Context
    ) -> tuple[tuple[Array, ...], Sums]:
        """Run one layer; return (x of each chunk [rows / chunks, seq_shard, d_model], Sums)."""
        assert self.model.block is not None
        pairs = zip(xs, auxs, strict=True)
        outputs = [self.model.block(params, x, aux, context) for x, aux in pairs]
        total = functools.reduce(add_sums, (sums for _, sums in outputs))
        return tuple(x for x, _ in outputs), total
