"""Tokenizers, token shards on disk and the loader; rank and world size come in as ints."""
