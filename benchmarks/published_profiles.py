"""The built-in models against the profile files that their authors published.

    python benchmarks/published_profiles.py FOLDER

FOLDER holds the files of `FILES`, from the repositories of PipeDream and DAPPLE. Each is
read and compared with our table layer by layer and edge by edge. Then its sums are printed. They
stand in `tests/profile/test_built_in_models.py`, so that no table can change unnoticed. The script
ends with the first figure that differs by more than five digits can hold.
"""

import argparse
import sys
from collections.abc import Iterable
from math import isclose
from pathlib import Path

from penstock.profile.find import find_profile, read_any_profile
from penstock.profile.model_profile import Edge, ModelProfile

FILES = {
    "bert-48": ("dapple/bert-48-pbs-2.txt", 2),
    "xlnet-36": ("dapple/xlnet-36-pbs-1.txt", 1),
    "gnmt-16": ("dapple/gnmt-16-pbs-64.txt", 64),
    "amoebanet-36": ("dapple/amoeba-36-pbs-1.txt", 1),
    "vgg-19": ("dapple/vgg-19-pbs-32.txt", 32),
    "resnet-50": ("pipedream/resnet50.txt", 128),
    "vgg-16": ("pipedream/vgg16.txt", 128),
    "inception-v3": ("pipedream/inception_v3.txt", 128),
    "gnmt-8": ("pipedream/gnmt.txt", 64),
}
SAVED_ELSEWHERE = ("bert-48", "xlnet-36", "gnmt-16", "amoebanet-36", "vgg-19", "resnet-50")
"""Models whose bytes for the backward come from a paper's text."""

ROUNDING = 5e-5


def edge_bytes(edges: Iterable[Edge]) -> dict[tuple[int, int], tuple[float, float]]:
    """Bytes of a sample, forwards and backwards, by producer and consumer."""
    return {(e.producer, e.consumer): (e.bytes.at(1), e.gradient_bytes.at(1)) for e in edges}


def figures(profile: ModelProfile, name: str) -> list[tuple[str, float]]:
    """Every figure of a profile, with what it is."""
    found: list[tuple[str, float]] = [("batch", float(profile.batch_size))]
    kinds = ["forward_s", "backward_input_s", "backward_weight_s"]
    kinds += [] if name in SAVED_ELSEWHERE else ["saved_bytes"]
    for i, layer in enumerate(profile.layers):
        found += [(f"{kind} of layer {i}", getattr(layer, kind).at(1)) for kind in kinds]
        found.append((f"parameters of layer {i}", float(layer.parameter_bytes)))
    for ends, sizes in sorted(edge_bytes(profile.edges).items()):
        found += [(f"edge {ends}, {way}", sizes[i]) for i, way in enumerate(("there", "back"))]
    for cut in range(1, len(profile.layers)):
        tensors = {edge.tensor for edge in profile.crossing[cut]}
        found.append((f"tensors over cut {cut}", float(len(tensors))))
    return found


def sums(profile: ModelProfile) -> tuple[float, ...]:
    """Layers and edges, and sums of their figures: plain, and each weighted with its place."""
    layers = list(enumerate(profile.layers, 1))
    return (
        len(profile.layers),
        len(profile.edges),
        sum(layer.forward_s.at(1) for _, layer in layers),
        sum(i * layer.forward_s.at(1) for i, layer in layers),
        sum(layer.backward_s.at(1) for _, layer in layers),
        sum(i * layer.backward_s.at(1) for i, layer in layers),
        sum(layer.parameter_bytes for _, layer in layers),
        sum(i * layer.parameter_bytes for i, layer in layers),
        sum(edge.bytes.at(1) for edge in profile.edges),
        sum((e.producer + 1) * (e.consumer + 1) * e.bytes.at(1) for e in profile.edges),
    )


def main() -> None:
    """Compare all, and print their sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for name, (file, batch) in FILES.items():
        published = read_any_profile(folder / file, batch)
        theirs, ours = figures(published, name), figures(find_profile(name), name)
        if [what for what, _ in theirs] != [what for what, _ in ours]:
            sys.exit(f"{name}: the table has other layers or edges than {file}")
        for (what, expected), (_, found) in zip(theirs, ours, strict=True):
            least = 1.0 if what.startswith("parameters") else 1e-15
            if not isclose(found, expected, rel_tol=ROUNDING, abs_tol=least):
                sys.exit(f"{name}: {what} is {found}, published {expected}")
        print(f'    "{name}": ({", ".join(f"{each:.9g}" for each in sums(published))}),')


if __name__ == "__main__":
    main()
