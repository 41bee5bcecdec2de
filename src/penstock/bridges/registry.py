"""The frameworks that plans go to and layouts come from, by the names of the command line."""

from penstock.bridges.deepspeed import export_deepspeed
from penstock.bridges.layout import Exporter, Importer
from penstock.bridges.megatron import export_megatron, import_megatron
from penstock.bridges.torch_pipelining import export_torch, import_torch
from penstock.bridges.torchtitan import export_torchtitan

__all__ = ["EXPORTERS", "IMPORTERS"]

EXPORTERS: dict[str, Exporter] = {
    "torch": export_torch,
    "torchtitan": export_torchtitan,
    "megatron": export_megatron,
    "deepspeed": export_deepspeed,
}

IMPORTERS: dict[str, Importer] = {
    "torch": import_torch,
    "megatron": import_megatron,
}
