"""Compiling while the job runs, and what that cost.

One thread compiles in the order in which programs were asked for, which is the same on every
process: backends that agree on compiled code between processes wait for each other otherwise.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileCost:
    """Seconds of one compilation.

    Attributes:
      compile_s: tracing, lowering and compiling.
      exposed_s: of that, seconds for which someone waited for the result.
    """

    compile_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """Seconds that passed while the job did something else."""
        return max(self.compile_s - self.exposed_s, 0.0)


class Compiling(Generic[T]):
    """Something that is being compiled, or waits for its turn."""

    def __init__(self, future: "Future[tuple[T, float]]") -> None:
        self._future = future
        self._lock = threading.Lock()
        self._exposed_s = 0.0

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    def result(self) -> T:
        """Waits for it.

        Raises:
          Whatever compiling raised.
        """
        start_s = time.perf_counter()
        value, _ = self._future.result()
        with self._lock:
            self._exposed_s += time.perf_counter() - start_s
        return value

    @property
    def cost(self) -> CompileCost:
        """What it cost so far; complete once `result` has returned."""
        compile_s = self._future.result()[1] if self._future.done() else 0.0
        return CompileCost(compile_s=compile_s, exposed_s=min(self._exposed_s, compile_s))


class CompileQueue:
    """One background thread that compiles, first come first served."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nereus-compile")

    def submit(self, compile_it: Callable[[], T]) -> Compiling[T]:
        """Asks for a compilation; every process asks in the same order."""
        return Compiling(self._pool.submit(_timed, compile_it))

    def close(self) -> None:
        """Ends the thread; what has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def compile_now(compile_it: Callable[[], T]) -> Compiling[T]:
    """Compiles in this thread: all of it is exposed."""
    future: Future[tuple[T, float]] = Future()
    value, seconds = _timed(compile_it)
    future.set_result((value, seconds))
    compiling = Compiling(future)
    compiling._exposed_s = seconds
    return compiling


def _timed(compile_it: Callable[[], T]) -> tuple[T, float]:
    start_s = time.perf_counter()
    value = compile_it()
    return value, time.perf_counter() - start_s
