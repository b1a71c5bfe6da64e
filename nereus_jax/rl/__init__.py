"""Reinforcement learning as pure functions on response-aligned [B, T] arrays with a mask."""
