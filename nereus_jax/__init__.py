"""nereus_jax: adaptive parallelism for RL post-training on JAX."""
