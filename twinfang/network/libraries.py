"""The shared libraries that NCCL and UCX look for at run time.

Where one is missing, NCCL and UCX leave out what needs it and say nothing. NIXL's wheel brings libibverbs and
libmlx5 along for UCX, but under names of its own, which NCCL does not look for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from wire.codec import message

IBVERBS = "libibverbs.so.1"
DRIVER = "the GPU's driver"

PACKAGES = {
    IBVERBS: "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libefa.so.1": "ibverbs-providers",
    "librdmacm.so.1": "librdmacm1",
    "libcuda.so.1": DRIVER,
    "libnvidia-ml.so.1": DRIVER,
}
"""Where each library comes from: a package of Debian and Ubuntu, or the driver.

| library | without it |
|---|---|
| libibverbs | NCCL uses sockets between hosts |
| libmlx5 | NCCL can't have a GPU's memory read past the processor's root complex |
| libefa | UCX leaves out its module for EFA |
| librdmacm | libfabric, which plugins of NCCL use, leaves out its provider for RDMA |
| libcuda, libnvidia-ml | no GPU |
"""


@message
class Library:
    """One library on one host."""

    name: str
    loads: bool

    def __str__(self) -> str:
        return f"{self.name} {'loads' if self.loads else f'is missing ({PACKAGES[self.name]})'}"


def libraries(names: Iterable[str] = PACKAGES) -> tuple[Library, ...]:
    """Returns whether this process can load each library."""
    return tuple(Library(name, _loads(name)) for name in names)


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
