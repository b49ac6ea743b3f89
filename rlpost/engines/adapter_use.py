"""SGLang's tokenizer manager for an engine that serves the adapter of a policy.

Input: SGLang's server, whose registry holds at most one adapter: that of the current version. Output:
a subclass of ``TokenizerManager`` in which every request uses this adapter, and in which an adapter
can be unloaded once no request uses it. The module imports SGLang, so it is imported only in server
processes, and only by engines that take adapters.

SGLang 0.5.21 chooses the adapter after a pause has ended, so a request that waited for new weights
gets the adapter of the new version, whichever was current when it was sent.

SGLang counts the requests of an adapter, and an unload waits until the count is zero. The count is not
decremented for a request that is aborted in the waiting queue (``_handle_abort_req``) or fails before
it is dispatched (``_release_req_states_on_failure``), so the unload would never return. Here the
requests themselves are counted: ``rid_to_state`` drops each of them, however it ends. This module
becomes unnecessary when SGLang releases the adapter in these two cases too, and when a server has a
default adapter.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
from sglang.srt.managers.tokenizer_manager import TokenizerManager

POLL_S = 0.02


def make_manager(server_args: object, port_args: object) -> Any:
    """Return the manager and its templates, as ``launch_server`` expects them."""
    return init_tokenizer_manager(server_args, port_args, TokenizerManagerClass=AdapterUser)


class AdapterRegistry(LoRARegistry):  # type: ignore[misc]
    """The registry of an engine; ``requests`` are those in flight by their ids."""

    def __init__(self, requests: dict[str, Any]) -> None:
        """Start without an adapter."""
        super().__init__()
        self._requests = requests

    @property
    def current(self) -> LoRARef | None:
        """The adapter that was loaded last; None before the first."""
        return next(reversed(self._registry.values()), None)

    async def release(self, lora_id: str | list[str]) -> None:
        """Do nothing: ``wait_for_unload`` checks the requests themselves."""

    async def wait_for_unload(self, lora_id: str) -> None:
        """Return when no request in flight uses the adapter."""
        while any(state.obj.lora_id == lora_id for state in self._requests.values()):
            await asyncio.sleep(POLL_S)
        self._counters.pop(lora_id, None)


class AdapterUser(TokenizerManager):  # type: ignore[misc]
    """Gives every request the current adapter."""

    lora_registry: AdapterRegistry

    def init_lora(self) -> None:
        """Replace SGLang's registry by one that checks the requests themselves."""
        super().init_lora()
        self.lora_registry = AdapterRegistry(self.rid_to_state)

    async def _validate_and_resolve_lora(self, obj: Any) -> None:
        current = self.lora_registry.current
        if obj.lora_path or current is None:
            await super()._validate_and_resolve_lora(obj)
            return
        # No await between choosing the adapter and recording it: an unload must see this request.
        if obj.is_single:
            obj.lora_path, obj.lora_id = current.lora_name, current.lora_id
            return
        obj.lora_path = [current.lora_name] * len(obj.rid)
        obj.lora_id = [current.lora_id] * len(obj.rid)
        for one in obj.__dict__.get("_sub_obj_cache", {}).values():
            one.lora_path, one.lora_id = current.lora_name, current.lora_id
