"""Training over processes: the pipeline and everything it stands on."""
