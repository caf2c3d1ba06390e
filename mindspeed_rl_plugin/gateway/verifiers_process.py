"""The start of an agents' process whose agent is an environment of verifiers, in the interpreter that has verifiers.

What else the gateway needs there, uvicorn and Starlette, comes with verifiers; so this module finds verifiers first.
"""

from __future__ import annotations

import types

from mindspeed_rl_plugin.gateway.agent_messages import CLEAN_UP_SECONDS, AgentSetup
from mindspeed_rl_plugin.gateway.verifiers_load import load
from mindspeed_rl_plugin.workers.child import Parent
from mindspeed_rl_plugin.workers.keeper import keep


def main(connection: int, lifeline: int) -> None:
    """As `agent_process.main`; `agent` of the setup is what `verifiers_load.load` takes."""
    keep(connection, lifeline, CLEAN_UP_SECONDS)
    parent = Parent(connection, None)
    setup: AgentSetup = parent.receive()
    loaded = parent.load("", load, setup.agent)
    parent.load("", _agents).run(parent, setup, loaded)


def _agents() -> types.ModuleType:
    from mindspeed_rl_plugin.gateway import verifiers_agents

    return verifiers_agents
