"""What a supervisor prints."""

import sys

from nereus_jax.elastic.messages import Action, Order


def show(order: Order) -> None:
    """Prints what an order means, if it is news."""
    slots = ", ".join(str(slot) for slot in sorted(order.members))
    words = {
        Action.RUN: f"world {order.epoch}: slots {slots}",
        Action.STOP: f"{order.reason}: the world is formed anew at the end of the step",
        Action.KILL: f"{order.reason}: going on from the last checkpoint",
    }
    if order.action in words:
        say(words[order.action])


def say(text: str) -> None:
    """Prints a line to stderr."""
    print(f"nereus: {text}", file=sys.stderr, flush=True)
