"""Schemas of two tools, and what models of several families write when they call both."""

from __future__ import annotations

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/few"}, "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"few": {"type": "integer", "minimum": 0, "maximum": 9}},
}  # fmt: skip
CLOCK = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}

# By format: a text of the model, with its marks as special tokens where they are some.
SAID = {
    "gpt-oss": "<|channel|>commentary<|message|>Let me see.\n<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.clock <|constrain|>json<|message|>{"zone": "U}\\"T"}<|call|><|start|>assistant to=functions.weather'
    "<|channel|>commentary json<|message|>{}<|call|>",
    "tags": 'Let me see.\n<tool_call>\n<function=clock>\n<parameter=zone>\nU}"T\n</parameter>\n</function>\n'
    "</tool_call>\n<tool_call>\n<function=weather>\n</function>\n</tool_call>",
    "seed": 'Let me see.\n<seed:tool_call>\n<function=clock>\n<parameter=zone>U}"T</parameter>\n</function>\n'
    "</seed:tool_call>\n<seed:tool_call>\n<function=weather>\n</function>\n</seed:tool_call>",
    "gemma 4": 'Let me see.\n<|tool_call>call:clock{zone:<|"|>U}"T<|"|>}<tool_call|><|tool_call>call:weather{}'
    "<tool_call|>",
    "hermes": 'Let me see.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "U}\\"T"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    "mistral": 'Let me see.\n[TOOL_CALLS] [{"name": "clock", "arguments": {"zone": "U}\\"T"}}, '
    '{"name": "weather", "arguments": {}}]',
    "mistral 11": 'Let me see.\n[TOOL_CALLS]clock[ARGS]{"zone": "U}\\"T"}[TOOL_CALLS]weather[ARGS]{}',
    "phi 4": 'Let me see.\n<|tool_call|>[{"name": "clock", "arguments": {"zone": "U}\\"T"}}, '
    '{"name": "weather", "arguments": {}}]<|/tool_call|>',
    "llama 3": '<|python_tag|>{"name": "clock", "parameters": {"zone": "U}\\"T"}}; '
    '{"name": "weather", "parameters": {}}',
    "json": '{"name": "clock", "arguments": {"zone": "U}\\"T"}}\n{"name": "weather", "arguments": {}}',
}
EXPECTED = [("clock", '{"zone": "U}\\"T"}'), ("weather", "{}")]
