"""The compiled core, in C++ (`bind.cpp`)."""

version: str
"""The version of the package that it was built for."""

sources: str
"""The digest of the C++ files that it was built from (`penstock.core.digest`)."""
