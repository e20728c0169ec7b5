"""What a machine wants to be done, collected in order."""

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.effects import ConnectionId, Effect, Ignored, Send, Write


class Outbox:
    """Effects that nobody has carried out yet."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    @property
    def is_empty(self) -> bool:
        return not self._effects

    def do(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    def send(self, connection: ConnectionId, message: messages.ToNode) -> None:
        self.do(Send(connection=connection, message=message))

    def write(self, record: events.Record) -> None:
        self.do(Write(record=record))

    def ignore(self, reason: str) -> None:
        self.do(Ignored(reason=reason))

    def take(self) -> tuple[Effect, ...]:
        """Return all effects, and forget them."""
        effects, self._effects = tuple(self._effects), []
        return effects
