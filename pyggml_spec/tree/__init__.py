"""Draft trees: building them, the order and mask the target needs, and the walk that accepts a path (pure NumPy)."""
