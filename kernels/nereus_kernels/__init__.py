"""Accelerator kernels of nereus_jax: one folder per operation, each with a reference as its contract."""
