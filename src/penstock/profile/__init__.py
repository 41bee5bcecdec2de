"""What each layer of a model costs, and the files that say so."""
