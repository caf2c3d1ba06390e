"""Agents that behave as users' may: loaded by the tests of the gateway from this file."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time

import anthropic
import httpx
import openai


def of(base_url, api_key, kind=openai.AsyncOpenAI):
    return kind(base_url=base_url, api_key=api_key, max_retries=0)


async def agent(row, base_url, api_key):
    """The one that the row names."""
    return await globals()[row["agent"]](row, base_url, api_key)


async def plays(row, base_url, api_key):
    """Makes the calls that the model asks for, one after the other, until it asks for none."""
    client, messages = of(base_url, api_key), [*row.get("before", ()), {"role": "user", "content": row["prompt"]}]
    while True:
        turn = (
            (await client.chat.completions.create(model="any", messages=messages, tools=row["tools"]))
            .choices[0]
            .message
        )
        messages.append(turn.model_dump(exclude_none=True))
        if not turn.tool_calls:
            return row.get("reward")
        for call in turn.tool_calls:
            text = json.loads(call.function.arguments)["text"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


HTTP = openai.DefaultAsyncHttpxClient()


async def talks(row, base_url, api_key):
    """Numbers its answers, until the job says that there are no more turns. Its reward is by what the model said."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    messages, said = [{"role": "user", "content": row["prompt"]}], ""
    for number in range(1, 9):
        try:
            answer = await client.chat.completions.create(model="any", messages=messages)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            break
        text = answer.choices[0].message.content
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"[{number}]"}]
    return sum(map(ord, said)) % 5 / 4


