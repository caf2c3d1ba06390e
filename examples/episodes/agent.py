"""An agent with the `openai` package: it asks the model, makes the calls that the model asks for, and asks again."""

import json

import openai

HTTP = openai.DefaultAsyncHttpxClient()  # for all episodes: it takes long to make one
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "b": {"type": "integer", "description": "The second number."},
            },
            "required": ["a", "b"],
        },
    },
}


async def play(row: dict, base_url: str, api_key: str) -> None:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[MULTIPLY])
        turn = answer.choices[0].message
        messages.append(turn.model_dump(exclude_none=True))
        if not turn.tool_calls:
            return
        for call in turn.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result(call.function.arguments)})


def result(arguments: str) -> str:
    given = json.loads(arguments)
    try:
        return str(given["a"] * given["b"])
    except (KeyError, TypeError):
        return "error: give the numbers a and b"
