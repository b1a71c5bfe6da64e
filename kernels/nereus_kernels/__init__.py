"""Accelerator kernels of nereus_jax: a folder per operation, each with a reference as contract."""
