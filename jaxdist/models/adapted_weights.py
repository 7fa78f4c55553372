"""Frozen weights with trained parts: adapters of products, and rows of embeddings."""

from __future__ import annotations

import abc
import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.core import collectives
from jaxdist.core.types import Array, Context
from jaxdist.core.weights import ADAPTED, CompositeWeight, SumOver
from jaxdist.settings import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """Constants of an adapter: its module, rank, factor, and its part of the weight's outputs.

    Its outputs are `size` entries from `start` on, along dim `dim` of the weight of one layer or
    expert; size 0 = all entries of this device. `num_inputs` are those of all devices. `layer` is
    as in `adapters.Product`.
    """

    module: str
    rank: int
    scale: float
    dim: int
    start: int
    size: int
    num_inputs: int
    layer: str = ""

    def stop(self, total: int) -> int:
        """Return the index after the adapter's last output, in a dim of `total` entries."""
        return self.start + (self.size or total)


class NotAnArrayError(ConfigError, AttributeError):
    """Raised if a model uses a weight with an adapter as an array."""


class AdaptedWeight(CompositeWeight, abc.ABC):
    """A frozen weight, `base`, with trained arrays next to it."""

    base: Any

    def without_adapters(self) -> Any:
        """Return the frozen weight."""
        return self.base

    @abc.abstractmethod
    def merged(self) -> Array:
        """Return the base with the trained arrays merged in, float32 [*dims of the base]."""

    @abc.abstractmethod
    def with_start(self) -> AdaptedWeight:
        """Return the weight with the initial values of trained arrays that depend on the base."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraWeight(AdaptedWeight):
    """A frozen weight [*inputs, *outputs], and its adapters, ordered by start in `parts`.

    `adapters` has for each module, in float32, "a" [*inputs, rank], "b" [rank, *its outputs] and
    with DoRA "scale" [*its outputs]. `is_stacked`: stored arrays have a leading dim of layers.
    """

    base: Any
    adapters: dict[str, dict[str, Any]]
    parts: tuple[Adapter, ...] = dataclasses.field(metadata={"static": True})
    is_stacked: bool = dataclasses.field(default=True, metadata={"static": True})

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an error for an attribute of arrays: adapters work in `Context.dot` only."""
            raise NotAnArrayError(
                f"a weight with an adapter has no {name!r}: the model must multiply it with "
                "context.dot(dims, x, weight). Change the model, or leave the weight out of "
                "lora.targets."
            )

        def __jax_array__(self) -> Array:
            """Raise an error: no other function of jax takes the weight [*inputs, *outputs]."""
            return self.__getattr__("__jax_array__")

    def multiply(
        self,
        dot: Callable[..., Array],
        dims: str,
        x: Array,
        *,
        out_dtype: Any,
        sum_over: SumOver,
        drop: Callable[[Array, Adapter], Array] | None = None,
    ) -> Array:
        """Return x·base + scale·(x·A)·B [*dims after the arrow], rescaled if it is DoRA.

        `drop` applies dropout to x [*dims of x] before it is multiplied by A. Raise `ConfigError`
        if the product does not contract exactly the dims of A, which come first in the weight.
        """
        inputs, _, out = dims.partition("->")
        left, right = (part.split() for part in inputs.split(","))
        shared = [name for name in right if name in left]
        first = self.parts[0]
        num_inputs = self.adapters[first.module]["a"].ndim - 1
        if shared != right[:num_inputs] or set(shared) & {*out.split()}:
            raise ConfigError(
                f"the adapter of {first.module} is for the sum over its first {num_inputs} dims, "
                f"but Context.dot({dims!r}) has {', '.join(shared)} in both factors. Adapters "
                "need these first in the weight, and not in the result. Write their number as in "
                "lora.targets=layers/out:2, or leave the weight out of lora.targets."
            )
        rows, columns = ([n for n in names if n not in shared] for names in (left, right))
        down = f"{' '.join(left)}, {' '.join(shared)} rank -> {' '.join(rows)} rank"
        up = f"{' '.join(rows)} rank, rank {' '.join(columns)} -> {out}"
        y = dot(dims, x, self.base, out_dtype=out_dtype)
        dim = out.split().index(right[first.dim])
        pieces, end = [], 0
        for part in self.parts:
            own = self.adapters[part.module]
            if drop is None:
                low = dot(down, x, own["a"])
            else:  # backward saves x alone, not one copy for each adapter
                dropped = lambda x, a, part=part: dot(down, drop(x, part), a)
                low = jax.checkpoint(dropped)(x, own["a"])
            # Scale the smaller factor: it has rank columns.
            low = low * jnp.asarray(part.scale, low.dtype)
            stop = part.stop(y.shape[dim])
            piece = jax.lax.slice_in_dim(y, part.start, stop, axis=dim)
            piece = piece + dot(up, low, own["b"], out_dtype=out_dtype)
            if "scale" in own:
                squares = self._squares(part, len(shared))
                if math.prod(own["a"].shape[:-1]) < part.num_inputs:
                    squares = sum_over(squares, "tensor")
                piece = piece * (own["scale"] * jax.lax.rsqrt(squares)).astype(piece.dtype)
            pieces += [jax.lax.slice_in_dim(y, end, part.start, axis=dim), piece]
            end = stop
        pieces.append(jax.lax.slice_in_dim(y, end, y.shape[dim], axis=dim))
        y = jnp.concatenate([x for x in pieces if x.shape[dim]], dim)
        return checkpoint_name(y, ADAPTED)

    def _squares(self, part: Adapter, num_inputs: int) -> Array:
        """Return the squared norm of base + scale·A·B over local inputs, float32 [*outputs].

        It is a constant for the gradient (Liu et al. 2024, "DoRA", section 4.3). The sum is not
        formed: with G = AᵀA, it is ‖W‖² + 2·scale·⟨B, AᵀW⟩ + scale²·⟨B, G·B⟩ for each output.
        """
        own = jax.lax.stop_gradient(self.adapters[part.module])
        w = self.base.astype(jnp.float32)
        w = jax.lax.slice_in_dim(w, part.start, part.stop(w.shape[part.dim]), axis=part.dim)
        outputs = w.shape[num_inputs:]
        w = w.reshape(-1, *outputs)
        a, b = own["a"].astype(jnp.float32), own["b"].astype(jnp.float32)
        a = a.reshape(-1, part.rank)
        product = lambda dims, *x: jnp.einsum(dims, *x, precision="highest")
        squares = jnp.sum(jnp.square(w), 0)
        cross = jnp.sum(b * product("ir,i...->r...", a, w), 0)
        inner = jnp.sum(b * product("rs,s...->r...", product("ir,is->rs", a, a), b), 0)
        return jax.lax.stop_gradient(squares + 2 * part.scale * cross + part.scale**2 * inner)

    def merged(self) -> Array:
        """Return the weight with its adapters, float32 [layers if stacked, *inputs, *outputs]."""
        if not self.is_stacked:
            return self._as_layer().merged()[0]
        total = self.base.astype(jnp.float32)
        for part in self.parts:
            own = self.adapters[part.module]
            a, b = (own[name].astype(jnp.float32) for name in "ab")
            flat = jnp.einsum(
                "lir,lro->lio",
                a.reshape(a.shape[0], -1, part.rank),
                b.reshape(*b.shape[:2], -1),
                precision="highest",
            )
            own_outputs = slice(part.start, part.stop(total.shape[part.dim + 1]))
            index = (slice(None),) * (part.dim + 1) + (own_outputs,)
            new = total[index] + part.scale * flat.reshape(*a.shape[:-1], *b.shape[2:])
            if "scale" in own:
                ins = tuple(range(1, a.ndim - 1))
                norm = jnp.sqrt(jnp.sum(jnp.square(new), ins, keepdims=True))
                new = new * (jnp.expand_dims(own["scale"], ins) / norm)
            total = total.at[index].set(new)
        return total

    def with_start(self) -> LoraWeight:
        """Return the weight with DoRA's magnitudes set to the column norms of the base."""
        if not self.is_stacked:
            started = jax.tree.map(lambda x: x[0], self._as_layer().with_start())
            return dataclasses.replace(started, is_stacked=False)
        base, adapters = self.base.astype(jnp.float32), {}
        for part in self.parts:
            own = self.adapters[part.module]
            if "scale" in own:
                index = (slice(None),) * (part.dim + 1)
                index += (slice(part.start, part.stop(base.shape[part.dim + 1])),)
                ins = tuple(range(1, own["a"].ndim - 1))
                own = {**own, "scale": jnp.sqrt(jnp.sum(jnp.square(base[index]), ins))}
            adapters[part.module] = own
        return dataclasses.replace(self, adapters=adapters)

    def _as_layer(self) -> LoraWeight:
        """Return the weight as the only one of a stack, leaves [1, ...]."""
        return dataclasses.replace(jax.tree.map(lambda x: x[None], self), is_stacked=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertLora(LoraWeight):
    """Frozen weights [experts, *inputs, *outputs], merged with adapters before each product."""

    def astype(self, dtype: Any) -> Array:
        """Return one layer's weights with the adapters merged in, [experts, *inputs, *outputs]."""
        return super().merged().astype(dtype)

    def merged(self) -> Array:
        """Return the complete weight [layers, experts, *inputs, *outputs], float32."""
        return jax.vmap(LoraWeight.merged)(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterLora(LoraWeight):
    """The frozen weight of a router [d_model, experts], to which adapters are added, as in PEFT."""

    def astype(self, dtype: Any) -> Array:
        """Return the weight of a layer with the adapters merged in, [d_model, experts]."""
        return dataclasses.replace(self, is_stacked=False).merged().astype(dtype)


def with_dropout(context: Context, rate: float, rows: Array) -> Context:
    """Return a context that drops inputs of adapters in training; `rows`: global, int32 [batch]."""
    key = context.dropout_key
    if key is None:
        return context

    def drop(x: Array, part: Adapter) -> Array:
        """Return x [batch, seq, *inputs] with dropped inputs."""
        own = zlib.crc32(f"{part.layer}{part.module}".encode()) & 0x7FFFFFFF
        size = math.prod(x.shape[2:])
        first = context.tensor_index() * size if size < part.num_inputs else 0
        kept = keep_mask(
            jax.random.fold_in(key, own),
            rate,
            rows,
            context.position_ids(x.shape[1]),
            first + jnp.arange(size),
        )
        return jnp.where(kept.reshape(x.shape), x / (1 - rate), jnp.zeros_like(x))

    def dot(dims: str, x: Array, w: Any, *, out_dtype: Any = None) -> Array:
        """Return the product [*dims after the arrow]; see `types.dot`."""
        if not isinstance(w, LoraWeight):
            return context.dot(dims, x, w, out_dtype=out_dtype)
        return w.multiply(
            context.dot, dims, x, out_dtype=out_dtype, sum_over=context.sum, drop=drop
        )

    return dataclasses.replace(context, dot=dot)


def keep_mask(key: Array, rate: float, rows: Array, positions: Array, inputs: Array) -> Array:
    """Return bool [rows, positions, inputs]: False with probability `rate`.

    The last three are int32 indices in the global batch, in the row, and in the layer's inputs. An
    element depends only on the key and its own indices, so every mesh draws the same mask.
    """
    fold = jax.random.fold_in
    bits = lambda key: jax.random.key_data(key)[0]
    draw = lambda key: jax.vmap(lambda i: bits(fold(key, i)))(inputs)
    of_row = lambda key: jax.vmap(lambda i: draw(fold(key, i)))(positions)
    drawn = jax.vmap(lambda i: of_row(fold(key, i)))(rows)
    return drawn >= jnp.uint32(round(rate * 2**32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRows(AdaptedWeight):
    """A frozen table [vocab, d_model] (`dim` 0) or kernel [d_model, vocab] (1), and trained rows.

    The `rows`, float32 [tokens, d_model], replace the vectors of the tokens `ids`.
    """

    base: Any
    rows: Any
    ids: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})

    def complete(self, first: Any = 0) -> Array:
        """Return the base [*dims] with the rows written to it; `first` is its first token."""
        size = self.base.shape[self.dim]
        own = jnp.asarray(self.ids, jnp.int32) - first
        # Rows of other devices are dropped. Distinct indices avoid an index per weight in backward.
        dropped = size + jnp.arange(len(self.ids), dtype=jnp.int32)
        own = jnp.where((own >= 0) & (own < size), own, dropped)
        rows = self.rows.astype(self.base.dtype)
        axes = tuple(sorted(set().union(*map(collectives.varying_axes, (self.base, rows, own)))))
        base, rows, own = collectives.vary((self.base, rows, own), axes)
        if self.dim == 0:
            return base.at[own].set(rows, mode="drop", unique_indices=True)
        return base.at[:, own].set(rows.T, mode="drop", unique_indices=True)

    def merged(self) -> Array:
        """Return the complete table or kernel, float32 [*dims of the base]."""
        return dataclasses.replace(self, base=self.base.astype(jnp.float32)).complete()

    def with_start(self) -> TokenRows:
        """Return the weight with new rows: those of the base."""
        rows = jnp.take(self.base, jnp.asarray(self.ids), self.dim).astype(jnp.float32)
        return dataclasses.replace(self, rows=rows.T if self.dim else rows)


def complete(weight: Any, context: Context) -> Array:
    """Return this device's table [vocab, d_model] or kernel [d_model, vocab] as an array."""
    if not isinstance(weight, TokenRows):
        return weight
    # Generation reads stored weights, whose dtype would round the rows.
    weight = dataclasses.replace(weight, base=weight.base.astype(context.dtype))
    return weight.complete(context.tensor_index() * weight.base.shape[weight.dim])
