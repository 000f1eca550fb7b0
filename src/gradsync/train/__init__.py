"""Configuration, optimizer, checkpoints, evaluation and the training loop."""
