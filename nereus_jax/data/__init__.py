"""Prompts, tokenizers and the position in the data, counted in samples."""
