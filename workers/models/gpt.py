"""A byte-level GPT in one file, small enough to read in one go and quick on a CPU.

    bytes (B, T) -> embedding -> [attention + feed-forward] x layers -> norm -> logits (B, T, 256)

B = batch, T = bytes in a row (at most the context), C = width, N = heads, D = C / N = width of a head. There is no
tokenizer: a token is a byte, so a loss in nats per byte compares across models and corpora of any language.

Every parameter is a matrix. Norms have no gain and linear maps no bias: at this size they add small tensors, and time
to synchronise them, but no quality. The embedding and the output map are separate: tying them would save 256 x C
parameters, which is little when the vocabulary is the 256 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY: Final = 256
"""Every byte is a token, and there are no others."""

ROTARY_BASE: Final = 10_000.0
INIT_STD: Final = 0.02
FEED_FORWARD_FACTOR: Final = 4


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a model; all four are needed to rebuild it from its parameters."""

    layers: int = 4
    width: int = 128
    heads: int = 2
    context: int = 128

    def __post_init__(self) -> None:
        """Refuse shapes that no model has.

        Raises:
            ValueError: a number is below 1, or the heads do not split the width into even parts.
        """
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a model needs at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width = {self.width} does not split into {self.heads} heads of an even width: "
                f"make it a multiple of {2 * self.heads}"
            )


def normalise(x: Tensor) -> Tensor:
    """Scale the last dimension to mean 0 and variance 1; float of any shape in, the same shape out.

    `layer_norm` rather than `rms_norm`: its kernel is fused on CPUs, and quality does not differ at this size.
    """
    return functional.layer_norm(x, (x.shape[-1],))


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each float32 (context, head_width / 2).

    Source: Su et al., RoFormer, arXiv 2104.09864, equation 34: position t turns pair i by t * base^(-2i/D).
    """
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) by their position's angles: (B, N, T, D) with tables (T, D/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, N, T, D)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, N, T, D)
        out: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class FeedForward(nn.Module):
    """Two linear maps with a squared ReLU between them (So et al., Primer, arXiv 2109.08668)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, FEED_FORWARD_FACTOR * config.width, bias=False)
        self.output = nn.Linear(FEED_FORWARD_FACTOR * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(functional.relu(self.expand(x)).square())
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the stream it reads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(normalise(x), cosine, sine)
        out: Tensor = x + self.feed_forward(normalise(x))
        return out


class GPT(nn.Module):
    """The model. `forward` gives logits, `loss` nats per byte, `generate` text."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        """Build and initialise; two models built with generators of one seed are bit-equal on one build of torch."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        cosine, sine = rotary_tables(config.context, config.width // config.heads)
        # Not part of the model's state: both follow from the configuration, so nobody needs to be sent them.
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.initialise(generator)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters afresh, in the order of their names.

        Maps that write into the residual stream start smaller by sqrt(2 x layers), so that its variance does not
        grow with depth (Radford et al., GPT-2, section 2.3). A small head makes the first loss ln 256 = 5.55.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in sorted(self.named_parameters()):
            std = residual_std if name.endswith("output.weight") else INIT_STD
            parameter.normal_(0.0, std, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the next byte at every position: int64 (B, T) -> float (B, T, 256), T at most the context."""
        length = inputs.shape[1]
        cosine, sine = self.cosine[:length], self.sine[:length]
        x = normalise(self.embedding(inputs))  # (B, T, C)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: Tensor = self.head(normalise(x))
        return logits

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, a scalar; both arguments int64 (B, T)."""
        logits = self(inputs)
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))

    @torch.no_grad()
    def generate(
        self, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, generator: torch.Generator | None = None
    ) -> bytes:
        """Continue `prompt` by `num_bytes` sampled bytes and return these alone.

        Temperature 0 takes the likeliest byte each time. An empty prompt stands for a line feed. Only the last
        `context` bytes are seen. `generator` must live on the CPU, whatever the model's device.
        """
        device = self.embedding.weight.device
        text = torch.tensor(list(prompt or b"\n"), dtype=torch.long, device=device)
        start = len(text)
        for _ in range(num_bytes):
            logits = self(text[-self.config.context :].unsqueeze(0))[0, -1].float().cpu()  # (256,)
            if temperature > 0:
                chances = (logits / temperature).softmax(-1)
                following = torch.multinomial(chances, 1, generator=generator)
            else:
                following = logits.argmax(-1, keepdim=True)
            text = torch.cat((text, following.to(device)))
        return bytes(text[start:].tolist())
