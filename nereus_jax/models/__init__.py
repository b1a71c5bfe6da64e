"""Decoder models in flax.nnx, the KV cache and the pipeline, and Hugging Face import and export."""
