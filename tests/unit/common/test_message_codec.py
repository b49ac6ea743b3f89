"""Invariant: only the frame that the other side would send next is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.message_codec import (
    MAX_BODY_BYTES,
    MessageCodec,
    MessageError,
    hello_key,
    session_key,
)

KEY = hello_key(b"a secret")


def speak(message: dict[str, object]) -> bytes:
    return MessageCodec(KEY, "node").pack(message)


@given(st.lists(st.text(max_size=40), max_size=5), st.integers(1, 40))
def test_messages_arrive_in_order_however_the_stream_is_cut(texts: list[str], piece: int) -> None:
    node, head = MessageCodec(KEY, "node"), MessageCodec(KEY, "head")
    messages = [{"kind": "said", text: number} for number, text in enumerate(texts)]
    stream = b"".join(node.pack(message) for message in messages)
    received = []
    for start in range(0, len(stream), piece):
        head.feed(stream[start : start + piece])
        while (message := head.unpack()) is not None:
            received.append(message)
    assert received == messages


@pytest.mark.parametrize("position", [4, 20, 36, 40])
def test_a_changed_byte_is_refused(position: int) -> None:
    frame = bytearray(speak({"kind": "hello"}))
    frame[position] ^= 1
    head = MessageCodec(KEY, "head")
    head.feed(bytes(frame))
    with pytest.raises(MessageError, match="not authentic"):
        head.unpack()


def test_a_repeated_frame_is_refused() -> None:
    frame = speak({"kind": "lost"})
    head = MessageCodec(KEY, "head")
    head.feed(frame + frame)
    assert head.unpack() == {"kind": "lost"}
    with pytest.raises(MessageError, match="repeated"):
        head.unpack()


def test_reordered_frames_are_refused() -> None:
    node, head = MessageCodec(KEY, "node"), MessageCodec(KEY, "head")
    first, second = node.pack({"n": 1}), node.pack({"n": 2})
    head.feed(second + first)
    with pytest.raises(MessageError):
        head.unpack()


def test_a_frame_sent_back_to_its_speaker_is_refused() -> None:
    node = MessageCodec(KEY, "node")
    node.feed(node.pack({"kind": "hello"}))
    with pytest.raises(MessageError):
        node.unpack()


def test_another_secret_is_refused() -> None:
    head = MessageCodec(hello_key(b"another secret"), "head")
    head.feed(speak({"kind": "hello"}))
    with pytest.raises(MessageError):
        head.unpack()


def test_a_frame_of_another_session_is_refused() -> None:
    """A recorded session cannot be replayed, because the head's nonce is part of the key."""
    node, head = (
        MessageCodec(session_key(b"s", "n1", "h1"), "node"),
        MessageCodec(session_key(b"s", "n1", "h2"), "head"),
    )
    head.feed(node.pack({"kind": "joined"}))
    with pytest.raises(MessageError):
        head.unpack()


def test_an_oversized_frame_is_refused_before_it_has_arrived() -> None:
    head = MessageCodec(KEY, "head")
    head.feed((MAX_BODY_BYTES + 1).to_bytes(4, "big") + bytes(32))
    with pytest.raises(MessageError, match=str(MAX_BODY_BYTES)):
        head.unpack()


def test_an_oversized_message_is_not_packed() -> None:
    with pytest.raises(ValueError, match="at most"):
        speak({"text": "x" * MAX_BODY_BYTES})
