"""Whether what is trained outlives the loss of a node."""

from collections.abc import Callable

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import Stage


def survives(plan: ExecutionPlan, node_of: Callable[[DeviceId], int]) -> bool:
    """Whether parameters and optimizer of all that is trained are still whole when any one node is
    lost; where the plan is on a single node, any one device.

    Every block of a replica must be on two nodes at least, and ZeRO-1 has no two copies of the
    optimizer. What is frozen can be read again, and what a weight edge fills comes anew.

    Args:
      plan: that runs.
      node_of: the node of a device.
    """
    trained = [s for s in plan.choices if s.stage is Stage.TRAIN]
    devices = {d for s in trained for d in plan.plan[s].devices}
    alone = len({node_of(d) for d in devices}) == 1
    for stage in trained:
        placement = plan.plan[stage]
        layout = placement.layout
        if layout.dp == 1 or plan.choices[stage].zero1:
            return False
        size = layout.pp * layout.tp
        for position in range(size):
            copies = placement.devices[position::size]
            if len(set(copies if alone else map(node_of, copies))) == 1:
                return False
    return True
