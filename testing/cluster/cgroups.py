"""Control groups (version 1) of a machine's own, below those of this process."""

from __future__ import annotations

import time
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
REMOVAL_DEADLINE_S = 20.0
CPU_SHARES = "16"
"""Of 1,024: while pods start, the control plane, which is outside, and all others must not wait for them."""


class NoCgroupsError(Exception):
    """There are no cgroups of version 1 in which a machine could run."""


def hierarchies() -> dict[str, Path]:
    """Returns, for each hierarchy by its name (``memory``, ``systemd``), the folder of this process."""
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names:
            name = names.removeprefix("name=")
            found[name] = MOUNTED / name / path.lstrip("/")
    missing = {"cpu", "cpuacct", "cpuset", "memory"} - {one for name in found for one in name.split(",")}
    if missing:
        raise NoCgroupsError(
            f"this machine mounts no cgroups of version 1 for {', '.join(sorted(missing))}: boot it with "
            "systemd.unified_cgroup_hierarchy=0"
        )
    return found


def make(name: str) -> list[Path]:
    """Makes a group in each hierarchy and returns the folders."""
    made = []
    for above in hierarchies().values():
        own = above / name
        own.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group, which then takes no process
            if (own / setting).exists():
                (own / setting).write_text((above / setting).read_text())
        if (own / "cpu.shares").exists():
            (own / "cpu.shares").write_text(CPU_SHARES)
        made.append(own)
    return made


def remove(folders: list[Path]) -> None:
    """Removes groups and all below them. Their processes have ended; Linux may still be about to notice."""
    limit = time.monotonic() + REMOVAL_DEADLINE_S
    for folder in folders:
        inner = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
        for group in [*inner, folder]:
            while True:
                try:
                    group.rmdir()
                    break
                except OSError:
                    assert time.monotonic() < limit, f"{group} still has processes"
                    time.sleep(0.1)
