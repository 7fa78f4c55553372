"""Contender of `versus.py` in PyTorch, eager: `versus_pytorch.py JOB.json`.

It trains the decoder of `bare.py`: RMSNorm, rotary positions, `scaled_dot_product_attention`,
SwiGLU and an untied head. Fused q/k/v and gate/up products and the fused AdamW make it as fast as
eager PyTorch can be on a CPU.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from versus_pipe import serve


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, job: dict[str, Any]):
        super().__init__()
        d, self.heads, self.kv_heads = job["d_model"], job["num_heads"], job["num_kv_heads"]
        self.head_dim, self.eps = d // self.heads, job["norm_eps"]
        self.norm1, self.norm2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.qkv = nn.Linear(d, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, d, bias=False)
        self.up = nn.Linear(d, 2 * job["mlp_dim"], bias=False)
        self.down = nn.Linear(job["mlp_dim"], d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the block to x [batch, seq, d_model]; cos and sin are [seq, head_dim / 2]."""
        batch, seq, d = x.shape
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(F.rms_norm(x, (d,), self.norm1, self.eps))
        qkv = qkv.view(batch, seq, heads + 2 * kv_heads, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=heads != kv_heads
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        gate, up = self.up(F.rms_norm(x, (d,), self.norm2, self.eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Decoder from tokens [batch, seq] to logits [batch, seq, vocab]."""

    def __init__(self, job: dict[str, Any]):
        super().__init__()
        d, vocab, self.eps = job["d_model"], job["vocab_size"], job["norm_eps"]
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(job) for _ in range(job["num_layers"]))
        self.norm = nn.Parameter(torch.ones(d))
        self.head = nn.Linear(d, vocab, bias=False)
        half = d // job["num_heads"] // 2
        frequencies = job["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(job["seq_len"])[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        out_std = job["init_std"] / math.sqrt(2 * job["num_layers"])
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                is_output = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=out_std if is_output else job["init_std"])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every position."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(F.rms_norm(x, x.shape[-1:], self.norm, self.eps))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [batch, heads, seq, head_dim]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], float]]:
    """Build model and optimizer; return the facts and the function that trains."""
    torch.set_num_threads(job["cores"])
    torch.manual_seed(0)
    model = Decoder(job)
    weights = list(model.parameters())
    matrices = [weight for weight in weights if weight.ndim > 1]
    scales = [weight for weight in weights if weight.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": scales, "weight_decay": 0.0}],
        lr=job["learning_rate"],
        betas=(job["beta1"], job["beta2"]),
        eps=job["eps"],
        weight_decay=job["weight_decay"],
        fused=True,
    )
    rows = [torch.tensor(batch) for batch in job["batches"]]
    batches = itertools.cycle([(r[:, :-1].contiguous(), r[:, 1:].reshape(-1)) for r in rows])

    def run(steps: int) -> float:
        for _ in range(steps):
            tokens, targets = next(batches)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, job["max_grad_norm"])
            optimizer.step()
        return loss.item()

    facts = {
        "parameters": sum(weight.numel() for weight in weights),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "threads": torch.get_num_threads(),
    }
    return facts, run


if __name__ == "__main__":
    serve(start)
