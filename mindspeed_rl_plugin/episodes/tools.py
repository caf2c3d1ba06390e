"""Loads a user's tools (functions) and environments (classes), see docs/episodes.md, and checks the model's calls.

`reset` may have the parameters `seed` (32 bits, the same for all episodes of a group), `prompt`, `answer`, `messages`,
`record` (all other fields of the data row), single fields of the record, and `**record`. It returns the environment's
first text, messages of the role user, or None, or a pair (one of these, info).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mindspeed_rl_plugin.reward.calling import number
from mindspeed_rl_plugin.workers.call_loop import is_async
from mindspeed_rl_plugin.workers.user_files import load_function

NOT_TOOLS = ("reset", "get_reward", "close")  # public methods that are not tools
RESET = ("seed", "prompt", "answer", "messages", "record")  # parameters of `reset` other than fields of the record
SEEDS = 1 << 32  # numpy takes no larger seeds
DESCRIBE = (
    "give each parameter a type hint and a line under Args: in the docstring, in Google's style (docs/episodes.md); a "
    "method that is no tool must begin with _"
)

JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


class Offer(NamedTuple):
    """What was loaded of a user's code."""

    tools: tuple[str, ...]  # names of functions
    methods: tuple[str, ...] = ()  # names of an environment's tools
    steps: bool = False  # whether the environment has `step`
    rewards: bool = False  # whether the environment has `get_reward`
    fields: tuple[str, ...] = ()  # fields of the record that its `reset` requires
    concurrent: tuple[str, ...] = ()  # coroutines among "tool NAME", "method NAME", "reset", "step", "get_reward"


class Answer(NamedTuple):
    """The result of a call."""

    texts: tuple[str, ...] = ()  # messages for the model
    reward: float = 0.0
    done: bool = False  # whether the episode is over
    brief: str | None = None  # the exception in one line; None: no exception, or no answer
    error: str | None = None  # the exception with its traceback, or why there is no answer; None: no error
    seconds: float = 0.0  # time of the user's code
    unmade: bool = False  # the call was not made, because its environment could not be made again


def load_tool(file: str, name: str) -> Callable[..., Any]:
    """Load a function that the model may call. Raises ValueError for a function that it cannot call."""
    function = load_function(file, name)
    if inspect.isclass(function):
        raise ValueError(f"{name} is a class; give it to --rl-environment, or give a function")
    _check_parameters(name, function)
    return function


def load_environment(file: str, name: str) -> type:
    """Load a class of environments. Raises ValueError for other objects."""
    made = load_function(file, name)
    if not inspect.isclass(made):
        raise ValueError(f"{name} is no class; give a class with reset, and with tools or step")
    if not callable(getattr(made, "reset", None)):
        raise ValueError(f"{name} has no reset; add this method, which begins an episode")
    if needed := [p.name for p in _parameters(made) if p.default is p.empty and p.kind in _SINGLE_VALUE]:
        raise ValueError(f"{name}() needs {', '.join(needed)}; it is called without arguments: give them defaults")
    if hasattr(made, "step"):
        _check_step(name, made)
    elif not methods(made):
        raise ValueError(f"{name} has neither tools (public methods) nor step; add one of them")
    for method in () if hasattr(made, "step") else methods(made):
        _check_parameters(f"{name}.{method}", getattr(made, method))
    return made


def read_calls(found: Any) -> str:
    """The result of a user's parser as JSON: [name, arguments] for each call, null for a call that cannot be read.
    found: for each call a dictionary with name and arguments, or None. Raises ValueError for any other result."""
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"it returned {found!r:.80} of type {type(found).__name__}, not a list")
    calls = []
    for entry in found:
        name, arguments = (entry.get("name"), entry.get("arguments")) if isinstance(entry, Mapping) else (None, None)
        if entry is not None and not (name and isinstance(name, str) and isinstance(arguments, Mapping | None)):
            raise ValueError(
                f"it returned {entry!r:.80} for a call; give a dictionary with name, a string, and arguments, a "
                "dictionary, or None for a call that cannot be read"
            )
        calls.append(entry and [name, dict(arguments or {})])
    try:
        return json.dumps(calls)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it returned arguments that are no JSON: {error}") from None


def methods(environment: type) -> tuple[str, ...]:
    """Names of the public methods that are tools in a class without `step`."""
    members = [name for name, _ in inspect.getmembers(environment, inspect.isfunction)]
    return tuple(name for name in members if name[0] != "_" and name not in NOT_TOOLS)


def offer_of(tools: Mapping[str, Any], environment: type | None) -> Offer:
    """Describe the loaded code for the parent. Raises ValueError for two tools with the same name."""
    calls = {f"tool {name}": tool for name, tool in tools.items()}
    if environment is not None:
        own = methods(environment)
        calls |= {f"method {name}": getattr(environment, name) for name in own}
        calls |= {name: getattr(environment, name, None) for name in ("reset", "step", "get_reward")}
    concurrent = tuple(name for name, function in calls.items() if is_async(function))
    if environment is None:
        return Offer(tuple(tools), concurrent=concurrent)
    steps = hasattr(environment, "step")
    own = () if steps else own
    if twice := sorted({*tools} & {*own}):
        raise ValueError(f"{environment.__name__} and --rl-tools both have {', '.join(twice)}; rename one of them")
    named = [p for p in _parameters(environment.reset)[1:] if p.kind in _BY_NAME]  # without self
    needed = [p.name for p in named if p.default is p.empty and p.name not in RESET]
    return Offer(tuple(tools), own, steps, hasattr(environment, "get_reward"), tuple(needed), concurrent)


