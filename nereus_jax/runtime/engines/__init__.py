"""Engines: a model-stage under a placement, as programs compiled ahead of time."""
