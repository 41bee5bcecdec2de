"""The commands of ``penstock``, their options, and what they print."""
