"""Draft trees: building them, the order the target visits them in, and the walk that accepts a path (pure NumPy)."""
