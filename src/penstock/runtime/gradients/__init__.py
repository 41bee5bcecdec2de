"""Gradients in buckets, summed over ranks; their scale, their noise, who steps what."""
