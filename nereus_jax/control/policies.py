"""When a job looks for another plan and when it moves, by name."""

import dataclasses
import enum
import re

from nereus_jax.core.errors import ConfigError

GAMMA = 0.5
"""Share of the horizon within which a transition must pay back: of the published sweep the middle
of the flat part (arXiv 2609.34645, section 7.3.3)."""
EVERY = 3


class Gain(enum.StrEnum):
    """What an optional move needs.

    NEVER: there is none.
    ANY: the target is faster.
    PAYBACK: Eq. 2: the transition pays back within a share of the horizon.
    """

    NEVER = "never"
    ANY = "any"
    PAYBACK = "payback"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy.

    Attributes:
      name: as on the command line.
      gain: what an optional move needs.
      gamma: share of the horizon, 0 to 1; 0: urgent moves only.
      every: steps from one replan to the next; 0: when triggers say so.
      on_thresholds: signals trigger.
      on_pool: new devices and those that leave without being used trigger.
      foresees: a predicted violation of memory is urgent.
      same_degrees: pp and tp of every model-stage stay; only dp follows the pool.
    """

    name: str
    gain: Gain
    gamma: float = GAMMA
    every: int = 0
    on_thresholds: bool = True
    on_pool: bool = True
    foresees: bool = True
    same_degrees: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ConfigError(
                f"policy {self.name}: gamma must be in [0, 1], got {self.gamma:g}; 0: urgent "
                f"moves only, 0.5: the default"
            )
        if self.every < 0:
            raise ConfigError(f"policy {self.name}: steps must be at least 1, got {self.every}")


def static() -> Policy:
    """Never moves but from devices that go; then with the same pp and tp."""
    return Policy(
        name="static",
        gain=Gain.NEVER,
        on_thresholds=False,
        on_pool=False,
        foresees=False,
        same_degrees=True,
    )


def dp_only() -> Policy:
    """Follows the pool with dp, pp and tp as they are: what elastic training usually does."""
    return Policy(
        name="dp_only", gain=Gain.ANY, on_thresholds=False, foresees=False, same_degrees=True
    )


def any_gain() -> Policy:
    """Moves at every trigger to whatever is faster."""
    return Policy(name="any_gain", gain=Gain.ANY)


def every_k(steps: int = EVERY) -> Policy:
    """Looks every so many steps, and moves to whatever is faster."""
    if steps < 1:
        raise ConfigError(f"policy every_k: steps must be at least 1, got {steps}")
    return Policy(name="every_k", gain=Gain.ANY, every=steps, on_thresholds=False)


def payback(gamma: float = GAMMA) -> Policy:
    """Moves at triggers when the transition pays back within gamma times the horizon."""
    return Policy(name="payback", gain=Gain.PAYBACK, gamma=gamma)


POLICIES = ("static", "dp_only", "any_gain", "every_k", "payback")


def parse_policy(text: str) -> Policy:
    """Reads `payback`, `payback=0.4`, `every_k=5`, ...

    Raises:
      ConfigError: the name is not known (the message has those that are), or the number is not
        possible.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:=\s*(\S+)|\(\s*([^)\s]+)\s*\))?\s*", text)
    name = match[1] if match else text
    number = (match[2] or match[3]) if match else None
    if name not in POLICIES:
        raise ConfigError(f"policy {text!r} is not known; use one of {', '.join(POLICIES)}")
    if name in ("every_k", "payback") and number is not None:
        try:
            return every_k(int(number)) if name == "every_k" else payback(float(number))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            wanted = "a whole number of steps" if name == "every_k" else "gamma in [0, 1]"
            raise ConfigError(f"policy {name}: needs {wanted}, got {number!r}") from None
    if number is not None:
        raise ConfigError(f"policy {name} takes no number, got {number!r}; write {name}")
    made = {
        "static": static,
        "dp_only": dp_only,
        "any_gain": any_gain,
        "every_k": every_k,
        "payback": payback,
    }
    return made[name]()
