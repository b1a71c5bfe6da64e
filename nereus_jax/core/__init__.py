"""The nouns of the project: values without jax that every other package speaks."""
