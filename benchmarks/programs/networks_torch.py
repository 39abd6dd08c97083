"""The workload's networks in PyTorch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from workload import HEADS, LAYERS, MLP_WIDTH, TOKENS, VOCABULARY, WIDTH


def lenet5(bias: bool = True) -> nn.Module:
    """Return the layers of `model_zoo.LeNet5`, with PyTorch's own initial weights; `bias` is of the convolutions."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, bias=bias), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, bias=bias), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def _mlp(width: int) -> nn.Module:
    layers = (nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return nn.Sequential(nn.Flatten(), *layers)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the shape of its input: (batch, tokens, width)."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """A small language model: from tokens to the logits of the next ones, of shape (batch * tokens, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.blocks(self.embedding(tokens) + self.positions)).flatten(0, 1)


class Standardized(nn.Conv2d):
    """A 3x3 convolution as in `model_zoo.SmallResNet`: standardized weights times a trained gain."""

    def __init__(self, channels: int, out: int, stride: int, gain: float = math.sqrt(2 / (1 - 1 / math.pi))):
        super().__init__(channels, out, 3, stride, padding=1)
        nn.init.kaiming_normal_(self.weight)
        nn.init.zeros_(self.bias)
        self.gain = nn.Parameter(torch.full((out, 1, 1, 1), gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution."""
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        variance = centred.square().mean((1, 2, 3), keepdim=True)
        scale = torch.rsqrt(variance * self.weight[0].numel() + 1e-4) * self.gain
        return F.conv2d(x, centred * scale, self.bias, self.stride, self.padding)


class Residual(nn.Module):
    """Two convolutions beside the identity, the second with a gain that begins with 0."""

    def __init__(self, channels: int):
        super().__init__()
        self.first, self.second = Standardized(channels, channels, 1), Standardized(channels, channels, 1, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the shape of its input."""
        return F.relu(x + self.second(F.relu(self.first(x))))


class SmallResNet(nn.Module):
    """`model_zoo.SmallResNet` in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        channels, parts = 32, [Standardized(3, 32, 1), nn.ReLU()]
        for out in (48, 96, 192):
            parts += [Standardized(channels, out, 2), nn.ReLU(), Residual(out)]
            channels = out
        self.stages, self.head = nn.Sequential(*parts), nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.stages(x).mean((2, 3)))


class Basic(nn.Module):
    """A block of ResNet-18, with torchvision's names."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        shortcut = nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(*shortcut) if stride > 1 or channels != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


class ResNet18(nn.Module):
    """`model_zoo.ResNet18` in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        stages = [
            nn.Sequential(Basic(before, out, stride), Basic(out, out, 1))
            for before, out, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        ]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))))
        return self.fc(x.mean((2, 3)))


def make(name: str) -> nn.Module:
    """Return a network of the workload."""
    if name == "lenet5":
        return lenet5(bias=False)  # MindSpore's convolutions have none unless asked for one
    return Transformer() if name == "transformer" else _mlp(MLP_WIDTH[name])
