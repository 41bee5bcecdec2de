"""Planned pipeline-parallel training for PyTorch."""