def schema_of(flag: str, name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool as chat templates take it. flag: the flag that names the tool, for errors. Raises
    ValueError if a type hint or a part of the docstring is missing. Imports transformers, and so torch."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise ValueError(f"{flag}: {name} cannot be shown to a model: {error}; {DESCRIBE}") from error
    schema["function"]["name"] = name
    return schema


def reset_arguments(reset: Callable[..., Any], task: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The arguments for `reset`: those that its signature takes, from the seed and the fields of task and record."""
    names = {p.name for p in _parameters(reset) if p.kind in _BY_NAME}
    record = task["record"]
    given = {**record, **{k: task.get(k) for k in RESET}, "seed": seed % SEEDS}
    if any(p.kind == p.VAR_KEYWORD for p in _parameters(reset)):
        names |= {"prompt", "answer", "seed", *record}  # **record gets all of these that are not parameters
    return {k: v for k, v in given.items() if k in names}


def read_reset(value: Any) -> Answer:
    """Read the result of `reset`: a text, messages, None, or one of these with info. Raises ValueError for others."""
    return Answer(_texts(value[0] if isinstance(value, tuple) and len(value) == 2 else value))


def read_step(value: Any) -> Answer:
    """Read the result of `step`, in one of its forms. Raises ValueError for other results."""
    if isinstance(value, Mapping) and {"reward", "done"} <= {*value}:
        observation, reward, over = value.get("observations"), value["reward"], [value["done"]]
    elif isinstance(value, tuple) and 3 <= len(value) <= 5:
        observation, reward, *over = value[: max(3, len(value) - 1)]
    else:
        raise ValueError(
            f"it returned {value!r:.80} of type {type(value).__name__}; give (observation, reward, terminated, "
            "truncated, info), (observation, reward, done), or a dictionary with observations, reward and done"
        )
    if unclear := [done for done in over if done not in (True, False)]:
        raise ValueError(f"it returned {unclear[0]!r:.80} for whether the episode is over, not True or False")
    return Answer(_texts(observation), number(reward), any(over))


def _texts(observation: Any) -> tuple[str, ...]:
    """The texts of an observation, which is a text, a list of messages of the role user, or None."""
    if observation is None:
        return ()
    if isinstance(observation, str):
        return (observation,)
    if isinstance(observation, (list, tuple)) and all(isinstance(one, Mapping) for one in observation):
        if other := [one for one in observation if one.get("role") != "user" or not isinstance(one["content"], str)]:
            raise ValueError(f"it returned the message {other[0]!r:.80}; give role user and a text as content")
        return tuple(one["content"] for one in observation)
    raise ValueError(
        f"it returned an observation of type {type(observation).__name__}, not a text: {observation!r:.80}; turn it "
        "into a text that the model can read"
    )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SINGLE_VALUE = (inspect.Parameter.POSITIONAL_ONLY, *_BY_NAME)


def _parameters(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    return tuple(inspect.signature(function).parameters.values())


def _check_parameters(name: str, function: Callable[..., Any]) -> None:
    """Raises ValueError for parameters without names, since a model's arguments have names."""
    for p in _parameters(function):
        if p.kind not in _BY_NAME:
            shown = {p.VAR_POSITIONAL: f"*{p.name}", p.VAR_KEYWORD: f"**{p.name}"}.get(p.kind, f"{p.name}, /")
            raise ValueError(f"{name} takes {shown}; a model's arguments have names: name each parameter")


def _check_step(name: str, environment: type) -> None:
    try:
        inspect.signature(environment.step).bind(None, "")
    except TypeError:
        takes = inspect.signature(environment.step)
        raise ValueError(f"{name}.step takes {takes}; it is called with one text, the model's turn") from None


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value fits a schema. Supports what type hints and most tools use: types, enum, anyOf, items,
    prefixItems, properties, required, additionalProperties, nullable."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    if not _of_type(value, schema.get("type")):
        return False
    if isinstance(value, list):
        if (first := schema.get("prefixItems")) is not None:
            return len(value) == len(first) and all(map(fits, value, first))
        return all(fits(one, schema.get("items") or {}) for one in value)
    return not isinstance(value, dict) or _object_fits(value, schema)


def takes(parameters: Mapping[str, Any]) -> str:
    """The parameters of a tool, in one line for the model."""
    needed = parameters.get("required", ())
    described = [
        f"{name}: {_type_in_words(schema)}{'' if name in needed else ' (optional)'}"
        for name, schema in parameters.get("properties", {}).items()
    ]
    return ", ".join(described) or "no arguments"


def _of_type(value: Any, type_: str | list[str] | None) -> bool:
    """Whether a value has a schema's type, or one of several; an unknown type fits all values."""
    if isinstance(type_, list):
        return any(_of_type(value, one) for one in type_)
    if type_ not in JSON_TYPES:
        return True
    return isinstance(value, JSON_TYPES[type_]) and (type_ == "boolean" or not isinstance(value, bool))


def _object_fits(value: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    known, more = schema.get("properties"), schema.get("additionalProperties")
    if not all(name in value for name in schema.get("required", ())):
        return False
    if known is None:
        return more in (None, True, False) or all(fits(one, more) for one in value.values())
    return all(fits(one, known[name]) if name in known else bool(more) for name, one in value.items())


def _type_in_words(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(map(_type_in_words, schema["anyOf"]))
    type_ = schema.get("type", "any")
    return " or ".join(type_) if isinstance(type_, list) else type_
