"""Tables of rows whose changed cells alone are uploaded."""

from __future__ import annotations

import random

import numpy as np

from engine.memory.async_copy import upload
from engine.step.step_table import StepTable
from testing.simulated_gpu.gpu import SimulatedGpu


def test_a_steps_rows_are_the_hosts_whatever_changes_and_whoever_comes_and_goes():
    """The simulated GPU has memory of its own: what is not uploaded does not arrive."""
    luck = random.Random(3)
    host = np.zeros((9, 40), dtype=np.int32)
    with SimulatedGpu() as gpu:
        table = StepTable.make(host, 8, gpu.device)
        places, rows = np.full(9, -1), []
        for _ in range(200):
            changed = [luck.randrange(8 * 40) for _ in range(luck.choice([0, 1, 1, 16, 100]))]
            for cell in changed:
                host.reshape(-1)[cell] = luck.randrange(1, 10_000)
            table.send(np.array(changed, dtype=np.int64), places)
            if luck.random() < 0.2:
                rows = luck.sample(range(8), luck.randint(1, 8))
                places.fill(-1)
                places[rows] = range(len(rows))
                table.arrange(upload(np.array(rows), gpu.device))
            found = table.device[: len(rows)].cpu().numpy()
            assert (found == host[rows]).all()
