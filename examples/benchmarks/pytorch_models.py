"""The models of `models.py`, layer for layer, in PyTorch.

The comments name what a habit of PyTorch would have made otherwise.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_KERAS_EPSILON = 1e-3  # of normalisation over the features


class Trained(nn.Module):
    """A model and its loss, so that both are compiled together.

    Args:
        name: One of `examples.benchmarks.cases`.
        has_narrow_sums: Whether the sums between the layers of a transformer
            are bfloat16, as in Keras. Autocast keeps them in float32.
        as_torchvision: Whether ResNet-50 is that of torchvision.
    """

    def __init__(
        self,
        name: str,
        has_narrow_sums: bool = False,
        as_torchvision: bool = False,
    ) -> None:
        super().__init__()
        network = NETWORKS[name]
        if as_torchvision:
            network = functools.partial(network, as_torchvision=True)
        self.net: nn.Module = network()
        self._name = name
        self.has_adam = name in _ADAM_RATES
        if has_narrow_sums:
            for each in self.modules():
                if isinstance(each, Sums):
                    each.dtype = torch.bfloat16

    def forward(self, inputs: Any, labels: Any) -> Any:
        """Returns the mean loss, in float32."""
        return self.objective(self.net(inputs), labels)

    def objective(self, logits: Any, labels: Any) -> Any:
        """Returns the mean loss of logits, in float32."""
        logits = logits.flatten(0, -2)
        return functional.cross_entropy(logits, labels.flatten().long())

    def optimizer(self) -> torch.optim.Optimizer:
        """Makes the optimizer that the Keras model has."""
        if not self.has_adam:
            return torch.optim.SGD(
                self.parameters(), 0.01, momentum=0.9, fused=True
            )
        return torch.optim.AdamW(
            self.parameters(),
            _ADAM_RATES[self._name],
            eps=1e-7,
            weight_decay=0.004,
            fused=True,
        )


class Sums(nn.Module):
    """The sums between the layers of a transformer, in a dtype of their own."""

    dtype: torch.dtype | None = None

    def forward(self, x: Any) -> Any:
        """Returns the same, in that dtype."""
        return x if self.dtype is None else x.to(self.dtype)


class ResNet50(nn.Module):
    """ResNet-50, with biases, and strides in the first convolution of a block.

    The paper has them there. torchvision has them in the second, which computes
    more, and has no biases.
    """

    def __init__(
        self, classes: int = 1000, as_torchvision: bool = False
    ) -> None:
        super().__init__()
        has_bias = not as_torchvision
        self.first = _normalised_convolution(3, 64, 7, 2, has_bias)
        blocks, channels = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            width = 64 * 2**stage
            for index in range(count):
                stride = 2 if stage and not index else 1
                blocks.append(
                    Bottleneck(channels, width, stride, as_torchvision)
                )
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Any) -> Any:
        """Returns logits."""
        x = functional.relu(self.first(_channels_first(images)))
        x = self.blocks(functional.max_pool2d(x, 3, stride=2, padding=1))
        return self.head(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(
        self, channels: int, width: int, stride: int, as_torchvision: bool
    ) -> None:
        super().__init__()
        has_bias = not as_torchvision
        strides = (1, stride) if as_torchvision else (stride, 1)
        self.shortcut = (
            nn.Identity()
            if channels == 4 * width
            else _normalised_convolution(
                channels, 4 * width, 1, stride, has_bias
            )
        )
        self.convolutions = nn.Sequential(
            _normalised_convolution(channels, width, 1, strides[0], has_bias),
            nn.ReLU(),
            _normalised_convolution(width, width, 3, strides[1], has_bias),
            nn.ReLU(),
            _normalised_convolution(width, 4 * width, 1, 1, has_bias),
        )

    def forward(self, x: Any) -> Any:
        """Returns the sum of both ways."""
        return functional.relu(self.shortcut(x) + self.convolutions(x))


class Attention(nn.Module):
    """Attention of a sequence to itself, by a fused kernel."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self._heads, self._is_causal = heads, is_causal
        self.inwards = nn.Linear(width, 3 * width)
        self.outwards = nn.Linear(width, width)

    def forward(self, x: Any, mask: Any = None) -> Any:
        """Returns a sequence; the mask is true for keys that are seen."""
        split = self.inwards(x).unflatten(-1, (3, self._heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self._is_causal
        )
        return self.outwards(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a perceptron, each after a normalisation."""

    def __init__(
        self,
        width: int,
        heads: int,
        epsilon: float = _KERAS_EPSILON,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width, epsilon)
        self.attention = Attention(width, heads, is_causal)
        self.before_perceptron = nn.LayerNorm(width, epsilon)
        self.perceptron = _perceptron(width)

    def forward(self, x: Any) -> Any:
        """Returns a sequence."""
        x = x + self.attention(self.before_attention(x))
        return x + self.perceptron(self.before_perceptron(x))


class PostBlock(nn.Module):
    """Attention and a perceptron, each before a normalisation."""

    def __init__(self, width: int, heads: int, epsilon: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, is_causal=False)
        self.after_attention = nn.LayerNorm(width, epsilon)
        self.perceptron = _perceptron(width)
        self.after_perceptron = nn.LayerNorm(width, epsilon)
        self.sums = Sums()

    def forward(self, x: Any, mask: Any) -> Any:
        """Returns a sequence."""
        x = self.sums(self.after_attention(x + self.attention(x, mask)))
        return self.sums(self.after_perceptron(x + self.perceptron(x)))


class Gpt(nn.Module):
    """A decoder; its head computes in float32 or under autocast."""

    def __init__(
        self,
        depth: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 32_000,
        has_wide_head: bool = True,
    ) -> None:
        super().__init__()
        self.has_wide_head = has_wide_head
        self.embedding = nn.Embedding(vocabulary, width)
        self.sums = Sums()
        self.blocks = nn.Sequential(
            *(Block(width, heads, is_causal=True) for _ in range(depth))
        )
        self.last = nn.LayerNorm(width, _KERAS_EPSILON)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Any) -> Any:
        """Returns logits."""
        x = self.last(self.blocks(self.sums(self.embedding(tokens))))
        if not self.has_wide_head:
            return self.head(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.float())


class VisionTransformer(nn.Module):
    """ViT-B/16."""

    def __init__(
        self,
        depth: int = 12,
        width: int = 768,
        heads: int = 12,
        size: int = 224,
        patch: int = 16,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        count = (size // patch) ** 2 + 1
        self.positions = nn.Parameter(torch.randn(count, width) * 0.02)
        self.blocks = nn.Sequential(
            *(Block(width, heads, epsilon=1e-6) for _ in range(depth))
        )
        self.last = nn.LayerNorm(width, 1e-6)
        self.head = nn.Linear(width, classes)
        self.sums = Sums()

    def forward(self, images: Any) -> Any:
        """Returns logits."""
        x = self.patches(_channels_first(images)).flatten(2).transpose(1, 2)
        token = self.token.expand(len(x), -1, -1)
        x = self.sums(torch.cat([token, x], dim=1) + self.positions)
        return self.head(self.last(self.blocks(x))[:, 0])


class Bert(nn.Module):
    """BERT base, told to sort texts that are padded with zeros."""

    def __init__(
        self,
        depth: int = 12,
        width: int = 768,
        heads: int = 12,
        length: int = 512,
        vocabulary: int = 30_522,
    ) -> None:
        super().__init__()
        epsilon = 1e-12
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.first = nn.LayerNorm(width, epsilon)
        self.blocks = nn.ModuleList(
            PostBlock(width, heads, epsilon) for _ in range(depth)
        )
        self.pooled = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)
        self.sums = Sums()

    def forward(self, tokens: Any) -> Any:
        """Returns logits."""
        seen = (tokens != 0)[:, None, None]
        x = self.sums(self.first(self.embedding(tokens) + self.positions))
        for block in self.blocks:
            x = block(x, seen)
        return self.head(torch.tanh(self.pooled(x[:, 0])))


class Small(nn.Module):
    """A convolutional network that a CPU trains in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2)
        self.head = nn.Linear(8 * 7 * 7, 10)

    def forward(self, images: Any) -> Any:
        """Returns logits."""
        x = functional.relu(self.convolution(_channels_first(images)))
        return self.head(x.permute(0, 2, 3, 1).flatten(1))


def _perceptron(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


def _normalised_convolution(
    channels: int, filters: int, size: int, stride: int, has_bias: bool
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(
            channels, filters, size, stride, padding=size // 2, bias=has_bias
        ),
        nn.BatchNorm2d(filters, eps=1.001e-5, momentum=0.01),
    )


def _channels_first(images: Any) -> Any:
    """Returns bytes as numbers to compute with; they stay where they lie."""
    half = torch.is_autocast_enabled(images.device.type)
    dtype = torch.bfloat16 if half else torch.float32
    return images.permute(0, 3, 1, 2).to(dtype)


NETWORKS = {
    "resnet": ResNet50,
    "gpt": Gpt,
    "gpt-bf16": functools.partial(Gpt, has_wide_head=False),
    "gpt-350m": functools.partial(Gpt, 24, 1024, 16, has_wide_head=False),
    "gpt-1.3b": functools.partial(Gpt, 24, 2048, 16, has_wide_head=False),
    "gpt-5.5b": functools.partial(Gpt, 26, 4096, 32, has_wide_head=False),
    "vit": VisionTransformer,
    "bert": Bert,
    "small": Small,
}
_ADAM_RATES = {
    "gpt": 1e-4,
    "gpt-bf16": 1e-4,
    "gpt-350m": 1e-4,
    "gpt-1.3b": 1e-4,
    "gpt-5.5b": 1e-4,
    "vit": 1e-4,
    "bert": 1e-5,
}
