"""The bounds that a number of the configuration must keep, as annotations of its type."""

import dataclasses
import math
from typing import Annotated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """An interval of finite numbers; a bound of None is absent."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def contains(self, value: float) -> bool:
        """Whether `value` is finite and inside the interval."""
        if not math.isfinite(value):
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        return self.high is None or not (
            value > self.high or (self.high_open and value == self.high)
        )

    def __str__(self) -> str:
        parts: list[str] = []
        if self.low is not None:
            parts.append(f"{'>' if self.low_open else '>='} {self.low:.12g}")
        if self.high is not None:
            parts.append(f"{'<' if self.high_open else '<='} {self.high:.12g}")
        return " and ".join(parts) or "that is finite"


PositiveInt = Annotated[int, Range(low=1)]
NonNegativeInt = Annotated[int, Range(low=0)]
SeedInt = Annotated[int, Range(low=0, high=2**32 - 1)]
ProblemCount = Annotated[int, Range(low=0, high=100_000_000)]
FiniteFloat = Annotated[float, Range()]
PositiveFloat = Annotated[float, Range(low=0, low_open=True)]
NonNegativeFloat = Annotated[float, Range(low=0)]
Probability = Annotated[float, Range(low=0, high=1)]
PositiveProbability = Annotated[float, Range(low=0, high=1, low_open=True)]
Decay = Annotated[float, Range(low=0, high=1, high_open=True)]
AtLeastOne = Annotated[float, Range(low=1)]
