"""hivemind: a pair of averagers that find each other through a distributed hash table and average the MLP in 8 bits."""

from __future__ import annotations

from typing import Any, Final

import torch

from benchmarks.peers.orders import Orders
from benchmarks.peers.plan import Plan
from benchmarks.peers.processes import write_address
from benchmarks.peers.training import Loop

AVERAGING_SECONDS_MAX: Final = 60.0


def introduce(plan: Plan, orders: Orders) -> None:
    """The member of the hash table that learners are told of; it takes no part in the averaging."""
    table = _join([])
    write_address(plan, ",".join(str(address) for address in table.get_visible_maddrs()))
    orders.stop.wait()
    table.shutdown()


def _join(known: list[str]) -> Any:
    """A member of the hash table that keeps to loopback: without what finds a way through a router."""
    import hivemind

    return hivemind.DHT(
        initial_peers=known or None,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        start=True,
    )


def learn(plan: Plan, orders: Orders) -> None:
    """One learner: every H inner steps it waits for an averaging of the parameters and takes the result."""
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Uniform8BitQuantization

    loop = Loop(plan)
    table = _join(plan.address.split(","))
    averager = DecentralizedAverager(
        [parameter.detach().clone() for parameter in loop.model.parameters()],
        table,
        prefix="mlp",
        target_group_size=2,
        min_group_size=2,
        compression=Uniform8BitQuantization(),
        start=True,
    )
    commits = 0

    def average() -> None:
        nonlocal commits
        with averager.get_tensors() as tensors, torch.no_grad():
            for tensor, parameter in zip(tensors, loop.model.parameters(), strict=True):
                tensor.copy_(parameter)
        commits += averager.step(timeout=AVERAGING_SECONDS_MAX) is not None
        with averager.get_tensors() as tensors, torch.no_grad():
            for tensor, parameter in zip(tensors, loop.model.parameters(), strict=True):
                parameter.copy_(tensor)

    loop.wait_for_start(orders)
    while not loop.is_over and not orders.stop.is_set():
        is_due = (loop.num_steps + 1) % plan.interval == 0
        loop.inner_step(average if is_due else None)
        loop.write(commits=commits)
    averager.shutdown()
    table.shutdown()
