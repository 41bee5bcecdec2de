"""Training without a flush: the pipeline never drains between batches."""
