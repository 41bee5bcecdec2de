"""The batch: its layout, its lengths, and the part of a micro-batch."""
