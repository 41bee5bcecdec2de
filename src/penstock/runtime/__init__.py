"""Training over several processes: the pipeline and all that it is built on."""
