"""Side-by-side measurements: the same training step under different engines, alternating, in one run."""
