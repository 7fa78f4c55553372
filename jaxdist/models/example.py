"""A Flax model of your own on every mesh: a transformer of Flax's layers as a `Model` record.

    python -m jaxdist.train --model=custom --model.factory=jaxdist.models.example:build

`RULES` lists the named dims of weights that `fsdp` and `tp` split. With `tensor="auto"` XLA
partitions the products over `tp`. For pipeline stages see decoder.py.
"""

import jax
from flax import nnx

from jaxdist.core.types import Batch, Context, Dims, Model, Params, Sums, TokenHead
from jaxdist.models.layers import functional
from jaxdist.objectives import cross_entropy

RULES = {"width": "fsdp", "hidden": "tensor", "my_heads": "tensor"}


class Block(nnx.Module):
    """Attention and MLP. Weights without `dims` are replicated."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        dims = lambda *names: {"dims": Dims(names)}
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        into, out_of = dims("width", "my_heads", None), dims("my_heads", None, "width")
        self.attention = nnx.MultiHeadAttention(
            heads, width, decode=False, kernel_metadata=into, out_kernel_metadata=out_of, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, kernel_metadata=dims("width", "hidden"), rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_metadata=dims("hidden", "width"), rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Map x [batch, seq, width] to the same shape."""
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.silu(self.up(self.norms[1](x))))


class Net(nnx.Module):
    """Token embedding (tied with the head) and two blocks."""

    def __init__(self, vocab: int, width: int, heads: int, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(2)])


def build(*, seq_len: int, vocab: int = 1024, width: int = 64, heads: int = 4) -> Model:
    """Build the model; `model.factory` names this function, `model.args` are its arguments."""
    init, axes, bind = functional(lambda rngs: Net(vocab, width, heads, rngs))

    def head(params: Params, _: None, batch: Batch, __: Context) -> tuple[TokenHead, Sums]:
        net, tokens = bind(params), batch["tokens"]
        x = net.tokens(tokens)
        for block in net.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return TokenHead(x, net.tokens.embedding[...].T, vocab), {}

    return Model(
        name="custom", init=init, axes=axes, rules=RULES, head=head, objective=cross_entropy,
        dims=dict(width=width, hidden=4 * width, my_heads=heads), tensor="auto", vocab_size=vocab,
    )  # fmt: skip
