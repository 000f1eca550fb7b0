"""GPT-2 and its sampling; knows nothing of ranks."""
