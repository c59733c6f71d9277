"""Every wait of the step path and of the handoff, and how an engine would run without it.

On the simulated GPU each removal has to show: as a wrong token, an error, or an operator that waits. A wait
whose removal never shows is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import engine.engine
import engine.step.buffers
from engine.engine import Engine
from engine.memory.async_copy import Download
from engine.schedule.scheduler import Scheduler
from testing.engines.speculating import Ask, sampled_asks, serve, short_asks
from testing.simulated_gpu.engines import CROWDED, Setting, Simulated, all_kinds_of_asks
from testing.simulated_gpu.gpu import SimulatedGpu
from testing.simulated_gpu.handoff import SimulatedHandoff, assert_all_free
from testing.simulated_gpu.streams import Late

NGRAM = Setting("dense", 2, "ngram", "none")
STORING = Setting("dense", 0, None, "all", (("state_block_size", 16), ("max_batch_tokens", 32)))
SANITIZED = Setting("dense", 0, None, "none", (("sanitize", True),))


def _without_landing(method: str) -> AbstractContextManager[object]:
    """Let a method of the engine leave steps in flight, which it would read back first."""
    original = getattr(Engine, method)

    def call(self: Engine, *args: object, **kwargs: object) -> object:
        with patch.object(Engine, "_land_all", lambda self, but=0: None):
            return original(self, *args, **kwargs)

    return patch.object(Engine, method, call)


@dataclass(frozen=True)
class RemovedWait:
    """One wait, the change that removes it, and the requests that need it."""

    where: str
    removal: Callable[[], AbstractContextManager[object]]
    setting: Setting = NGRAM
    asks: Callable[[int], list[Ask]] = lambda seed: all_kinds_of_asks(6, seed)
    hands_over: bool = False

    def finds(self, model_dir: Path, seed: int) -> str:
        """Run without the wait; return what went wrong, or an empty string."""
        try:
            with self.removal():
                return self._differences(model_dir, seed)
        except Exception as error:
            return repr(error)

    def _differences(self, model_dir: Path, seed: int) -> str:
        if not self.hands_over:
            simulated = Simulated.make(self.setting, model_dir, Late(seed))
            found = simulated.differences(self.asks(seed), seed)
            with simulated.gpu:
                assert_all_free(simulated.engine)
            return "; ".join(found[:1])
        asks = [one for one in self.asks(seed) if one.prompt_logprobs is None and len(one.prompt) > 1]
        expected = serve(self.setting.engine(model_dir, "cpu"), asks, 4)
        answers = SimulatedHandoff(self.setting, model_dir, SimulatedGpu(Late(seed))).serve(asks, seed)
        for ours, theirs in zip(answers, expected, strict=True):
            if ours.finish_reason != "cancelled" and ours.said != theirs.said:
                return f"{ours.said}, expected {theirs.said}"
        return ""


def _removals() -> dict[str, RemovedWait]:
    def results() -> AbstractContextManager[object]:
        return patch.object(Download, "wait", lambda self: self.host)

    return {
        "results are read before they have been copied": RemovedWait("Download.wait", results),
        "a prompt is held before it was computed": RemovedWait(
            "Download.wait", results, asks=lambda seed: sampled_asks(12, seed), hands_over=True
        ),
        "a staging buffer is filled while it is copied": RemovedWait(
            "engine/step/buffers.py STAGES", lambda: patch.object(engine.step.buffers, "STAGES", 1)
        ),
        "more steps are in flight than buffers": RemovedWait(
            "Engine.step_with: _land_all(but=steps_ahead)",
            lambda: patch("engine.config.EngineConfig.resolve_steps_ahead", lambda self, device: 4),
        ),
        "a request is preempted while its step runs": RemovedWait(
            "Engine._land_needed, must_preempt",
            lambda: patch.object(Scheduler, "must_preempt", False),
            CROWDED,
            lambda seed: short_asks(8, seed),
        ),
        "a grammar's row runs before its masks": RemovedWait(
            "Engine._land_needed, _follows",
            lambda: patch.object(engine.engine, "_follows", lambda launched: False),
        ),
        "a cancelled request's slots are given back while its step runs": RemovedWait(
            "Engine.cancel: _land_all", lambda: _without_landing("cancel"), STORING
        ),
        "a peer's bytes land before the sanitizer's NaN": RemovedWait(
            "Sanitizer.vacated: synchronize",
            lambda: patch.object(SimulatedGpu, "_wait", lambda self, reason: None),
            SANITIZED,
            lambda seed: sampled_asks(12, seed),
            hands_over=True,
        ),
    }


REMOVED_WAITS = _removals()
