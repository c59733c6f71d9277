"""A GPU that is simulated on a CPU, beneath torch's own calls: late queues, events, graphs, pinned memory.

An engine whose device is ``cuda`` runs here as it is. Its tensors are in CPU memory, but say that they are on
a GPU. Operators on them are queued, and run later: in any order that streams and events allow. So a host that
reads a result before its event, or fills a pinned buffer again before it was copied, gets wrong tokens.

    with SimulatedGpu(seed=1) as gpu:
        engine = Engine(EngineConfig(model_dir, "both", device="cuda", ...))
        ...
    assert not gpu.waits

| module | holds |
|---|---|
| ``streams`` | streams and events: queues of operations, and the order in which they run |
| ``device_tensor`` | tensors that queue the operators that are called on them |
| ``shapes`` | the results' shapes, without computing the results |
| ``waits`` | which operators wait for the device, and which a capture refuses |
| ``graphs`` | captured graphs, which share their memory |
| ``kernels`` | kernels: the launch on a GPU is checked, the CPU path computes |
| ``gpu`` | puts the parts in the place of ``torch.cuda`` and of torch's functions that make tensors |
| ``jit_keys`` | the variants of Triton kernels that launches need |
| ``engines``, ``handoff`` | an engine beside its twin on the CPU; two engines and transfers between them |
| ``removed_waits`` | how an engine would run without each of its waits |
"""

import triton  # before any kernel: on a machine without GPUs they do without Triton unless it is there

__all__ = ["triton"]
