# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""How a simulated cluster is at a moment: which nodes are slow, what the network reaches, noise.

Everything is a function of the seed and of the step or the second, never of what was asked before:
two policies that run the same step at the same time meet the same conditions.
"""

import dataclasses
import functools
import math
import zlib

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.simulator.curves import Scatter

Floats = NDArray[np.float64]

NODE_TAG, WAVE_TAG, STEP_TAG, STAGE_TAG = 1, 2, 3, 4
"""Tell the streams of random numbers of one seed apart."""
WAVES = 4
"""Sines that a slow change is the sum of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of a cluster.

    Attributes:
      scatter: how large everything is.
      nodes: of the cluster.
      devices_per_node: of each.
      seed: draws them.
    """

    scatter: Scatter
    nodes: int
    devices_per_node: int
    seed: int

    @functools.cached_property
    def _node_logs(self) -> Floats:
        rng = np.random.default_rng([self.seed, NODE_TAG])
        return self.scatter.node_std * rng.standard_normal(self.nodes)

    @functools.cached_property
    def _waves(self) -> tuple[Floats, Floats]:
        """[nodes + 1, WAVES] frequencies and phases; the last row is the network's."""
        rng = np.random.default_rng([self.seed, WAVE_TAG])
        shape = self.nodes + 1, WAVES
        periods = self.scatter.drift_period_s * 2.0 ** rng.uniform(-1.0, 1.0, shape)
        return 2.0 * math.pi / periods, rng.uniform(0.0, 2.0 * math.pi, shape)

    def _slow_change(self, time_s: float) -> Floats:
        """[nodes + 1] of variance 1 in the long run."""
        frequencies, phases = self._waves
        return np.sin(frequencies * time_s + phases).sum(axis=1) * math.sqrt(2.0 / WAVES)

    def device_factors(self, step: int, time_s: float) -> Floats:
        """[devices] seconds of each device over those of a usual one, node by node."""
        scatter = self.scatter
        rng = np.random.default_rng([self.seed, STEP_TAG, step])
        logs = self._node_logs + scatter.drift_std * self._slow_change(time_s)[:-1]
        straggles = rng.random(self.nodes) < scatter.straggler_rate
        more = rng.exponential(max(scatter.straggler_factor - 1.0, 0.0), self.nodes)
        nodes = np.exp(logs) * np.where(straggles, 1.0 + more, 1.0)
        own = rng.standard_normal((self.nodes, self.devices_per_node))
        return (nodes[:, None] * np.exp(scatter.device_std * own)).ravel()

    def network(self, time_s: float) -> float:
        """What the network between nodes reaches over what it usually does."""
        return float(np.exp(self.scatter.network_std * self._slow_change(time_s)[-1]))

    def stage_factor(self, step: int, stage: ModelStage) -> float:
        """Of the seconds of a model-stage in a step."""
        std = {
            Stage.SCORE: self.scatter.score_std,
            Stage.TRAIN: self.scatter.train_std,
            Stage.GENERATE: self.scatter.generate_std,
        }[stage.stage]
        name = zlib.crc32(str(stage).encode())
        rng = np.random.default_rng([self.seed, STAGE_TAG, step, name])
        return math.exp(std * float(rng.standard_normal()))
