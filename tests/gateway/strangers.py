"""Agents that nobody here wrote, with one tool, as a command for --rl-agent.

    python strangers.py pydantic-chat | pydantic-responses | pydantic-messages | smolagents

The row may name another one. The reward is 1 if the answer is the row's.
"""

import json
import os
import sys

SYSTEM = "Say what is in the box."


def look(text: str) -> str:
    """Look into a box.

    Args:
        text: Name of the box.
    """
    return ROW.get("boxes", {}).get(text, text)


def pydantic_agent(dialect: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
    agent = Agent(models[dialect]("policy"), system_prompt=SYSTEM, tools=[look])
    return agent.run_sync(ROW["prompt"]).output


def smol_agent() -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    prompts = {
        "system_prompt": SYSTEM,
        "planning": dict.fromkeys(("initial_plan", "update_plan_pre_messages", "update_plan_post_messages"), ""),
        "managed_agent": {"task": "", "report": ""},
        "final_answer": {"pre_messages": SYSTEM, "post_messages": "Answer."},
    }
    agent = ToolCallingAgent([tool(look)], OpenAIModel("policy"), prompts, max_steps=4, verbosity_level=0)
    return agent.run(ROW["prompt"])


if __name__ == "__main__":
    ROW = json.load(sys.stdin)
    name, _, dialect = ROW.get("agent", sys.argv[1]).partition("-")
    answer = pydantic_agent(dialect) if name == "pydantic" else smol_agent()
    os.write(int(os.environ["MINDSPEED_RL_REWARD_FD"]), b"1" if answer == ROW["answer"] else b"0")
    os._exit(0)  # the usual end of so many modules takes longer than the episode
