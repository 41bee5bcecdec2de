"""What each process of the link test runs."""

from torch import distributed

from penstock.cluster.cluster import Cluster
from penstock.measure.links import measure_links


def measured() -> Cluster:
    distributed.init_process_group("gloo")
    return measure_links()
