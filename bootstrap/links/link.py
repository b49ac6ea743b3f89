"""Message link between two agents, with failure detection.

Input: a connection. Output: a ``Link``. Three failures are distinguished, because they mean
different states of the node: connection closed (the agent exited, its machine is up); no
acknowledgement (the machine or the route to it is down); no heartbeat (the agent hangs or is
stopped, and its kernel still acknowledges).
"""

from __future__ import annotations

import asyncio
import ipaddress
from contextlib import suppress

from common.addresses import keep_alive
from common.message_codec import Message, MessageCodec, MessageError

BEAT_S = 2.0
SILENCE_S = 10.0
_ALIVE: Message = {"kind": "alive"}


class LinkLost(Exception):
    """The other agent is gone, or sent an invalid message.

    ``node_is_bad``: the machine did not answer, so a restart there would fail again.
    """

    def __init__(self, cause: str, *, node_is_bad: bool = False) -> None:
        super().__init__(cause)
        self.node_is_bad = node_is_bad


class Link:
    """A message stream to another agent."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, codec: MessageCodec
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._beating: asyncio.Task[None] | None = None
        self.codec = codec
        # A node that loses power does not close its connections: detect it after about 8 s.
        keep_alive(writer.get_extra_info("socket"), idle_s=2, interval_s=2)

    @property
    def local_ip(self) -> str:
        return plain_ip(self._writer.get_extra_info("sockname")[0])

    @property
    def local_port(self) -> int:
        return int(self._writer.get_extra_info("sockname")[1])

    @property
    def peer_ip(self) -> str:
        return plain_ip(self._writer.get_extra_info("peername")[0])

    @property
    def peer_port(self) -> int:
        return int(self._writer.get_extra_info("peername")[1])

    def start_beating(self) -> None:
        """Send a heartbeat every ``BEAT_S`` and expect a message every ``SILENCE_S``."""
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def send(self, message: Message) -> None:
        """Send a message. Raises LinkLost if the other side is gone."""
        try:
            self._writer.write(self.codec.pack(message))
            await self._writer.drain()
        except OSError as error:
            raise _lost_by(error) from error

    async def receive(self) -> Message:
        """Return the next message that is not a heartbeat. Raises LinkLost if the link ends."""
        while True:
            message = await self._receive_any()
            if message["kind"] == "refused":
                raise LinkLost(f"the head rejected this node: {message['cause']}")
            if message != _ALIVE:
                return message

    def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        self._writer.close()

    async def _receive_any(self) -> Message:
        try:
            while (message := self.codec.unpack()) is None:
                data = await self._read()
                if not data:
                    raise LinkLost("the connection was closed: its agent ended or was killed")
                self.codec.feed(data)
        except TimeoutError as error:
            if error.errno is not None:  # the kernel's ETIMEDOUT is a TimeoutError as well
                raise _lost_by(error) from error
            cause = f"it has been silent for {SILENCE_S:.0f} s: its agent hangs or is stopped"
            raise LinkLost(cause, node_is_bad=True) from error
        except OSError as error:
            raise _lost_by(error) from error
        except MessageError as error:
            raise LinkLost(str(error)) from error
        return message

    async def _read(self) -> bytes:
        """Read the next bytes.

        Raises TimeoutError after a silence, unless this process itself was stalled.
        """
        loop = asyncio.get_running_loop()
        while True:
            asked_at = loop.time()
            try:
                async with asyncio.timeout(SILENCE_S if self._beating else None):
                    return await self._reader.read(65_536)
            except TimeoutError as error:
                # Longer than the timeout: this process was stalled, and heartbeats may be unread.
                was_stalled = loop.time() - asked_at >= SILENCE_S + BEAT_S
                if error.errno is not None or not was_stalled:
                    raise

    async def _beat(self) -> None:
        with suppress(LinkLost):  # the receiver reports the loss
            while True:
                await self.send(_ALIVE)
                await asyncio.sleep(BEAT_S)


def plain_ip(ip: str) -> str:
    """Normalise an address: drop the scope ``%eth0``, and map ``::ffff:10.0.0.1`` to 10.0.0.1."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def _lost_by(error: OSError) -> LinkLost:
    if isinstance(error, ConnectionError):
        return LinkLost(f"the connection broke ({error}): its agent ended or was killed")
    return LinkLost(f"its machine does not answer ({error})", node_is_bad=True)
