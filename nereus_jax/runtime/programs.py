"""Programs compiled ahead of time, kept by what they depend on, with what their compilation
cost."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import jax

from nereus_jax.runtime.compile_queue import CompileCost, CompileQueue, Compiling, compile_now
from nereus_jax.runtime.emu import Site
from nereus_jax.runtime.ledger import MemoryLedger

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramKey:
    """What a compiled program depends on: model-stage, layout, devices, and everything static."""

    model_stage: str
    name: str
    layout: str
    devices: tuple[str, ...]
    static: tuple[Hashable, ...]

    @classmethod
    def of(
        cls, site: Site, engine: "DataclassInstance", name: str, *shape: Hashable
    ) -> "ProgramKey":
        """The key of an engine's program for one shape: all fields of the engine count.

        Args:
          site: where the program runs.
          engine: a frozen dataclass; fields that do not compare (`compare=False`) are left out.
          name: of the program.
          *shape: what the program is specialized to beside the engine's fields.
        """
        fields = [f.name for f in dataclasses.fields(engine) if f.compare and f.name != "site"]
        return cls(
            model_stage=str(site.model_stage),
            name=name,
            layout=str(site.placement.layout),
            devices=tuple(str(d) for d in site.placement.devices),
            static=(*shape, *(getattr(engine, name) for name in fields)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program and its sizes.

    Attributes:
      run: the executable; it takes arrays with exactly the compiled shapes and shardings.
      argument_bytes: per device, as XLA counts them.
      output_bytes: per device; outputs that reuse an argument's buffer are in `alias_bytes` too.
      temp_bytes: per device, what the program needs beside arguments and outputs while it runs.
      alias_bytes: per device, outputs that take over an argument's memory.
    """

    run: jax.stages.Compiled
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def extra_bytes(self) -> int:
        """Per device, what it needs beside its arguments: an output that takes over no argument's
        memory exists beside them."""
        return self.temp_bytes + max(self.output_bytes - self.alias_bytes, 0)


Recipe = tuple[ProgramKey, Callable[[], jax.stages.Lowered]]
"""What a program depends on, and how it is lowered."""


class ProgramCache:
    """Compiled programs of a job: `get` compiles on the first use, `prefetch` ahead of it.

    Attributes:
      ledger: where each run is entered.
    """

    def __init__(self, budget_bytes: int = 0) -> None:
        """Makes an empty cache.

        Args:
          budget_bytes: that a device may have; 0: as much as there is.
        """
        self.ledger = MemoryLedger(budget_bytes=budget_bytes)
        self._programs: dict[ProgramKey, Compiling[Program]] = {}

    def run(self, recipe: Recipe, *arguments: Any) -> Any:
        """Launches the program of a recipe.

        Raises:
          JaxRuntimeError: a device has no memory for it.
        """
        program, key = self.get(*recipe), recipe[0]
        name = f"{key.name} of {key.model_stage}"
        self.ledger.launch(name, key.devices, program.extra_bytes)
        return program.run(*arguments)

    def get(self, key: ProgramKey, lower: Callable[[], jax.stages.Lowered]) -> Program:
        """The program of this key; lowered by `lower` and compiled if it is not there yet."""
        if key not in self._programs:
            self._programs[key] = compile_now(lambda: _compile(lower))
        return self._programs[key].result()

    def has(self, key: ProgramKey) -> bool:
        """Whether `get` returns the program of this key at once."""
        return key in self._programs and self._programs[key].done

    def prefetch(
        self, key: ProgramKey, lower: Callable[[], jax.stages.Lowered], queue: CompileQueue
    ) -> None:
        """Compiles in the background; a `get` before it is there waits for it."""
        if key not in self._programs:
            self._programs[key] = queue.submit(lambda: _compile(lower))

    def items(self) -> tuple[tuple[ProgramKey, Program], ...]:
        """All programs that are there, in the order in which they were asked for."""
        return tuple((k, p.result()) for k, p in self._programs.items() if p.done)

    @property
    def costs(self) -> tuple[CompileCost, ...]:
        """What each compilation cost so far."""
        return tuple(p.cost for p in self._programs.values())


def _compile(lower: Callable[[], jax.stages.Lowered]) -> Program:
    compiled = lower().compile()
    memory = compiled.memory_analysis()

    def size(name: str) -> int:
        return int(getattr(memory, name, 0) or 0)

    return Program(
        run=compiled,
        argument_bytes=size("argument_size_in_bytes"),
        output_bytes=size("output_size_in_bytes"),
        temp_bytes=size("temp_size_in_bytes"),
        alias_bytes=size("alias_size_in_bytes"),
    )
