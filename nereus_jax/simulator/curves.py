"""What the simulated cluster reaches of its hardware, as curves over sizes: read from `truth.json`.

They are the ground truth of a simulation, and hidden from its controller, which has one efficiency
for each operation class. They were fitted to published measurements before any policy was run
(`benchmarks/truth`); where there is none, the file says what is assumed, and why.
"""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

FILE = "truth.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCurve:
    """Matrix products and memory traffic of one kind of device.

    Attributes:
      peak: share of the peak FLOPs that a product reaches whose sides are all large.
      half_width, half_depth: columns and inner size at which a product reaches half of that.
      corner: norm p in (compute^p + memory^p)^(1/p).
      bandwidth: share of the memory's bandwidth at which products read weights.
      elementwise_bandwidth: the same of norms, sums and activations.
      kernel_s: of a kernel beside its work.
      attention_peak: share of the peak FLOPs that scores reach in long sequences.
      attention_half_tokens: length at which they reach half of that.
    """

    peak: float
    half_width: float
    half_depth: float
    corner: float
    bandwidth: float
    elementwise_bandwidth: float
    kernel_s: float
    attention_peak: float
    attention_half_tokens: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkCurve:
    """Messages over one kind of link.

    Attributes:
      share: of the bandwidth that large messages reach.
      half_bytes: message that takes twice what its bytes would.
      ramp: how the bandwidth rises with the message: seconds = bytes / rate * (1 + (half / bytes)
        ^ ramp).
      hop_s: of a hop beside that.
    """

    share: float
    half_bytes: float
    ramp: float
    hop_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scatter:
    """What differs between nodes, in time, and from step to step.

    Attributes:
      score_std, train_std, generate_std: of the logarithm of a model-stage's seconds.
      device_std: of the logarithm of a device's seconds, from step to step.
      node_std: of the logarithm of a node's seconds, as it is.
      drift_std: of the same, moving slowly.
      drift_period_s: in which it moves.
      network_std: of the logarithm of what a network between nodes reaches, moving as slowly.
      straggler_rate: of a node and a step.
      straggler_factor: its seconds over those of the others, mean.
    """

    score_std: float
    train_std: float
    generate_std: float
    device_std: float
    node_std: float
    drift_std: float
    drift_period_s: float
    network_std: float
    straggler_rate: float
    straggler_factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryScatter:
    """How memory differs from its model.

    Attributes:
      temporaries_std: of the logarithm of a stage's temporaries over the modelled ones.
      fragmentation: share of what is in use that an allocator cannot give away, when it is old.
      fragmentation_steps: in which it comes to two thirds of that.
    """

    temporaries_std: float
    fragmentation: float
    fragmentation_steps: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds beside steps.

    Attributes:
      compile_s: of one program, median.
      compile_std: of its logarithm.
      compile_slowdown: of steps while programs are compiled beside them.
      setup_s: of every change of plan.
      operation_s: of one operation of a transition.
      uplink_share: of the links of a node's devices together that the node reaches at a time.
      restart_s: from the end of a job to the first step after it, without state and compiler.
      storage_bytes_per_s: of a checkpoint, for each device.
    """

    compile_s: float
    compile_std: float
    compile_slowdown: float
    setup_s: float
    operation_s: float
    uplink_share: float
    restart_s: float
    storage_bytes_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """All parameters of a simulated cluster.

    Attributes:
      kernels: by the kind of device that was profiled.
      links: `intra_node`, `inter_node`, `host`.
      scatter, memory, overheads: see there.
      sources: of the numbers, one line each.
    """

    kernels: Mapping[str, KernelCurve]
    links: Mapping[str, LinkCurve]
    scatter: Scatter
    memory: MemoryScatter
    overheads: Overheads
    sources: tuple[str, ...] = ()

    def kernel(self, hardware_name: str) -> KernelCurve:
        """Of the profiled kind that is nearest: the longest name that the hardware's begins with,
        else `other`."""
        names = [n for n in self.kernels if hardware_name.startswith(n)]
        return self.kernels[max(names, key=len)] if names else self.kernels["other"]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Truth":
        """Reads what `to_json` made."""
        return cls(
            kernels={k: KernelCurve(**v) for k, v in data["kernels"].items()},
            links={k: LinkCurve(**v) for k, v in data["links"].items()},
            scatter=Scatter(**data["scatter"]),
            memory=MemoryScatter(**data["memory"]),
            overheads=Overheads(**data["overheads"]),
            sources=tuple(data["sources"]),
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return dataclasses.asdict(self)


@functools.cache
def load_truth() -> Truth:
    """The parameters that this package comes with."""
    resource = importlib.resources.files("nereus_jax.simulator").joinpath(FILE)
    return Truth.from_json(json.loads(resource.read_text(encoding="utf-8")))
