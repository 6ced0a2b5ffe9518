"""Who is connected: sessions by token, with where to answer them. Pure; nothing here is durable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from isles.proto.messages import Channel, Hello, Role


class Owner(NamedTuple):
    """A process, whichever of its incarnations."""

    role: Role
    id: str
    key_name: str

    def __str__(self) -> str:
        return f"{self.role} {self.id}"


@dataclass
class Session:
    """One incarnation of one process that said HELLO."""

    token: str
    role: Role
    id: str
    incarnation: str
    region: str
    heard_at: float
    key_name: str = ""
    """Of the keys that it is for; empty = a broker without keys."""
    public: str = ""
    """The key with which it was last used; through a relay, that of the proof in its HELLO."""
    via: str = ""
    """The relay through which it was opened; empty = none."""
    rejoin: str = ""
    """What its WELCOME tells, as long as that may have been lost; empty if its id was not given."""
    is_given: bool = False
    """Whether its HELLO had no id."""
    connections: dict[Channel, bytes] = field(default_factory=dict)
    """Where it was last heard on each channel, other than through a relay."""
    has_left: bool = False

    @property
    def owner(self) -> Owner:
        """The same for all incarnations of a process."""
        return Owner(self.role, self.id, self.key_name)


@dataclass
class Sessions:
    """All open sessions; at most one per incarnation, so that a repeated HELLO gets the answer it got before."""

    draw_token: Callable[[], str]
    num_max: int
    num_per_key_max: int
    _by_token: dict[str, Session] = field(default_factory=dict)
    _by_identity: dict[tuple[str, str, str], Session] = field(default_factory=dict)

    def open(
        self, hello: Hello, connection: bytes, now: float, *, key_name: str = "", public: str = "", via: str = ""
    ) -> tuple[Session, bool] | None:
        """The session of who says HELLO, and whether it is new or had ended; None if there are too many."""
        identity = (hello.role, hello.id, hello.incarnation)
        session = self._by_identity.get(identity)
        is_new = session is None or session.has_left
        if session is None:
            if self.is_full(key_name):
                return None
            token = self.draw_token()
            session = Session(token, hello.role, hello.id, hello.incarnation, hello.region, now, key_name)
            self._by_token[token] = self._by_identity[identity] = session
        session.heard_at, session.has_left, session.public, session.via = now, False, public, via
        session.connections = {Channel.CONTROL: connection}
        return session, is_new

    def adopt(
        self, token: str, hello: Hello, connection: bytes, now: float, *, key_name: str = "", public: str = ""
    ) -> Session:
        """The session that another broker opened for who said HELLO; it takes the place of that incarnation's last."""
        identity = (hello.role, hello.id, hello.incarnation)
        earlier = self._by_identity.get(identity)
        if earlier is not None:
            self.end(earlier)
        session = Session(token, hello.role, hello.id, hello.incarnation, hello.region, now, key_name, public)
        session.connections = {Channel.CONTROL: connection}
        self._by_token[token] = self._by_identity[identity] = session
        return session

    def is_full(self, key_name: str) -> bool:
        """Whether no more sessions may be opened by keys of this name."""
        if len(self._by_token) >= self.num_max:
            return True
        if not key_name:
            return False
        return sum(session.key_name == key_name for session in self._by_token.values()) >= self.num_per_key_max

    def hear(
        self,
        session: Session,
        channel: Channel,
        connection: bytes,
        now: float,
        public: str = "",
        *,
        is_relayed: bool = False,
    ) -> None:
        """Something was said in a session, whichever connection it came on; through a relay that tells no more."""
        session.heard_at, session.rejoin = now, ""
        if not is_relayed:
            session.public, session.via = public, ""
            session.connections[channel] = connection

    def relay_at(self, connection: bytes) -> str:
        """The id of the relay that was last heard on a control connection; empty if it is nobody's, or no relay's."""
        found = (
            session.id
            for session in self._by_token.values()
            if session.role == "relay" and session.connections.get(Channel.CONTROL) == connection
        )
        return next(found, "")

    def get(self, token: str) -> Session | None:
        return self._by_token.get(token)

    def find(self, role: Role, name: str, incarnation: str) -> Session | None:
        """The session of one incarnation of a process."""
        return self._by_identity.get((role, name, incarnation))

    def find_given(self, key_name: str, incarnation: str) -> Session | None:
        """The session of an incarnation that was given its id."""
        return next(
            (
                session
                for session in self._by_token.values()
                if session.is_given and (session.key_name, session.incarnation) == (key_name, incarnation)
            ),
            None,
        )

    def end(self, session: Session) -> None:
        """Forgets a session."""
        del self._by_token[session.token]
        del self._by_identity[session.role, session.id, session.incarnation]

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_token.values()))

    def forget_idle(self, heard_before: float) -> list[Session]:
        """Ends and returns the sessions that were last heard before a time."""
        idle = [session for session in self._by_token.values() if session.heard_at < heard_before]
        for session in idle:
            self.end(session)
        return idle
