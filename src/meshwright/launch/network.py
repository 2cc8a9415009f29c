"""Addresses and interfaces of this machine: which one ranks of other machines should be reached through.

IPv4 only: gloo and NCCL take an interface's name, and every cluster that names hosts has IPv4 between them. Imports no
torch.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct

from meshwright.environment import LOOPBACK, LaunchedRank, interface_is_set, meeting_address, use_interface
from meshwright.errors import BadInput

_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface (man 7 netdevice)."""
_NAME_BYTES = 15
"""The longest name of an interface."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`."""
    found = re.fullmatch(r"([\w.-]+):(\d{1,5})", text)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise BadInput(f"--rendezvous must be HOST:PORT, such as node0:29500, not {text!r}.")
    return found[1], int(found[2])


def resolve(host: str) -> str:
    """The IPv4 address of a host."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise BadInput(f"The host {host!r} has no IPv4 address here: {error.strerror or error}.") from None


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def interfaces() -> dict[str, str]:
    """The interfaces that have an IPv4 address, with it."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                found[name] = socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue  # it has none
    return found


def interface_towards(address: str) -> tuple[str, str] | None:
    """The interface, with its address, through which this machine reaches `address`; None if it has no route.

    An address of this machine is reached through the interface that has it, although packets to it take loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))  # sends nothing: a datagram socket only looks up the route
        except OSError:
            return None
        own = asking.getsockname()[0]
    named = {value: name for name, value in interfaces().items()}
    return (named[own], own) if own in named else None


def choose_interface(asked: str | None, host: str) -> tuple[str, str]:
    """The interface for traffic between nodes, with its address: the one asked for, or the one that leads to `host`."""
    if asked is not None:
        return asked, address_of(asked)
    address = resolve(host)
    if is_loopback(address):
        raise BadInput(
            f"{host!r} is {address} here, which other nodes cannot reach; "
            "give --rendezvous an address that all nodes reach, or name the network with --interface."
        )
    found = interface_towards(address)
    if found is None:
        raise BadInput(f"This machine has no route to {host!r} ({address}); name the network with --interface.")
    return found


def bind_launched(place: LaunchedRank, asked: str | None = None) -> None:
    """Bind gloo and NCCL to the interface asked for, or to the one that leads to the ranks' meeting point.

    An interface that the user set for gloo or NCCL stays. Ranks of one node stay on loopback. Where the meeting point
    is `localhost` for some ranks of several nodes (older Kubernetes operators), gloo and NCCL choose.
    """
    if asked is not None:
        address_of(asked)
        use_interface(asked)
    elif not interface_is_set():
        if place.ranks == place.local_ranks:
            use_interface(LOOPBACK)
        else:
            host = meeting_address()
            address = None if host is None else resolve(host)
            found = None if address is None or is_loopback(address) else interface_towards(address)
            if found is not None:
                use_interface(found[0])


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; refuses a name that this machine does not have."""
    known = interfaces()
    if interface not in known:
        raise BadInput(f"There is no interface {interface!r} with an IPv4 address here, only {', '.join(known)}.")
    return known[interface]
