"""The transfers of a job: weights from where they are trained to where they are used.

Here the two halves meet: planning says what moves, the runtime moves it.
"""

from collections.abc import Iterable, Mapping

import jax

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.tiling import LeafTiling, tile_leaf
from nereus_jax.planning.transfers import plan_transfer
from nereus_jax.runtime.emu import Params, Site
from nereus_jax.runtime.transfers import Transfer
from nereus_jax.runtime.world import World


def make_transfer(
    world: World,
    source_spec: EmuSpec,
    source: Site,
    target_spec: EmuSpec,
    target: Site,
    *,
    share: bool = True,
    lost: Iterable[DeviceId] = (),
    parked: bool = False,
) -> Transfer:
    """The transfer of a model's leaves from one site to another; nothing is compiled yet.

    Args:
      world: the devices.
      source_spec: the leaves at the source.
      source: where they are.
      target_spec: the leaves wanted, by name and with their dtype; each is a leaf of the source.
      target: where they go; other devices, another layout and so another padding.
      share: whether blocks that do not change are handed on; else the result is a copy.
      lost: devices whose blocks are not there any more.
      parked: the blocks at the source are in host memory.
    """
    names = [leaf.name for leaf in target_spec]
    held, wanted = tilings(source_spec, source), tilings(target_spec, target)
    schedule = plan_transfer(
        [held[name] for name in names],
        [wanted[name] for name in names],
        share=share,
        lost=lost,
    )
    abstract = target.abstract(target_spec)
    targets = [abstract[name] for name in names]
    return Transfer(schedule, targets, world.handles, parked=parked)


def edge_temp_bytes(transfer: Transfer) -> int:
    """What a transfer needs on a device beside both ends while it runs."""
    collective = transfer.collective if transfer.is_compiled else None
    temp_bytes = collective.temp_bytes if collective is not None else 0
    return max(temp_bytes, transfer.inflight_bytes)


def tilings(spec: EmuSpec, site: Site) -> dict[str, LeafTiling]:
    """How the leaves of a model lie on a site."""
    devices = site.placement.devices
    return {leaf.name: tile_leaf(leaf, spec.rules, site.mesh_shape, devices) for leaf in spec}


def run_transfer(transfer: Transfer, params: Mapping[str, jax.Array]) -> Params:
    """Moves the leaves by name; leaves that the transfer does not ask for are ignored."""
    names = [leaf.name for leaf in transfer.schedule.targets]
    moved = transfer.run([params[name] for name in names])
    return dict(zip(names, moved, strict=True))
