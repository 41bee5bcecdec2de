"""A pass over layers whose devices divide their parameters, as two SimPy processes."""

from collections.abc import Generator, Sequence

import simpy


def gathered_pass_s(messages_s: Sequence[float], work_s: Sequence[float], scatters: bool) -> float:
    """Seconds until every layer was gathered and has computed, and its gradients are scattered.

    Two layers are whole at a time. The wire sends a layer's gradients before it gathers the layer
    that takes its place.
    """
    env, count = simpy.Environment(), len(messages_s)
    gathered = [env.event() for _ in range(count)]
    computed = [env.event() for _ in range(count)]

    def wire() -> Generator[simpy.Event, None, None]:
        for layer in range(count + 2):
            if layer >= 2:
                yield computed[layer - 2]
                if scatters:
                    yield env.timeout(messages_s[layer - 2])
            if layer < count:
                yield env.timeout(messages_s[layer])
                gathered[layer].succeed()

    def device() -> Generator[simpy.Event, None, None]:
        for layer in range(count):
            yield gathered[layer]
            yield env.timeout(work_s[layer])
            computed[layer].succeed()

    env.process(wire())
    env.process(device())
    env.run()
    return float(env.now)
