"""Supervisors that keep a job of several processes going when one of them dies; without jax."""
