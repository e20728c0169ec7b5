import msgspec
import pytest

from oobleck_jax.elastic import messages
from oobleck_jax.elastic.messages import decode_to_coordinator, decode_to_node, encode
from oobleck_jax.planning.plan import NodeId
from tests.elastic.plans import plan_of


def test_a_plan_travels_unchanged() -> None:
    begin = messages.Begin(
        generation=3,
        plan=plan_of((0, 2), (1,), spare=(4,)),
        members=(messages.Member(node=NodeId(0), link_address="127.0.0.1:1", cores=(0, 1), holds=(2, 3)),),
        fabric_address="127.0.0.1:2",
        step=17,
    )
    assert decode_to_node(encode(begin)) == begin


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"type":"Nonsense"}',
        b'{"type":"Heartbeat"}',
        b'{"type":"Heartbeat","node":"1"}',
        b'{"type":"Stop","reason":"a message of the other direction"}',
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_to_coordinator(data)


def test_a_directions_messages_are_not_the_others() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_to_node(encode(messages.Heartbeat(node=NodeId(0))))
