"""A chain in the shape of a Llama of 8B, and two hosts for it."""

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

MS, MB = 1e-3, 1e6


def two_hosts(devices: int = 8, memory_bytes: float = 40e9) -> Cluster:
    """Two hosts of so many GPUs with links of 450 GB/s, joined by 50 GB/s."""
    gpus = (Device("H100", memory_bytes),) * devices
    hosts = tuple(Host(name, gpus, 450e9, 50e9, 3e-6, 1e-5) for name in ("a", "b"))
    return Cluster("two hosts", hosts)


def llama_like() -> ModelProfile:
    """67 layers: an embedding, 32 blocks of two, a norm, a head."""

    def layer(name: str, forward_ms: float, parameters: float, saved_mb: float) -> LayerCost:
        half = Affine(5e-5, forward_ms * MS)
        saved, workspace = Affine(0.0, saved_mb * MB), Affine(0.0, 30 * MB)
        return LayerCost(name, half, half, half, int(parameters), 0, saved, workspace)

    blocks = [
        part
        for _ in range(32)
        for part in (layer("attention", 1.45, 84e6, 210), layer("mlp", 2.9, 352e6, 390))
    ]
    ends = layer("norm", 0.02, 8e3, 34), layer("head", 8.6, 1.05e9, 1050)
    layers = (layer("embedding", 0.02, 1.05e9, 34), *blocks, *ends)
    sent = Affine(0.0, 33.5 * MB)
    edges = tuple(Edge(i, i + 1, f"x{i}", sent, sent) for i in range(len(layers) - 1))
    return ModelProfile("llama", layers, edges, batch_size=4)
