"""The training loop, its events and its recovery."""
