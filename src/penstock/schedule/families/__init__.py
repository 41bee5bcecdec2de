"""Published orders of work, one file each."""
