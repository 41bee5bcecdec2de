"""Messages and sums of gradients in memory that the ranks of one host share."""
