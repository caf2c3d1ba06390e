"""`--rl-environment openenv:URL`: a session of an OpenEnv server for each episode, as a class with `reset` and `step`.

Implements the protocol of the client in openenv 0.10: JSON over a WebSocket at /ws, schemas at /schema. The package
itself is not imported, since it requires another version of huggingface_hub and many packages.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from mindspeed_rl_plugin.config.episode_flags import OPENENV

WAIT = 10.0  # seconds for a server to accept a connection, and to send its schemas
MAX_MESSAGE_BYTES = 1 << 26  # bytes of a message
# Titles of the schemas of actions that are calls of tools.
TOOLS = ("Action", "CallToolAction", "ListToolsAction")
CALL = {
    "type": "object",
    "properties": {
        "type": {"const": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["type", "tool_name", "arguments"],
}


class OpenEnv:
    """One episode. A turn of the model is an action: a JSON object, maybe in a code fence; if actions have one required
    field, its value is enough. A turn that is no valid action gets an error as its observation."""

    url = ""

    def __init__(self) -> None:
        from websockets.sync.client import connect

        self._schema = schema(self.url)
        self._socket = connect(f"ws{self.url.removeprefix('http')}/ws", open_timeout=WAIT, max_size=MAX_MESSAGE_BYTES)

    def reset(self, seed: int, reset: Mapping[str, Any] | None = None) -> str:
        """reset: this field of a data row has further arguments for the server's reset."""
        if self._schema.get("title") in TOOLS:
            tools = self._ask("step", {"type": "list_tools"})["observation"]["tools"]
            self._schema = {**CALL, "available_tools": tools}
        text = _text(self._ask("reset", {"seed": seed, **(reset or {})})["observation"])
        if len(self._schema.get("required", ())) == 1:
            return text
        return f"{text}\n\nAnswer with a JSON object of this schema: {json.dumps(self._schema, ensure_ascii=False)}"

    def step(self, text: str) -> tuple[str, float, bool]:
        """Observation, reward, and whether the episode is over."""
        try:
            result = self._ask("step", action_of(text, self._schema))
        except ActionError as error:
            return f"error: {error}", 0.0, False
        return _text(result["observation"]), float(result["reward"] or 0.0), bool(result["done"])

    def close(self) -> None:
        self._send({"type": "close"})
        self._socket.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Raises ActionError for an action that the server refuses, RuntimeError for other errors."""
        self._send({"type": kind, "data": data})
        answer = json.loads(self._socket.recv())
        if answer["type"] != "error":
            return answer["data"]
        code, message = answer["data"].get("code"), answer["data"].get("message")
        if code == "VALIDATION_ERROR" and kind == "step":
            wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in answer["data"].get("errors") or ())
            raise ActionError(f"the action is not valid: {'; '.join(wrong) or message}")
        if code == "CAPACITY_REACHED":
            message = f"{message}; raise max_concurrent_envs of the server: each running episode has a session"
        raise RuntimeError(f"{self.url} answered {kind} with {code}: {message}")

    def _send(self, message: Mapping[str, Any]) -> None:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # `_ask` reads why a server has refused a session
            self._socket.send(json.dumps(message))


class ActionError(ValueError):
    """The model's turn is not a valid action."""


def environment_at(url: str) -> type[OpenEnv]:
    """The class for the server at a URL, with or without `openenv:` before it. Raises ValueError for an invalid URL."""
    url = url.removeprefix(OPENENV).rstrip("/")
    if not re.match("https?://.", url):
        raise ValueError(f"--rl-environment {OPENENV}{url}: give the server's address as http://HOST:PORT")
    return type("OpenEnv", (OpenEnv,), {"url": url})


@functools.cache
def schema(url: str) -> dict[str, Any]:
    """JSON schema of a server's actions, without `metadata`, which every action has. Raises ValueError if no server
    answers."""
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=WAIT) as answer:
            found = dict(json.load(answer)["action"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{url} does not answer as an OpenEnv server ({url}/schema: {error}); start it, or correct the URL of "
            "--rl-environment"
        ) from error
    found["properties"] = {name: value for name, value in found.get("properties", {}).items() if name != "metadata"}
    return found


def action_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The action in a turn of the model. Raises ActionError if there is none."""
    text = text.strip()
    if fenced := re.fullmatch("```[a-z]*\n(.*?)\n?```", text, re.DOTALL):
        text = fenced[1].strip()
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(value, dict):
        return value
    if len(needed := schema.get("required", ())) != 1:
        raise ActionError(f"answer with a JSON object of this schema: {json.dumps(schema, ensure_ascii=False)}")
    takes_text = schema["properties"].get(needed[0], {}).get("type") == "string"
    return {needed[0]: text if takes_text else value}


def _text(observation: Any) -> str:
    """An observation as text: without `metadata`; its only field if this is a text, else all fields as JSON."""
    if isinstance(observation, Mapping):
        observation = {name: value for name, value in observation.items() if name != "metadata"}
        if len(observation) == 1 and isinstance(only := next(iter(observation.values())), str):
            return only
    return json.dumps(observation, ensure_ascii=False)
