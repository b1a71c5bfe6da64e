"""Which plan, and how to get there: works on `core` values alone, without jax."""
