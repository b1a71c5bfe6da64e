"""Executes plans on devices with jax; knows no policy."""
