"""Log-probability and entropy of given tokens without the [tokens, vocabulary] array."""
