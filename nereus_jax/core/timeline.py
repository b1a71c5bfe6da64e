"""What ran when, and where: the spans that timings, traces and the planner's checks are made of."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work on some devices, from its dispatch to its end."""

    name: str
    """What ran: the model-stage (`actor-GENERATE`), the transition, `checkpoint`, ..."""
    kind: str
    """Its class, for colours and sums: `model_stage`, `weight_edge`, `compile`, `host`, ..."""
    start_s: float
    """On the run's clock, in seconds: Unix time live (so that a resumed run and all processes
    share it), virtual time in a simulation."""
    end_s: float
    """On the same clock; at least `start_s`."""
    devices: tuple[str, ...]
    """Names of the devices that were busy; empty for work of the host alone."""
    step: int
    """The step it belongs to."""
    bytes: int | None = None
    """Bytes moved between devices, where moving them is what it did."""

    def __post_init__(self) -> None:
        assert self.start_s <= self.end_s, f"span {self.name} ends before it starts"
        assert self.bytes is None or self.bytes >= 0, f"span {self.name} moved {self.bytes} bytes"

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s