async def forks(row, base_url, api_key):
    """Two turns behind one at the same time, an edited history, two draws, and a title that is not trained."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)

    async def ask(messages, model="policy", n=1):
        answers = await client.chat.completions.create(model=model, messages=messages, n=n)
        return [choice.message.content for choice in answers.choices]

    opening = [{"role": "user", "content": row["prompt"]}]
    (first,) = await ask(opening)
    behind = [*opening, {"role": "assistant", "content": first}]
    asked = [[*behind, {"role": "user", "content": text}] for text in "ab"]
    await asyncio.gather(*map(ask, asked), ask(opening, "policy-untrained"))
    await ask([*opening, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "c"}], n=2)
    (last,) = await ask([*behind, {"role": "user", "content": "d"}])
    return sum(map(ord, first + last)) % 5 / 4


async def plays_streaming(row, base_url, api_key):
    """The same; answers come as events, and go back in other words: parts, and arguments without spaces."""
    client, messages = of(base_url, api_key), [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}]
    while True:
        text, calls = "", []
        stream = await client.chat.completions.create(model="any", messages=messages, tools=row["tools"], stream=True)
        async for chunk in stream:
            delta = chunk.choices[0].delta
            text += delta.content or ""
            calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        messages.append({"role": "assistant", "content": f" {text}\n", **({"tool_calls": calls} if calls else {})})
        if not calls:
            return row.get("reward")
        for call in calls:
            said = json.loads(call["function"]["arguments"])["text"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": said}]})


async def plays_messages(row, base_url, api_key, stream=False):
    """The same with Anthropic's client."""
    client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
    names, tools = {"name": "name", "description": "description", "parameters": "input_schema"}, []
    for tool in row["tools"]:
        tools.append({names[field]: value for field, value in tool["function"].items()})
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        given = {"model": "any", "max_tokens": 9999, "messages": messages, "tools": tools}
        if stream:
            async with client.messages.stream(**given) as events:
                turn = await events.get_final_message()
        else:
            turn = await client.messages.create(**given)
        messages.append({"role": "assistant", "content": [block.to_dict() for block in turn.content]})
        if turn.stop_reason != "tool_use":
            return row.get("reward")
        calls = [block for block in turn.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": c.input["text"]} for c in calls]
        messages.append({"role": "user", "content": results})


plays_messages_streaming = functools.partial(plays_messages, stream=True)


def waits(row, base_url, api_key):
    """No coroutine function."""
    client = of(base_url, api_key, openai.OpenAI)
    messages = [{"role": "user", "content": row["prompt"]}]
    turn = client.chat.completions.create(model="any", messages=messages, max_tokens=7, stop="!").choices[0]
    if row.get("does") == "exits":
        sys.exit("no key")
    return float(len(turn.message.content))


async def edits(row, base_url, api_key):
    client = of(base_url, api_key)
    ask, said = client.chat.completions.create, []
    messages = [{"role": "user", "content": row["prompt"]}]
    turn = (await ask(model="any", messages=messages)).choices[0].message.content
    for history in (
        [*messages, {"role": "assistant", "content": turn + "?"}, {"role": "user", "content": "and"}],
        [{"role": "user", "content": "other"}],
        [*messages, {"role": "assistant", "content": turn}],
    ):
        try:
            await ask(model="any", messages=history)
        except openai.BadRequestError as error:
            said.append(error.body["message"])
    return await tells(said, row)


async def tells(said, row):
    with open(row["out"], "a") as file:
        file.write("\n".join(said) + "\n")
    return 1.0


async def asks_for(row, base_url, api_key):
    """Requests with the fields of the row; what each gets."""
    said = []
    async with httpx.AsyncClient(timeout=60) as client:
        for headers, more in row["requests"]:
            body = {"messages": [{"role": "user", "content": "hi"}], **more}
            url = f"{base_url}/chat/completions"
            given = {"Authorization": f"Bearer {api_key}", **headers}
            answer = await client.post(url, json=body, headers=given)
            said.append(f"{answer.status_code} {answer.json().get('error', {}).get('message', 'ok')}")
    return await tells(said, row)


async def goes_away(row, base_url, api_key):
    """Sends a request twice, because the answer does not come in time; then another, whose answer it never reads."""
    body = {"messages": [{"role": "user", "content": row["prompt"]}], "stream": row["stream"]}
    url, key = f"{base_url}/chat/completions", {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=key, timeout=0.2) as hasty, httpx.AsyncClient(headers=key) as patient:

        async def leaves():
            try:
                answer = await hasty.post(url, json=body)
            except httpx.ReadTimeout:
                return
            raise AssertionError(f"the turn comes later: {answer.text}")

        await leaves()
        text = (await patient.post(url, json=body)).text
        turn = json.loads(text)["choices"][0]["message"]["content"] if not row["stream"] else streamed(text)
        body["messages"] += [{"role": "assistant", "content": turn}, {"role": "user", "content": "more"}]
        await leaves()
    await asyncio.sleep(row["stays"])
    return 1.0


def streamed(text):
    """The content of the events of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


async def forks_often(row, base_url, api_key):
    """A thousand conversations, as many at once as a client has connections. Its reward is how many were answered."""
    free = asyncio.Semaphore(100)
    async with httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {api_key}"}) as client:

        async def ask(number):
            body = {"messages": [{"role": "user", "content": str(number)}]}
            async with free:
                answer = (await client.post(f"{base_url}/chat/completions", json=body)).json()
            assert "choices" in answer or answer["error"]["code"] == "context_length_exceeded"
            return "choices" in answer

        return float(sum(await asyncio.gather(*map(ask, range(1000)))))


KEYS = {}


async def lies(row, base_url, api_key):
    """Asks twice with its own secret, once with the name of another episode."""
    KEYS[api_key] = secret = api_key.partition("-")[2]
    while len(KEYS) < 2:
        await asyncio.sleep(0.01)
    names, answers = [key.partition("-")[0] for key in KEYS], []
    async with httpx.AsyncClient(timeout=60) as client:
        for name in names:
            key, body = {"X-Api-Key": f"{name}-{secret}"}, {"messages": [{"role": "user", "content": row["prompt"]}]}
            answers.append(await client.post(f"{base_url}/chat/completions", json=body, headers=key))
    assert sorted(answer.status_code for answer in answers) == [200, 401]
    return 1.0


async def hears_nothing(row, base_url, api_key):
    """Ends although the only answer has not reached it."""
    hasty = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=0.2)
    try:
        await hasty.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    except openai.APITimeoutError:
        await asyncio.sleep(1)
    return 1.0


async def floods(row, base_url, api_key):
    """More than a body may have, JSON inside JSON, no JSON, a path that there is not, and another host."""
    deep, said = "[" * 100 + "]" * 100, []
    async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {api_key}"}) as client:
        url = f"{base_url}/chat/completions"
        for body in (b" " * (33 << 20), deep.encode(), b"[" * 10**5, b"no", b'{"messages": [1e999]}'):
            answer = await client.post(url, content=body)
            said.append(f"{answer.status_code} {answer.json()['error']['message']}")
        answers = [await client.get(f"{base_url}/episodes"), await client.get(f"{base_url}/models")]
        answers.append(await client.post(url, json={}, headers={"Host": "elsewhere.example"}))
        said += [f"{answer.status_code} {answer.text}" for answer in answers]
    return await tells(said, row)


async def dies(row, base_url, api_key):
    await of(base_url, api_key).chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    os._exit(3)


async def gives_no_number(row, base_url, api_key):
    await of(base_url, api_key).chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    return {"accuracy": 1.0}


async def asks_nothing(row, *_):
    return 1.0


async def hangs(row, base_url, api_key):
    await of(base_url, api_key).chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    await asyncio.sleep(1000)


async def leaves(row, *_):
    sys.exit("no key")


async def raises(row, *_):
    raise OSError("out of order")


def command():
    """A command: reads the row, asks, and writes its reward."""
    row = json.load(sys.stdin)
    client = openai.OpenAI(max_retries=0)  # it finds the gateway by its environment
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": row["prompt"]}])
    print("in", os.getcwd(), sorted(os.environ))
    with open(row["out"], "w") as file:
        json.dump({"said": answer.choices[0].message.content, "in": os.getcwd(), "env": sorted(os.environ)}, file)
    subprocess.Popen(["sleep", "1000"], start_new_session=row.get("does") == "fails")
    if row.get("does") == "kills":
        os.kill(os.getppid(), signal.SIGKILL)
    if row.get("does") == "fails":
        sys.exit(3)
    if row.get("does") == "eats":
        eaten = [bytearray(1 << 28) for _ in range(8)]
        time.sleep(1000)
        assert eaten
    if row.get("does") != "nothing":
        os.write(int(os.environ["MINDSPEED_RL_REWARD_FD"]), b"0.75")


def forever():
    """A command that talks as `talks` does, with a child that outlives it."""
    row = json.load(sys.stdin)
    subprocess.Popen(["sleep", "1000"])
    base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    os.write(int(os.environ["MINDSPEED_RL_REWARD_FD"]), b"%f" % asyncio.run(talks(row, base_url, key)))


if __name__ == "__main__":
    forever() if "forever" in sys.argv else command()
