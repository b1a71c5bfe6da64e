"""The blocks of global arrays, one by one, also when some of them are gone.

A global array that has lost a block may refuse to give out the others. So they are looked at while
the array is whole, and remembered as long as it lives.
"""

import weakref
from collections.abc import Iterable, Mapping

import jax

from nereus_jax.core.devices import DeviceId
from nereus_jax.runtime.world import World

Blocks = Mapping[DeviceId, jax.Array]
"""Blocks of one array on this process's devices, each an array on its device alone."""


class BlockViews:
    """The blocks of arrays that were seen whole; views of their buffers, not copies."""

    def __init__(self) -> None:
        self._seen: dict[int, Blocks] = {}

    def look(self, world: World, arrays: Iterable[jax.Array]) -> None:
        """Remembers the blocks of arrays that are new and whole."""
        names = {handle: device for device, handle in world.handles.items()}
        for array in arrays:
            if id(array) in self._seen or array.is_deleted():
                continue
            self._seen[id(array)] = {names[s.device]: s.data for s in array.addressable_shards}
            weakref.finalize(array, self._seen.pop, id(array), None)

    def of(self, world: World, array: jax.Array) -> Blocks:
        """The blocks of an array, those that are gone among them."""
        self.look(world, [array])
        return self._seen.get(id(array), {})
