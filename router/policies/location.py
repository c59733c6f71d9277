"""Where servers run, and how far two of them are from each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """The parts of a cluster that a server is in, each within the next. An empty name is not known."""

    node: str = ""
    rack: str = ""
    zone: str = ""

    def distance(self, other: Location) -> int:
        """Return 0 on one node, 1 in one rack, 2 in one zone, and 3 for servers that share no known part."""
        pairs = ((self.node, other.node), (self.rack, other.rack), (self.zone, other.zone))
        return next((steps for steps, (own, others) in enumerate(pairs) if own and own == others), len(pairs))


NOWHERE = Location()
"""The location of a server of which nothing is known."""
