"""Keys that job files had once, each with what to use instead."""

__all__ = ["REMOVED_KEYS"]

REMOVED_KEYS = {
    "gradient_noise": "leave it out; a callback can compare squared norms of gradients itself",
}
