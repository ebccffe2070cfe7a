"""Addresses of hosts and network interfaces, checked before a process waits for them."""

import contextlib
import ipaddress
import socket
import struct

_FLAGS, _ADDRESS, _UP = 0x8913, 0x8915, 1  # SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP of Linux


def split(address: str) -> tuple[str, int]:
    """Splits `host:port`, or `[address]:port` with an IPv6 address.

    Raises:
      ValueError: If host or port is missing, or the port is outside [1, 65535].
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not host or (":" in host and not bracketed) or not port.isdecimal():
        raise ValueError(f"coordinator {address!r} needs a host and a port; write HOST:29411.")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"coordinator {address!r}: the port must be in [1, 65535].")
    return host, int(port)


def join(host: str, port: int) -> str:
    """The inverse of `split`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> str:
    """Looks up the numeric address of a host.

    Raises:
      ValueError: If the name does not resolve, or means all addresses of a host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"the coordinator's name {host!r} does not resolve on {socket.gethostname()} "
            f"({error.strerror}); write an address that every host knows as --coordinator."
        ) from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_unspecified:
        raise ValueError(
            f"coordinator {host!r} means every address of a host; write the one address on which "
            f"process 0 shall listen: {listing()}."
        )
    return address


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that is up and has one; Linux only."""
    import fcntl  # Windows lacks it, and one process does not need it

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):
                (flags,) = struct.unpack("16xh", fcntl.ioctl(probe, _FLAGS, request)[:18])
                if flags & _UP:
                    answer = fcntl.ioctl(probe, _ADDRESS, request)
                    found[name] = socket.inet_ntoa(answer[20:24])
    return found


def listing() -> str:
    """The interfaces and their addresses, for a message."""
    return ", ".join(f"{name} {address}" for name, address in interfaces().items())


def require_interface(name: str) -> str:
    """Returns the IPv4 address of an interface.

    Raises:
      ValueError: If this host has no such interface, it is down, or it has no IPv4 address.
    """
    usable = interfaces()
    if name in usable:
        return usable[name]
    there = name in (other for _, other in socket.if_nameindex())
    what = "is down or has no IPv4 address" if there else "does not exist"
    raise ValueError(
        f"interface {name!r} {what} on {socket.gethostname()}; write --interface with one of: "
        f"{listing()}."
    )
