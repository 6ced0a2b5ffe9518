"""Flower: a server with FedAvg, and clients that train the MLP between two of its rounds, in fp32.

Server and clients are the library's own, started as functions: `start_server` and `start_client`, which speak to each
other without the further processes of a Flower deployment.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

import numpy as np
import torch

from benchmarks.peers.orders import Orders
from benchmarks.peers.plan import BATCH_SIZE, Plan
from benchmarks.peers.processes import write_address
from benchmarks.peers.training import Loop

ROUNDS_MAX: Final = 10_000
"""More than any comparison lets it make."""


def serve(plan: Plan, _: Orders) -> None:
    """The server; it samples both clients each round and evaluates nothing."""
    from flwr.server import ServerConfig, start_server
    from flwr.server.strategy import FedAvg

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    write_address(plan, address)
    strategy = FedAvg(fraction_evaluate=0.0, min_fit_clients=2, min_available_clients=2)
    start_server(server_address=address, config=ServerConfig(num_rounds=ROUNDS_MAX), strategy=strategy)


def learn(plan: Plan, orders: Orders) -> None:
    """One client. What lies between the end of its training and the next is what Flower adds."""
    from flwr.client import NumPyClient, start_client

    loop = Loop(plan)

    class Client(NumPyClient):  # type: ignore[misc, unused-ignore] # Any where the library is not installed
        def get_parameters(self, config: object) -> list[Any]:
            return [parameter.detach().numpy().copy() for parameter in loop.model.parameters()]

        def fit(self, parameters: list[Any], config: object) -> tuple[list[Any], int, dict[str, float]]:
            with torch.no_grad():
                for parameter, given in zip(loop.model.parameters(), parameters, strict=True):
                    parameter.copy_(torch.from_numpy(np.asarray(given)))
            loop.added.end()
            for _ in range(plan.interval):
                loop.inner_step()
                loop.write(commits=loop.num_steps // plan.interval)
            if loop.is_over:
                os._exit(0)  # a client has no way to end before its server does
            loop.added.begin()
            return self.get_parameters({}), BATCH_SIZE * plan.interval, {}

    loop.wait_for_start(orders)
    loop.added.begin()
    start_client(server_address=plan.address, client=Client().to_client())
