"""ParallelLayout and the mesh that it stands for.

A mesh has four axes, (dp, pp, kv, kvr). Tensor parallelism is the product of the last two: `kv`
shards the key/value heads, and the `kvr` ranks of one `kv` position share a copy of their heads. So
a tp degree above the number of key/value heads needs no padded or duplicated tensor: replication is
what the sharding says.
"""

import dataclasses
import functools
import math

DP, PP, KV, KVR = "dp", "pp", "kv", "kvr"
MESH_AXES: tuple[str, ...] = (DP, PP, KV, KVR)
TP_AXES: tuple[str, ...] = (KV, KVR)


@dataclasses.dataclass(frozen=True, order=True)
class ParallelLayout:
    """Degrees of data, pipeline and tensor parallelism; which devices is a Placement's matter."""

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "tp"):
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{name} must be a positive integer, got {degree!r}")

    @property
    def num_devices(self) -> int:
        return self.dp * self.pp * self.tp

    def mesh_shape(self, num_kv_heads: int) -> tuple[int, int, int, int]:
        """Sizes of the axes (dp, pp, kv, kvr) for a model with `num_kv_heads` key/value heads."""
        kv = math.gcd(self.tp, num_kv_heads)
        return (self.dp, self.pp, kv, self.tp // kv)

    def __str__(self) -> str:
        return f"dp={self.dp},pp={self.pp},tp={self.tp}"


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """The positive divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
