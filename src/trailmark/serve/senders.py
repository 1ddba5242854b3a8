"""Who may send a request: programs, and pages of this server's own address; not a web page that a browser has open.

A page can make a browser send requests to any address. It cannot set the header Host (a name that it points to this
machine would stand there: DNS rebinding), or Origin, or without asking first the content type of JSON. So these three
are checked. /health is open to all: it tells and does nothing.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request

from trailmark.serve.errors import ApiError

ANY = "*"
JSON = re.compile(r"application/(?:[a-z0-9.!#$&^_+\-]+\+)?json", re.ASCII)


class Senders:
    """`hosts` are names beside those of this machine, under which clients may ask; "*" is every name."""

    def __init__(self, hosts: Sequence[str] = ()):
        self.any = ANY in hosts
        self.names = {"localhost", socket.gethostname().lower(), *(h.lower().rstrip(".") for h in hosts)} - {""}

    def check(self, request: Request) -> None:
        host, origin = request.headers.get("host"), request.headers.get("origin")
        if not self.any:
            if host is not None and not self.known(name := host_name(host)) and not is_ip(name):
                raise ApiError(403, self.refusal("Host", host), code="host_not_allowed")
            if origin is not None and not self.may_come_from(origin, host):
                raise ApiError(403, self.refusal("Origin", origin), code="origin_not_allowed")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and not JSON.fullmatch(kind):
            raise ApiError(
                415, "the body must be JSON: send the header 'Content-Type: application/json'.", code="not_json"
            )

    def known(self, name: str) -> bool:
        return name in self.names or name.endswith(".localhost")

    def may_come_from(self, origin: str, host: str | None) -> bool:
        """Whether a page is of this server or this machine."""
        _, found, address = origin.partition("://")
        name = host_name(address)
        loopback = is_ip(name) and ipaddress.ip_address(name).is_loopback
        return bool(found) and (self.known(name) or loopback or address == host)

    def refusal(self, header: str, given: str) -> str:
        return (
            f"{header} '{given[:100]}' is not a name of this server: start it with --allow-host NAME to accept "
            "clients that use this name."
        )


def host_name(address: str) -> str:
    """The name or number in `name:port`; empty if it is neither."""
    if not re.fullmatch(r"[A-Za-z0-9._\-]+(:\d*)?|\[[0-9A-Fa-f:.]+\](:\d*)?", address):
        return ""
    return (urlsplit(f"//{address}").hostname or "").rstrip(".")


def is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
