"""The model families of torchvision and timm: the smallest member of each, without dropout.

Imported only where both are installed, which needs another torch than the project's own on some
machines; see docs/benchmarks/models.md for the commands.
"""

from collections.abc import Iterator
from typing import Any

import timm
import torch
import torchvision
from torch import nn

SAMPLES = 4
CLASSES = 4
MEMBERS_TRIED = 6
TORCHVISION = (
    *("alexnet", "convnext_tiny", "densenet", "efficientnet_b0", "efficientnet_v2_s"),
    *("googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2"),
    *("mobilenet_v3_small", "regnet_x_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_0"),
    *("swin", "vgg11_bn", "vit"),
    *("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large"),
    *("mvit_v1_b", "r3d_18", "s3d"),
)
"""One of each family of classifiers, of segmentation and of films; detection has no plain loss."""

SMALL = (
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "_xxs",
    "_xs",
    "tiny",
    "_050",
    "18",
    "_s",
    "small",
)


def registered_families() -> list[tuple[str, str]]:
    """Names with the library, for the census."""
    own = [(name, "torchvision") for name in TORCHVISION]
    return own + [(f"timm: {module}", "timm") for module in timm.list_modules()]


def family_model(name: str, library: str) -> nn.Module:
    """A family's smallest member with random weights, in training mode, dropout 0."""
    torch.manual_seed(0)
    if library == "torchvision":
        options: dict[str, Any] = {"num_classes": CLASSES}
        if name in ("googlenet", "inception_v3"):
            options |= {"aux_logits": False, "init_weights": True}
        if name.startswith(("deeplab", "fcn", "lraspp")):
            options |= {"weights_backbone": None}
        if name == "vit":
            model = torchvision.models.VisionTransformer(64, 16, 2, 4, 64, 128, **options)
        elif name == "densenet":
            model = torchvision.models.DenseNet(16, (2, 2, 2, 2), 32, **options)
        elif name == "swin":
            model = torchvision.models.SwinTransformer(
                [4, 4], 32, [2, 2], [2, 4], [4, 4], **options
            )
        else:
            model = torchvision.models.get_model(name, weights=None, **options)
    else:
        model = timm.create_model(_smallest(name.removeprefix("timm: ")), num_classes=CLASSES)
    for module in model.modules():
        kind = type(module).__name__.lower()
        if "drop" in kind or "stochasticdepth" in kind:
            for attribute in ("p", "drop_prob"):
                if hasattr(module, attribute):
                    setattr(module, attribute, 0.0)
    return model.train()


def _smallest(module: str) -> str:
    """The member with the fewest parameters among those whose names sound small."""

    def rank(name: str) -> int:
        return next((n for n, word in enumerate(SMALL) if word in name), len(SMALL))

    names = sorted(timm.list_models(module=module), key=rank)[:MEMBERS_TRIED]
    sizes: dict[str, int] = {}
    for name in names:
        with torch.device("meta"):
            try:
                model = timm.create_model(name, num_classes=CLASSES)
            except Exception:
                continue
        sizes[name] = sum(p.numel() for p in model.parameters())
    return min(sizes, key=lambda name: sizes[name]) if sizes else names[0]


def family_batches(model: nn.Module, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pictures or films with their classes; the first size that the model runs on is taken."""
    made = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, ...]] = [(3, 64, 64), (3, 96, 96), (3, 224, 224)]
    if name in ("mvit_v1_b", "r3d_18", "s3d", "swin3d_t"):
        shapes = [(3, 16, 32, 32), (3, 16, 64, 64), (3, 16, 224, 224)]
    default: Any = getattr(model, "default_cfg", None)
    if default is not None:
        shapes.append(tuple(default["input_size"]))
    for shape in dict.fromkeys(shapes):
        pictures = torch.randn(SAMPLES, *shape, generator=made)
        yield pictures, torch.arange(SAMPLES) % CLASSES
        yield pictures, torch.randint(CLASSES, (SAMPLES, *shape[1:]), generator=made)


def family_loss(result: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the classes, of the sample or of every point."""
    logits = result["out"] if isinstance(result, dict) else result
    logits = logits[0] if isinstance(logits, tuple | list) else logits
    return nn.functional.cross_entropy(logits, target)
