"""Whether to move, and when: the controller as a pure function of events, without jax."""
