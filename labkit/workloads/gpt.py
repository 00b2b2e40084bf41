"""A GPT in plain PyTorch, built from a `GPTShape`: what the ranks train.

Letters at the end of a name are the tensor's shape: B samples, T tokens, C hidden width, H heads, D width of a head,
V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.shapes import GPTShape


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.to_qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.to_out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Mix each token with those before it; [B, T, C] to [B, T, C]."""
        B, T, C = x_BTC.shape
        qkv = self.to_qkv(x_BTC).view(B, T, 3, self.num_heads, C // self.num_heads)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        out_BTC: Tensor = self.to_out(y_BHTD.transpose(1, 2).reshape(B, T, C))
        return out_BTC


class Block(nn.Module):
    """Attention, then a two-layer perceptron four times as wide, each added to its input."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(shape.hidden, bias=False)
        self.attention = Attention(shape)
        self.norm_mlp = nn.LayerNorm(shape.hidden, bias=False)
        self.widen = nn.Linear(shape.hidden, 4 * shape.hidden, bias=False)
        self.narrow = nn.Linear(4 * shape.hidden, shape.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """One step of the residual stream; [B, T, C] to [B, T, C]."""
        x_BTC = x_BTC + self.attention(self.norm_attention(x_BTC))
        x_BTC = x_BTC + self.narrow(F.gelu(self.widen(self.norm_mlp(x_BTC))))
        return x_BTC


class GPT(nn.Module):
    """A decoder-only transformer; its output layer shares the token embedding's weights.

    Args:
        shape: Sizes; `shape.num_params` is exactly what this holds.
        seed: Of the initial weights. The same on every rank, so that all begin equal.
    """

    def __init__(self, shape: GPTShape, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape = shape
        self.token = nn.Embedding(shape.vocab_size, shape.hidden)
        self.position = nn.Embedding(shape.sequence_length, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal with 0.02; smaller where a block adds to the stream, since 2·L of them add up (GPT-2)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            for layer in (module.attention.to_out, module.narrow):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * self.shape.num_layers))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Mean cross-entropy against the targets, a scalar; without targets the logits, [B, T, V]."""
        T = tokens_BT.shape[1]
        x_BTC = self.token(tokens_BT) + self.position.weight[:T]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = F.linear(self.norm(x_BTC), self.token.weight)
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
