"""The plan of a job that has lost devices, where there is no controller to choose one."""

from nereus_jax.config.plan_entry import PlanEntry, largest_layout
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.trainer.job import Job


def surviving_plan(job: Job, pool: DevicePool) -> Plan:
    """A plan for the devices that are left, near to the one that was.

    A model-stage keeps its intact replicas. One that has none gets one replica, as it was if the
    pool has devices enough, else of the largest degrees that divide the old ones.

    Raises:
      InfeasiblePlanError: no device is left.
    """
    if not len(pool):
        raise InfeasiblePlanError("all devices are lost; start again with others")
    alive = set(pool.devices)
    return Plan(
        placements={stage: _survivor(p, pool, alive) for stage, p in job.plan.placements.items()}
    )


def _survivor(placement: Placement, pool: DevicePool, alive: set[DeviceId]) -> Placement:
    layout = placement.layout
    replicas = [placement.replica_devices(rank) for rank in range(layout.dp)]
    intact = [devices for devices in replicas if alive.issuperset(devices)]
    if intact:
        return Placement(
            layout=ParallelLayout(len(intact), layout.pp, layout.tp),
            devices=tuple(d for devices in intact for d in devices),
        )
    largest = largest_layout(PlanEntry(dp=1, pp=layout.pp, tp=layout.tp), len(pool))
    return Placement(
        layout=ParallelLayout(1, largest.pp, largest.tp),
        devices=pool.devices[: largest.num_devices],
    )
