"""What a model is made of, in a few integers: parameters and FLOP by formula, no torch needed."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import UsageError


@dataclass(frozen=True)
class GPTShape:
    """A decoder-only transformer in GPT-2's layout, without biases, output tied to the embedding.

    Attributes:
        num_layers: Transformer blocks, L.
        hidden: Width of the residual stream, C.
        num_heads: Attention heads, H; `hidden` is a multiple of it.
        sequence_length: Tokens a sample, T; also the number of learned positions.
        vocab_size: Distinct tokens, V; 256 for bytes.
    """

    num_layers: int
    hidden: int
    num_heads: int
    sequence_length: int = 128
    vocab_size: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"{name} is {value!r}, but must be a whole number of 1 or more.",
                    try_="lab.GPTShape.of_depth(4)",
                )
        if self.hidden % self.num_heads:
            raise UsageError(
                f"hidden({self.hidden}) is not a multiple of num_heads({self.num_heads}).",
                try_=f"hidden={self.num_heads * -(-self.hidden // self.num_heads)}",
            )

    @classmethod
    def of_depth(cls, num_layers: int, *, sequence_length: int = 128) -> GPTShape:
        """One knob for a whole family: width 64 a layer, heads 64 wide.

        >>> GPTShape.of_depth(4).hidden
        256
        """
        return cls(num_layers, hidden=64 * num_layers, num_heads=num_layers, sequence_length=sequence_length)

    @property
    def num_params(self) -> int:
        """Parameters, exactly: 12·L·C² in the blocks, V·C + T·C in the embeddings, (2L+1)·C in the norms.

        Source: Radford et al. 2019 (GPT-2), layout of the blocks, with biases left out.

        >>> GPTShape(1, hidden=2, num_heads=1, sequence_length=3, vocab_size=5).num_params  # 48 + 16 + 6
        70
        """
        blocks = 12 * self.num_layers * self.hidden**2
        embeddings = (self.vocab_size + self.sequence_length) * self.hidden
        norms = (2 * self.num_layers + 1) * self.hidden
        return blocks + embeddings + norms

    @property
    def flop_per_token(self) -> int:
        """FLOP to train on one token: 6 a weight that multiplies, 12·L·C·T for attention's scores.

        Positions and norms multiply nothing; the tied embedding does, as the output layer.

        Source: Chowdhery et al. 2022 (PaLM), appendix B.

        >>> GPTShape(1, hidden=2, num_heads=1, sequence_length=3, vocab_size=5).flop_per_token  # 6·58 + 72
        420
        """
        matmul_params = 12 * self.num_layers * self.hidden**2 + self.vocab_size * self.hidden
        return 6 * matmul_params + 12 * self.num_layers * self.hidden * self.sequence_length
