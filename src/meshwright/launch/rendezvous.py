"""Where the launchers of a run meet, and the store through which its ranks find one another.

Torch's handler keeps one store for ranks over restarts. A quick rank finds in it the addresses that slower peers had in
the attempt before, and fails to connect (pytorch issue 135712). Here ranks get a new store for every attempt. Each
store listens on one address only; torch's own listen on all interfaces.
"""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from meshwright.errors import BadInput, NodesMissing
from meshwright.launch.node_options import NodeOptions

LOOPBACK = "127.0.0.1"
LAST_CALL_S = 5.0
"""How long a run with enough nodes waits for more of them."""
KEEP_ALIVE_S, KEEP_ALIVE_MISSES = 2, 5
_STORE_LIMIT = timedelta(seconds=60)
RUN = "meshwright"


class LocalRendezvous(RendezvousHandler):
    """Rendezvous of the ranks of this machine alone."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.round = -1
        """Counts the attempts from 0."""

    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        store = listening_store(LOOPBACK)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of the agent's store."""
        return True

    def get_backend(self) -> str:
        return "meshwright"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other node can join, so nothing to do."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class NodeRendezvous(LocalRendezvous):
    """Rendezvous of the launchers of several nodes: torch's, with a new store for the ranks of every attempt.

    Nodes are numbered by their ranks. A node that is lost is given up after `KEEP_ALIVE_S * KEEP_ALIVE_MISSES` seconds.
    """

    def __init__(self, options: NodeOptions) -> None:
        super().__init__(RUN)
        self._options, self._waiting = options, 0
        self.store = meeting_store(options)
        """Lives as long as the launcher of node 0; for what launchers tell one another."""
        self._inner = DynamicRendezvousHandler.from_backend(
            RUN,
            self.store,
            C10dRendezvousBackend(self.store, RUN),
            options.fewest,
            options.most,
            local_addr=f"{options.rank:06d}",  # torch numbers nodes in the order of these
            timeout=RendezvousTimeout(join=timedelta(seconds=options.wait), last_call=timedelta(seconds=LAST_CALL_S)),
            keep_alive_interval=KEEP_ALIVE_S,
            keep_alive_max_attempt=KEEP_ALIVE_MISSES,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other nodes; raises `NodesMissing` if too few come, or if node 0 has ended the run."""
        try:
            return self._meet()
        except RendezvousClosedError:
            raise NodesMissing("The run has ended on the other nodes.") from None
        except RendezvousTimeoutError:
            wanted = self._options.fewest
            raise NodesMissing(
                f"Fewer than {wanted} nodes met at {self._options.host}:{self._options.port} "
                f"within {self._options.wait:g} s; start `train` on each node with the same --rendezvous."
            ) from None
        except (RendezvousError, DistNetworkError, DistStoreError) as error:
            raise NodesMissing(f"The meeting point on node 0 does not answer any more: {error}") from None

    def _meet(self) -> RendezvousInfo:
        self._waiting = 0
        met = self._inner.next_rendezvous()
        if met.rank == 0:
            ranks_store = listening_store(self._options.address)
            counted = self.store.add("rounds", 1) - 1
            met.store.set("meeting", json.dumps([counted, self._options.address, ranks_store.port]))
            self._ranks_store = ranks_store  # lives until the next attempt
        self.round, address, port = json.loads(met.store.get("meeting"))
        return RendezvousInfo(met.store, met.rank, met.world_size, RendezvousStoreInfo(address, port))

    @property
    def address(self) -> str:
        return self._options.address

    def num_nodes_waiting(self) -> int:
        """As last counted: the agent asks often, and must not wait for a store that is lost."""
        return self._waiting

    def count_waiting(self) -> None:
        self._waiting = self._inner.num_nodes_waiting()

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()

    def shutdown(self) -> bool:
        return bool(self._inner.shutdown())


def listening_store(address: str, port: int = 0) -> TCPStore:
    """A store that listens on one address; torch's would listen on all interfaces."""
    listener = socket.create_server((address, port))
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, master_listen_fd=listener.detach(), timeout=_STORE_LIMIT)


def meeting_store(options: NodeOptions) -> TCPStore:
    """The store where nodes meet: node 0 opens it, the others connect as soon as it is there."""
    where = f"{options.host}:{options.port}"
    if options.rank == 0:
        try:
            return listening_store(options.host, options.port)
        except OSError as error:
            raise BadInput(
                f"Node 0 cannot listen at {where}: {error.strerror}; --rendezvous must name a free port of node 0."
            ) from None
    deadline = time.monotonic() + options.wait
    while True:
        try:
            socket.create_connection((options.host, options.port), timeout=5.0).close()
            return TCPStore(options.host, options.port, is_master=False, timeout=_STORE_LIMIT)
        except (OSError, DistNetworkError, DistStoreError) as error:
            if time.monotonic() > deadline:
                raise NodesMissing(f"Node 0 did not answer at {where} within {options.wait:g} s: {error}.") from None
            time.sleep(0.5)
