"""Functions that numba compiles at their first call, never at import. CPU kernels consist of such functions.

* The machine code is cached on disk: in NUMBA_CACHE_DIR if set, else next to the module, else (read-only
  installations) in the user's cache folder. Only the first process on a machine compiles. Servers of a stack
  start together: while one of them compiles a function, the others wait for it.
* A function may call another function of its module, or an intrinsic; numba inlines the call if that helps.
* Sums may be reordered and contracted into FMA, but NaN and infinity keep their meaning: the state
  sanitizer finds stale reads by the NaN that they produce.
* The GIL is released while a function runs.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import time
import types
import zlib
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

__all__ = ["CpuFunction", "CpuIntrinsic", "cpu_function"]

logger = logging.getLogger(__name__)

# No "nnan", "ninf": with them the compiler may drop exactly the NaN by which a stale slot is found.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}
LOCK_S = 60.0
"""For how long a process waits for another one that compiles the same function. That takes some seconds."""
_LOOK_S = 0.02


class CpuIntrinsic:
    """Instructions that can't be written in numba's Python, for compiled functions to call.

    ``make`` returns a result of :func:`numba.extending.intrinsic`; it is called when a function compiles.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    @functools.cached_property
    def dispatcher(self) -> Any:
        """The object that numba compiles in place of a call."""
        return self.make()

    @functools.cached_property
    def _digest(self) -> int:
        return zlib.crc32(Path(self.make.__code__.co_filename).read_bytes())


class CpuFunction:
    """A function that numba compiles when it is first called; ``cpu_function`` decorates it."""

    def __init__(self, fn: Callable[..., None]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn

    @functools.cached_property
    def dispatcher(self) -> Any:
        """Numba's dispatcher of this function; creating it compiles nothing yet."""
        import numba

        # The same code, but the names of called functions refer to numba's dispatchers.
        names = {name: value.dispatcher for name, value in self._callees.items()}
        fn = types.FunctionType(self.fn.__code__, self.fn.__globals__ | names)
        functools.update_wrapper(fn, self.fn)
        # Numba recompiles when this function's file changes; the digest adds the files of its callees.
        fn.__qualname__ += f"_{self._digest:08x}"
        try:
            return _compiled_once(numba.njit(fastmath=_FASTMATH, nogil=True, cache=True)(fn))
        except RuntimeError:  # numba found no folder to cache in
            _warn_that_nothing_is_cached()
            return numba.njit(fastmath=_FASTMATH, nogil=True)(fn)

    @functools.cached_property
    def _callees(self) -> dict[str, CpuFunction | CpuIntrinsic]:
        named = {name: self.fn.__globals__.get(name) for name in self.fn.__code__.co_names}
        return {
            name: value for name, value in named.items() if isinstance(value, (CpuFunction, CpuIntrinsic))
        }

    @functools.cached_property
    def _digest(self) -> int:
        """Checksum of the source files that this function's machine code is made from."""
        digest = zlib.crc32(Path(self.fn.__code__.co_filename).read_bytes())
        for callee in self._callees.values():
            digest = zlib.crc32(callee._digest.to_bytes(4), digest)
        return digest

    def __call__(self, *args: Any) -> None:
        self.dispatcher(*args)


def _compiled_once(dispatcher: Any) -> Any:
    """Lets one process at a time compile a dispatcher's function. The others find it in the cache."""
    from numba.core.compiler_lock import global_compiler_lock

    compile_signature = dispatcher.compile
    function = dispatcher.py_func
    path = Path(dispatcher.stats.cache_path, f"{function.__module__}.{function.__qualname__}.lock")

    @functools.wraps(compile_signature)
    def compile_alone(signature: Any) -> Any:
        # Threads in turn first: two processes would otherwise wait for each other's threads.
        with global_compiler_lock, _locked(path):
            return compile_signature(signature)

    dispatcher.compile = compile_alone
    return dispatcher


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Holds a lock among processes, which also ends with this process.

    Goes on without it in a folder that this process can't write to, and if another process, which may be
    frozen, has it for too long: to compile twice is no fault. The system's own wait for a lock has no end.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file, until_s = stack.enter_context(path.open("ab")), time.monotonic() + LOCK_S
            while not _locks(file):
                if time.monotonic() > until_s:
                    logger.warning(
                        "another process has held %s for %g s; this one compiles the function too: "
                        "if that process is frozen, end it",
                        *(path, LOCK_S),
                    )
                    break
                time.sleep(_LOOK_S)
        yield


def _locks(file: IO[bytes]) -> bool:
    """Returns whether this process has got the file's lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@functools.cache
def _warn_that_nothing_is_cached() -> None:
    logger.warning("no writable folder: every process compiles the CPU kernels again; set NUMBA_CACHE_DIR")


if TYPE_CHECKING:  # numba infers the types of these functions at each call
    from typing import no_type_check as cpu_function
else:
    cpu_function = CpuFunction
