"""A prefill engine and a decode engine on the simulated GPU. Transfers between them land at random moments.

A transfer moves bytes between the pools without asking the device's queues, as NIXL does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from engine.engine import Engine
from engine.request import Request
from testing.engines.speculating import MOST_STEPS, Answer, Ask
from testing.simulated_gpu.engines import Setting
from testing.simulated_gpu.gpu import SimulatedGpu
from wire.messages.handoff import Ticket


class SimulatedHandoff:
    """Serves requests: prefilled on one engine, handed over, decoded on the other."""

    def __init__(self, setting: Setting, model_dir: Path, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        with gpu:
            self.source = setting.engine(model_dir, "cuda", "prefill")
            self.sink = setting.engine(model_dir, "cuda", "decode")

    def serve(self, asks: Sequence[Ask], seed: int) -> list[Answer]:
        """Return the answers. ``seed`` decides the order of steps, transfers and requests that leave."""
        choose = random.Random(seed)
        answers = [Answer(ask.request(str(i))) for i, ask in enumerate(asks)]
        waiting, landing = list(answers), []
        for answer in answers:
            answer.cancelled = choose.random() < 0.2  # at a random step, whatever stage it has reached
        with self._gpu, self._gpu.watching():
            for _ in range(MOST_STEPS):
                if waiting and choose.random() < 0.5:
                    answer = waiting.pop()
                    self.source.add(_prefilling(answer.request))
                if choose.random() < 0.6:
                    for request in self.source.step().prefilled:
                        self._submit(answers[int(request.request_id)].request, request)
                if choose.random() < 0.6:
                    landing += self._decode(answers, choose)
                if landing and choose.random() < 0.5:
                    self._land(landing.pop(choose.randrange(len(landing))))
                if all(answer.finish_reason is not None for answer in answers) and not landing:
                    return answers
        raise AssertionError("requests never ended")

    def _submit(self, request: Request, held: Request) -> None:
        memory, num_tokens = held.memory, request.num_prompt - 1
        request.ticket = Ticket(
            request.request_id, 0, 0, "h:1", "i", num_tokens, tuple(memory.block_ids), memory.state_slot, 1.0
        )
        self.sink.add(request)

    def _decode(self, answers: Sequence[Answer], choose: random.Random) -> list[Request]:
        result = self.sink.step()
        for output in result.outputs:
            assert output.error is None, output.error
            answer = answers[int(output.request_id)]
            if answer.finish_reason is None:  # tokens of steps in flight may follow a cancellation
                answer.add(output)
        for request in list(self.sink.scheduler.active):
            answer = answers[int(request.request_id)]
            if answer.cancelled and answer.finish_reason is None and choose.random() < 0.1:
                if request.request_id in self.sink.scheduler.waiting:  # nobody will read: the lease ends
                    self.source.release(request.request_id)
                self.sink.cancel(request.request_id)
                answer.finish_reason = "cancelled"
        return result.to_transfer

    def _land(self, request: Request) -> None:
        """Move the bytes at once, past all queues, and let both engines go on with their memory."""
        ticket, source, sink = request.ticket, self.source.caches, self.sink.caches
        assert ticket is not None
        blocks = list(zip(ticket.block_ids, request.memory.block_ids, strict=False))
        for theirs, ours in blocks[len(request.memory.nodes) :]:
            sink.kv.plain[ours] = source.kv.plain[theirs]
        sink.state.plain[request.memory.state_slot] = source.state.plain[ticket.state_slot]
        self.source.release(request.request_id)
        assert self.sink.transferred(request, error=None, settled=True) == []


def _prefilling(request: Request) -> Request:
    return Request(request.request_id, list(request.tokens), params=None)


def assert_all_free(engine: Engine) -> None:
    """Assert that only the prefix cache owns anything, once the steps in flight are read back."""
    while not engine.step().did_nothing:
        pass
    owned = engine.scheduler.owned
    assert owned.cache.num_available_blocks == owned.blocks.capacity
    assert owned.cache.num_available_slots == owned.slots.capacity
