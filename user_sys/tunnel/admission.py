"""What a peer may do, by its key and its role: open a session, send a message, write in a name."""

from __future__ import annotations

from user_sys.errors import WireError
from user_sys.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION, Hello
from user_sys.tunnel.keys import AllowedKey, Role
from user_sys.tunnel.session import Peer, Session
from user_sys.tunnel.wire import ALLOWED, SESSION_BYTES, AnyMessage, Channel


def objection(
    routing_id: bytes, channel: Channel, session: Session | None, hello: Hello, entry: AllowedKey | None
) -> str:
    """Why a Hello opens nothing; empty where it does."""
    oldest = hello.oldest or hello.protocol
    if hello.protocol < OLDEST_PROTOCOL or oldest > PROTOCOL_VERSION:
        return other_version(str(hello.protocol) if oldest >= hello.protocol else f"{oldest} to {hello.protocol}")
    if entry is None:
        return "this key is not allowed"
    if not entry.may_be(hello.name, hello.role):
        return f"this key belongs to the {entry.role} {entry.name!r}, not to the {hello.role} {hello.name[:80]!r}"
    if len(routing_id) != 1 + SESSION_BYTES or (session is None) != (channel is Channel.CONTROL):
        return "this Hello opens no session"
    if session is not None and channel in session.greeted:
        return "this channel was opened before"
    return ""


def require_allowed(peer: Peer, message: AnyMessage) -> None:
    """Raises WireError unless `peer` may send `message`: its role allows the type, its key the name."""
    if not isinstance(message, ALLOWED[peer.role]):
        raise WireError(f"a {peer.role} may not send {type(message).__name__}")
    claimed = _claimed_name(peer.role, message)
    if claimed is not None and claimed != peer.name:
        raise WireError(f"{peer.name} wrote in the name of {claimed[:80]!r}")


def other_version(theirs: str) -> str:
    ours = str(PROTOCOL_VERSION) if OLDEST_PROTOCOL == PROTOCOL_VERSION else f"{OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
    return f"the gateway speaks protocol version {ours}, this peer {theirs}; install the same release"


def _claimed_name(role: Role, message: AnyMessage) -> str | None:
    """Whose name a message is written in, where that must be the sender's own."""
    if role == "console":
        return None
    return getattr(message, "robot", getattr(message, "node", None))
