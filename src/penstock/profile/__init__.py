"""What each layer of a model costs, and the file formats for it."""
