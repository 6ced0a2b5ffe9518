"""torchft: a lighthouse, and replicas whose DiLoCo wrapper synchronises the MLP over Gloo, in fp32.

The lighthouse has the defaults of its command line, the manager those of its constructor; the process group's timeout
is that of torchft's own example.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import torch
from torch import nn

from benchmarks.peers.orders import Orders
from benchmarks.peers.plan import NUM_LAYERS, Plan
from benchmarks.peers.processes import write_address
from benchmarks.peers.training import Loop

MODES: Final = {"whole": (1, 0), "streaming": (NUM_LAYERS, 2)}
"""How it synchronises: fragments, and inner steps between the start of a fragment's all-reduce and its end."""
JOIN_TIMEOUT_MS: Final = 60_000
QUORUM_TICK_MS: Final = 100
HEARTBEAT_TIMEOUT_MS: Final = 5_000
GLOO_SECONDS: Final = 10
"""As in the example that torchft ships."""


def light(plan: Plan, orders: Orders) -> None:
    """The lighthouse. Option `replicas`: how many must be there before anything is synchronised."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=int(plan.options["replicas"]),
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=QUORUM_TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    # It names the host, whose address need not be the one that it is bound to.
    write_address(plan, f"http://127.0.0.1:{urlsplit(server.address()).port}")
    orders.stop.wait()
    server.shutdown()


def learn(plan: Plan, orders: Orders) -> None:
    """One replica. What the wrapper's hooks of the inner optimizer take is what it adds to the training thread."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so
    from torchft.local_sgd import DiLoCo

    loop = Loop(plan)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fragments, delay = MODES[plan.options.get("mode", "whole")]
    manager = _make_manager(loop, plan, store.port)
    parts = _parts(loop.model, fragments)
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    # torch calls hooks in the order in which they were registered: ours stand before and behind those of the wrapper.
    loop.optimizer.register_step_pre_hook(loop.added.begin)
    loop.optimizer.register_step_post_hook(loop.added.begin)
    with DiLoCo(manager, parts, loop.optimizer, outer, sync_every=plan.interval, fragment_sync_delay=delay):
        loop.optimizer.register_step_pre_hook(loop.added.end)
        loop.optimizer.register_step_post_hook(loop.added.end)
        loop.wait_for_start(orders)
        while not loop.is_over and not orders.stop.is_set():
            loop.inner_step()
            loop.write(participants=manager.num_participants(), commits=manager.current_step())
    manager.shutdown(wait=False)


def _make_manager(loop: Loop, plan: Plan, store_port: int) -> Any:
    """A manager whose replica is a group of one rank, with the store at this port."""
    from torchft import Manager, ProcessGroupGloo

    def load(state: dict[str, Any]) -> None:
        loop.model.load_state_dict(state["model"])
        loop.optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=GLOO_SECONDS)),
        load_state_dict=load,
        state_dict=lambda: {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,  # the wrapper asks for it
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store_port,
        lighthouse_addr=plan.address,
        replica_id=plan.name,
        hostname="127.0.0.1",
    )


def _parts(model: nn.Sequential, count: int) -> list[nn.Module]:
    """The model as it is, or one part for each of its large layers."""
    if count == 1:
        return [model]
    layers = list(model)
    return [nn.Sequential(*layers[2 * part : 2 * part + (2 if part < count - 1 else 3)]) for part in range(count)]
