"""What verifiers' renderer of prompts says. No test: test_verifiers_renderer.py runs it, in verifiers' interpreter.

On stdin questions by name, each [folder of a tokenizer, method, arguments, named arguments]; on stdout answers by name.
"""

import json
import sys

from transformers import AutoTokenizer

from mindspeed_rl_plugin.episodes.verifiers_renderer import MARKS, AppendingRenderer


def answer(folder, method, *arguments, **named):
    renderer = AppendingRenderer(AutoTokenizer.from_pretrained(folder))
    if method == "parse_response":
        (call,) = renderer.parse_response(*arguments, **named).tool_calls
        return [renderer.config.tool_parser, call.name, call.arguments]
    said = getattr(renderer, method)(*arguments, **named)
    return said if method == "render_ids" else said.token_ids


answers = {name: answer(*words, **named) for name, (*words, named) in json.load(sys.stdin).items()}
json.dump({"parsers": sorted(MARKS.values()), **answers}, sys.stdout)
