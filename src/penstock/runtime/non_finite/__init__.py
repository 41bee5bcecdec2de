"""Loss or gradients that are NaN or infinite: where they appeared first, and what follows."""
